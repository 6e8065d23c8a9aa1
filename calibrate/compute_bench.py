"""ComputeBench: decoder layers of a Hugging Face model, timed part by part."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from calibrate.campaign import Skipped
from calibrate.clock import Clock, CpuClock, CudaClock
from calibrate.compute_rows import HOST_PREFIX, compute_rows
from calibrate.grid import Point, grid
from calibrate.journal import Seconds
from calibrate.layer_marks import ForwardTimes, LayerMarks
from calibrate.measurement import Measurement
from calibrate.this_machine import device_name
from kvrsim.errors import InputError
from kvrsim.model import ModelSpec
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.geometry import Geometry, load_model

LAYERS = 2  # of the model that is timed: the second one's input is what a layer has written, as in a whole model
_PROBE = 256  # tokens of the forward that shows how fast the device is
_HOLD = 1.5  # of the host's time to issue a forward, that the device is kept busy beforehand
_EAGER_COPIES = 5  # score matrices that eager attention holds at a time: scores, mask added, softmax in fp32, weights
_HOST_CHUNK = 64  # tokens of the forwards that show how long the host takes


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSetup:
    """What is timed, and on what."""

    model: ModelSpec
    config: Mapping[str, Any]  # the model's config.json
    device: str  # "cpu" or "cuda"
    dtype: str
    kernels: tuple[str, ...]  # attention
    max_context: int  # tokens
    threads: int  # of a CPU

    def __post_init__(self) -> None:
        kinds = self.model.layer_kinds
        if any(layer.num_experts for layer in kinds):
            raise InputError("model", self.model.name, "a dense model: experts are not timed")
        if len(kinds) > 1:
            raise InputError("model", self.model.name, "a model whose layers are all alike")


@dataclass(slots=True)
class ComputeBench:
    """Forward passes of LAYERS layers with random weights behind random prefixes."""

    setup: ComputeSetup
    clock: Clock
    _models: dict[str, Any] = field(default_factory=dict)  # by kernel; they share their weights
    _seen: set[str] = field(default_factory=set)  # points that have run once, which warms up
    _rate: float = 0.0  # FLOP/s, of the probe
    _least_s: float = 0.0  # of a forward, whatever its length

    @classmethod
    def build(cls, setup: ComputeSetup) -> ComputeBench:
        """Load the model once for each kernel, and see how fast the device is."""
        if setup.device == "cpu":
            torch.set_num_threads(setup.threads)
        clock: Clock = CudaClock(torch.cuda) if setup.device == "cuda" else CpuClock()
        bench = cls(setup, clock)
        for kernel in setup.kernels:
            bench._load(kernel)
        bench._probe()
        return bench

    def points(self) -> Sequence[str]:
        """The grid, and where the host is not the device, the host's own time."""
        found = [point.key for point in grid(self.setup.max_context, self.setup.kernels)]
        if self.clock.host_is_device:
            return found
        return [*(f"{HOST_PREFIX}{kernel}" for kernel in self.setup.kernels), *found]

    def expected_s(self, point: str) -> float:
        """FLOPs at the probe's rate; eager kernels take longer than their FLOPs."""
        at = self._point(point)
        slower = 4.0 if at.kernel == "eager" else 1.5
        model, layer = self.setup.model, self.setup.model.layers[0]
        rows = 2.0 * layer.active_parameters * at.chunk
        scores = 4.0 * model.num_attention_heads * model.head_dim * at.chunk * (at.prefix + at.chunk)
        return self._least_s + LAYERS * (rows + slower * scores) / self._rate

    def sample(self, point: str) -> Seconds:
        """One forward; the first of a point is not counted."""
        at = self._point(point)
        if point not in self._seen:
            self._check_memory(at)
            self._forward(at, bare=point.startswith(HOST_PREFIX))
            self._seen.add(point)
        times, host_s = self._forward(at, bare=point.startswith(HOST_PREFIX))
        if point.startswith(HOST_PREFIX):
            return {"host_layer": host_s}
        return _named(times)

    def rows(self, samples: Mapping[str, Sequence[Seconds]]) -> list[Measurement]:
        """Medians of the layers' parts; what depends on the chunk alone is put together."""
        setup = self.setup
        return compute_rows(samples, setup.model, dtype=setup.dtype, device=device_name(setup.device, setup.threads))

    def pids(self) -> Sequence[int]:
        """This process alone."""
        return ()

    def close(self) -> None:
        """Give the memory back."""
        self._models.clear()
        gc.collect()
        if self.setup.device == "cuda":
            torch.cuda.empty_cache()

    def _point(self, key: str) -> Point:
        if key.startswith(HOST_PREFIX):
            return Point(kernel=key.removeprefix(HOST_PREFIX), chunk=_HOST_CHUNK, prefix=0)
        return Point.parse(key)

    def _load(self, kernel: str) -> None:
        config = dict(self.setup.config) | {"num_hidden_layers": LAYERS, "use_cache": True}
        config.pop("layer_types", None)
        model = load_model(config, dtype=self.setup.dtype, device=self.setup.device, attention=kernel)  # type: ignore[arg-type]
        for other in self._models.values():
            model.load_state_dict(other.state_dict(), assign=True)
            break
        self._models[kernel] = model

    def _probe(self) -> None:
        """A short forward and a longer one: what any forward takes, and FLOPs a second."""
        kernel = self.setup.kernels[0]
        tokens = min(_PROBE, self.setup.max_context)
        seconds = []
        for chunk in (1, tokens):
            at = Point(kernel=kernel, chunk=chunk, prefix=0)
            seconds.append(min(_total(self._forward(at)[0]) for _ in range(3)))
        flops = LAYERS * 2.0 * self.setup.model.layers[0].active_parameters * tokens
        self._least_s = seconds[0]
        self._rate = flops / max(seconds[1] - seconds[0], 0.1 * seconds[1])

    def _check_memory(self, at: Point) -> None:
        """Skip what a CPU's memory would not hold; a GPU says so itself."""
        if self.setup.device != "cpu":
            return
        from kvrsim.request import dtype_bytes

        scores = at.chunk * (at.prefix + at.chunk)
        heads = self.setup.model.num_attention_heads * _EAGER_COPIES if at.kernel == "eager" else 4
        needed = scores * heads * dtype_bytes(self.setup.dtype)
        free = _free_bytes()
        if free is not None and needed > 0.8 * free:
            raise Skipped(f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")

    def _forward(self, at: Point, *, bare: bool = False) -> tuple[ForwardTimes, float]:
        """The parts' times and the host's seconds a layer; `bare`: only whole layers are marked."""
        model = self._models[at.kernel]
        geometry = Geometry.of(model)
        marks = LayerMarks(model, geometry, self.clock, bare=bare)
        try:
            with marks, torch.inference_mode():
                return self._timed(model, geometry, marks, at)
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            raise Skipped("out of the device's memory") from None

    def _timed(self, model: Any, geometry: Geometry, marks: LayerMarks, at: Point) -> tuple[ForwardTimes, float]:
        device = geometry.device
        cache = PrefixCache.stub(geometry, prefix_len=at.prefix, chunk_len=at.chunk, on_update=marks.on_cache)
        tokens = torch.randint(0, self.setup.model.vocab_size, (1, at.chunk), device=device)
        positions = torch.arange(at.prefix, at.prefix + at.chunk, device=device)[None]
        hold_s = 0.0
        for _ in range(1 if self.clock.host_is_device else 2):  # the first shows how long the host takes
            self.clock.start(hold_s)
            self.clock.mark("start")
            model(input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1)
            self.clock.mark("end")
            found = self.clock.finish()
            hold_s = _HOLD * found[-1].host_s
        times = marks.times(found)
        return times, sum(layer.host for layer in times.layers) / len(times.layers)


def _named(times: ForwardTimes) -> dict[str, float]:
    """Seconds by what was timed, each the mean of its like in a layer and of the layers."""
    layers = times.layers
    found = {
        "prepare": times.prepare,
        "embedding": times.embedding,
        "head": times.head,
        "layer": _mean([layer.before + layer.append + layer.attention + layer.after for layer in layers]),
        "before_attention": _mean([layer.before for layer in layers]),
        "cache_append": _mean([layer.append for layer in layers]),
        "attention": _mean([layer.attention for layer in layers]),
        "after_attention": _mean([layer.after for layer in layers]),
        "norm": _mean([norm for layer in layers for norm in layer.norms]),
        "rotary": _mean([layer.rotary for layer in layers]),
        "activation": _mean([layer.activation for layer in layers]),
        "residual": _mean([layer.residual for layer in layers]),
    }
    shapes: dict[tuple[int, int], list[float]] = {}
    for layer in layers:
        for fan_in, fan_out, seconds in layer.gemms:
            shapes.setdefault((fan_in, fan_out), []).append(seconds)
    return found | {f"gemm {fan_in} {fan_out}": _mean(all_s) for (fan_in, fan_out), all_s in shapes.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _total(times: ForwardTimes) -> float:
    named = _named(times)
    return times.prepare + times.embedding + times.head + LAYERS * named["layer"]


def _free_bytes() -> int | None:
    """What Linux says could be allocated."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    except (OSError, ValueError, IndexError):
        return None
    return found[0] * 1024 if found else None
