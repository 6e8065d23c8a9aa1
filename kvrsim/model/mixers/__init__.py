"""Mixers: the part of a layer in which tokens see each other, by kind. Shapes only.

A mixer says what later tokens need of a token (its cache), of how many tokens, and what does not grow with them (a
state). Token counts may be numbers or arrays; results have their shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvrsim.model.gemm import Gemm
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
    "with_matrices",
]

Mixer = Attention | LatentAttention | CompressedAttention | Recurrence


def with_matrices(mixer: Mixer, of: Callable[[Gemm], Gemm]) -> Mixer:
    """The same with each weight matrix replaced by `of` it."""
    changed = replace(mixer, projections=tuple(map(of, mixer.projections)), output=tuple(map(of, mixer.output)))
    if isinstance(changed, LatentAttention):
        changed = replace(changed, expand=of(changed.expand))
    if not isinstance(changed, Recurrence) and changed.indexer is not None:
        indexer = replace(changed.indexer, projections=tuple(map(of, changed.indexer.projections)))
        changed = replace(changed, indexer=indexer)
    return changed
