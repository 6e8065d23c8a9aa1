"""A model in words: its parameters, and which layers see tokens how."""

from __future__ import annotations

from collections import Counter

from kvrsim.model.spec import ModelSpec

_NO_MIXER = "MLP alone"


def mixers_of(model: ModelSpec) -> dict[str, int]:
    """The kinds of mixers in words, in order of their first layers, and how many layers have each."""
    return dict(Counter(_NO_MIXER if layer.mixer is None else layer.mixer.title for layer in model.layers))


def describe_mixers(model: ModelSpec) -> str:
    """For people: "36 attention in chunks of 8192, 12 full attention"."""
    return ", ".join(f"{count} {title}" for title, count in mixers_of(model).items())


def describe_parameters(parameters: int) -> str:
    """For people: "8.0 B"; small models with a digit more, trillions as T."""
    if parameters >= 1e12:
        return f"{parameters / 1e12:.2f} T"
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e9:.2f} B"
