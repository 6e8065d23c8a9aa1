"""What kinds of layers a profile has rates for: what is priced by other kernels' rates, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.cost.mixing.chosen import sparse_call
from kvrsim.model.mixers import RECURRENCE_TITLES, Attention, LatentAttention, Mixer, Recurrence
from kvrsim.model.spec import ModelSpec
from kvrsim.profile.profile import CalibrationProfile, KernelRates

_COUNTED = "counted from FLOPs and bytes at the rates of other operations"


def head_dims(model: ModelSpec, rates: KernelRates) -> tuple[int, ...]:
    """Widths of heads that the rates of softmax attention price: not of latents with rates of their own, nor states."""
    found = {
        layer.mixer.head_dim
        for layer in model.layer_kinds
        if isinstance(layer.mixer, Attention | LatentAttention)
        and not layer.mixer.is_sparse
        and (rates.latent is None or not isinstance(layer.mixer, LatentAttention))
    }
    return tuple(sorted(found))


def coverage_notes(model: ModelSpec, profile: CalibrationProfile, element_bytes: int) -> Iterator[str]:
    """A sentence for each kind of layer of the model that the profile has no rates for."""
    rates, mixers = profile.kernels, [layer.mixer for layer in model.layer_kinds if layer.mixer is not None]
    missing = f"profile {profile.name} has no rates of"
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentAttention) and not mixer.is_sparse]
    if latents and rates.latent is None:
        yield f"{missing} latent attention; priced as attention of heads as wide as its keys and values in the mean"
    if any(_is_counted(mixer, rates) for mixer in mixers):
        yield f"{missing} attention to chosen keys; {_COUNTED}"
    kinds = dict.fromkeys(mixer.kind for mixer in mixers if isinstance(mixer, Recurrence))
    for kind in kinds:
        if rates.recurrence is None:
            yield f"{missing} {RECURRENCE_TITLES[kind]}; {_COUNTED}"
        elif kind not in rates.recurrence.kinds:
            yield f"{missing} {RECURRENCE_TITLES[kind]}; priced as the most similar recurrence that it has"
    types = {layer.mlp[0].compute for layer in model.layer_kinds if layer.num_experts}
    if any(rates.experts is None or not rates.experts.covers(compute, element_bytes) for compute in types):
        yield f"{missing} such experts as grouped products; counted as products one by one"


def _is_counted(mixer: Mixer, rates: KernelRates) -> bool:
    """Whether a mixer attends to chosen keys for which there are no rates."""
    if isinstance(mixer, Recurrence) or not mixer.is_sparse:
        return False
    return rates.sparse is None or rates.sparse.of(sparse_call(mixer, np.ones(1), np.zeros(1))) is None
