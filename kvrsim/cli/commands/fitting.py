"""Fitting a profile and saying how well it agrees: what `kvrsim calibrate fit`, `import` and `all` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.cli.options import check_output, check_plot
from kvrsim.errors import InputError
from kvrsim.version import __version__

if TYPE_CHECKING:
    from calibrate.data.measurement import Measurement
    from calibrate.fit.report import FitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to fit and where to write it."""

    output: str
    gpu: str | None
    link: str | None
    name: str | None
    kernel: str | None
    report: str | None
    plot: str | None
    json: bool

    def check(self) -> None:
        """Complain before the work rather than after it."""
        check_output(self.output, "--output")
        check_output(self.report, "--report")
        check_plot(self.plot)
        if self.kernel is not None:
            from calibrate.fit.attention import KERNELS

            if self.kernel not in KERNELS:
                raise InputError("--attention-kernel", self.kernel, ", ".join(KERNELS))


def write_fit(
    rows: list[Measurement], wanted: Wanted, argument: str, origins: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Fit, write, and print how well the profile agrees; with --json nothing is printed, the caller does."""
    from calibrate.fit.profile import FitChoices, Label, fit_profile
    from calibrate.measure.machine import gpu_of, link_of

    spec = gpu_of(rows, wanted.gpu, origins)
    profile, found = fit_profile(
        rows,
        Label(
            name=wanted.name or Path(wanted.output).stem,
            provenance={"fitted": f"{date.today().isoformat()} by kvrsim {__version__}"},
        ),
        gpu=spec,
        link=link_of(spec, wanted.link, origins),
        choices=FitChoices(attention_kernel=wanted.kernel, fused=wanted.kernel != "eager"),
        argument=argument,
        origins=origins,
    )
    profile.write(wanted.output)
    if wanted.report is not None:
        found.write(wanted.report, picture=wanted.plot)
    if wanted.plot is not None:
        found.plot(wanted.plot)
    if not wanted.json:
        _show(found, wanted.output)
    return found.to_dict()


def _show(found: FitReport, output: str) -> None:
    """One row an operation, and what has to be known of it."""
    from calibrate.fit.report import TITLES
    from kvrsim.cli.render.tables import columns, facts, show

    table = columns("operation")
    columns("rows", "error", "left out", numbers=True, into=table)
    for kind, fit in found.profile.operations.items():
        errors = (f"{fit.mape:.1%}", f"{fit.cross_validated_mape:.1%}") if fit.num_rows else ("", "")
        table.add_row(TITLES[kind], str(fit.num_rows), *errors)
    notes = facts()
    sources = sorted({fit.source for fit in found.profile.operations.values() if fit.num_rows})
    for index, source in enumerate(sources):
        notes.add_row("" if index else "from:", source)
    for index, note in enumerate((*found.layers_note, *found.notes)):
        notes.add_row("" if index else "notes:", note)
    notes.add_row("written:", f"{output}, profile {found.profile.name} of {found.profile.gpu}")
    meaning = "error: mean of the absolute relative errors; left out: of rows that the fit has not seen"
    show(table, "", meaning, "", notes)
