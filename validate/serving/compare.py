"""Predictions for serving engines compared with published prefills: parts of pages, and figures for a test.

`python -m validate.serving.compare` rewrites validate/data/serving_figures.json, which a test compares with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.engine import EngineFit, load_engine
from kvrsim.io.files import write_atomically
from kvrsim.units import format_tokens
from kvrsim.views.figure import save_figure
from validate.report import fill, table
from validate.serving.fit import (
    ENGINES,
    SERVING,
    ServingError,
    each_side,
    errors_of,
    left_out_engines,
    read_rows,
    unexplained,
    without_width,
)

_TICKS = (1, 16, 128, 1024, 8192, 65536, 524288)
_LENGTHS = ((0, 512), (512, 2048), (2048, 8192), (8192, 10**9))  # tokens of all prompts together


def part(comparison: Comparison) -> list[str]:
    """The accuracy page's part on serving engines, Markdown lines."""
    own, others = comparison.with_batches()
    settings = (
        (name, f"{fit.left_out}s", f"{fit.left_out_median_ape:.1%}", f"{fit.left_out_mape:.1%}", f"{fit.coverage:.0%}")
        for name, fit in comparison.fits.items()
    )
    engines, engines_left_out = (
        _summaries(title, _by(errors, lambda error: error.row.engine, short=False))
        for title, errors in (("engine, own terms", comparison.own), ("engine, left out", comparison.others))
    )
    return fill(
        "accuracy_serving",
        predictions=_summaries("prediction", comparison.figures()),
        own=own,
        others=others,
        number=len(comparison.batches[0]),
        long=comparison.left_out_coverage(short=False),
        short=comparison.left_out_coverage(short=True),
        settings=table(("engine", "left out", "median error", "mean", "inside, 512 tokens and more"), settings),
        nested=comparison.nested_coverage,
        engines=engines,
        engines_left_out=engines_left_out,
        lengths=_summaries("tokens of all prompts", _by(comparison.own, _length)),
        strategies=_summaries("strategy", _by(comparison.own, lambda error: error.row.strategy)),
    )


def page(comparison: Comparison, left_out: Sequence[ServingError]) -> list[str]:
    """Every row, Markdown lines; left_out: the rows that rules leave out, with their engines' own terms."""
    rules = _by(left_out, lambda error: f"{error.row.engine}, `{error.row.left_out}`")
    heads = ("engine", "case", "measured s", "own terms s", "error", "80 % interval", "engine left out")
    rows = (
        (
            own.row.engine,
            own.row.case,
            f"{own.row.ttft_s:.4g}",
            f"{own.predicted_s:.4g}",
            f"{own.rel_error:+.1%}",
            f"{own.low_s:.3g} to {own.high_s:.3g}",
            f"{other.rel_error:+.1%}",
        )
        for own, other in zip(comparison.own, comparison.others, strict=True)
    )
    return fill("serving", rules=_summaries("engine and rule, own terms", rules), rows=table(heads, rows))


def _length(error: ServingError) -> str:
    low, high = next(span for span in _LENGTHS if span[0] <= error.row.tokens < span[1])
    if high == _LENGTHS[-1][1]:
        return f"{low} and more"
    return f"{low} to {high - 1}" if low else f"below {high}"


def _by(
    errors: Sequence[ServingError], key: Callable[[ServingError], str], short: bool | None = None
) -> dict[str, dict[str, Any]]:
    used = [error for error in errors if short is None or error.is_short is short]
    names = dict.fromkeys(key(error) for error in sorted(used, key=lambda error: error.row.tokens))
    return {name: summary(error for error in used if key(error) == name) for name in names}


