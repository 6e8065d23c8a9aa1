"""Prefills on several GPUs that others published, compared with predictions: `python -m validate.multi_gpu`.

The command writes docs/results/multi_gpu.md from data/multi_gpu_prefills.csv. Of kvrsim, only the rule for intervals is
fitted to these TTFTs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from calibrate.engines.prefills import EnginePrefill
from kvrsim.builder import make_scenario
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.hardware import load_link
from kvrsim.model.mixers import Attention
from kvrsim.published import read_table
from kvrsim.scenario import Partition
from kvrsim.strategies import get_strategy
from kvrsim.units import format_seconds, format_tokens
from planner.simulate import run_simulation
from validate.published.compare import DATA
from validate.report import RESULTS, fill, run_command, table, write_page
from validate.results import ROOT
from validate.silicon import OtherPrefill

PAGE = RESULTS / "multi_gpu.md"
_LINK_RIG = "BurstAttention"  # the rig whose TTFTs are mostly messages over an unstated link
_LINK_ROWS = "Megatron, all-reduce"  # its rows from which the link's bandwidth is computed
_LINK_TOKENS = 65536  # longest of these rows
_LINK_BANDWIDTHS = np.arange(20, 81) * 1e9  # bytes/s that are tried
_LAYER = 5  # a layer in the middle of the model


@dataclass(frozen=True, kw_only=True)
class MultiGpuRow:
    """One published figure."""

    fields: Mapping[str, str]  # columns of the file

    @property
    def rig(self) -> str:
        """The machine, by its source."""
        return self.fields["rig"]

    @property
    def way(self) -> str:
        """Strategy, number of GPUs, and what else tells the rows of a rig apart."""
        gpus = int(self.fields["num_gpus"])
        words = [self.fields["strategy"], f"{gpus} GPU{'s' * (gpus > 1)}", self.fields["notes"]]
        return ", ".join(word for word in words if word)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, a cached prefix included."""
        return int(self.fields["context_len"])

    @property
    def new_tokens(self) -> int:
        """Tokens that are prefilled."""
        return self.tokens - int(self.fields["cached_prefix"])

    @property
    def measured_s(self) -> float:
        """The published seconds."""
        return float(self.fields["seconds"])

    @property
    def is_compared(self) -> bool:
        """Whether the row is a TTFT that no rule of the file leaves out."""
        return self.fields["quantity"] == "ttft" and not self.fields["left_out"]

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Arguments of make_scenario, without the engine."""
        cluster = self.fields["cluster"]
        if cluster.endswith(".json"):
            cluster = str(ROOT / cluster)
        asked: dict[str, Any] = {"model": self.fields["model"], "cluster": cluster, "ctx": self.tokens}
        asked["gpus"] = int(self.fields["num_gpus"])
        if self.new_tokens < self.tokens:
            asked |= {"cached_prefix": self.tokens - self.new_tokens, "prefix_placement": "sharded"}
        return asked

    @cached_property
    def prefill(self) -> EnginePrefill:
        """The prefill that the row measured, in the engine's steps."""
        strategy = self.fields["strategy"]
        pieces = None
        step = int(self.fields["step_tokens"] or self.new_tokens)
        if step < self.new_tokens:
            strategy = f"{strategy}+pp1"
            pieces = tuple(min(step, self.new_tokens - first) for first in range(0, self.new_tokens, step))
        return EnginePrefill(
            case=f"{self.rig} {self.new_tokens} on {self.way}",
            source=self.fields["source"],
            engine=self.fields["engine"],
            version="",
            asked=self.asked,
            strategy=strategy,
            pieces=pieces,
            tokens=self.new_tokens,
            measured_s=self.measured_s,
        )

    @cached_property
    def check(self) -> OtherPrefill:
        """The prediction with its interval."""
        return OtherPrefill.of(self.prefill)


def read_rows() -> list[MultiGpuRow]:
    """All figures, in the order of the file."""
    return [MultiGpuRow(fields=fields) for fields in read_table(DATA / "multi_gpu_prefills.csv")]


# -- ratios within a rig


