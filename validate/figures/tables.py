"""The paper's appendix tables: every published row, predicted beside reported, as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from kvrsim.results.results import SimResult
from validate.figures.cases import Predictions
from validate.published.compare import summary
from validate.published.reference import Row

_WORDS = {"none": "on one GPU"}


def paragraph(*sentences: str) -> list[str]:
    """Prose, wrapped, and an empty line."""
    return [*textwrap.wrap(" ".join(sentences), width=118, break_on_hyphens=False, break_long_words=False), ""]


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table whose first column is on the left, the others on the right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines)]


def by_table(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], list[Row]]:
    """Rows by publication, table, model and link, in the order of the data."""
    grouped: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.source, row.table, row.model, row.link), []).append(row)
    return grouped


def appendix(rows: Iterable[Row], predictions: Predictions) -> list[str]:
    """One section a table, model and link."""
    lines: list[str] = []
    for (source, table, model, link), group in by_table(rows).items():
        results = [predictions.of_row(row) for row in group]
        where = _WORDS.get(link, f"at {link}")
        lines += [f"### {source}, table {table}: {model} {where}", "", _summary_line(group, results), ""]
        heads = ("tokens", "GPUs", "strategy", "reported s", "predicted s", "low–high s", "error", "within", "used")
        cells = [row_cells(row, result) for row, result in zip(group, results, strict=True)]
        lines += [*markdown_table(heads, cells), ""]
    return lines


def row_cells(row: Row, result: SimResult) -> tuple[str, ...]:
    """One line: what is reported, what is predicted, and how far they are apart."""
    return (
        str(row.context_len),
        str(row.num_gpus),
        row.strategy,
        f"{row.ttft_s:g}",
        f"{result.ttft_s:.3f}",
        f"{result.ttft_low_s:.3f}–{result.ttft_high_s:.3f}",
        f"{result.ttft_s / row.ttft_s - 1:+.1%}",
        "yes" if is_within(row, result) else "**no**",
        "yes" if row.used_for_calibration else "no",
    )


def is_within(row: Row, result: SimResult) -> bool:
    """Whether the reported TTFT lies in the predicted interval, give or take its rounding."""
    return row.is_inside(result.ttft_low_s, result.ttft_high_s)


def _summary_line(rows: Sequence[Row], results: Sequence[SimResult]) -> str:
    pairs = list(zip(rows, results, strict=True))
    errors = summary(
        [{"rel_error": result.ttft_s / row.ttft_s - 1, "inside": is_within(row, result)} for row, result in pairs]
    )
    within = round(errors["coverage"] * errors["n"])
    shares = f"mean absolute error {errors['mape']:.1%}, median {errors['median_ape']:.1%}"
    return f"{errors['n']} rows, {shares}; {within} within the predicted interval."