def _summaries(title: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Table of summaries by name."""
    formats = {"median_ape": ".1%", "mape": ".1%", "median": "+.1%", "coverage": ".0%"}
    rows = (
        (name, group["n"], *(f"{group[key]:{spec}}" for key, spec in formats.items()))
        for name, group in groups.items()
        if group["n"]
    )
    return table((title, "rows", "median error", "mean", "with sign (median)", "inside"), rows)


def plot(comparison: Comparison, path: Path) -> None:
    """Predicted over measured by tokens, own terms and engine left out side by side."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("own terms", "engine left out")
    for axes, title, errors in zip(panels, titles, (comparison.own, comparison.others), strict=True):
        axes.axhspan(0.9, 1.1, color="0.92")
        axes.axhline(1.0, color="0.6", linewidth=1)
        for number, name in enumerate(ENGINES):
            mine = [error for error in errors if error.row.engine == name]
            ratios = [1 + error.rel_error for error in mine]
            axes.scatter([error.row.tokens for error in mine], ratios, s=24, color=f"C{number}", label=name, alpha=0.8)
        axes.set(xscale="log", xlabel="tokens of all prompts", title=title)
        axes.set_xticks(_TICKS, [format_tokens(tick) for tick in _TICKS])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("predicted TTFT / measured TTFT")
    panels[1].legend(frameon=False, fontsize=8)
    save_figure(figure, path, argument="report", dpi=130)


FIGURES = Path(__file__).parents[1] / "data" / "serving_figures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every row under its engine's own record, and under what the other engines have in common."""

    own: tuple[ServingError, ...]
    others: tuple[ServingError, ...]
    batches: tuple[tuple[ServingError, ...], ...]  # `own` and `others` of rows that batch_over_prompt leaves out
    fits: Mapping[str, EngineFit]  # by engine: own terms, with each setting left out
    nested_coverage: float  # of engines left out, by intervals that rest on the other engines' errors alone

    def left_out_coverage(self, *, short: bool) -> float:
        """Share of the rows inside their intervals, predicted by own terms that their setting was left out of."""
        rows = {name: sum(e.row.engine == name and e.is_short is short for e in self.own) for name in self.fits}
        shares = {name: (fit.short_coverage if short else fit.coverage) or 0.0 for name, fit in self.fits.items()}
        return sum(rows[name] * shares[name] for name in rows) / sum(rows.values())

    def with_batches(self) -> tuple[float, float]:
        """Median absolute error of the rows of 512 tokens and more, own terms and engine left out, with `batches`."""
        both = zip((self.own, self.others), self.batches, strict=True)
        own, others = (np.median([abs(e.rel_error) for e in (*rows, *more) if not e.is_short]) for rows, more in both)
        return float(own), float(others)

    def figures(self) -> dict[str, Any]:
        """The page's first table, as plain JSON values."""
        return {
            f"{title}, {length}": summary(error for error in errors if error.is_short is is_short)
            for title, errors in (("own terms", self.own), ("engine left out", self.others))
            for length, is_short in (("512 tokens and more", False), ("below 512 tokens", True))
        }


def compare() -> Comparison:
    """With the records that ship; an engine left out is predicted by the records of the others."""
    rows = read_rows()
    engines = {name: load_engine(name) for name in ENGINES}
    fit = load_engine(SERVING).fit
    assert fit is not None, "python -m validate.serving.fit writes it"
    priors = left_out_engines(engines)
    of = {name: [row for row in rows if row.engine == name] for name in ENGINES}
    batches = [row for row in read_rows(compared=False) if row.left_out == "batch_over_prompt"]
    bare = {name: errors_of(of[name], without_width(priors[name], fit)) for name in ENGINES}
    return Comparison(
        own=tuple(error for name in ENGINES for error in errors_of(of[name], engines[name])),
        batches=(
            tuple(error for row in batches for error in errors_of([row], engines[row.engine])),
            tuple(error for row in batches for error in errors_of([row], priors[row.engine])),
        ),
        fits={name: engine.fit for name, engine in engines.items() if engine.fit is not None},
        others=tuple(error for name in ENGINES for error in errors_of(of[name], replace(priors[name], fit=fit))),
        nested_coverage=_nested_coverage(bare),
    )


def rows_left_out() -> list[ServingError]:
    """The rows that rules leave out, under their engines' own records."""
    rows = [row for row in read_rows(compared=False) if row.left_out]
    return [error for name in ENGINES for error in errors_of([r for r in rows if r.engine == name], load_engine(name))]


def _nested_coverage(bare: Mapping[str, Sequence[ServingError]]) -> float:
    """Share of the rows of 512 tokens and more inside an interval that the errors of the other engines alone give."""
    inside: list[bool] = []
    for name, mine in bare.items():
        others = [error for other, errors in bare.items() if other != name for error in errors]
        shorter, longer = each_side(unexplained(others))
        inside += [bool(-shorter <= off <= longer) for off in unexplained(mine)]
    return float(np.mean(inside))


def summary(errors: Iterable[ServingError]) -> dict[str, Any]:
    """Number of rows, median and mean absolute error, the median with its sign, and the share inside the intervals."""
    known = list(errors)
    if not known:
        return {"n": 0, "median_ape": None, "mape": None, "median": None, "coverage": None}
    signed = np.array([error.rel_error for error in known])
    return {
        "n": len(known),
        "median_ape": float(np.median(np.abs(signed))),
        "mape": float(np.abs(signed).mean()),
        "median": float(np.median(signed)),
        "coverage": float(np.mean([error.inside for error in known])),
    }


def main() -> None:
    """Rewrite the figures."""
    figures = compare().figures()
    write_atomically(FIGURES, (json.dumps(figures, indent=2) + "\n").encode(), argument="figures")
    for title, group in figures.items():
        print(f"{title}: {group['n']} rows, median {group['median_ape']:.1%}, inside {group['coverage']:.0%}")


if __name__ == "__main__":
    main()
