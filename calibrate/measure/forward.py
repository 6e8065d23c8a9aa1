"""ForwardTimer: forward passes of a few decoder layers of a Hugging Face model, timed part by part."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from calibrate.measure.campaign import SkippedPoint
from kvrsim.errors import InputError
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.host import free_memory
from kvrsim.runtime.kv_cache import CacheListener, Chunk, PrefixCache, UpdateEvent
from kvrsim.runtime.marks import Mark, MarkRecorder, clock_of, hooked, mark_empty, without_marks
from kvrsim.runtime.model import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """One forward pass: `chunk` tokens; the keys and values of `prefix` earlier tokens are in the cache.

    Other kinds of points time the host's part of a forward (host), a layer during a pending receive (pending), and a
    ring's attention to a block of `prefix` keys (block).
    """

    kernel: str  # attention kernel: "eager", "sdpa" or "flash"
    chunk: int
    prefix: int
    kind: str = ""  # host, pending or block; empty: a forward pass

    def __str__(self) -> str:
        name = f"{self.kind} {self.kernel}".lstrip()
        if self.kind == "host":
            return name
        return f"{name} {self.chunk}+{self.prefix}"


HOST_CHUNK = 64  # tokens of the forwards that measure the host's time
LAYERS = 2  # number of layers of the timed model; the second reads a layer's output, as in a whole model
HEAT_S = 0.3  # seconds of work before each shorter sample: an idle GPU starts at a clock that it cannot sustain
_HOLD = 1.5  # before a forward the device is kept busy for this multiple of the seconds that the host needs to issue it
# Score matrices in memory at once in eager attention: scores, masked scores, softmax in fp32, weights.
_EAGER_COPIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSetup:
    """The model and the machine to be timed."""

    model: ModelSpec
    config: Mapping[str, Any]  # the model's config.json
    device: str  # "cpu" or "cuda"
    dtype: str
    kernels: tuple[str, ...]  # attention kernels
    max_context: int  # maximum number of tokens of prefix and chunk together
    threads: int  # threads of a CPU
    num_gpus: int = 1  # GPUs of this machine; with two or more, layers are also timed during a pending receive

    def __post_init__(self) -> None:
        kinds = self.model.layer_kinds
        if any(layer.num_experts for layer in kinds):
            raise InputError("model", self.model.name, "a dense model: experts are not timed")
        if len(kinds) > 1:
            raise InputError("model", self.model.name, "a model whose layers are all alike")
        if not isinstance(kinds[0].mixer, Attention):
            raise InputError("model", self.model.name, "attention to K and V: latents and states are not timed")


class _Marks(CacheListener):
    """Listener that marks updates of the cache on a clock."""

    def __init__(self, clock: MarkRecorder) -> None:
        self.clock = clock

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        self.clock.mark(event, layer)


@dataclass(slots=True)
class ForwardTimer:
    """Timer of forward passes of LAYERS layers with random weights behind random prefixes."""

    setup: ComputeSetup
    clock: MarkRecorder
    models: dict[str, PreTrainedModel] = field(
        default_factory=dict
    )  # models by attention kernel; they share their weights
    known_s: dict[Point, float] = field(default_factory=dict)  # device seconds of the last timed forward

    @classmethod
    def build(cls, setup: ComputeSetup) -> ForwardTimer:
        """Load the model once for each kernel."""
        if setup.device == "cpu":
            torch.set_num_threads(setup.threads)
        timer = cls(setup, clock_of(setup.device))
        for kernel in setup.kernels:
            timer._load(kernel)
        return timer

    def layer_s(self, at: Point, *, heat: bool = False) -> float:
        """Device seconds of a layer with marks only at its ends and at attention's ends."""
        return self.forward(at, bare=True, heat=heat)["layer"]

    def check_memory(self, at: Point) -> None:
        """Raise SkippedPoint for a point that exceeds a CPU's memory; on a GPU, `forward` raises it."""
        if self.setup.device != "cpu":
            return
        from kvrsim.scenario import dtype_bytes

        scores = at.chunk * (at.prefix + at.chunk)
        heads = self.setup.model.num_attention_heads * _EAGER_COPIES if at.kernel == "eager" else 4
        needed = scores * heads * dtype_bytes(self.setup.dtype)
        free = free_memory()
        if needed > 0.8 * free:
            raise SkippedPoint(f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")

    def forward(self, at: Point, *, bare: bool = False, heat: bool = False) -> dict[str, float]:
        """Seconds of the parts, see LayerParts; bare: mark whole layers only.

        Raises SkippedPoint if memory runs out.
        """
        try:
            return self._forward(at, bare=bare, heat=heat)
        except torch.OutOfMemoryError:
            pass  # its traceback holds tensors; they are free once this clause has ended
        gc.collect()
        raise SkippedPoint("out of the device's memory")

    def release(self) -> None:
        """Return the memory that torch keeps for later tensors to the device, so that other processes can use it.

        Not while a receive is pending: the device cannot be synchronised then.
        """
        if self.setup.device == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, at: Point, *, bare: bool, heat: bool) -> dict[str, float]:
        model = self.models[at.kernel]
        geometry = Geometry.of(model)
        parts = LayerParts(model, geometry, bare=bare)
        with torch.inference_mode():
            if heat:
                self._heat(model, geometry, at)
            with parts.hooked(self.clock):
                return self._time(model, geometry, parts, at, heat=heat)

    def _heat(self, model: PreTrainedModel, geometry: Geometry, at: Point) -> None:
        """Run forwards of the point for HEAT_S, until just before the timed one."""
        forward = self._prepare(model, geometry, at, None)
        until_s = time.monotonic() + HEAT_S
        while time.monotonic() < until_s:
            forward()
            self.clock.wait()

    def _time(
        self, model: PreTrainedModel, geometry: Geometry, parts: LayerParts, at: Point, *, heat: bool
    ) -> dict[str, float]:
        """Seconds of the parts of a forward.

        heat: on a GPU another forward follows the hold, which needs little power, so that the timed one starts at the
        clock of a long prefill.
        """
        forward = self._prepare(model, geometry, at, _Marks(self.clock))
        before = None
        if heat and not self.clock.host_is_device:
            before = self._prepare(model, geometry, at, None)
        hold_s = 0.0
        for _ in range(1 if self.clock.host_is_device else 2):  # the first run measures the host's time
            self.clock.start(hold_s)
            if before is not None:
                before()
                self.clock.clear()
            mark_empty(self.clock)
            self.clock.mark("start")
            forward()
            self.clock.mark("end")
            marks = self.clock.finish()
            hold_s = _HOLD * marks[-1].host_s * (1 if before is None else 2)
        corrected = without_marks(marks)
        self.known_s[at] = corrected[-1].device_s - corrected[0].device_s
        return parts.times(corrected)

    def _prepare(
        self, model: PreTrainedModel, geometry: Geometry, at: Point, listener: CacheListener | None
    ) -> Callable[[], object]:
        """Prepare a forward of the point that can be repeated."""
        device = geometry.device
        cache = PrefixCache.stub(geometry, Chunk(start=at.prefix, length=at.chunk), listener)
        tokens = torch.randint(0, self.setup.model.vocab_size, (1, at.chunk), device=device)
        positions = torch.arange(at.prefix, at.prefix + at.chunk, device=device)[None]
        return partial(
            model, input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
        )

    def block(self, at: Point) -> dict[str, float]:
        """Seconds of a chunk's attention to a block of `prefix` unmasked keys, and of merging the result."""
        from kvrsim.runtime.attention import Merged, block_attention

        model = self.setup.model
        dtype = Geometry.of(self.models[at.kernel]).dtype
        shapes = [(model.num_attention_heads, at.chunk), *[(model.num_key_value_heads, at.prefix)] * 2]
        query, key, value = (torch.randn(1, *shape, model.head_dim, dtype=dtype) for shape in shapes)
        with torch.inference_mode():
            merged = Merged()
            merged.add(*block_attention(at.kernel, query, key, value, None, causal=False))  # type: ignore[arg-type]
            self.clock.start()
            self.clock.mark("start")
            result = block_attention(at.kernel, query, key, value, None, causal=False)  # type: ignore[arg-type]
            self.clock.mark("block")
            merged.add(*result)
            self.clock.mark("merged")
            start, attended, ended = self.clock.finish()
        return {"block": attended.device_s - start.device_s, "merge": ended.device_s - attended.device_s}

    def close(self) -> None:
        """Release the memory."""
        self.models.clear()
        gc.collect()
        self.release()

    def _load(self, kernel: str) -> None:
        config = dict(self.setup.config) | {"num_hidden_layers": LAYERS, "use_cache": True}
        config.pop("layer_types", None)
        model = load_model(config, dtype=self.setup.dtype, device=self.setup.device, attention=kernel)  # type: ignore[arg-type]
        if self.models:
            first = next(iter(self.models.values()))
            model.load_state_dict(first.state_dict(), assign=True)  # all kernels share the weights of the first
        self.models[kernel] = model


