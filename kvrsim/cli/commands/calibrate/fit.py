"""`kvrsim calibrate fit` and `import`: measurements to a profile, and how well it agrees with them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json
from kvrsim.cli.parsing import check_output, check_plot
from kvrsim.cli.progress import WorkProgress
from kvrsim.errors import InputError
from kvrsim.text import printable
from kvrsim.version import __version__

if TYPE_CHECKING:
    from calibrate.data import Measurement
    from calibrate.fit.report import FitReport

Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the profile, as JSON.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the profile. Default: its file's.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """What to fit and where to write it; `check` before the work."""

    output: Output
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME|PATH", help="The GPU measured. Default: the one named in the rows."),
    ] = None
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME|PATH", help="The link measured. Default: the one of the GPU's cluster."),
    ] = None
    name: Name = None
    attention_kernel: Annotated[
        str | None,
        typer.Option(
            "--attention-kernel",
            metavar="fa2|flashinfer|paged|fa3|eager",
            help="Form of the kernel. Default: the best fit.",
        ),
    ] = None
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="Also write the errors of the fit as Markdown.")
    ] = None
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Plot fitted against measured times: FILE.png, .svg or .pdf."),
    ] = None
    json: Json = False

    def check(self) -> None:
        """Complain before the work rather than after it."""
        check_output(self.output, "output")
        check_output(self.report, "report")
        check_plot(self.plot)
        if self.attention_kernel is not None:
            from calibrate.fit.attention import KERNELS

            if self.attention_kernel not in KERNELS:
                raise InputError("attention_kernel", self.attention_kernel, ", ".join(KERNELS))


@takes(FitOptions)
def fit(
    wanted: FitOptions,
    *,
    compute: Annotated[
        str,
        typer.Option("--compute", metavar="SOURCE", help="Measured kernels: CSV, or another source (see import)."),
    ],
    links: Annotated[
        str | None, typer.Option("--links", metavar="SOURCE", help="Measured links. Default: the datasheet's.")
    ] = None,
) -> None:
    """Fit a profile to measurements of one GPU and its links.

    Prints how well it agrees with them.

    Example: kvrsim calibrate fit --compute compute.csv --links links.csv -o here.json
    """
    from calibrate.data import read_origins
    from calibrate.importers import read_source

    wanted.check()
    rows = read_source(compute, "compute")
    origins = read_origins([compute], "compute")
    if links is not None:
        rows += read_source(links, "links")
        origins += read_origins([links], "links")
    found = write_fit(rows, wanted, "compute", origins)
    if wanted.json:
        print_json(found)


@takes(FitOptions)
def import_(
    wanted: FitOptions,
    *,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="aiconfigurator:SYSTEM, or a CSV file; append ?gpu=TEXT, ?kernel=TEXT or ?model=TEXT to filter.",
        ),
    ],
    measurements: Annotated[
        str | None, typer.Option("--measurements", metavar="FILE", help="Also write the rows as one CSV file.")
    ] = None,
) -> None:
    """Fit a profile to measurements that others have published.

    Example: kvrsim calibrate import aiconfigurator:b200_sxm/vllm -o b200.json
    """
    from calibrate.data import read_origins, write_measurements
    from calibrate.importers import read_source

    wanted.check()
    check_output(measurements, "measurements")
    with WorkProgress() as progress:
        rows = []
        for source in sources:
            progress(f"reading {printable(source)}")
            rows += read_source(source, "SOURCE...")
    if measurements is not None:
        write_measurements(measurements, rows, "measurements")
    found = write_fit(rows, wanted, "SOURCE...", read_origins(sources, "SOURCE..."))
    if wanted.json:
        print_json(found)


def write_fit(
    rows: list[Measurement], wanted: FitOptions, argument: str, origins: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Fit, write, and print how well the profile agrees; with --json nothing is printed, the caller does."""
    from calibrate.fit.profile import FitChoices, Label, fit_profile
    from calibrate.measure.device import gpu_of, link_of

    spec = gpu_of(rows, wanted.gpu, origins)
    label = Label(
        name=wanted.name or Path(wanted.output).stem,
        provenance={"fitted": f"{date.today().isoformat()} by kvrsim {__version__}"},
    )
    link = link_of(spec, wanted.link, origins)
    choices = FitChoices(attention_kernel=wanted.attention_kernel, fused=wanted.attention_kernel != "eager")
    with WorkProgress() as progress:
        progress(f"fitting {len(rows)} rows")
        profile, found = fit_profile(
            rows, label, gpu=spec, link=link, choices=choices, argument=argument, origins=origins
        )
    profile.write(wanted.output)
    if wanted.report is not None:
        found.write(wanted.report, picture=wanted.plot)
    if wanted.plot is not None:
        found.plot(wanted.plot)
    if not wanted.json:
        _show(found, wanted)
    return found.to_dict()


def _show(found: FitReport, wanted: FitOptions) -> None:
    """One row per operation, then notes."""
    from calibrate.fit.report import TITLES
    from kvrsim.cli.render.layout import Hint, columns, facts, show

    table = columns("operation")
    columns("rows", "error", "held-out", numbers=True, into=table)
    for kind, fit in found.profile.operations.items():
        errors = (f"{fit.mape:.1%}", f"{fit.cross_validated_mape:.1%}") if fit.num_rows else ("", "")
        table.add_row(TITLES[kind], str(fit.num_rows), *errors)
    notes = facts()
    sources = sorted({fit.source for fit in found.profile.operations.values() if fit.num_rows})
    for index, source in enumerate(sources):
        notes.add_row("" if index else "from:", source)
    for index, note in enumerate((*found.layers_note, *found.notes)):
        notes.add_row("" if index else "notes:", note)
    notes.add_row("written:", f"{wanted.output}, profile {found.profile.name} of {found.profile.gpu}")
    for path in (wanted.report, wanted.plot):
        if path is not None:
            notes.add_row("", path)
    meaning = "error: mean absolute relative error of the fitted rows; held-out: of rows that the fit has not seen"
    plan = Hint(f"kvrsim plan --profile {shlex.quote(wanted.output)} --gpus 2 --ctx 4k")
    show(table, "", meaning, "", notes, plan)
