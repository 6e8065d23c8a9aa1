"""LayerParts: how long each part of a Hugging Face model's layers takes, from the marks of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.hooks import Clock, Mark, hooked


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a hooked module of a layer is."""

    kind: str  # "gemm", "norm" (of the residual stream), "qk_norm" or "mlp"
    where: str  # "before" or "after" attention
    name: str  # of the module, unique in its layer
    shape: tuple[int, int] | None = None  # of a gemm: in_features, out_features


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Device seconds of one decoder layer's parts, in one forward pass."""

    before: float  # up to the cache update: norm, projections, rotary embedding
    append: float  # the cache's update
    attention: float
    after: float  # output projection to the end
    host: float  # the host issuing all of it
    gemms: Sequence[tuple[int, int, float]]  # in_features, out_features, seconds: one each
    norms: Sequence[float]  # one each
    activation: float  # the MLP without its matrix products
    rotary: float  # rest of `before`: rotary embedding, reshaping; without the norms of queries and keys
    residual: float  # rest of `after`: residual additions


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTimes:
    """Device seconds of one forward pass."""

    prepare: float  # before the first layer, without the embedding: mask, rotary tables
    host_prepare: float  # the host issuing all of that and the embedding
    embedding: float
    layers: Sequence[LayerTimes]
    head: float  # logits


class LayerParts:
    """The modules of a model's layers that are marked, and their times from the marks of a forward pass."""

    def __init__(self, model: Any, geometry: Geometry, *, bare: bool = False) -> None:
        """bare: mark whole layers only, which costs the host little."""
        self.model, self.geometry = model, geometry
        self.parts = () if bare else tuple(_parts(geometry.layers(model)[0], geometry))

    def hooked(self, clock: Clock) -> AbstractContextManager[None]:
        """While the context lasts, the model's modules mark on the clock."""
        names = [part.name for part in self.parts]
        return hooked(self.model, self.geometry, clock, parts=names, ends=True)

    def times(self, marks: Sequence[Mark]) -> ForwardTimes:
        """The parts of a forward pass whose first mark is its start."""
        device = _Spans({mark.name: mark.device_s for mark in marks})
        firsts = [index for index, mark in enumerate(marks) if mark.name == "layer"]
        lasts = [index for index, mark in enumerate(marks) if mark.name == "layer_end"]
        layers = [self._layer(marks[first : last + 1]) for first, last in zip(firsts, lasts, strict=True)]
        embedding = device.of("embedding")
        return ForwardTimes(
            prepare=max(marks[firsts[0]].device_s - marks[0].device_s - embedding, 0.0),
            host_prepare=marks[firsts[0]].host_s - marks[0].host_s,
            embedding=embedding,
            layers=layers,
            head=device.of("head"),
        )

    def _layer(self, marks: Sequence[Mark]) -> LayerTimes:
        at = _Spans({mark.name: mark.device_s for mark in marks})
        before, after = at.between("layer", "update"), at.between("output", "layer_end")
        mlp = sum(at.of(part.name) for part in self.parts if part.kind == "mlp")
        inside = sum(at.of(part.name) for part in self.parts if part.kind == "gemm" and _is_in_mlp(part))
        known = {
            where: sum(at.of(part.name) for part in self.parts if part.where == where and not _is_in_mlp(part))
            for where in ("before", "after")
        }
        gemms = [(*part.shape, at.of(part.name)) for part in self.parts if part.shape is not None]
        return LayerTimes(
            before=before,
            append=at.between("update", "updated"),
            attention=at.between("updated", "output"),
            after=after,
            host=marks[-1].host_s - marks[0].host_s,
            gemms=gemms,
            norms=[at.of(part.name) for part in self.parts if part.kind == "norm"],
            activation=max(mlp - inside, 0.0),
            rotary=max(before - known["before"], 0.0),
            residual=max(after - known["after"], 0.0),
        )


@dataclass(frozen=True, slots=True)
class _Spans:
    at: Mapping[str, float]

    def between(self, first: str, last: str) -> float:
        return self.at[last] - self.at[first]

    def of(self, name: str) -> float:
        return self.between(f">{name}", f"<{name}")


def _parts(layer: Any, geometry: Geometry) -> Iterator[Part]:
    """Matrix products, norms, and the MLP as a whole; experts are not supported."""
    output = geometry.output_projection_of(layer)
    attention = geometry.attention_of(layer)
    inside = {id(module) for module in attention.modules()}
    for name, module in layer.named_modules():
        where = "before" if id(module) in inside and module is not output else "after"
        if isinstance(module, nn.Linear):
            yield Part(kind="gemm", where=where, name=name, shape=(module.in_features, module.out_features))
        elif name == "mlp":
            yield Part(kind="mlp", where="after", name=name)
        elif _is_norm(module):
            if id(module) in inside:
                yield Part(kind="qk_norm", where="before", name=name)
            else:
                yield Part(kind="norm", where=_norm_place(name), name=name)


def _is_norm(module: Any) -> bool:
    return type(module).__name__.endswith("Norm")


def _norm_place(name: str) -> str:
    """Norms of the attention's input come before it; so do all norms where attention and MLP run in parallel."""
    return "after" if name.startswith("post_") else "before"


def _is_in_mlp(part: Part) -> bool:
    return part.name.startswith("mlp.")