# -- the parts of a layer, from the marks of a forward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedModule:
    """A hooked module of a layer."""

    kind: str  # "gemm", "norm" (of the residual stream), "qk_norm" or "mlp"
    where: str  # "before" or "after" attention
    name: str  # the module's name, unique in its layer
    shape: tuple[int, int] | None = None  # in_features and out_features of a gemm


class LayerParts:
    """The marked modules of a model's layers, and their seconds from the marks of a forward pass."""

    def __init__(self, model: PreTrainedModel, geometry: Geometry, *, bare: bool = False) -> None:
        """bare: mark whole layers only, which takes little of the host's time."""
        self.model = model
        self.geometry = geometry
        self.parts: tuple[HookedModule, ...] = ()
        if not bare:
            self.parts = tuple(_parts(geometry.layers(model)[0], geometry))

    def hooked(self, clock: MarkRecorder) -> AbstractContextManager[None]:
        """Hook the model's modules: they mark the clock while the context is open."""
        names = [part.name for part in self.parts]
        return hooked(self.model, self.geometry, clock, parts=names, ends=True)

    def times(self, marks: Sequence[Mark]) -> dict[str, float]:
        """Seconds of each part of a forward pass; the first mark is its start. Parts of layers are averaged.

        prepare: before the first layer, without the embedding (mask, rotary tables); head: logits; layer: a whole
        layer; host_prepare: the host issuing all work before the first layer; host_layer: the host issuing a layer.
        """
        device = _Spans({mark.name: mark.device_s for mark in marks})
        firsts = [index for index, mark in enumerate(marks) if mark.name == "layer"]
        lasts = [index for index, mark in enumerate(marks) if mark.name == "layer_end"]
        layers = [self._layer(marks[first : last + 1]) for first, last in zip(firsts, lasts, strict=True)]
        embedding = device.of("embedding")
        return {
            "prepare": max(marks[firsts[0]].device_s - marks[0].device_s - embedding, 0.0),
            "host_prepare": marks[firsts[0]].host_s - marks[0].host_s,
            "embedding": embedding,
            "head": device.of("head"),
            **{name: fmean(layer[name] for layer in layers) for name in layers[0]},
        }

    def _layer(self, marks: Sequence[Mark]) -> dict[str, float]:
        """Device seconds of the parts of one decoder layer; parts of the same name are averaged.

        before_attention: up to the cache update; after_attention: from the output projection on; activation: the MLP
        without its products; rotary: rest of before_attention, without the norms of queries and keys; residual: rest of
        after_attention.
        """
        at = _Spans({mark.name: mark.device_s for mark in marks})
        seconds: dict[str, list[float]] = {}
        for part in self.parts:
            if part.kind == "norm" or part.shape is not None:
                name = "norm"
                if part.shape is not None:
                    name = f"gemm {part.shape[0]} {part.shape[1]}"
                seconds.setdefault(name, []).append(at.of(part.name))
        mlp = sum(at.of(part.name) for part in self.parts if part.kind == "mlp")
        inside = sum(at.of(part.name) for part in self.parts if part.kind == "gemm" and _is_in_mlp(part))
        before = at.between("layer", "update")
        after = at.between("output", "layer_end")
        append = at.between("update", "updated")
        attention = at.between("updated", "output")
        return {
            "layer": before + append + attention + after,
            "before_attention": before,
            "cache_append": append,
            "attention": attention,
            "after_attention": after,
            "host_layer": marks[-1].host_s - marks[0].host_s,
            "activation": max(mlp - inside, 0.0),
            "rotary": max(before - self._timed_s(at, "before"), 0.0),
            "residual": max(after - self._timed_s(at, "after"), 0.0),
            **{name: fmean(parts_s) for name, parts_s in seconds.items()},
        }

    def _timed_s(self, at: _Spans, where: str) -> float:
        """Seconds of the marked parts before or after attention."""
        return sum(at.of(part.name) for part in self.parts if part.where == where and not _is_in_mlp(part))


