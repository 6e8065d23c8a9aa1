"""A model in words: its parameters, and which layers see tokens how."""

from __future__ import annotations

from collections import Counter

from kvrsim.model.spec import LayerSpec, ModelSpec


def mixers_of(model: ModelSpec) -> dict[str, int]:
    """The kinds of mixers in words, in order of their first layers, and how many layers have each."""
    return dict(Counter(map(mixer_title, model.layers)))


def mixer_title(layer: LayerSpec) -> str:
    """How a layer sees earlier tokens; of one that does not, what it is."""
    if layer.mixer is not None:
        return layer.mixer.title
    return "experts alone" if layer.num_experts else "MLP alone"


def describe_mixers(model: ModelSpec) -> str:
    """For people: "36 × attention in chunks of 8192; 12 × full attention"."""
    return "; ".join(f"{count} × {title}" for title, count in mixers_of(model).items())


def describe_parameters(parameters: int) -> str:
    """For people: "8.0 B"; small models with a digit more, trillions as T."""
    if parameters >= 1e12:
        return f"{parameters / 1e12:.2f} T"
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e9:.2f} B"
