"""`kvrsim calibrate`: from this machine, or from others' measurements, to a profile."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvrsim.cli.commands import measure
from kvrsim.cli.commands.calibrate_all import calibrate_all
from kvrsim.cli.commands.fitting import Wanted, write_fit
from kvrsim.cli.options import Json, check_output, print_json

app = typer.Typer(help="Measure a machine, and fit a profile to measurements.", no_args_is_help=False)

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


app.command("compute")(measure.compute)
app.command("links")(measure.links)
app.command("all")(calibrate_all)


@app.callback()
def _calibrate() -> None:
    """Measure a machine, and fit a profile to measurements."""


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
    from calibrate.data.provenance import read_origins
    from calibrate.importers import read_source

    wanted = Wanted(
        output=output, gpu=gpu, link=link, name=name, kernel=attention_kernel, report=report, plot=plot, json=json
    )
    wanted.check()
    rows = read_source(compute, "--compute")
    origins = read_origins([compute], "--compute")
    if links is not None:
        rows += read_source(links, "--links")
        origins += read_origins([links], "--links")
    _tell(write_fit(rows, wanted, "--compute", origins), json)


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
    from calibrate.data.measurement import write_measurements
    from calibrate.data.provenance import read_origins
    from calibrate.importers import read_source

    wanted = Wanted(
        output=output, gpu=gpu, link=link, name=name, kernel=attention_kernel, report=report, plot=plot, json=json
    )
    wanted.check()
    check_output(measurements, "--measurements")
    rows = [row for source in sources for row in read_source(source, "SOURCE...")]
    if measurements is not None:
        write_measurements(measurements, rows, "--measurements")
    _tell(write_fit(rows, wanted, "SOURCE...", read_origins(sources, "SOURCE...")), json)


def _tell(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
