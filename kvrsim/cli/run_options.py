"""Options of the commands that simulate or measure prefills: noise, and a timeline beside the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.cli.options import Seed
from kvrsim.cli.parsing import check_output, check_plot, parse_seed
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from planner.uncertainty.noise import Disturbance


@dataclass(frozen=True, kw_only=True)
class TimelineOptions:
    """Files of a timeline; `check` before the work."""

    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Write the timeline as JSON for Perfetto or chrome://tracing."),
    ] = None
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw a Gantt chart: FILE.png, FILE.svg or FILE.pdf."),
    ] = None

    def check(self) -> None:
        """InputError where a file cannot be written."""
        check_output(self.trace, "trace")
        check_plot(self.plot)

    @property
    def wanted(self) -> bool:
        """Whether either file is."""
        return self.trace is not None or self.plot is not None


@dataclass(frozen=True, kw_only=True)
class PageOptions(TimelineOptions):
    """The same where the picture may be an interactive page."""

    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw a Gantt chart: FILE.html is an interactive page, FILE.png, FILE.svg and FILE.pdf are pictures.",
        ),
    ] = None

    def check(self) -> None:
        """InputError where a file cannot be written."""
        check_output(self.trace, "trace")
        check_plot(self.plot, page=True)


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """A noise, as text, and the seed of all random draws."""

    noise: Annotated[
        str | None,
        typer.Option(
            "--noise",
            metavar="SPEC",
            help="Simulate under noise: side-traffic:duty=0.5,share=0.67,slowdown=0.03, jitter:0.05, slow-gpu:3x1.2,"
            " slow-link:2-3x4, paper, several joined by +, or a JSON file.",
        ),
    ] = None
    samples: Annotated[
        str | None, typer.Option("--samples", metavar="N", help="Number of runs under --noise. Default: 200.")
    ] = None
    seed: Seed = "0"

    @property
    def seed_number(self) -> int:
        """The seed; InputError where it is none."""
        return parse_seed(self.seed)

    def disturbance(self) -> Disturbance | None:
        """The noise asked for; InputError for what needs one without one."""
        if self.noise is None:
            if self.samples is not None:
                raise InputError("samples", self.samples, "with --noise SPEC")
            return None
        from kvrsim.noise import parse_noise
        from kvrsim.units import parse_count
        from planner.uncertainty.noise import DEFAULT_SAMPLES, MAX_SAMPLES, Disturbance

        count = DEFAULT_SAMPLES if self.samples is None else parse_count(self.samples, "samples", maximum=MAX_SAMPLES)
        return Disturbance(noise=parse_noise(self.noise), seed=self.seed_number, num_samples=count)
