"""The tables of routed experts in aiconfigurator-core: systems/data/SYSTEM/moe/FRAMEWORK/VERSION/moe_perf.parquet.

A row is one call of a framework's experts on one GPU of moe_tp_size x moe_ep_size: num_tokens tokens, of whose experts
those are computed that this GPU holds, num_experts / moe_ep_size of them, inter_size / moe_tp_size wide. Routing,
top-k, permuting and summing up are in the times. `distribution` says how tokens were spread over experts: evenly
(balanced), or by a power law with its exponent (collector/helper.py of github.com/ai-dynamo/aiconfigurator); of several
GPUs the one that was timed is then the busiest. SGLang's rows of several GPUs are of no use: its collector gives what
belongs to other GPUs to expert 0 (collector/sglang/collect_moe.py).

Of each type the kernel that has most rows is read: the others stand in where it does not run. Rows that take over half
as long again as some row of the same shape with more tokens are dropped; their kernels were chosen badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from calibrate.importers.tables import read_table
from kvrsim.errors import InputError
from kvrsim.kernels.experts import ExpertsCall
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.program import Array

HALF = "half"
# What the tables call the types, and kvrsim's names; HALF is half precision.
TYPES = MappingProxyType(
    {"bfloat16": HALF, "w4a16_mxfp4": "mxfp4_wo", "w4a8_mxfp4_mxfp8": "mxfp4_fp8"}
    | {kind: kind for kind in GEMM_TYPES if not kind.startswith("mxfp4")}
)
_SHAPE = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
_TEXTS = ["moe_dtype", "kernel_source", "distribution"]
LEAST_TOKENS = 64
_SLOW = 1.5
_NOT_READ = ("min_latency", "as_silu")  # in a kernel's name: for decoding; of another activation than the model's
# Experts without a gate, as Nemotron-H has them: inter_size, topk, num_experts. No column says so.
_PLAIN = ((1856, 6, 128), (2688, 22, 512), (5120, 22, 512))
# How often collectors run a call before they time it, and while they do; the second pair is of power laws.
_LOOPS = MappingProxyType({"sglang": ((25, 50), (25, 50)), "trtllm": ((3, 6), (5, 5)), "vllm": ((3, 6), (5, 5))})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertRows:
    """As many calls of one type as the arrays are long."""

    kind: str  # a key of GEMM_TYPES, or HALF
    source: str
    kernel: str
    dropped: int  # rows that were left out as slow
    tokens: Array
    hidden_size: Array
    intermediate_size: Array  # of a whole expert
    num_experts: Array  # of the model
    num_experts_per_tok: Array
    tp_size: Array
    ep_size: Array
    gated: Array
    exponent: Array  # of the power law; 0: balanced
    seconds: Array
    warmups: Array
    repeats: Array

    def take(self, some: Any) -> ExpertRows:
        """Some of them, by index or mask."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: array[some] for name, array in arrays.items() if isinstance(array, np.ndarray)})

    def with_seconds(self, seconds: Array) -> ExpertRows:
        """The same rows with other times."""
        return replace(self, seconds=seconds)

    def call(self, imbalance: Array | float = 1.0) -> ExpertsCall:
        """All of them as one call, whose sizes are arrays."""
        one: Any = self  # sizes of a call are numbers; the form takes arrays as well
        return ExpertsCall(
            tokens=self.tokens,
            hidden_size=one.hidden_size,
            intermediate_size=one.intermediate_size / one.tp_size,
            gated=one.gated > 0,
            num_experts=one.num_experts / one.ep_size,
            num_experts_per_tok=one.num_experts_per_tok / one.ep_size,
            compute=None if self.kind == HALF else self.kind,
            imbalance=imbalance,  # type: ignore[arg-type]
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of each row the model's: hidden_size, intermediate_size, num_experts_per_tok, num_experts."""
        columns = (self.hidden_size, self.intermediate_size, self.num_experts_per_tok, self.num_experts)
        return [tuple(map(int, shape)) for shape in zip(*columns, strict=True)]


def read_experts(
    text: str, kinds: Sequence[str] | None = None, argument: str = "experts", root: Path | None = None
) -> list[ExpertRows]:
    """The rows of a source, one ExpertRows a type; `kinds`: those wanted, None: all that the table has.

    `text`, `root` and errors: see calibrate.importers.tables.read_table; InputError too for a type without rows.
    """
    frame, source = read_table(
        text, "moe", "moe_perf.parquet", ["num_tokens", *_SHAPE], _TEXTS, argument=argument, root=root
    )
    framework = source.split("/")[-2]
    kind = frame["moe_dtype"].map(TYPES.get)
    there = [one for one in (HALF, *GEMM_TYPES) if (kind == one).any()]
    for one in kinds or ():
        if one not in there:
            raise InputError(argument, one, f"a type of {text}: {', '.join(there)}")
    usable = (frame["num_tokens"] >= LEAST_TOKENS) & frame["distribution"].str.match(r"balanced$|power_law_[0-9.]+$")
    for part in _NOT_READ:
        usable &= ~frame["kernel_source"].str.contains(part)
    return [_rows(frame[usable & (kind == one)], one, source, framework) for one in (kinds or there)]


def _rows(frame: Any, kind: str, source: str, framework: str) -> ExpertRows:
    name = frame["kernel_source"].str.removesuffix("_nongated")
    frame = frame[name == name.mode()[0]]
    frame = frame.groupby([*_SHAPE, "distribution", "num_tokens"], as_index=False)["latency"].median()
    frame = frame.sort_values("num_tokens", ascending=False, kind="stable")
    least = frame.groupby([*_SHAPE, "distribution"])["latency"].cummin()
    kept = frame[frame["latency"] <= _SLOW * least].sort_values([*_SHAPE, "distribution", "num_tokens"])
    exponent = kept["distribution"].str.extract(r"([0-9.]+)$")[0].astype(float).fillna(0.0).to_numpy()
    plain = [shape in _PLAIN for shape in zip(kept["inter_size"], kept["topk"], kept["num_experts"], strict=True)]
    even, skewed = _LOOPS.get(framework, ((0, 1), (0, 1)))
    loops = np.where(exponent[:, None] > 0, skewed, even).astype(float)
    numbers = {column: kept[column].to_numpy(dtype=float) for column in ("num_tokens", *_SHAPE, "latency")}
    return ExpertRows(
        kind=kind,
        source=source,
        kernel=str(name.mode()[0]),
        dropped=len(frame) - len(kept),
        tokens=numbers["num_tokens"],
        hidden_size=numbers["hidden_size"],
        intermediate_size=numbers["inter_size"],
        num_experts=numbers["num_experts"],
        num_experts_per_tok=numbers["topk"],
        tp_size=numbers["moe_tp_size"],
        ep_size=numbers["moe_ep_size"],
        gated=1.0 - np.array(plain, dtype=float),
        exponent=exponent,
        seconds=numbers["latency"] / 1000,
        warmups=loops[:, 0],
        repeats=loops[:, 1],
    )
