"""compute_rows: measurements from the samples of a ComputeBench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.measure.grid import Point
from calibrate.measure.journal import Seconds
from kvrsim.cost.traffic import after_attention, before_attention
from kvrsim.model.spec import ModelSpec
from kvrsim.request import dtype_bytes

SOURCE = "kvrsim calibrate compute"
HOST_PREFIX = "host "  # of points that time the host, before the attention kernel
PENDING_PREFIX = "pending "  # of points that time a layer beside a receive that waits, before the point
BARE_LAYER = "bare layer"  # of a sample: a whole layer without marks inside

_BY_POINT = ("attention", "before_attention", "after_attention", "layer", "prepare")  # depend on prefix or kernel, too
_OUTSIDE = ("prepare", "embedding", "head")  # of the layers
_FENCE = 1.5  # interquartile ranges
_LEAST_S = 1e-9  # what is less is nothing that was measured


def compute_rows(
    samples: Mapping[str, Sequence[Seconds]], model: ModelSpec, *, dtype: str, device: str
) -> list[Measurement]:
    """Medians, means and interquartile ranges; parts that depend on the chunk alone from all points of that chunk.

    Where layers were timed without marks too, their parts are scaled so that they add up to those.
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
        point, taken = Point.parse(key), _unmarked(taken)
        chunks.setdefault(point.chunk, []).extend(taken)
        found += rows.of_point(point, taken)
    for chunk in sorted(chunks):
        found += rows.of_chunk(chunk, chunks[chunk])
    found += rows.head([seconds for taken in chunks.values() for seconds in taken])
    return found


class _Rows:
    """Measurements with what they have in common."""

    def __init__(self, *, model: ModelSpec, common: Mapping[str, Any]) -> None:
        self.model, self.common = model, common
        self.element_bytes = dtype_bytes(common["dtype"])
        self.traffic = traffic_of(model)

    def of_point(self, point: Point, taken: Sequence[Seconds]) -> Iterator[Measurement]:
        """Attention and what the layer sums up to."""
        model = self.model
        for operation in _BY_POINT:
            heads = {}
            if operation == "attention":
                heads = {
                    "num_attention_heads": model.num_attention_heads,
                    "num_key_value_heads": model.num_key_value_heads,
                    "head_dim": model.head_dim,
                }
            yield from self._row(
                operation,
                [seconds[operation] for seconds in taken],
                kernel=point.kernel,
                chunk=point.chunk,
                prefix=point.prefix,
                **heads,
            )

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
        copied = 2 * chunk * self.model.kv_bytes_per_token_layer(self.element_bytes)
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
        """None where nothing was to be measured, such as rotary embedding under ALiBi."""
        low, median_s, high = (float(value) for value in np.percentile(seconds, (25, 50, 75)))
        if median_s > _LEAST_S:
            fence_s = _FENCE * (high - low)  # Tukey's: what lies beyond is drawn in
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

    Hooks and marks only take time, so nothing is ever scaled up: what is longer without them is chance.
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
    mlp = model.layers[0].mlp
    width = next((gemm.in_features for gemm in reversed(mlp) if gemm.out_features == model.hidden_size), 0)
    before = before_attention(model, fused=False)
    after = after_attention(model, fused=False, intermediate=width)
    nbytes = {step.op: step.nbytes for step in reversed((*before, *after))}  # the first norm is the input's
    return {
        "norm": nbytes["norm"],
        **({"rotary": nbytes["rotary"]} if "rotary" in nbytes else {}),
        "activation": nbytes["activation"],
        "residual": nbytes["residual"],
        "embedding": 4.0 * model.hidden_size,
    }
