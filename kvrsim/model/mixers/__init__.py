"""Mixers: the part of a layer in which tokens see each other, by kind. Shapes only.

A mixer says what later tokens need of a token (its cache), of how many tokens, and what does not grow with them (a
state). Token counts may be numbers or arrays; results have their shape.
"""

from kvrsim.model.mixers.attention import Attention
from kvrsim.model.mixers.indexer import Indexer
from kvrsim.model.mixers.latent import CompressedAttention, LatentAttention
from kvrsim.model.mixers.recurrence import RECURRENCE_TITLES, Recurrence, RecurrenceKind

__all__ = [
    "RECURRENCE_TITLES",
    "Attention",
    "CompressedAttention",
    "Indexer",
    "LatentAttention",
    "Mixer",
    "Recurrence",
    "RecurrenceKind",
]

Mixer = Attention | LatentAttention | CompressedAttention | Recurrence
