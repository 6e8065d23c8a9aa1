"""ComputeBench: the points of a model's layers, each timed by a ForwardTimer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibrate.data.measurement import Measurement
from calibrate.measure.compute_points import (
    BARE_LAYER,
    BLOCK_PREFIX,
    HOST_PREFIX,
    PENDING_PREFIX,
    Point,
    block_points,
    compute_rows,
    grid,
)
from calibrate.measure.forward_timer import HEAT_S, LAYERS, ComputeSetup, ForwardTimer, mean, mean_layer_s
from calibrate.measure.journal import Seconds
from calibrate.measure.layer_times import ForwardTimes
from calibrate.measure.machine import device_name
from calibrate.measure.pending import PendingRanks
from kvrsim.io.schema import fields_to_json

_PROBE = 256  # tokens of the forward that shows how fast the device is
_HOST_CHUNK = 64  # tokens of the forwards that show how long the host takes
_MARKED_S = 2e-2  # of a forward; in a shorter one marks take a large part: its layers are also timed without them


@dataclass(slots=True)
class ComputeBench:
    """Forward passes of LAYERS layers with random weights behind random prefixes."""

    setup: ComputeSetup
    timer: ForwardTimer
    _warm: set[str] = field(default_factory=set)  # points that have run once
    _rate: float = 0.0  # FLOP/s, of the probe
    _least_s: float = 0.0  # of a forward, whatever its length
    _pending: PendingRanks | None = None  # started when they are first asked for

    @classmethod
    def build(cls, setup: ComputeSetup) -> ComputeBench:
        """Load the models, and measure how fast the device is."""
        bench = cls(setup, ForwardTimer.build(setup))
        bench._probe()
        return bench

    def points(self) -> Sequence[str]:
        """The grid; on a CPU also blocks of a ring, elsewhere the host's time, and layers beside a pending receive."""
        points = grid(self.setup.max_context, self.setup.kernels)
        found = [point.key for point in points]
        if self.timer.clock.host_is_device:
            return [found[0], *(f"{BLOCK_PREFIX}{point.key}" for point in block_points(points)), *found[1:]]
        beside = (
            [f"{PENDING_PREFIX}{point.key}" for point in _pending_points(points)] if self.setup.num_gpus > 1 else []
        )
        return [*(f"{HOST_PREFIX}{kernel}" for kernel in self.setup.kernels), *beside, *found]

    def expected_s(self, point: str) -> float:
        """FLOPs at the probe's rate, and the heating; eager kernels take longer than their FLOPs."""
        at = self._point(point)
        if point.startswith(BLOCK_PREFIX):
            model = self.setup.model
            return 2 * 1.5 * 4.0 * model.num_attention_heads * model.head_dim * at.chunk * at.prefix / self._rate
        slower = 4.0 if at.kernel == "eager" else 1.5
        model, layer = self.setup.model, self.setup.model.layers[0]
        rows = 2.0 * layer.active_parameters * at.chunk
        scores = 4.0 * model.num_attention_heads * model.head_dim * at.chunk * (at.prefix + at.chunk)
        forward_s = self._least_s + LAYERS * (rows + slower * scores) / self._rate
        forwards_s = forward_s * (2 if forward_s < _MARKED_S else 1)
        return forwards_s + (HEAT_S if self._heats(point, forward_s) else 0.0)

    def sample(self, point: str) -> Seconds:
        """One forward, on a GPU at the clock of a long prefill; the first of a point is not counted.

        Raises Skipped where it does not fit.
        """
        if point.startswith(PENDING_PREFIX):
            return self._beside_pending(point.removeprefix(PENDING_PREFIX))
        if point.startswith(BLOCK_PREFIX):
            return self.timer.block(self._point(point))
        at, bare = self._point(point), point.startswith(HOST_PREFIX)
        if point not in self._warm:
            self.timer.check_memory(at)
            self.timer.forward(at, bare=bare)
            self._warm.add(point)
        times, host_s = self.timer.forward(at, bare=bare, heat=self._heats(point, self.timer.known_s.get(at, 0.0)))
        if bare:
            return {"host_layer": host_s, "host_prepare": times.host_prepare}
        found = _named(times)
        if self.timer.known_s[at] < _MARKED_S:
            found[BARE_LAYER] = self.timer.layer_s(at)
        return found

    def conditions(self) -> Mapping[str, Any] | None:
        """What NVML said while the last sample was taken; None on a CPU."""
        return None if self.timer.reading is None else fields_to_json(self.timer.reading)

    def _heats(self, point: str, forward_s: float) -> bool:
        """Whether the device has to be heated first; the host's time is its own."""
        return not self.timer.clock.host_is_device and not point.startswith(HOST_PREFIX) and forward_s < HEAT_S

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
        self.timer.close()

    def _point(self, key: str) -> Point:
        if key.startswith(HOST_PREFIX):
            return Point(kernel=key.removeprefix(HOST_PREFIX), chunk=_HOST_CHUNK, prefix=0)
        return Point.parse(key.removeprefix(PENDING_PREFIX).removeprefix(BLOCK_PREFIX))

    def _probe(self) -> None:
        """A short forward and a longer one: what any forward takes, and FLOPs a second."""
        kernel = self.setup.kernels[0]
        tokens = min(_PROBE, self.setup.max_context)
        seconds = []
        for chunk in (1, tokens):
            at = Point(kernel=kernel, chunk=chunk, prefix=0)
            seconds.append(min(_total(self.timer.forward(at)[0]) for _ in range(3)))
        flops = LAYERS * 2.0 * self.setup.model.layers[0].active_parameters * tokens
        self._least_s = seconds[0]
        self._rate = flops / max(seconds[1] - seconds[0], 0.1 * seconds[1])


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
        "layer": mean_layer_s(times),
        "before_attention": mean([layer.before for layer in layers]),
        "cache_append": mean([layer.append for layer in layers]),
        "attention": mean([layer.attention for layer in layers]),
        "after_attention": mean([layer.after for layer in layers]),
        "norm": mean([norm for layer in layers for norm in layer.norms]),
        "rotary": mean([layer.rotary for layer in layers]),
        "activation": mean([layer.activation for layer in layers]),
        "residual": mean([layer.residual for layer in layers]),
    }
    shapes: dict[tuple[int, int], list[float]] = {}
    for layer in layers:
        for fan_in, fan_out, seconds in layer.gemms:
            shapes.setdefault((fan_in, fan_out), []).append(seconds)
    return found | {f"gemm {fan_in} {fan_out}": mean(all_s) for (fan_in, fan_out), all_s in shapes.items()}


def _total(times: ForwardTimes) -> float:
    named = _named(times)
    return times.prepare + times.embedding + times.head + LAYERS * named["layer"]
