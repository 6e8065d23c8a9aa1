"""The options that say what disturbs a prefill, and what comes of it for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kvrsim.noise.statistics import Distribution, Estimate
    from kvrsim.results import Plan, SimResult
    from planner.uncertainty.disturbed import Disturbance

NoiseOption = Annotated[
    str | None,
    typer.Option(
        "--noise",
        metavar="SPEC",
        help="What disturbs it: side-traffic:duty=0.5,share=0.67,slowdown=0.03, jitter:0.05, slow-gpu:3x1.2,"
        " slow-link:2-3x4, paper, several joined by +, or a JSON file.",
    ),
]
Samples = Annotated[
    str | None,
    typer.Option("--samples", metavar="N", help="Runs under the noise that the distribution is of. Default: 200."),
]
Objective = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="mean|p50|p95|p99",
        help="What of TTFT under --noise the partition of kvr-s is searched for. Default: mean.",
    ),
]


def parse_disturbance(noise: str | None, samples: str | None, seed: int) -> Disturbance | None:
    """The noise asked for; InputError for samples without one."""
    if noise is None:
        if samples is not None:
            raise InputError("--samples", samples, "with --noise SPEC")
        return None
    from kvrsim.noise.parse import parse_noise
    from kvrsim.units import parse_count
    from planner.uncertainty.disturbed import DEFAULT_SAMPLES, Disturbance
    from planner.uncertainty.noisy import MAX_SAMPLES

    count = DEFAULT_SAMPLES if samples is None else parse_count(samples, "--samples", maximum=MAX_SAMPLES)
    return Disturbance(noise=parse_noise(noise), seed=seed, num_samples=count)


def parse_objective(objective: str | None, disturbance: Disturbance | None) -> str:
    """The figure to plan for; InputError for one without a noise."""
    from kvrsim.noise.statistics import check_objective

    if objective is not None and disturbance is None:
        raise InputError("--objective", objective, "with --noise SPEC")
    return "mean" if objective is None else check_objective(objective)


def add_simulated(table: Table, result: SimResult) -> None:
    """What noise and requests behind each other add to a simulation's facts."""
    from kvrsim.units import format_seconds

    if result.noise is not None and result.noisy is not None:
        table.add_row("noise:", result.noise.describe())
        _add_distribution(table, result.noisy)
    if (stream := result.stream) is not None:
        figures = stream.to_dict()
        table.add_row("requests:", f"{figures['count']}, {stream.arrivals}")
        times = [format_seconds(figures[f"{name}_ttft_s"]) for name in ("mean", "p50", "p95", "p99")]
        table.add_row("", "TTFT mean {}, median {}, p95 {}, p99 {}".format(*times))
        shown = ", ".join(format_seconds(ttft_s) for ttft_s in stream.ttft_s[:8])
        table.add_row("", f"each: {shown}{', ...' if len(stream.ttft_s) > 8 else ''}")
        steady = "" if stream.steady_per_s is None else f"; {stream.steady_per_s:.3g} without a pause between requests"
        table.add_row("", f"{stream.throughput_per_s:.3g} a second{steady}")
        used = ", ".join(f"{share:.0%}" for share in stream.utilisation[:16])
        table.add_row("", f"computing, rank by rank: {used}{', ...' if len(stream.utilisation) > 16 else ''}")


def add_planned(table: Table, plan: Plan) -> None:
    """What noise adds to a plan's facts."""
    from kvrsim.units import format_seconds

    if (report := plan.noise) is None:
        return
    table.add_row("noise:", report.noise.describe())
    for result in plan.strategies:
        if result.noisy is not None:
            table.add_row("", f"{result.strategy}: {_summary(result.noisy)}")
    if report.quiet_s is None or report.robust_s is None:
        return
    quiet, robust = format_seconds(report.quiet_s), format_seconds(report.robust_s)
    same = report.quiet_partition == report.robust_partition
    gained = (
        f"{robust} against {quiet} of the partition planned without noise ({1 - report.robust_s / report.quiet_s:+.2%})"
    )
    said = "the partition planned without the random part is kept" if same else gained
    table.add_row("", f"kvr-s, {report.objective} over {report.num_samples} samples not planned on: {said}")


def _add_distribution(table: Table, noisy: Distribution) -> None:
    from kvrsim.units import format_seconds

    table.add_row("", f"{noisy.num_samples} samples: mean {_limits(noisy.mean)}; {_more(noisy)}")
    percentiles = ((name, getattr(noisy, name)) for name in ("p50", "p95", "p99"))
    shown = ", ".join(f"{name} {_limits(estimate)}" for name, estimate in percentiles)
    table.add_row("", f"{shown}, worst {format_seconds(noisy.worst_s)}")


def _summary(noisy: Distribution) -> str:
    from kvrsim.units import format_seconds

    parts = (f"{name} {format_seconds(getattr(noisy, name).value_s)}" for name in ("mean", "p50", "p95", "p99"))
    return f"{', '.join(parts)}; {_more(noisy)}"


def _more(noisy: Distribution) -> str:
    more = round(noisy.mean.value_s / noisy.quiet_s - 1, 4) + 0.0  # no "-0.0%"
    return f"mean {more:+.1%} on quiet"


def _limits(estimate: Estimate) -> str:
    """A figure and its confidence limits."""
    from kvrsim.units import format_seconds

    ends = [None if end is None else format_seconds(end) for end in (estimate.low_s, estimate.high_s)]
    if ends == [None, None]:
        return format_seconds(estimate.value_s)
    return f"{format_seconds(estimate.value_s)} ({ends[0] or '?'}–{ends[1] or '?'})"
