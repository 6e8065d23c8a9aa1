"""A gate for the model of time: limits of its errors by group of rows, and faults that must break them.

    python -m validate.gate     write docs/results/gate.md; the exit code is 1 if a limit is missed or a fault passes

The rows are published prefills that this checkout has: the paper's with even chunks, those of engines of 2023 and 2024,
and those on several GPUs. data/gate_limits.json states the limits. A fault changes the model of time, or its intervals,
as a programming error could. A gate that lets a fault pass would let that error pass, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from calibrate.prefills.fit import PrefillCheck, RowCheck
from calibrate.prefills.verdict import AccuracyLimits, LimitCheck
from kvrsim.engine import SHORT_TOKENS
from kvrsim.execution import place
from kvrsim.io.schema import JsonObject, read
from kvrsim.published import PublishedTtft, read_table
from kvrsim.published import read_rows as read_paper
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from kvrsim.units import scale
from planner.candidates import Candidate
from validate import multi_gpu, serving
from validate.published.compare import DATA, scenario_of
from validate.report import RESULTS, fill, run_command, table, write_page

PAGE = RESULTS / "gate.md"
_SEARCHED = "kvr-s"  # strategy of the paper with searched chunks: the gate is about times, not about searches


# -- rows


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One published prefill."""

    group: str
    case: str
    read: Callable[[], Scenario]  # reads the scenario, which takes tens of milliseconds
    strategy: str
    pieces: tuple[int, ...] | None  # tokens of the engine's steps; None: one chunk per rank
    measured_s: float

    @cached_property
    def scenario(self) -> Scenario:
        """What was measured."""
        return self.read()

    def check(self, fault: ModelFault) -> RowCheck:
        """The prediction of a model of time with this fault."""
        scenario = fault.change(self.scenario)
        execution = place(scenario, get_strategy(self.strategy))
        partition = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
        if self.pieces is not None:
            partition = Partition(chunk_lens=self.pieces)
        candidate = Candidate(execution=execution, partition=partition)
        interval = candidate.interval
        ttft_s = candidate.ttft_s
        return RowCheck(
            case=self.case,
            measured_s=self.measured_s,
            predicted_s=ttft_s,
            low_s=ttft_s * (interval.low_s / ttft_s) ** fault.width,
            high_s=ttft_s * (interval.high_s / ttft_s) ** fault.width,
        )


def read_gate_rows() -> list[GateRow]:
    """All rows of the gate, by group."""
    return [*_paper_rows(), *_serving_rows(), *_multi_gpu_rows()]


def _paper_rows() -> Iterable[GateRow]:
    for row in read_paper():
        if row.strategy == _SEARCHED or row.link == "1GB/s":  # no single network explains the rows at 1 GB/s
            continue
        yield GateRow(
            group="paper, 10 GB/s" if row.link == "10GB/s" else "paper",
            case=row.case,
            read=partial(_paper_scenario, row),
            strategy="kvr-e" if row.strategy == "kvr" else row.strategy,
            pieces=None,
            measured_s=row.ttft_s,
        )


def _paper_scenario(row: PublishedTtft) -> Scenario:
    return scenario_of(row)[0]


def _serving_rows() -> Iterable[GateRow]:
    for row in read_table(DATA / "serving_prefills.csv"):
        if row["engine_name"] not in serving.ENGINES or row["left_out"]:
            continue
        tokens = int(row["context_len"]) * int(row["batch"])
        yield GateRow(
            group="engines of 2023, short" if tokens < SHORT_TOKENS else "engines of 2023",
            case=f"{row['model']} {tokens} {row['strategy']} on {row['num_gpus']} {row['gpu']}",
            read=partial(serving.scenario_of, row),
            strategy=row["strategy"],
            pieces=None,
            measured_s=float(row["seconds"]),
        )


_KINDS = {  # group of a rig of several GPUs
    "APB": "dense, long",
    "Meta": "dense, power limit, several nodes",
    "RTX 3090": "dense, GPU with scaled rates",
    "RTX PRO 6000": "mixture",
}


def _multi_gpu_rows() -> Iterable[GateRow]:
    for row in multi_gpu.read_rows():
        if not row.is_compared:
            continue
        prefill = row.prefill
        yield GateRow(
            group=_KINDS[row.rig],
            case=prefill.case,
            read=partial(getattr, prefill, "scenario"),
            strategy=prefill.strategy,
            pieces=prefill.pieces,
            measured_s=row.measured_s,
        )


# -- faults


Change = Callable[[Scenario], Scenario]


def _unchanged(scenario: Scenario) -> Scenario:
    return scenario


@dataclass(frozen=True, kw_only=True)
class ModelFault:
    """An error in the model of time, or in the intervals."""

    name: str
    change: Change = _unchanged  # the scenario as the faulty model sees it
    width: float = 1.0  # factor on the logarithms of high / predicted and of predicted / low


NO_FAULT = ModelFault(name="none")


