"""`kvrsim calibrate all`: from nothing to a profile of this machine, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.commands.calibrate import measure
from kvrsim.cli.commands.calibrate.fit import FitOptions, Name, write_fit
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json
from kvrsim.cli.parsing import check_output
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from calibrate.measure.campaign import Campaign, Measured
    from calibrate.measure.forward import ComputeSetup

_COMPUTE_SHARE = 0.75  # of the minutes
_NO_DATASHEET = "pcie4-x16"  # the link of a device that no built-in cluster has, where nobody measures one
_SUFFIX = ".json"

Output = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.json",
        help="Write the profile, and beside it FILE.compute.csv, FILE.links.csv, FILE.md and FILE.png.",
    ),
]


@takes(measure.LayerOptions)
def calibrate_all(
    layers: measure.LayerOptions,
    *,
    output: Output,
    ranks: measure.Ranks = None,
    links: Annotated[
        str | None,
        typer.Option("--links", metavar="FILE", help="Use links measured elsewhere instead of measuring them."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME|PATH", help="Use a datasheet's link instead of measuring it."),
    ] = None,
    name: Name = None,
    minutes: measure.Minutes = "4",
    timeout: measure.Timeout = "60s",
    even_if_busy: measure.EvenIfBusy = False,
    json: Json = False,
) -> None:
    """Measure layers and links of this machine and fit a profile.

    Reports how well the profile agrees with the measurements.

    Example: kvrsim calibrate all --minutes 5 -o here.json
    """
    from calibrate.importers import read_source
    from kvrsim.units import parse_seconds

    check_output(output, "output")
    if Path(output).suffix != _SUFFIX:
        raise InputError("output", output, f"a file that ends in {_SUFFIX}")
    if links is not None and link is not None:
        raise InputError("link", link, "nothing where --links is given")
    if links is not None:
        read_source(links, "links")  # complain before the work
    setup = layers.setup()
    count = measure.parse_ranks(ranks, setup.device, setup.threads)
    files = _Files(output)
    steps = [("layers", files.compute_campaign(setup), _COMPUTE_SHARE)]
    if links is None and link is None and count > 1:
        timeout_s = parse_seconds(timeout, "timeout")
        steps.append(("links", files.link_campaign(setup, count, timeout_s), 1 - _COMPUTE_SHARE))
    done = [_step(*step, minutes, even_if_busy) for step in steps]
    links_file = links or (str(files.links) if len(steps) > 1 else None)
    try:
        told = _fitted(files, links_file, link, name, json)
    except InputError as refusal:
        for measured in done:
            measured.journal.remove()  # the next run measures anew; the CSV files stay
        advice = "measure again with nothing else running, or with more --minutes"
        raise InputError(refusal.parameter, refusal.value, f"{refusal.accepted}; {advice}") from None
    for measured in done:
        measured.journal.remove()
    if json:
        outcomes = {title: measure.outcome_json(one.outcome) for (title, *_), one in zip(steps, done, strict=True)}
        print_json(told | {"measured": outcomes, "files": files.names(links_file)})


def _fitted(files: _Files, links: str | None, link: str | None, name: str | None, json: bool) -> dict[str, Any]:
    """The profile, its report and plot, from the CSV files."""
    from calibrate.data import read_origins
    from calibrate.importers import read_source

    sources = [str(files.compute), *([links] if links else [])]
    wanted = FitOptions(
        output=files.output,
        link=link or (None if links else _datasheet_link(files)),
        name=name,
        report=str(files.report),
        plot=str(files.plot),
        json=json,
    )
    rows = [row for source in sources for row in read_source(source, "output")]
    return write_fit(rows, wanted, "calibrate all", read_origins(sources, "output"))


def _step(title: str, campaign: Campaign, share: float, minutes: str, even_if_busy: bool) -> Measured:
    return measure.run(campaign, measure.policy_of(minutes, even_if_busy, share), title)


class _Files:
    """What goes beside the profile."""

    def __init__(self, output: str) -> None:
        stem = Path(output).with_suffix("")
        self.output = output
        self.compute, self.links, self.report, self.plot = (
            Path(f"{stem}{ending}") for ending in (".compute.csv", ".links.csv", ".md", ".png")
        )

    def compute_campaign(self, setup: ComputeSetup) -> Campaign:
        """Layers."""
        from calibrate.measure.compute import compute_campaign

        return compute_campaign(setup, self.compute, measure.command())

    def link_campaign(self, setup: ComputeSetup, ranks: int, timeout_s: float) -> Campaign:
        """Messages up to K and V of a layer for the longest context."""
        from calibrate.measure.compute import layer_kv_bytes
        from calibrate.measure.links import link_campaign

        return link_campaign(
            ranks=ranks,
            device=setup.device,
            backend="nccl" if setup.device == "cuda" else "gloo",
            threads=setup.threads,
            max_bytes=max(layer_kv_bytes(setup), 2**20),
            timeout_s=timeout_s,
            output=self.links,
            command=measure.command(),
        )

    def names(self, links: str | None) -> dict[str, str | None]:
        """For JSON."""
        return {
            "profile": self.output,
            "compute": str(self.compute),
            "links": links,
            "report": str(self.report),
            "plot": str(self.plot),
        }


def _datasheet_link(files: _Files) -> str | None:
    """None where a built-in cluster has the device; else the link that such a device is likely to have."""
    from calibrate.data import read_origins
    from kvrsim.hardware.cluster import builtin_clusters, load_cluster

    gpu = next((origin["gpu"]["name"] for origin in read_origins([str(files.compute)], "compute")), None)
    known = {load_cluster(name).gpu.name for name in builtin_clusters()}
    return None if gpu in known else _NO_DATASHEET
