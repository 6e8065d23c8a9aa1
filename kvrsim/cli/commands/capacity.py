"""`kvrsim capacity`: the fleet that a workload needs for a target of TTFT."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from kvrsim.cli.commands.table import Table, read_table
from kvrsim.cli.options import (
    Json,
    ScenarioOptions,
    Seed,
    check_output,
    check_plot,
    parse_choice,
    parse_seed,
    print_json,
    takes_scenario,
)
from kvrsim.cli.outputs import write_beside

DECODES = ("separate", "last-gpu")
OBJECTIVES = ("gpus", "cost")
ORDERS = ("first-come", "shortest-first")
_FROM_REQUESTS = {"ctx": "1", "gpus": "1", "batch": "1", "cached_prefix": "0"}  # what requests say, not options


def _without_lengths(command: Callable[..., None]) -> Callable[..., None]:
    """The same command without the options that requests stand for."""

    @functools.wraps(command)
    def fewer(*args: object, **kwargs: object) -> None:
        command(*args, **_FROM_REQUESTS, **kwargs)

    signature = inspect.signature(command)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in _FROM_REQUESTS]
    fewer.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return fewer


@_without_lengths
@takes_scenario
def capacity(
    options: ScenarioOptions,
    *,
    requests: Annotated[
        str,
        typer.Option(
            "--requests",
            metavar="FILE|azure:FILE|mooncake:FILE|synthetic:SPEC",
            help="A trace, or arrivals drawn at random, such as synthetic:poisson,rate=4,context=lognormal:2k:1.",
        ),
    ],
    slo_ttft: Annotated[str, typer.Option("--slo-ttft", metavar="TIME", help="The TTFT to keep within, such as 2s.")],
    percentile: Annotated[
        str, typer.Option("--percentile", metavar="P", help="Percent of all requests that have to, up to 100.")
    ] = "99",
    max_gpus: Annotated[str | None, typer.Option("--max-gpus", metavar="N", help="At most. Default: 512.")] = None,
    group_sizes: Annotated[
        str, typer.Option("--group-sizes", metavar="N,N,...", help="GPUs that a group may have.")
    ] = "1,2,4,8",
    rate_scale: Annotated[
        str, typer.Option("--rate-scale", metavar="X", help="So many times the requests in the same time.")
    ] = "1",
    time_compression: Annotated[
        str, typer.Option("--time-compression", metavar="X", help="The same requests, so many times as fast.")
    ] = "1",
    price_per_gpu_hour: Annotated[
        str | None,
        typer.Option(
            "--price-per-gpu-hour", metavar="USD", help="One for all, or by size of group: 1=2.0,2=2.0,4=2.4,8=3.1."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="|".join(OBJECTIVES), help="What to minimise.")
    ] = "gpus",
    decode: Annotated[
        str,
        typer.Option(
            "--decode", metavar="|".join(DECODES), help="Who decodes: another fleet, or the group's last GPU."
        ),
    ] = "separate",
    tpot: Annotated[
        str | None,
        typer.Option("--tpot", metavar="TIME", help="Time per output token, such as 30ms, with --decode last-gpu."),
    ] = None,
    batch_tokens: Annotated[
        str | None,
        typer.Option("--batch-tokens", metavar="LEN", help="Prompts run together up to so many new tokens."),
    ] = None,
    order: Annotated[
        str, typer.Option("--order", metavar="|".join(ORDERS), help="Of a queue: first come, or fewest new tokens.")
    ] = "first-come",
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="TIME", help="Mean time between failures of a group, such as 86400s."),
    ] = None,
    repair: Annotated[str, typer.Option("--repair", metavar="TIME", help="How long a failed group is away.")] = "600s",
    slow_groups: Annotated[
        str | None,
        typer.Option(
            "--slow-groups",
            metavar="SHARE:FACTOR",
            help="A share of the groups takes FACTOR times as long, such as 10%:1.3.",
        ),
    ] = None,
    replications: Annotated[
        str, typer.Option("--replications", metavar="N", help="Independent draws of a synthetic workload.")
    ] = "5",
    sure: Annotated[
        bool, typer.Option("--sure", help="The upper end of the interval has to meet the target as well.")
    ] = False,
    uniform_only: Annotated[
        bool, typer.Option("--uniform-only", help="Only fleets of like groups behind one queue.")
    ] = False,
    table: Table = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a report with its pictures in one file.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the pictures: FILE.png, FILE.svg or FILE.pdf.")
    ] = None,
    seed: Seed = "0",
    json: Json = False,
) -> None:
    """Find the smallest or cheapest fleet for a TTFT target.

    The answer includes the rule that sends prompts to its groups. Exits with 1 where no fleet meets the target; the
    nearest miss and the reasons are printed.
    """
    parse_choice(objective, "--objective", OBJECTIVES)
    number = parse_seed(seed)
    check_output(html, "--html")
    check_plot(plot)
    scenario, warnings = options.scenario()
    from planner.capacity.plan import plan_capacity
    from planner.capacity.request import make_request

    request = make_request(
        requests=requests,
        slo_ttft=slo_ttft,
        percentile=percentile,
        max_gpus=max_gpus,
        group_sizes=group_sizes,
        rate_scale=rate_scale,
        time_compression=time_compression,
        price_per_gpu_hour=price_per_gpu_hour,
        objective=objective,
        decode=decode,
        tpot=tpot,
        batch_tokens=batch_tokens,
        order=order,
        mtbf=mtbf,
        repair=repair,
        slow_groups=slow_groups,
        replications=replications,
        sure=sure,
        uniform_only=uniform_only,
        seed=number,
    )
    from kvrsim.cli.progress import WorkProgress

    with WorkProgress() as progress:
        result = plan_capacity(scenario, request, table=read_table(table), warnings=warnings, on_progress=progress)
    if json:
        print_json(result.to_dict())
    else:
        from kvrsim.cli.render.capacity import show_capacity

        show_capacity(result)
    from planner.capacity.plots import write_plot
    from planner.capacity.report import write_report

    write_beside((html, lambda path: write_report(result, path)), (plot, lambda path: write_plot(result, path)))
    if not result.feasible:
        raise typer.Exit(1)