@dataclass(frozen=True, kw_only=True)
class RigRatio:
    """Two TTFTs of one machine."""

    first: MultiGpuRow
    second: MultiGpuRow

    @property
    def kind(self) -> str:
        """What differs between the two."""
        if self.first.fields["strategy"] != self.second.fields["strategy"]:
            return "strategy"
        if self.first.new_tokens != self.second.new_tokens:
            return "length"
        return "link"

    @property
    def measured(self) -> float:
        """The published ratio."""
        return self.second.measured_s / self.first.measured_s

    @property
    def predicted(self) -> float:
        """The predicted ratio."""
        return self.second.check.predicted_s / self.first.check.predicted_s

    @property
    def rel_error(self) -> float:
        """Relative error of the predicted ratio."""
        return self.predicted / self.measured - 1


def ratios_of(rows: Iterable[MultiGpuRow]) -> list[RigRatio]:
    """The ratio of each further row of a pair to its first row."""
    by_pair: dict[str, list[MultiGpuRow]] = {}
    for row in rows:
        by_pair.setdefault(row.fields["pair"], []).append(row)
    return [RigRatio(first=group[0], second=other) for group in by_pair.values() for other in group[1:]]


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """Errors of some rows, as text."""

    number: int
    median: str  # with its sign
    size: str  # median of the sizes
    low: str  # smallest error, with its sign
    high: str  # largest error, with its sign
    inside: str  # share of the measurements inside their intervals
    width: str  # median ratio of the ends of the intervals

    @classmethod
    def of(cls, rows: Sequence[MultiGpuRow]) -> RowErrors:
        """The errors of the rows' predictions."""
        checks = [row.check for row in rows]
        errors = [check.rel_error for check in checks]
        return cls(
            number=len(rows),
            median=f"{np.median(errors):+.1%}",
            size=f"{np.median(np.abs(errors)):.1%}",
            low=f"{min(errors):+.0%}",
            high=f"{max(errors):+.0%}",
            inside=f"{np.mean([check.inside for check in checks]):.0%}",
            width=f"{np.median([check.high_s / check.low_s for check in checks]):.2f}",
        )


# -- the page


def rig_table(rows: Sequence[MultiGpuRow]) -> list[str]:
    """Table of errors by rig and way."""
    groups: dict[tuple[str, str], list[MultiGpuRow]] = {}
    for row in rows:
        groups.setdefault((row.rig, row.way.removesuffix(", again")), []).append(row)
    lines = []
    for (rig, way), group in groups.items():
        model = group[0].prefill.scenario.model
        gpu = group[0].prefill.scenario.cluster.gpu.name
        lines.append((rig, f"{model.name} on {gpu}", way, _span(group), *_errors(group)))
    lines.append(("all", "", "", _span(rows), *_errors(rows)))
    heads = (
        "rig",
        "model, GPU",
        "strategy",
        "new tokens",
        "number",
        "median error",
        "median size",
        "inside",
        "high / low",
    )
    return table(heads, lines)


def _span(rows: Sequence[MultiGpuRow]) -> str:
    low = min(row.new_tokens for row in rows)
    high = max(row.new_tokens for row in rows)
    if low == high:
        return format_tokens(low)
    return f"{format_tokens(low)} to {format_tokens(high)}"


def _errors(rows: Sequence[MultiGpuRow]) -> tuple[object, ...]:
    """Cells of a table."""
    errors = RowErrors.of(rows)
    return errors.number, errors.median, errors.size, errors.inside, errors.width


def ratio_table(ratios: Sequence[RigRatio]) -> list[str]:
    """Table of ratios."""
    lines = (
        (
            ratio.first.rig,
            f"{ratio.second.way}, {format_tokens(ratio.second.new_tokens)}",
            f"{ratio.first.way}, {format_tokens(ratio.first.new_tokens)}",
            ratio.kind,
            f"{ratio.measured:.3f}",
            f"{ratio.predicted:.3f}",
            f"{ratio.rel_error:+.1%}",
        )
        for ratio in ratios
    )
    return table(("rig", "TTFT of", "divided by that of", "differ in", "measured", "predicted", "error"), lines)


def ratio_summary(ratios: Sequence[RigRatio]) -> list[str]:
    """Table of the sizes of errors of ratios, by what differs."""
    lines = []
    for kind in ("strategy", "length", "link"):
        sizes = [abs(ratio.rel_error) for ratio in ratios if ratio.kind == kind]
        if sizes:
            lines.append((kind, len(sizes), f"{np.median(sizes):.1%}", f"{max(sizes):.1%}"))
    return table(("the two differ in", "ratios", "median error", "largest"), lines)


