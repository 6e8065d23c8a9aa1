"""LayerMarks: hooks on a Hugging Face model that mark where each part of a forward pass begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from calibrate.measure.clock import Clock, Mark
from kvrsim.runtime.geometry import Geometry

_FIRST, _LAST = "layer", "layer_end"


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

    before: float  # up to the cache: norm, projections, rotary embedding
    append: float  # the cache's update
    attention: float
    after: float  # output projection to the end
    host: float  # the host issuing all of it
    gemms: Sequence[tuple[int, int, float]]  # in_features, out_features, seconds: one each
    norms: Sequence[float]  # one each
    activation: float  # the MLP but for its products
    rotary: float  # what is left of `before`: rotary embedding, reshaping; without the norms of queries and keys
    residual: float  # what is left of `after`: residual additions


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTimes:
    """Device seconds of one forward pass."""

    prepare: float  # before the first layer, but for the embedding: mask, rotary tables
    host_prepare: float  # the host issuing all of that and the embedding
    embedding: float
    layers: Sequence[LayerTimes]
    head: float  # logits


@dataclass(slots=True)
class LayerMarks:
    """Hooks that mark on a clock; `with LayerMarks(...)` takes them off again."""

    model: Any
    geometry: Geometry
    clock: Clock
    bare: bool = False  # mark whole layers only, which costs the host little
    parts: tuple[Part, ...] = ()
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> LayerMarks:
        layers = self.geometry.layers(self.model)
        self.parts = () if self.bare else tuple(_parts(layers[0], self.geometry))
        for layer in layers:
            self._bracket(layer, _FIRST, _LAST)
            for part in self.parts:
                module = layer.get_submodule(part.name)
                self._bracket(module, f">{part.name}", f"<{part.name}")
            self._before(self.geometry.output_projection_of(layer), "output")
        self._bracket(self.model.get_input_embeddings(), ">embedding", "<embedding")
        self._bracket(self.model.get_output_embeddings(), ">head", "<head")
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_cache(self, layer_index: int, event: str) -> None:
        """What the cache calls as its update begins ("update") and ends ("updated")."""
        self.clock.mark(event)

    def times(self, marks: Sequence[Mark]) -> ForwardTimes:
        """The parts of a forward pass whose first mark is its start."""
        device = _Spans({mark.name: mark.device_s for mark in marks})
        firsts = [index for index, mark in enumerate(marks) if mark.name == _FIRST]
        lasts = [index for index, mark in enumerate(marks) if mark.name == _LAST]
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
        before, after = at.between(_FIRST, "update"), at.between("output", _LAST)
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

    def _bracket(self, module: Any, first: str, last: str) -> None:
        self._before(module, first)
        self._handles.append(module.register_forward_hook(_marking(self.clock, last)))

    def _before(self, module: Any, name: str) -> None:
        self._handles.append(module.register_forward_pre_hook(_marking(self.clock, name)))


def _marking(clock: Clock, name: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        clock.mark(name)

    return hook


@dataclass(frozen=True, slots=True)
class _Spans:
    at: Mapping[str, float]

    def between(self, first: str, last: str) -> float:
        return self.at[last] - self.at[first]

    def of(self, name: str) -> float:
        return self.between(f">{name}", f"<{name}")


def _parts(layer: Any, geometry: Geometry) -> Iterator[Part]:
    """Products, norms, and the MLP as a whole; those of an expert are not looked for."""
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
    """Norms of the attention's input, and all of them where attention and MLP run in parallel, come first."""
    return "after" if name.startswith("post_") else "before"


def _is_in_mlp(part: Part) -> bool:
    return part.name.startswith("mlp.")
