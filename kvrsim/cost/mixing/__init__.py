"""What the mixer of one kind of layer costs: an implementation for each kind of mixer."""

from __future__ import annotations

from kvrsim.cost.mixing.base import Mixing, Setting
from kvrsim.cost.mixing.latent import LatentMixing
from kvrsim.cost.mixing.recurrent import RecurrentMixing
from kvrsim.cost.mixing.softmax import SoftmaxMixing
from kvrsim.errors import InputError
from kvrsim.model.mixers import Attention, LatentAttention, Mixer, Recurrence

__all__ = ["Mixing", "Setting", "mixing_of"]


def mixing_of(mixer: Mixer, setting: Setting) -> Mixing:
    """The costs of a mixer."""
    if isinstance(mixer, Attention):
        return SoftmaxMixing(setting, mixer)
    if isinstance(mixer, LatentAttention):
        return LatentMixing(setting, mixer)
    if isinstance(mixer, Recurrence):
        return RecurrentMixing(setting, mixer)
    raise InputError("model", mixer.title, "layers whose costs are known")
