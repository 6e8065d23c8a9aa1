"""Predicted beside measured on serving engines: `python -m validate.serving.compare`.

Rewrites validate/data/serving_figures.json, which a test compares with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.engine.engine import EngineFit, load_engine
from kvrsim.io.files import write_atomically
from validate.serving.errors import ServingError, errors_of
from validate.serving.fit import ENGINES, SERVING, left_out_engines
from validate.serving.rows import read_rows
from validate.serving.widths import each_side, unexplained, without_width

FIGURES = Path(__file__).parents[1] / "data" / "serving_figures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every row under its engine's own record, and under what the other engines have in common."""

    own: tuple[ServingError, ...]
    others: tuple[ServingError, ...]
    batches: tuple[
        tuple[ServingError, ...], tuple[ServingError, ...]
    ]  # the two of rows that batch_over_prompt leaves out
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
        """What the page's first table says, as plain JSON values."""
        return {
            "own terms, 512 tokens and more": summary(error for error in self.own if not error.is_short),
            "own terms, below 512 tokens": summary(error for error in self.own if error.is_short),
            "engine left out, 512 tokens and more": summary(error for error in self.others if not error.is_short),
            "engine left out, below 512 tokens": summary(error for error in self.others if error.is_short),
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
    found = list(errors)
    if not found:
        return {"n": 0, "median_ape": None, "mape": None, "median": None, "coverage": None}
    signed = np.array([error.rel_error for error in found])
    return {
        "n": len(found),
        "median_ape": float(np.median(np.abs(signed))),
        "mape": float(np.abs(signed).mean()),
        "median": float(np.median(signed)),
        "coverage": float(np.mean([error.inside for error in found])),
    }


def main() -> None:
    """Rewrite the figures."""
    found = compare()
    write_atomically(FIGURES, (json.dumps(found.figures(), indent=2) + "\n").encode(), argument="figures")
    for title, part in found.figures().items():
        print(f"{title}: {part['n']} rows, median {part['median_ape']:.1%}, inside {part['coverage']:.0%}")


if __name__ == "__main__":
    main()
