"""ComputeBench: decoder layers of a Hugging Face model, timed part by part."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from calibrate.data.measurement import Measurement
from calibrate.measure.campaign import Skipped
from calibrate.measure.clock import Clock, CpuClock, CudaClock, mark_empty, without_marks
from calibrate.measure.compute_rows import BARE_LAYER, HOST_PREFIX, PENDING_PREFIX, compute_rows
from calibrate.measure.device_watch import DeviceWatch, Reading
from calibrate.measure.grid import Point, grid
from calibrate.measure.journal import Seconds
from calibrate.measure.layer_marks import ForwardTimes, LayerMarks
from calibrate.measure.machine import device_name
from calibrate.measure.pending import PendingRanks
from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.model.spec import ModelSpec
from kvrsim.runtime.cache import OnUpdate, PrefixCache
from kvrsim.runtime.geometry import Geometry, load_model

LAYERS = 2  # of the model that is timed: the second one's input is what a layer has written, as in a whole model
_PROBE = 256  # tokens of the forward that shows how fast the device is
_HOLD = 1.5  # of the host's time to issue a forward, that the device is kept busy beforehand
_EAGER_COPIES = 5  # score matrices that eager attention holds at a time: scores, mask added, softmax in fp32, weights
_HOST_CHUNK = 64  # tokens of the forwards that show how long the host takes
_HEAT_S = (
    0.3  # of the layers' own work before a shorter sample: a GPU that has idled runs at clocks that it cannot hold
)
_MARKED_S = 2e-2  # of a forward, below which its marks are no small part: its layers are timed without them, too


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
    num_gpus: int = 1  # of this machine; from two on, layers are timed beside a pending receive

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
    _known_s: dict[Point, float] = field(default_factory=dict)  # device seconds of a forward, as last timed
    _seen: set[str] = field(default_factory=set)  # points that have run once, which warms up
    _rate: float = 0.0  # FLOP/s, of the probe
    _least_s: float = 0.0  # of a forward, whatever its length
    _watch: DeviceWatch | None = None  # of the GPU that is timed
    _reading: Reading | None = None  # of the last sample
    _pending: PendingRanks | None = None  # started when they are first asked for

    @classmethod
    def build(cls, setup: ComputeSetup) -> ComputeBench:
        """Load the model once for each kernel, and see how fast the device is."""
        if setup.device == "cpu":
            torch.set_num_threads(setup.threads)
        on_cuda = setup.device == "cuda"
        clock: Clock = CudaClock(torch.cuda) if on_cuda else CpuClock()
        watch = DeviceWatch.of_visible(torch, [torch.cuda.current_device()]) if on_cuda else None
        bench = cls(setup, clock, _watch=watch)
        for kernel in setup.kernels:
            bench._load(kernel)
        bench._probe()
        return bench

    def points(self) -> Sequence[str]:
        """The grid; where the host is not the device, the host's own time, and layers beside a pending receive."""
        points = grid(self.setup.max_context, self.setup.kernels)
        found = [point.key for point in points]
        if self.clock.host_is_device:
            return found
        beside = (
            [f"{PENDING_PREFIX}{point.key}" for point in _pending_points(points)] if self.setup.num_gpus > 1 else []
        )
        return [*(f"{HOST_PREFIX}{kernel}" for kernel in self.setup.kernels), *beside, *found]

    def expected_s(self, point: str) -> float:
        """FLOPs at the probe's rate, and the heating; eager kernels take longer than their FLOPs."""
        at = self._point(point)
        slower = 4.0 if at.kernel == "eager" else 1.5
        model, layer = self.setup.model, self.setup.model.layers[0]
        rows = 2.0 * layer.active_parameters * at.chunk
        scores = 4.0 * model.num_attention_heads * model.head_dim * at.chunk * (at.prefix + at.chunk)
        forward_s = self._least_s + LAYERS * (rows + slower * scores) / self._rate
        forwards_s = forward_s * (2 if forward_s < _MARKED_S else 1)
        return forwards_s + (_HEAT_S if self._heats(point, forward_s) else 0.0)

    def sample(self, point: str) -> Seconds:
        """One forward, on a GPU at the clock of a long prefill; the first of a point is not counted.

        Raises Skipped where it does not fit.
        """
        if point.startswith(PENDING_PREFIX):
            return self._beside_pending(point.removeprefix(PENDING_PREFIX))
        at, bare = self._point(point), point.startswith(HOST_PREFIX)
        if point not in self._seen:
            self._check_memory(at)
            self._forward(at, bare=bare)
            self._seen.add(point)
        times, host_s = self._forward(at, bare=bare, heat=self._heats(point, self._known_s.get(at, 0.0)))
        if bare:
            return {"host_layer": host_s, "host_prepare": times.host_prepare}
        found = _named(times)
        if self._known_s[at] < _MARKED_S:
            found[BARE_LAYER] = self.bare_layer_s(at)
        return found

    def bare_layer_s(self, at: Point, *, heat: bool = False) -> float:
        """Device seconds of a layer, of which only its ends and its attention's are marked."""
        return _layer_s(self._forward(at, bare=True, heat=heat)[0])

    def conditions(self) -> Mapping[str, Any] | None:
        """What NVML said while the last sample was taken; None on a CPU."""
        return None if self._reading is None else fields_to_json(self._reading)

    def _heats(self, point: str, forward_s: float) -> bool:
        """Whether the device has to be heated first; the host's time is its own."""
        return not self.clock.host_is_device and not point.startswith(HOST_PREFIX) and forward_s < _HEAT_S

    def _beside_pending(self, key: str) -> Seconds:
        """A layer alone and beside a receive that waits, on two ranks of their own."""
        if self._pending is None:
            self._pending = PendingRanks(self.setup)
        return self._pending.sample(key)

    def rows(self, samples: Mapping[str, Sequence[Seconds]]) -> list[Measurement]:
        """Medians of the layers' parts; what depends on the chunk alone is put together."""
        setup = self.setup
        return compute_rows(samples, setup.model, dtype=setup.dtype, device=device_name(setup.device, setup.threads))

    def pids(self) -> Sequence[int]:
        """Of the ranks that time a pending receive, once they run."""
        return () if self._pending is None else self._pending.pids

    def close(self) -> None:
        """Give the memory back, and end the ranks."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        self._models.clear()
        gc.collect()
        if self.setup.device == "cuda":
            torch.cuda.empty_cache()

    def _point(self, key: str) -> Point:
        if key.startswith(HOST_PREFIX):
            return Point(kernel=key.removeprefix(HOST_PREFIX), chunk=_HOST_CHUNK, prefix=0)
        return Point.parse(key.removeprefix(PENDING_PREFIX))

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

    def _forward(self, at: Point, *, bare: bool = False, heat: bool = False) -> tuple[ForwardTimes, float]:
        """The parts' times and the host's seconds a layer; `bare`: only whole layers are marked."""
        model = self._models[at.kernel]
        geometry = Geometry.of(model)
        marks = LayerMarks(model, geometry, self.clock, bare=bare)
        try:
            with torch.inference_mode():
                if heat:
                    self._heat(model, geometry, at)
                with marks:
                    return self._timed(model, geometry, marks, at)
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            raise Skipped("out of the device's memory") from None

    def _heat(self, model: Any, geometry: Geometry, at: Point) -> None:
        """The point's own forwards for _HEAT_S, which end just before it is timed."""
        forward = self._prepared(model, geometry, at, on_update=None)
        until_s = time.monotonic() + _HEAT_S
        while time.monotonic() < until_s:
            forward()
            self.clock.wait()

    def _timed(self, model: Any, geometry: Geometry, marks: LayerMarks, at: Point) -> tuple[ForwardTimes, float]:
        forward = self._prepared(model, geometry, at, on_update=marks.on_cache)
        hold_s = 0.0
        for _ in range(1 if self.clock.host_is_device else 2):  # the first shows how long the host takes
            self.clock.start(hold_s)
            mark_empty(self.clock)
            self.clock.mark("start")
            forward()
            self.clock.mark("end")
            if self._watch is not None:
                self._reading = self._watch.read()  # the device is at work: the host has only issued
            found = self.clock.finish()
            hold_s = _HOLD * found[-1].host_s
        corrected = without_marks(found)
        self._known_s[at] = corrected[-1].device_s - corrected[0].device_s
        times = marks.times(corrected)
        return times, sum(layer.host for layer in times.layers) / len(times.layers)

    def _prepared(
        self, model: Any, geometry: Geometry, at: Point, *, on_update: OnUpdate | None
    ) -> Callable[[], object]:
        """A forward of the point, to be run again and again."""
        device = geometry.device
        cache = PrefixCache.stub(geometry, prefix_len=at.prefix, chunk_len=at.chunk, on_update=on_update)
        tokens = torch.randint(0, self.setup.model.vocab_size, (1, at.chunk), device=device)
        positions = torch.arange(at.prefix, at.prefix + at.chunk, device=device)[None]
        return partial(
            model, input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
        )


def _pending_points(points: Sequence[Point]) -> list[Point]:
    """Up to three of the first kernel without a prefix, about the chunks that a rank of a long prefill has."""
    first = points[0].kernel
    alone = sorted({point.chunk for point in points if point.kernel == first and point.prefix == 0})
    powers = [chunk for chunk in alone if chunk & (chunk - 1) == 0]
    return [Point(kernel=first, chunk=chunk, prefix=0) for chunk in (powers or alone)[-1:-6:-2]]


def _named(times: ForwardTimes) -> dict[str, float]:
    """Seconds by what was timed, each the mean of its like in a layer and of the layers."""
    layers = times.layers
    found = {
        "prepare": times.prepare,
        "embedding": times.embedding,
        "head": times.head,
        "layer": _layer_s(times),
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


def _layer_s(times: ForwardTimes) -> float:
    return _mean([layer.before + layer.append + layer.attention + layer.after for layer in times.layers])


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
