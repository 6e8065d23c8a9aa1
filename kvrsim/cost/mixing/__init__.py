"""What the mixer of one kind of layer costs: an implementation for each kind of mixer."""

from __future__ import annotations

from kvrsim.cost.mixing.base import Mixing, Setting
from kvrsim.cost.mixing.latent import LatentMixing
from kvrsim.cost.mixing.recurrent import RecurrentMixing
from kvrsim.cost.mixing.softmax import SoftmaxMixing
from kvrsim.cost.mixing.sparse import SparseMixing
from kvrsim.model.mixers import Attention, CompressedAttention, Mixer, Recurrence

__all__ = ["Mixing", "Setting", "mixing_of"]


def mixing_of(mixer: Mixer, setting: Setting) -> Mixing:
    """The costs of a mixer."""
    if isinstance(mixer, Recurrence):
        return RecurrentMixing(setting, mixer)
    if isinstance(mixer, CompressedAttention) or mixer.is_sparse:
        return SparseMixing(setting, mixer)
    return SoftmaxMixing(setting, mixer) if isinstance(mixer, Attention) else LatentMixing(setting, mixer)
