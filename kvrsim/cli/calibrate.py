"""`kvrsim calibrate`: from measurements to a profile."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim import __version__
from kvrsim.cli.options import Json, check_output, print_json
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from calibrate.fit_report import FitReport
    from calibrate.measurement import Measurement

app = typer.Typer(help="Fit a profile to measurements.", no_args_is_help=False)

Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the profile, as JSON.")]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME|PATH", help="The GPU measured. Default: the one that the rows name."),
]
Link = Annotated[
    str | None,
    typer.Option("--link", metavar="NAME|PATH", help="The link measured. Default: the one of the GPU's cluster."),
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the profile. Default: its file's.")]
Kernel = Annotated[
    str | None,
    typer.Option(
        "--attention-kernel",
        metavar="PRESET",
        help="fa2, flashinfer, paged, fa3 or eager: how the kernel is written. Default: the nearest.",
    ),
]
Report = Annotated[
    str | None, typer.Option("--report", metavar="FILE", help="Write the errors of the fit as Markdown, too.")
]
Picture = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw fitted against measured: FILE.png, .svg or .pdf.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
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
        check_output(self.plot, "--plot")
        if self.plot is not None:
            from calibrate.fit_report import check_plot_suffix

            check_plot_suffix(self.plot, "--plot")
        if self.kernel is not None:
            from calibrate.fit_attention import KERNELS

            if self.kernel not in KERNELS:
                raise InputError("--attention-kernel", self.kernel, ", ".join(KERNELS))


@app.callback()
def _calibrate() -> None:
    """Fit a profile to measurements."""


@app.command("fit")
def fit(
    compute: Annotated[
        str,
        typer.Option("--compute", metavar="SOURCE", help="Measured kernels: CSV, or another source (see import)."),
    ],
    output: Output,
    links: Annotated[
        str | None, typer.Option("--links", metavar="SOURCE", help="Measured links. Default: the datasheet's.")
    ] = None,
    gpu: Gpu = None,
    link: Link = None,
    name: Name = None,
    attention_kernel: Kernel = None,
    report: Report = None,
    plot: Picture = None,
    json: Json = False,
) -> None:
    """Fit a profile to measurements of one GPU and its links, and say how well it agrees with them."""
    from calibrate.importers import read_source

    wanted = _Wanted(
        output=output, gpu=gpu, link=link, name=name, kernel=attention_kernel, report=report, plot=plot, json=json
    )
    wanted.check()
    rows = read_source(compute, "--compute")
    rows += read_source(links, "--links") if links is not None else []
    _fit(rows, wanted, "--compute")


@app.command("import")
def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="aiconfigurator:SYSTEM, or a CSV file; ?gpu=TEXT, ?kernel=TEXT or ?model=TEXT at its end filters.",
        ),
    ],
    output: Output,
    measurements: Annotated[
        str | None, typer.Option("--measurements", metavar="FILE", help="Write the rows as one CSV, too.")
    ] = None,
    gpu: Gpu = None,
    link: Link = None,
    name: Name = None,
    attention_kernel: Kernel = None,
    report: Report = None,
    plot: Picture = None,
    json: Json = False,
) -> None:
    """Fit a profile to measurements that others have published."""
    from calibrate.importers import read_source
    from calibrate.measurement import write_measurements

    wanted = _Wanted(
        output=output, gpu=gpu, link=link, name=name, kernel=attention_kernel, report=report, plot=plot, json=json
    )
    wanted.check()
    check_output(measurements, "--measurements")
    rows = [row for source in sources for row in read_source(source, "SOURCE...")]
    if measurements is not None:
        write_measurements(measurements, rows, "--measurements")
    _fit(rows, wanted, "SOURCE...")


def _fit(rows: list[Measurement], wanted: _Wanted, argument: str) -> None:
    """Fit, write, and print how well the profile agrees."""
    from calibrate.fit import FitChoices, Label, fit_profile
    from calibrate.machine import gpu_of, link_of

    spec = gpu_of(rows, wanted.gpu)
    profile, found = fit_profile(
        rows,
        Label(
            name=wanted.name or Path(wanted.output).stem,
            provenance={"fitted": f"{date.today().isoformat()} by kvrsim {__version__}"},
        ),
        gpu=spec,
        link=link_of(spec, wanted.link),
        choices=FitChoices(attention_kernel=wanted.kernel, fused=wanted.kernel != "eager"),
        argument=argument,
    )
    profile.write(wanted.output)
    if wanted.report is not None:
        found.write(wanted.report, picture=wanted.plot)
    if wanted.plot is not None:
        found.plot(wanted.plot)
    if wanted.json:
        print_json(found.to_dict())
    else:
        _show(found, wanted.output)


def _show(found: FitReport, output: str) -> None:
    """One row an operation, and what has to be known of it."""
    from calibrate.fit_report import TITLES
    from kvrsim.cli.tables import columns, facts, show

    table = columns("operation")
    columns("rows", "error", "left out", numbers=True, into=table)
    for kind, fit in found.profile.operations.items():
        errors = (f"{fit.mape:.1%}", f"{fit.cross_validated_mape:.1%}") if fit.num_rows else ("", "")
        table.add_row(TITLES[kind], str(fit.num_rows), *errors)
    notes = facts()
    sources = sorted({fit.source for fit in found.profile.operations.values() if fit.num_rows})
    for index, source in enumerate(sources):
        notes.add_row("" if index else "from:", source)
    for index, note in enumerate(found.notes):
        notes.add_row("" if index else "notes:", note)
    notes.add_row("written:", f"{output}, profile {found.profile.name} of {found.profile.gpu}")
    meaning = "error: mean of the absolute relative errors; left out: of rows that the fit has not seen"
    show(table, "", meaning, "", notes)
