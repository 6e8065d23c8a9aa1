"""ComputeBench: the points of a model's layers, each timed by a ForwardTimer, and measurements from their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.data import Measurement
from calibrate.measure.campaign import Campaign, Seconds, SkippedPoint
from calibrate.measure.device import device_name, origin, spec_of
from calibrate.measure.forward import HEAT_S, HOST_CHUNK, LAYERS, ComputeSetup, ForwardTimer, Point
from calibrate.measure.ranks import PendingRanks
from kvrsim.interp import quartiles
from kvrsim.io.schema import to_json
from kvrsim.kernels.elementwise import after_mixer, before_mixer, measured_merge
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec
from kvrsim.runtime.faults import RankError
from kvrsim.scenario import dtype_bytes

SOURCE = "kvrsim calibrate compute"
BARE_LAYER = "bare layer"  # name of the seconds of a whole layer that was timed without marks inside

_LEAST_CHUNK = 64
_MOST_PENDING = 4096  # longest chunk that is timed during a pending receive, in tokens: such a chunk fills a GPU
_LEAST_MEMORY_FIRST = ("flash", "sdpa", "eager")  # kernels by the memory that they need for a long chunk
_PROBE = 256  # tokens of a first forward that measures the device's speed
_MARKED_S = 2e-2  # seconds; shorter forwards are also timed without marks, because marks would take much of the time
_HOST = ("host_layer", "host_prepare")  # seconds of the host; all other parts are seconds of the device
# Parts that also depend on the prefix or the kernel.
_BY_POINT = ("attention", "before_attention", "after_attention", "layer", "prepare")
_OUTSIDE = ("prepare", "embedding", "head")  # parts outside the layers
_FENCE = 1.5  # Tukey's fences: outliers are farther from the quartiles than this number of interquartile ranges
_LEAST_S = 1e-9  # a part with a shorter median did not run


def compute_campaign(setup: ComputeSetup, output: Path, command: str) -> Campaign:
    """Campaign that times the model's layers."""

    def origin_of(rows: list[Measurement]) -> Mapping[str, Any]:
        return {
            "gpu": to_json(spec_of(setup.device, setup.dtype, setup.threads)),
            "model": dict(setup.config),
            "model_name": setup.model.name,
        }

    return Campaign(
        title="layers",
        build=lambda: ComputeBench.build(setup),
        about=origin(setup.device, setup.threads, command),
        origin=origin_of,
        output=output,
        gpus=[torch.cuda.current_device()] if setup.device == "cuda" else (),
    )


def layer_kv_bytes(setup: ComputeSetup) -> int:
    """Bytes of K and V of one layer for the longest context: the longest message of a prefill."""
    return setup.model.layer_cache_bytes(setup.max_context, dtype_bytes(setup.dtype))


