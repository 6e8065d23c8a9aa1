"""An engine fitted to whole prefills, and a profile checked against them, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.cli.render.format import format_interval
from kvrsim.cli.render.layout import Shrinkable, columns, facts, show
from kvrsim.units import format_seconds

if TYPE_CHECKING:
    from calibrate.prefills.fit import Errors, FittedTerm, PrefillCheck, PrefillFit
    from kvrsim.scenario import Scenario

_WHAT = {
    "request_s": "before the first layer, once a request",
    "token_s": "more for each token of the request",
    "step_s": "before each pass through the layers",
    "layer_s": "of the host, to issue one layer",
    "collective_s": "to start a collective of tensor parallelism",
    "kernel_scale": "the engine's kernels over the profile's",
    "sustained_share": "rate after long load over that of bursts",
}
_RATIOS = ("kernel_scale", "sustained_share")
_FEW = 4  # rows below which left-out errors say little


def show_fit(fit: PrefillFit, output: str) -> None:
    """Terms, errors, then rows."""
    table = columns("term")
    columns("prior", "fitted", "80 % interval", numbers=True, into=table)
    columns("identified", "what", into=table)
    for term in fit.terms:
        low, high = term.span
        name = term.prior.name
        table.add_row(
            name,
            _value(term, term.prior.median),
            _value(term, term.value),
            f"{low:.3g}–{high:.3g}" if name in _RATIOS else format_interval(low, high),
            "yes" if term.identified else "no",
            _WHAT.get(name, ""),
        )
    errors = columns("absolute error")
    columns("median", "mean", numbers=True, into=errors)
    for title, found in (("before", fit.before), ("after", fit.after), ("left out", fit.left_out)):
        errors.add_row(title, *_shares(found))
    rows = columns("row")
    columns("measured", "before", "after", "left out", "error left out", numbers=True, into=rows)
    found_s = zip(fit.measured_s, fit.before_s, fit.solution.after_s, fit.solution.left_out_s, strict=True)
    for case, seconds in zip(fit.cases, found_s, strict=True):
        rows.add_row(case, *map(format_seconds, seconds), f"{seconds[3] / seconds[0] - 1:+.1%}")
    notes = facts()
    if not all(term.identified for term in fit.terms):
        names = ", ".join(term.prior.name for term in fit.terms if not term.identified)
        notes.add_row("not identified:", f"{names}; the rows say little, or only of a sum, and the prior decides")
    if fit.engine.fit is not None:
        notes.add_row(
            "inside the interval:", f"{fit.engine.fit.coverage:.0%} of the rows left out (80 % are meant to be)"
        )
    if len(set(fit.cases)) < _FEW:
        notes.add_row("few rows:", "measure other lengths and numbers of GPUs, too")
    notes.add_row("written:", f"{output}, profile {fit.profile.name} of {fit.profile.gpu}, with the engine in it")
    meaning = "left out: each row predicted by a fit without it, and without its repetitions"
    show(table, "", errors, "", Shrinkable(rows, ("before", "after")), "", meaning, "", notes)


def show_check(check: PrefillCheck, scenario: Scenario) -> None:
    """Rows, then their errors together."""
    rows = columns("row")
    columns("measured", "predicted", "prediction interval", "error", numbers=True, into=rows)
    for row in check.rows:
        rows.add_row(
            row.case,
            format_seconds(row.measured_s),
            format_seconds(row.predicted_s),
            format_interval(row.low_s, row.high_s),
            f"{row.rel_error:+.1%}",
        )
    notes = facts()
    notes.add_row("profile:", f"{scenario.profile_name}, engine {scenario.engine_name}")
    notes.add_row("absolute error:", f"median {check.median_ape:.1%}, mean {check.mape:.1%}")
    notes.add_row("inside the interval:", f"{check.coverage:.0%} of {len(check.rows)} rows")
    show(Shrinkable(rows, ("80 %",)), "", notes)


def _value(term: FittedTerm, value: float) -> str:
    return f"{value:.3g}" if term.prior.name in _RATIOS else format_seconds(value)


def _shares(errors: Errors) -> tuple[str, str]:
    return f"{errors.median_ape:.1%}", f"{errors.mape:.1%}"