def row_table(rows: Sequence[MultiGpuRow]) -> list[str]:
    """Table of single TTFTs."""
    lines = []
    for row in rows:
        cells = [row.rig, row.way, row.new_tokens, row.tokens - row.new_tokens or ""]
        cells += [format_seconds(row.measured_s), format_seconds(row.check.predicted_s)]
        cells.append(f"{format_seconds(row.check.low_s)} to {format_seconds(row.check.high_s)}")
        cells.append(f"{row.check.rel_error:+.0%}")
        lines.append(cells)
    return table(("rig", "strategy", "new tokens", "cached", "measured", "predicted", "80 % interval", "error"), lines)


def prefix_table(rows: Sequence[MultiGpuRow]) -> list[str]:
    """Table of prefills behind a sharded prefix, by the share of new tokens."""
    lines = []
    for row in rows:
        execution = row.prefill.execution
        with_queries = execution.on(replace(execution.placed, prefix_access="pass-q"))
        lines.append(
            (
                f"{row.new_tokens / row.tokens:.1%}",
                row.new_tokens,
                row.tokens - row.new_tokens,
                format_seconds(row.measured_s),
                format_seconds(row.check.predicted_s),
                f"{row.check.rel_error:+.0%}",
                format_seconds(run_partition(with_queries, row.prefill.partition).ttft_s),
            )
        )
    return table(("new tokens, share", "new", "cached", "measured", "predicted", "error", "pass-q"), lines)


# -- parts of a layer


def part_table(rows: Sequence[MultiGpuRow]) -> list[str]:
    """Table of the parts of a layer of one source, by strategy."""
    lines = []
    for strategy, group in groupby(rows, key=lambda row: row.fields["strategy"]):
        parts = list(group)
        measured = {row.fields["quantity"].removeprefix("layer_"): row.measured_s for row in parts}
        predicted = _layer_parts(parts[0])
        attention_s = measured["attention"]
        messages_s = measured.get("communication", 0.0)
        others_s = measured["block"] - attention_s - messages_s
        for name, seconds in (("attention", attention_s), ("messages", messages_s), ("all others", others_s)):
            if seconds:
                ours = predicted[name]
                error = f"{ours / seconds - 1:+.0%}"
                lines.append((strategy, name, format_seconds(seconds), format_seconds(ours), error))
    return table(("strategy", "part of a layer", "measured", "predicted", "error"), lines)


def _layer_parts(row: MultiGpuRow) -> dict[str, float]:
    """Predicted seconds of the parts of one layer on rank 0."""
    result = run_simulation(row.prefill.scenario, strategy=row.fields["strategy"], record=("timeline",))
    assert result.timeline is not None  # recorded
    seconds = dict.fromkeys(("attention", "messages", "all others"), 0.0)
    for span in result.timeline.spans:
        if span.layer != _LAYER or span.rank != 0:
            continue
        if span.kind == "wait":
            seconds["messages"] += span.duration_s
        elif span.kind == "compute" and span.op == "attention":
            seconds["attention"] += span.duration_s
        elif span.kind == "compute":
            seconds["all others"] += span.duration_s
    return seconds


# -- a rig whose link is not stated


class SharedLink(NamedTuple):
    """A bandwidth that all GPUs of a rig share, as some of its rows show it."""

    bandwidth: str  # GB/s
    num_fitted: int  # rows from which it was computed
    largest: str  # largest error of these rows
    rows: list[str]  # table of the errors with it and with other networks


def link_part(rows: Sequence[MultiGpuRow]) -> SharedLink:
    """What a shared bandwidth, computed from some rows of the rig, says about the others."""
    fitted = [row for row in rows if row.fields["notes"] == _LINK_ROWS and row.tokens <= _LINK_TOKENS]
    errors = []
    for bandwidth in _LINK_BANDWIDTHS:
        log_errors = [abs(np.log(_on_link(row, bandwidth) / row.measured_s)) for row in fitted]
        errors.append(np.median(log_errors))
    best = float(_LINK_BANDWIDTHS[int(np.argmin(errors))])
    largest = max(abs(_on_link(row, best) / row.measured_s - 1) for row in fitted)
    lines = []
    for way, group in groupby(rows, key=lambda row: row.way):
        for row in group:
            free_s = _on_link(row, 1e13, topology="switch")
            cells = [way, row.tokens, format_seconds(row.measured_s), f"{1 - free_s / row.measured_s:.0%}"]
            for seconds in (_on_link(row, None, topology="switch"), _on_link(row, None), _on_link(row, best)):
                cells.append(f"{seconds / row.measured_s - 1:+.0%}")
            lines.append(cells)
    heads = (
        "strategy",
        "tokens",
        "measured",
        "not explained by computation",
        "error, a slot per GPU",
        "error, one slot for all",
        f"error, {best / 1e9:.0f} GB/s for all",
    )
    return SharedLink(f"{best / 1e9:.0f}", len(fitted), f"{largest:.0%}", table(heads, lines))


