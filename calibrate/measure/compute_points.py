"""The points of a ComputeBench: which chunks and prefixes are timed, and the measurements that their samples become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.measure.journal import Seconds
from kvrsim.kernels.elementwise import after_mixer, before_mixer, measured_merge
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec
from kvrsim.request import dtype_bytes
from kvrsim.results.quartiles import quartiles

_LEAST_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """One forward pass: `chunk` tokens behind `prefix` tokens whose keys and values are there."""

    kernel: str  # attention: "eager", "sdpa" or "flash"
    chunk: int
    prefix: int

    @property
    def key(self) -> str:
        """As in journals, such as "sdpa 64+128"."""
        return f"{self.kernel} {self.chunk}+{self.prefix}"

    @classmethod
    def parse(cls, key: str) -> Point:
        """Back from its key."""
        kernel, _, sizes = key.partition(" ")
        chunk, _, prefix = sizes.partition("+")
        return cls(kernel=kernel, chunk=int(chunk), prefix=int(prefix))


def grid(max_context: int, kernels: tuple[str, ...]) -> list[Point]:
    """Points up to `max_context` tokens for each attention kernel, most informative first.

    Chunk sizes are powers of two from 64, plus one non-tile-aligned size between each pair. Each is timed without a
    prefix (projections and the causal triangle) and with prefixes of half, one and three times its length and of the
    rest of the context (the rectangle over the prefix). Later kernels differ from the first only in attention and get
    every other chunk size. Powers of two, alone and at the end of the context, come first.
    """
    ranked: dict[Point, tuple[int, int, int]] = {}
    for index, kernel in enumerate(kernels):
        chunks = _chunks(max_context)
        for place, chunk in enumerate(chunks):
            if index > 0 and place % 2 and len(chunks) > 1:
                continue
            for rank, prefix in enumerate((0, max_context - chunk, chunk, 3 * chunk, chunk // 2)):
                if prefix + chunk <= max_context:
                    point = Point(kernel=kernel, chunk=chunk, prefix=prefix)
                    ranked.setdefault(point, (max(rank - 1, 0) + 2 * (place % 2), index, chunk))
    return sorted(ranked, key=lambda point: ranked[point])


def block_points(points: Sequence[Point]) -> list[Point]:
    """Blocks of a ring with as many keys as queries, of a half, a quarter and an eighth of the longest context.

    Eager attention takes a block as any other rectangle.
    """
    longest = max(point.chunk + point.prefix for point in points)
    kernels = sorted({point.kernel for point in points} - {"eager"})
    sizes = [longest // part for part in (2, 4, 8) if longest // part >= _LEAST_CHUNK]
    return [Point(kernel=kernel, chunk=size, prefix=size) for kernel in kernels for size in sizes]


def _chunks(max_context: int) -> list[int]:
    """64, 96, 128, 192 ...: powers of two, and at odd indices the sizes half-way between them."""
    chunks, chunk = [], _LEAST_CHUNK
    while chunk <= max_context:
        chunks += [one for one in (chunk, chunk * 3 // 2) if one <= max_context]
        chunk *= 2
    return chunks or [max_context]


SOURCE = "kvrsim calibrate compute"
HOST_PREFIX = "host "  # of points that time the host, before the attention kernel
PENDING_PREFIX = "pending "  # of points that time a layer beside a receive that waits, before the point
BLOCK_PREFIX = "block "  # of points that time a ring's attention to another rank's block, before the point
BARE_LAYER = "bare layer"  # of a sample: a whole layer without marks inside

_BY_POINT = ("attention", "before_attention", "after_attention", "layer", "prepare")  # depend on prefix or kernel, too
_OUTSIDE = ("prepare", "embedding", "head")  # of the layers
_FENCE = 1.5  # interquartile ranges
_LEAST_S = 1e-9  # below this nothing was measured


def compute_rows(
    samples: Mapping[str, Sequence[Seconds]], model: ModelSpec, *, dtype: str, device: str
) -> list[Measurement]:
    """Medians, means and interquartile ranges; parts that depend on the chunk alone from all points of that chunk.

    Where layers were also timed without marks, their parts are scaled to add up to those times.
    """
    rows = _Rows(model=model, common={"dtype": dtype, "device": device, "source": SOURCE})
    chunks: dict[int, list[Seconds]] = {}
    found: list[Measurement] = []
    for key, taken in samples.items():
        if key.startswith(HOST_PREFIX):
            found += rows.host(taken)
            continue
        if key.startswith(PENDING_PREFIX):
            found += rows.pending(Point.parse(key.removeprefix(PENDING_PREFIX)), taken)
            continue
        if key.startswith(BLOCK_PREFIX):
            found += rows.block(Point.parse(key.removeprefix(BLOCK_PREFIX)), taken)
            continue
        point, taken = Point.parse(key), _unmarked(taken)
        chunks.setdefault(point.chunk, []).extend(taken)
        found += rows.of_point(point, taken)
    for chunk in sorted(chunks):
        found += rows.of_chunk(chunk, chunks[chunk])
    found += rows.head([seconds for taken in chunks.values() for seconds in taken])
    return found


class _Rows:
    """Makes measurements with common fields."""

    def __init__(self, *, model: ModelSpec, common: Mapping[str, Any]) -> None:
        self.model, self.common = model, common
        self.element_bytes = dtype_bytes(common["dtype"])
        self.traffic = traffic_of(model)

    def of_point(self, point: Point, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """Attention, and sums over the layer."""
        for operation in _BY_POINT:
            heads = self._heads() if operation == "attention" else {}
            yield from self._row(
                operation,
                [seconds[operation] for seconds in taken],
                kernel=point.kernel,
                chunk=point.chunk,
                prefix=point.prefix,
                **heads,
            )

    def _heads(self) -> dict[str, int]:
        model = self.model
        return {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
        }

    def block(self, point: Point, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """A ring's attention to a block, and the merging of its result."""
        sizes = {"chunk": point.chunk, "prefix": point.prefix}
        yield from self._row("block", [one["block"] for one in taken], kernel=point.kernel, **sizes, **self._heads())
        mixer = self.model.layers[0].mixer
        assert isinstance(mixer, Attention)
        nbytes = round(measured_merge(mixer).nbytes * point.chunk * self.element_bytes / 2)
        seconds = [one["merge"] for one in taken]
        yield from self._row("merge", seconds, kernel="torch", tokens=point.chunk, bytes=nbytes)

    def of_chunk(self, chunk: int, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """Products, element-wise kernels, the cache's update."""
        for name in taken[0]:
            if name.startswith("gemm "):
                fan_in, fan_out = (int(text) for text in name.split()[1:])
                sizes = {"tokens": chunk, "in_features": fan_in, "out_features": fan_out}
                yield from self._row("gemm", [one[name] for one in taken], kernel="torch.nn.Linear", **sizes)
        for operation, nbytes in self.traffic.items():
            moved = {"tokens": chunk, "bytes": round(nbytes * chunk * self.element_bytes / 2)}
            yield from self._row(operation, [one[operation] for one in taken], kernel="torch", **moved)
        copied = 2 * self.model.layer_cache_bytes(chunk, self.element_bytes)
        appended = {"chunk": chunk, "prefix": 0, "bytes": copied}
        yield from self._row("cache_append", [one["cache_append"] for one in taken], kernel="torch", **appended)

    def head(self, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """Logits of one token."""
        if taken:
            head = self.model.lm_head
            sizes = {"in_features": head.in_features, "out_features": head.out_features}
            yield from self._row("head", [seconds["head"] for seconds in taken], kernel="torch.nn.Linear", **sizes)

    def host(self, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """The host issuing a layer, and what comes before the first one."""
        for operation in ("host_layer", "host_prepare"):
            yield from self._row(operation, [seconds[operation] for seconds in taken], kernel="torch")

    def pending(self, point: Point, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """A layer alone, and beside a receive that waits."""
        for operation in ("layer_alone", "layer_pending"):
            seconds = [one[operation] for one in taken]
            yield from self._row(operation, seconds, kernel=point.kernel, chunk=point.chunk, prefix=point.prefix)

    def _row(self, operation: str, seconds: Sequence[float], **fields: Any) -> Iterator[Measurement]:
        """No row where nothing was measured, such as rotary embedding under ALiBi."""
        low, median_s, high = quartiles(seconds)
        if median_s > _LEAST_S:
            fence_s = _FENCE * (high - low)  # Tukey's fences: outliers are clipped to them
            mean_s = float(np.mean(np.clip(seconds, low - fence_s, high + fence_s)))
            yield Measurement(
                operation=operation,
                median_s=median_s,
                mean_s=mean_s,
                spread_s=high - low,
                **{**self.common, **fields},
            )


def _unmarked(taken: Sequence[Seconds]) -> list[Seconds]:
    """The samples of a point, their layers' parts scaled to layers that were timed without marks inside.

    Marks only add time, so nothing is scaled up: a longer time without marks is chance.
    """
    layers_s = [(one["layer"], one[BARE_LAYER]) for one in taken if BARE_LAYER in one]
    if not layers_s:
        return list(taken)
    marked_s, bare_s = (float(np.median(seconds)) for seconds in zip(*layers_s, strict=True))
    factor = min(1.0, bare_s / marked_s)
    scaled = [{name: seconds * (1.0 if name in _OUTSIDE else factor) for name, seconds in one.items()} for one in taken]
    return [{name: seconds for name, seconds in one.items() if name != BARE_LAYER} for one in scaled]


def traffic_of(model: ModelSpec) -> dict[str, float]:
    """Bytes a token of two-byte elements of each element-wise kernel, as the simulator counts eager PyTorch's."""
    layer = model.layers[0]
    width = next((gemm.in_features for gemm in reversed(layer.mlp) if gemm.out_features == model.hidden_size), 0)
    before = before_mixer(model, layer, fused=False)
    after = after_mixer(model, layer, fused=False, intermediate=width)
    nbytes = {step.op: step.nbytes for step in reversed((*before, *after))}  # the first norm is the input's
    return {
        "norm": nbytes["norm"],
        **({"rotary": nbytes["rotary"]} if "rotary" in nbytes else {}),
        "activation": nbytes["activation"],
        "residual": nbytes["residual"],
        "embedding": 4.0 * model.hidden_size,
    }