def _links(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with the bandwidths of all links divided by a factor."""
    cluster = scenario.cluster
    link = scale(cluster.link, factor, only_rates=True)
    network = scale(cluster.network, factor, only_rates=True)
    return replace(scenario, cluster=replace(cluster, link=link, network=network))


def _kernels(scenario: Scenario, factor: float, *names: str) -> Scenario:
    """The scenario with these kernels slower by a factor."""
    profile = scenario.profile
    assert profile is not None  # no row is predicted from a datasheet
    changed = {name: scale(getattr(profile.kernels, name), factor) for name in names}
    return replace(scenario, profile=replace(profile, kernels=replace(profile.kernels, **changed)))


def _no_launches(scenario: Scenario) -> Scenario:
    """The scenario whose host and device launch kernels in no time; requests, steps and tokens keep their seconds."""
    nothing = {"layer_s": 0.0, "kernel_s": 0.0, "launch_s": 0.0}
    if scenario.engine is not None:
        host = replace(scenario.engine.host, **nothing)
        return replace(scenario, engine=replace(scenario.engine, host=host))
    profile = scenario.profile
    assert profile is not None  # no row is predicted from a datasheet
    return replace(scenario, profile=replace(profile, host=replace(profile.host, **nothing)))


FAULTS = (
    ModelFault(name="links have twice their bandwidth", change=lambda scenario: _links(scenario, 0.5)),
    ModelFault(name="links have half their bandwidth", change=lambda scenario: _links(scenario, 2.0)),
    ModelFault(name="kernels are launched in no time", change=_no_launches),
    ModelFault(
        name="attention takes 1.2 times as long", change=lambda scenario: _kernels(scenario, 1.2, "attention", "latent")
    ),
    ModelFault(
        name="matrix products take 1.2 times as long",
        change=lambda scenario: _kernels(scenario, 1.2, "gemm", "gemm_types", "experts"),
    ),
    ModelFault(
        name="element-wise kernels take half as long", change=lambda scenario: _kernels(scenario, 0.5, "elementwise")
    ),
    ModelFault(
        name="one of the two all-reduces of a layer is missing",
        change=lambda scenario: replace(scenario, model=replace(scenario.model, parallel_attn=True)),
    ),
    ModelFault(
        name="one layer of the model is missing",
        change=lambda scenario: replace(scenario, model=replace(scenario.model, layers=scenario.model.layers[1:])),
    ),
    ModelFault(name="intervals are half as wide", width=0.5),
    ModelFault(name="intervals are twice as wide", width=2.0),
)


# -- limits


def read_limits() -> dict[str, AccuracyLimits]:
    """The limits of each group."""
    groups = JsonObject.read(DATA / "gate_limits.json", "gate_limits")
    return {name: read(AccuracyLimits, groups.child(name)) for name in groups.fields if not name.startswith("_")}


def missed_limits(
    rows: Sequence[GateRow], fault: ModelFault, limits: Mapping[str, AccuracyLimits]
) -> dict[str, list[LimitCheck]]:
    """The limits that a model of time with this fault misses, by group; groups that meet all theirs are absent."""
    missed = {}
    for group, checks in checks_of(rows, fault).items():
        failures = [limit for limit in limits[group].check(checks) if not limit.ok]
        if failures:
            missed[group] = failures
    return missed


def checks_of(rows: Sequence[GateRow], fault: ModelFault = NO_FAULT) -> dict[str, PrefillCheck]:
    """The predictions of each group."""
    groups: dict[str, list[RowCheck]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row.check(fault))
    return {group: PrefillCheck(rows=tuple(checks)) for group, checks in groups.items()}


# -- the page


def page(rows: Sequence[GateRow], limits: Mapping[str, AccuracyLimits]) -> tuple[list[str], bool]:
    """Markdown lines of the page, and whether the gate holds: limits are met, and every fault misses one."""
    checks = checks_of(rows)
    missed = missed_limits(rows, NO_FAULT, limits)
    by_fault = {fault.name: missed_limits(rows, fault, limits) for fault in FAULTS}
    passing = [name for name, groups in by_fault.items() if not groups]
    holds = not missed and not passing
    if holds:
        verdict = f"All limits are met, and each of the {len(FAULTS)} faults breaks one."
    else:
        groups = ", ".join(missed) or "none"
        verdict = f"Limits are missed in these groups: {groups}. Faults that pass: {', '.join(passing) or 'none'}."
    lines = fill(
        "gate",
        count=len(rows),
        num_faults=len(FAULTS),
        verdict=verdict,
        limits=limit_table(checks, limits),
        faults=fault_table(by_fault),
    )
    return lines, holds


def limit_table(checks: Mapping[str, PrefillCheck], limits: Mapping[str, AccuracyLimits]) -> list[str]:
    """Table of each group's values and limits."""
    lines = []
    for group, check in checks.items():
        cells = [group, str(len(check.rows))]
        limit = limits[group]
        cells.append(_value_and_limit(f"{check.errors.median_ape:.1%}", limit.median_error, ".0%"))
        cells.append(_value_and_limit(f"{check.coverage:.0%}", limit.coverage, ".0%"))
        cells.append(_value_and_limit(f"{check.interval_score:.2f}", limit.interval_score, ".2f"))
        lines.append(cells)
    heads = ("group", "rows", "median error (at most)", "inside (at least)", "score (at most)")
    return table(heads, lines)


def _value_and_limit(value: str, limit: float | None, form: str) -> str:
    if limit is None:
        return value
    return f"{value} ({limit:{form}})"


def fault_table(by_fault: Mapping[str, Mapping[str, Sequence[LimitCheck]]]) -> list[str]:
    """Table of the limits that each fault breaks."""
    lines = []
    for name, groups in by_fault.items():
        broken = [f"{group}: {limit.text}" for group, failures in groups.items() for limit in failures]
        lines.append((name, len(broken), "; ".join(broken[:3]) or "none: this fault passes"))
    return table(("fault", "limits broken", "the first of them"), lines)


def main() -> int:
    """Write the page; return the exit code."""
    lines, holds = page(read_gate_rows(), read_limits())
    write_page(PAGE, lines)
    print(f"{PAGE}: {'holds' if holds else 'FAILS'}")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(run_command(main))