def grid(max_context: int, kernels: tuple[str, ...]) -> list[Point]:
    """Points up to `max_context` tokens for each attention kernel, most informative first.

    Chunk sizes are powers of two from 64, plus one non-tile-aligned size between each pair. Each chunk is timed without
    a prefix (projections and the causal triangle) and with prefixes of half, one and three times its length and of the
    rest of the context (the rectangle over the prefix). Kernels after the first get every other chunk size, because
    they differ only in attention. Powers of two come first, without a prefix and at the end of the context.
    """
    ranked: dict[Point, tuple[int, int, int]] = {}
    chunks = _chunks(max_context)
    for index, kernel in enumerate(kernels):
        for place, chunk in enumerate(chunks):
            if index > 0 and place % 2 and len(chunks) > 1:
                continue
            for rank, prefix in enumerate((0, max_context - chunk, chunk, 3 * chunk, chunk // 2)):
                if prefix + chunk <= max_context:
                    point = Point(kernel=kernel, chunk=chunk, prefix=prefix)
                    ranked.setdefault(point, (max(rank - 1, 0) + 2 * (place % 2), index, chunk))
    return sorted(ranked, key=lambda point: ranked[point])


def _chunks(max_context: int) -> list[int]:
    """64, 96, 128, 192 ...: powers of two, and the sizes half-way between them (at odd indices)."""
    chunks = []
    chunk = _LEAST_CHUNK
    while chunk <= max_context:
        chunks.append(chunk)
        if chunk * 3 // 2 <= max_context:
            chunks.append(chunk * 3 // 2)
        chunk *= 2
    return chunks or [max_context]


def _block_points(points: Sequence[Point]) -> list[Point]:
    """Blocks of a ring with as many keys as queries: a half, a quarter and an eighth of the longest context.

    Eager attention has no blocks: it computes a block like any other rectangle.
    """
    longest = max(point.chunk + point.prefix for point in points)
    kernels = sorted({point.kernel for point in points} - {"eager"})
    points_of_blocks = []
    for kernel, part in product(kernels, (2, 4, 8)):
        size = longest // part
        if size >= _LEAST_CHUNK:
            points_of_blocks.append(Point(kernel=kernel, chunk=size, prefix=size, kind="block"))
    return points_of_blocks


def _pending_points(points: Sequence[Point]) -> list[Point]:
    """Up to three points without a prefix, of the kernel that needs least memory, with chunks as in a long prefill.

    They run in a process of their own, beside the one that times the other points on the same GPU.
    """
    kernels = {point.kernel for point in points}
    kernel = next(kernel for kernel in _LEAST_MEMORY_FIRST if kernel in kernels)
    alone = sorted({point.chunk for point in points if point.kernel == kernel and point.prefix == 0})
    short = [chunk for chunk in alone if chunk <= _MOST_PENDING] or alone[:1]
    powers = [chunk for chunk in short if chunk & (chunk - 1) == 0]
    return [Point(kernel=kernel, chunk=chunk, prefix=0, kind="pending") for chunk in (powers or short)[-1:-6:-2]]


@dataclass(slots=True)
class ComputeBench:
    """Bench of forward passes of LAYERS layers with random weights behind random prefixes."""

    setup: ComputeSetup
    timer: ForwardTimer
    _warm: set[Point] = field(default_factory=set)  # points that have run once
    _rate: float = 0.0  # FLOP/s in the probe
    _least_s: float = 0.0  # seconds of the shortest forward
    _pending: PendingRanks | None = None  # ranks, started on their first use
    _pending_fault: str | None = None  # why the ranks have failed

    @classmethod
    def build(cls, setup: ComputeSetup) -> ComputeBench:
        """Load the models, and measure the device's speed."""
        bench = cls(setup, ForwardTimer.build(setup))
        bench._probe()
        return bench

    def points(self) -> Sequence[Point]:
        """The grid; on a CPU also blocks of a ring; on a GPU also host times and layers during a pending receive."""
        points = grid(self.setup.max_context, self.setup.kernels)
        if self.timer.clock.host_is_device:
            first, *rest = points
            return [first, *_block_points(points), *rest]
        hosts = [Point(kernel=kernel, chunk=HOST_CHUNK, prefix=0, kind="host") for kernel in self.setup.kernels]
        if self.setup.num_gpus > 1:
            hosts += _pending_points(points)
        return [*hosts, *points]

    def expected_s(self, point: Point) -> float:
        """Estimated seconds: FLOPs at the probe's rate, and heating; eager kernels are assumed to take longer."""
        at = point
        model = self.setup.model
        heads = model.num_attention_heads * model.head_dim
        if at.kind == "block":
            return 2 * 1.5 * 4.0 * heads * at.chunk * at.prefix / self._rate
        slower = 1.5
        if at.kernel == "eager":
            slower = 4.0
        rows = 2.0 * model.layers[0].active_parameters * at.chunk
        scores = 4.0 * heads * at.chunk * (at.prefix + at.chunk)
        forward_s = self._least_s + LAYERS * (rows + slower * scores) / self._rate
        expected_s = forward_s
        if forward_s < _MARKED_S:
            expected_s += forward_s
        if self._heats(at, forward_s):
            expected_s += HEAT_S
        return expected_s

    def sample(self, point: Point) -> Seconds:
        """Time one forward, on a GPU at the clock of a long prefill; the first forward of a point is not counted.

        Raises SkippedPoint if the point does not fit into memory, or its ranks fail. Afterwards the process holds no
        memory but the weights, because the ranks of pending points need some of the same GPU.
        """
        try:
            return self._sample(point)
        finally:
            self.timer.release()

    def _sample(self, at: Point) -> Seconds:
        if at.kind == "pending":
            return self._sample_pending(at)
        if at.kind == "block":
            return self.timer.block(at)
        bare = at.kind == "host"
        if at not in self._warm:
            self.timer.check_memory(at)
            self.timer.forward(at, bare=bare)
            self._warm.add(at)
        times = self.timer.forward(at, bare=bare, heat=self._heats(at, self.timer.known_s.get(at, 0.0)))
        samples = {name: seconds for name, seconds in times.items() if (name in _HOST) is bare}
        if not bare and self.timer.known_s[at] < _MARKED_S:
            samples[BARE_LAYER] = self.timer.layer_s(at)
        return samples

    def _sample_pending(self, at: Point) -> Seconds:
        """Time a layer on two ranks. If they fail, these points are skipped, and the others are still measured."""
        if self._pending_fault is not None:
            raise SkippedPoint(self._pending_fault)
        try:
            if self._pending is None:
                self._pending = PendingRanks(replace(self.setup, kernels=(at.kernel,)))
            return self._pending.sample(at)
        except RankError as error:
            self._pending_fault = f"two ranks are needed, and they failed: {error}"
        raise SkippedPoint(self._pending_fault)

    def _heats(self, at: Point, forward_s: float) -> bool:
        """Whether the device must be heated first; host times need no heating."""
        return not self.timer.clock.host_is_device and at.kind != "host" and forward_s < HEAT_S

    def rows(self, samples: Mapping[Point, Sequence[Seconds]]) -> list[Measurement]:
        """Median rows of the layers' parts; parts that depend only on the chunk are merged over prefixes."""
        setup = self.setup
        return compute_rows(samples, setup.model, dtype=setup.dtype, device=device_name(setup.device, setup.threads))

    def close(self) -> None:
        """Release the memory, and end the processes of the ranks."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        self.timer.close()

    def _probe(self) -> None:
        """Time a short and a longer forward: these give the seconds of the shortest forward, and the FLOP/s."""
        tokens = min(_PROBE, self.setup.max_context)
        seconds = []
        for chunk in (1, tokens):
            at = Point(kernel=self.setup.kernels[0], chunk=chunk, prefix=0)
            forwards_s = []
            for _ in range(3):
                times = self.timer.forward(at)
                forwards_s.append(sum(times[name] for name in _OUTSIDE) + LAYERS * times["layer"])
            seconds.append(min(forwards_s))
        flops = LAYERS * 2.0 * self.setup.model.layers[0].active_parameters * tokens
        self._least_s = seconds[0]
        self._rate = flops / max(seconds[1] - seconds[0], 0.1 * seconds[1])


def compute_rows(
    samples: Mapping[Point, Sequence[Seconds]], model: ModelSpec, *, dtype: str, device: str
) -> list[Measurement]:
    """Rows with medians, means and interquartile ranges; parts that depend only on the chunk use all its points.

    Where whole layers were also timed without marks, the parts of a layer are scaled to the time without marks.
    """
    rows = _Rows(model=model, common={"dtype": dtype, "device": device, "source": SOURCE})
    for point, seconds in samples.items():
        rows.add_point(point, seconds)
    rows.add_chunks()
    return rows.rows


class _Rows:
    """Measurements with common fields."""

    def __init__(self, *, model: ModelSpec, common: Mapping[str, Any]) -> None:
        self.model = model
        self.common = common
        self.element_bytes = dtype_bytes(common["dtype"])
        self.chunks: dict[int, list[Seconds]] = {}  # samples of whole forwards by their chunk
        self.rows: list[Measurement] = []

    def add_point(self, point: Point, seconds: Sequence[Seconds]) -> None:
        """Add rows that depend on the point: attention, sums over the layer, the host; `add_chunks` adds the rest."""
        model = self.model
        call = {"kernel": point.kernel, "chunk": point.chunk, "prefix": point.prefix}
        heads = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
        }
        if point.kind == "host":
            for operation in _HOST:
                self._add(operation, operation, seconds, kernel="torch")
        elif point.kind == "pending":
            for operation in ("layer_alone", "layer_pending"):
                self._add(operation, operation, seconds, **call)
        elif point.kind == "block":
            mixer = model.layers[0].mixer
            assert isinstance(mixer, Attention)
            self._add("block", "block", seconds, **call, **heads)
            self._add("merge", "merge", seconds, **self._traffic(measured_merge(mixer).nbytes, point.chunk))
        else:
            unmarked = _without_marks(seconds)
            self.chunks.setdefault(point.chunk, []).extend(unmarked)
            for operation in _BY_POINT:
                fields = call
                if operation == "attention":
                    fields = call | heads
                self._add(operation, operation, unmarked, **fields)

    def add_chunks(self) -> None:
        """Add rows of products, element-wise kernels and cache updates per chunk, and of the logits of one token."""
        for chunk, samples in sorted(self.chunks.items()):
            for name in samples[0]:
                if name.startswith("gemm "):
                    fan_in, fan_out = map(int, name.split()[1:])
                    sizes = {"tokens": chunk, "in_features": fan_in, "out_features": fan_out}
                    self._add("gemm", name, samples, kernel="torch.nn.Linear", **sizes)
            for operation, nbytes in traffic_of(self.model).items():
                self._add(operation, operation, samples, **self._traffic(nbytes, chunk))
            copied = 2 * self.model.layer_cache_bytes(chunk, self.element_bytes)
            self._add("cache_append", "cache_append", samples, kernel="torch", chunk=chunk, prefix=0, bytes=copied)
        if self.chunks:
            head = self.model.lm_head
            every = list(chain.from_iterable(self.chunks.values()))
            sizes = {"in_features": head.in_features, "out_features": head.out_features}
            self._add("head", "head", every, kernel="torch.nn.Linear", **sizes)

    def _traffic(self, nbytes: float, tokens: int) -> dict[str, Any]:
        """Fields of an element-wise kernel; `nbytes` counts bytes per token, in two-byte elements."""
        return {"kernel": "torch", "tokens": tokens, "bytes": round(nbytes * tokens * self.element_bytes / 2)}

    def _add(self, operation: str, name: str, samples: Sequence[Seconds], **fields: Any) -> None:
        """Add a row, unless nothing was measured, such as rotary embedding under ALiBi."""
        seconds = [sample[name] for sample in samples]
        low, median_s, high = quartiles(seconds)
        if median_s > _LEAST_S:
            fence_s = _FENCE * (high - low)  # Tukey's fences: outliers are clipped to them
            mean_s = float(np.mean(np.clip(seconds, low - fence_s, high + fence_s)))
            times: dict[str, Any] = {"median_s": median_s, "mean_s": mean_s, "spread_s": high - low}
            self.rows.append(Measurement(operation=operation, **times, **{**self.common, **fields}))


def _without_marks(rows: Sequence[Seconds]) -> list[Seconds]:
    """The samples of a point; the parts of layers are scaled to the time of layers without marks inside.

    Marks only add time: a longer time without marks is noise, and nothing is scaled up.
    """
    timed_twice = [seconds for seconds in rows if BARE_LAYER in seconds]
    if not timed_twice:
        return list(rows)
    marked_s = float(np.median([seconds["layer"] for seconds in timed_twice]))
    bare_s = float(np.median([seconds[BARE_LAYER] for seconds in timed_twice]))
    factor = min(1.0, bare_s / marked_s)
    scaled: list[Seconds] = []
    for seconds in rows:
        parts = dict(seconds)
        parts.pop(BARE_LAYER, None)
        for name in parts:
            if name not in _OUTSIDE:
                parts[name] *= factor
        scaled.append(parts)
    return scaled


def traffic_of(model: ModelSpec) -> dict[str, float]:
    """Bytes per token of each element-wise kernel, in two-byte elements, by the simulator's count for eager PyTorch."""
    layer = model.layers[0]
    width = next((gemm.in_features for gemm in reversed(layer.mlp) if gemm.out_features == model.hidden_size), 0)
    before = before_mixer(model, layer, fused=False)
    after = after_mixer(model, layer, fused=False, intermediate=width)
    nbytes = {step.op: step.nbytes for step in reversed((*before, *after))}  # the first norm replaces others
    return {
        "norm": nbytes["norm"],
        **({"rotary": nbytes["rotary"]} if "rotary" in nbytes else {}),
        "activation": nbytes["activation"],
        "residual": nbytes["residual"],
        "embedding": 4.0 * model.hidden_size,
    }