@dataclass(frozen=True, slots=True)
class _Spans:
    at: Mapping[str, float]

    def between(self, first: str, last: str) -> float:
        return self.at[last] - self.at[first]

    def of(self, name: str) -> float:
        return self.between(f">{name}", f"<{name}")


def _parts(layer: nn.Module, geometry: Geometry) -> Iterator[HookedModule]:
    """Yield matrix products, norms, and the MLP as a whole; experts are not supported."""
    attention, output = geometry.mixer_of(layer)
    assert attention is not None
    inside = {id(module) for module in attention.modules()}
    for name, module in layer.named_modules():
        where = "after"
        if id(module) in inside and module is not output:
            where = "before"
        if isinstance(module, nn.Linear):
            yield HookedModule(kind="gemm", where=where, name=name, shape=(module.in_features, module.out_features))
        elif name == "mlp":
            yield HookedModule(kind="mlp", where="after", name=name)
        elif type(module).__name__.endswith("Norm") and id(module) in inside:
            yield HookedModule(kind="qk_norm", where="before", name=name)
        elif type(module).__name__.endswith("Norm"):
            yield HookedModule(kind="norm", where="after" if name.startswith("post_") else "before", name=name)


def _is_in_mlp(part: HookedModule) -> bool:
    return part.name.startswith("mlp.")
