"""Fits to half of each engine's published prefills, checked on the other half.

`python -m validate.serving.half` rewrites docs/results/own-engine.md. The rule: of each engine on each cluster, the
machines (number of GPUs, strategy, model) and the sizes (prompt length, batch) of the rows that are compared are
numbered in order; a row is in the one half where the sum of its numbers is even, else in the other, as the fields of a
chessboard. So both halves span the machines and the lengths. Each half is fitted as `kvrsim calibrate prefills` does,
and the other is predicted. The prior is what the other engines have in common, so neither half is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibrate.prefills.cases import make_cases
from calibrate.prefills.fit import fit_prefills
from calibrate.prefills.rows import PrefillRow
from kvrsim.engine.engine import SHORT_TOKENS, Engine, load_engine
from kvrsim.io.files import write_atomically
from planner.partitions import partition_of
from planner.uncertainty.interval import interval
from validate.serving.fit import ENGINES, left_out_engines
from validate.serving.rows import ServingRow, read_rows

PAGE = Path(__file__).parents[2] / "docs" / "results" / "own-engine.md"
MOST_MEDIAN_APE = 0.05  # of all rows, each predicted by the fit to the half that it is not in
LEAST_ROWS = 4  # of an engine on a cluster: two to fit, two to predict


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedRow:
    """One published prefill, predicted by the fit to the other half."""

    row: ServingRow
    before_s: float  # with the prior engine
    predicted_s: float
    low_s: float  # of the 80 % prediction interval
    high_s: float

    @property
    def rel_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.row.ttft_s - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low_s <= self.row.ttft_s <= self.high_s

    @property
    def rel_error_before(self) -> float:
        """The same with the prior engine."""
        return self.before_s / self.row.ttft_s - 1


def groups() -> dict[tuple[str, str], tuple[ServingRow, ...]]:
    """Rows of an engine on a cluster, by size and machine; groups of a few rows are left out."""
    found: dict[tuple[str, str], list[ServingRow]] = {}
    for row in read_rows():
        found.setdefault((row.engine, row.cluster), []).append(row)
    by_size = {key: sorted(rows, key=lambda row: (_size(row), _machine(row))) for key, rows in found.items()}
    return {key: tuple(rows) for key, rows in by_size.items() if len(rows) >= LEAST_ROWS}


def halves(rows: Sequence[ServingRow]) -> tuple[int, ...]:
    """Of each row, the half that it is in: 0 or 1."""
    machines, sizes = sorted(set(map(_machine, rows))), sorted(set(map(_size, rows)))
    return tuple((machines.index(_machine(row)) + sizes.index(_size(row))) % 2 for row in rows)


def _machine(row: ServingRow) -> tuple[int, str, str]:
    return row.num_gpus, row.strategy, row.model


def _size(row: ServingRow) -> tuple[int, int]:
    return row.context_len, row.batch


def run(rows: Sequence[ServingRow], prior: Engine) -> tuple[HalvedRow, ...]:
    """Fit each half and predict the other. rows: of one engine on one cluster."""
    profile = rows[0].profile
    setting = {"cluster": rows[0].cluster, "engine": prior}
    cases = make_cases([_asked(row) for row in rows], profile, partition_of, setting).cases
    half_of = halves(rows)
    found = []
    fits = [
        fit_prefills(
            [case for case, own in zip(cases, half_of, strict=True) if own == half],
            profile,
            prior,
            name="half",
            source="serving_prefills.csv",
        )
        for half in (0, 1)
    ]
    for row, case, own in zip(rows, cases, half_of, strict=True):
        other = fits[1 - own].applied(case)
        seconds = other.ttft_s()
        sure = interval(other.scenario, other.strategy, other.partition, seconds)
        found.append(
            HalvedRow(row=row, before_s=case.ttft_s(), predicted_s=seconds, low_s=sure.low_s, high_s=sure.high_s)
        )
    return tuple(found)


def _asked(row: ServingRow) -> PrefillRow:
    return PrefillRow(
        ttft_s=row.ttft_s,
        where=row.case,
        model=row.model,
        num_gpus=row.num_gpus,
        strategy=row.strategy,
        context_len=row.context_len,
        batch=row.batch,
        cached_prefix=0,
        dtype=row.dtype,
    )


def run_all() -> dict[tuple[str, str], tuple[HalvedRow, ...]]:
    """By engine and cluster."""
    engines = {name: load_engine(name) for name in ENGINES}
    priors = {
        name: replace(prior, decode_step=engines[name].decode_step) for name, prior in left_out_engines(engines).items()
    }
    return {key: run(rows, priors[key[0]]) for key, rows in groups().items()}


def median_ape(errors: Iterable[float]) -> float | None:
    """Median of their sizes; None of none."""
    sizes = np.abs(list(errors))
    return float(np.median(sizes)) if len(sizes) else None


def report(found: dict[tuple[str, str], tuple[HalvedRow, ...]]) -> str:
    """The page, Markdown."""
    every = tuple(row for rows in found.values() for row in rows)
    lines = [
        "# Half of the rows for the other half",
        "",
        "Regenerated by `python -m validate.serving.half`. `kvrsim calibrate prefills` fits an engine to prefills that",
        "were measured on it ([how](../how-to/own-engine.md)). Here it is fitted to half of the published prefills of",
        "each engine on each cluster ([rows and sources](../../validate/data/serving_prefills.csv)), and predicts the",
        "other half.",
        "",
        "The rule: the machines (number of GPUs, strategy, model) and the sizes (prompt length, batch) of an",
        "engine's rows on a cluster are numbered in order. A row is in the one half if the sum of its two numbers",
        "is even, otherwise in the other half, like the fields of a chessboard. So both halves span the machines",
        "and the lengths. Every row is predicted once, by a fit that has not seen it. The prior is what the",
        "*other* engines have in common. That the first token of LMDeploy holds a decode step is taken as known.",
        f"Groups of fewer than {LEAST_ROWS} rows, and rows that the file leaves out by a rule, are not used.",
        "*Before* is the error with the prior engine. Figures are medians of the absolute error. *Inside* is the",
        "share of rows that lie in the 80 % prediction interval.",
        "",
        f"| engine | cluster | rows | before | all | from {SHORT_TOKENS} tokens | shorter | inside |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {engine} | {cluster} | {_shares(rows)} |" for (engine, cluster), rows in found.items()),
        f"| all | | {_shares(every)} |",
        "",
        "The length is that of the whole batch. An error is predicted / measured - 1.",
        "",
        "| engine | prefill | measured s | predicted s | error |",
        "|---|---|---|---|---|",
    ]
    for one in every:
        figures = f"{one.row.ttft_s:g} | {one.predicted_s:.4g} | {one.rel_error:+.1%}"
        lines.append(f"| {one.row.engine} | {one.row.case} | {figures} |")
    return "\n".join(lines) + "\n"


def _shares(rows: Sequence[HalvedRow]) -> str:
    long, short = ([row for row in rows if (row.row.tokens < SHORT_TOKENS) is is_short] for is_short in (False, True))
    before = median_ape(row.rel_error_before for row in rows)
    parts = [before, *(median_ape(row.rel_error for row in some) for some in (rows, long, short))]
    inside = f"{np.mean([row.inside for row in rows]):.0%}"
    return " | ".join((str(len(rows)), *("" if part is None else f"{part:.1%}" for part in parts), inside))


def main() -> int:
    """Rewrite the page; 1 where the median of all rows is above MOST_MEDIAN_APE."""
    found = run_all()
    write_atomically(PAGE, report(found).encode(), argument="report")
    errors = [row.rel_error for rows in found.values() for row in rows]
    median = median_ape(errors) or 0.0
    print(f"docs/results/own-engine.md: {len(errors)} rows, median absolute error {median:.1%}")
    return 0 if median <= MOST_MEDIAN_APE else 1


if __name__ == "__main__":
    raise SystemExit(main())