def _on_link(row: MultiGpuRow, bandwidth_bytes_per_s: float | None, **setting: Any) -> float:
    """TTFT of the row with another bandwidth, or another topology."""
    link = {} if bandwidth_bytes_per_s is None else {"link_bandwidth": bandwidth_bytes_per_s}
    scenario, _ = make_scenario(**row.asked, engine=row.fields["engine"], **link, **setting)
    execution = place(scenario, get_strategy(row.fields["strategy"]))
    partition = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
    return run_partition(execution, partition).ttft_s


def page(rows: Sequence[MultiGpuRow]) -> list[str]:
    """Markdown lines of the page."""
    compared = [row for row in rows if row.is_compared]
    by_rig = {rig: [row for row in compared if row.rig == rig] for rig in dict.fromkeys(row.rig for row in compared)}
    behind_prefix = [row for row in compared if row.new_tokens < row.tokens]
    ratios = ratios_of(row for row in compared if row not in behind_prefix)
    strategy_errors = [abs(ratio.rel_error) for ratio in ratios if ratio.kind == "strategy"]
    dense = [row for row in compared if not row.prefill.scenario.model.is_mixture]
    heads = behind_prefix[0].prefill.scenario.model.layer_kinds[0].mixer
    assert isinstance(heads, Attention)
    kv_bytes = 2 * 2 * heads.num_key_value_heads * heads.head_dim
    query_bytes = 2 * heads.num_attention_heads * heads.head_dim
    links = link_part([row for row in rows if row.rig == _LINK_RIG])
    return fill(
        "multi_gpu",
        count=len(compared),
        ratio_largest=f"{max(strategy_errors):.1%}",
        ratio_median=f"{np.median(strategy_errors):.1%}",
        apb=RowErrors.of(by_rig["APB"]),
        meta=RowErrors.of(by_rig["Meta"]),
        meta_full=f"{np.median([abs(_as_usual_h100(row) / row.measured_s - 1) for row in by_rig['Meta']]):.1%}",
        rtx3090=RowErrors.of(by_rig["RTX 3090"]),
        rtx6000=RowErrors.of(by_rig["RTX PRO 6000"]),
        dense=RowErrors.of(dense),
        all=RowErrors.of(compared),
        rigs=rig_table(compared),
        ratio_summary=ratio_summary(ratios),
        ratios=ratio_table(ratios),
        prefix=prefix_table(behind_prefix),
        prefix_errors=RowErrors.of(behind_prefix),
        no_prefix=RowErrors.of([row for row in by_rig["Meta"] if row not in behind_prefix]),
        kv_bytes=kv_bytes,
        query_bytes=query_bytes,
        pass_q_share=f"{kv_bytes / query_bytes:.1%}",
        parts=part_table([row for row in rows if row.fields["quantity"] != "ttft"]),
        slot=f"{load_link('pcie4-x16').bandwidth_bytes_per_s / 1e9:.1f}",
        rows=row_table(compared),
        link_bandwidth=links.bandwidth,
        link_fitted=links.num_fitted,
        link_largest=links.largest,
        link_rows=links.rows,
    )


def _as_usual_h100(row: MultiGpuRow) -> float:
    """TTFT of the row on nodes of H100 with their usual power limit and memory."""
    asked = row.asked | {"cluster": f"{row.asked['gpus'] // 8}x8xh100"}
    return replace(row.prefill, asked=asked).predicted_s


def main() -> None:
    """Write the page."""
    rows = read_rows()
    write_page(PAGE, page(rows))
    print(f"{PAGE}: {sum(row.is_compared for row in rows)} prefills")


if __name__ == "__main__":
    sys.exit(run_command(main))
