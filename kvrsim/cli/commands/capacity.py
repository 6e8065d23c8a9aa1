"""`kvrsim capacity`: the fleet that a workload needs for a target of TTFT."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.choices import DECODES, DEPLOY_ENGINES, FLEET_OBJECTIVES, ORDERS
from kvrsim.cli.options import Json, PackTokens, Seed, Table, WorkloadOptions, takes
from kvrsim.cli.outputs import print_json, write_beside
from kvrsim.cli.parsing import check_output, check_plot, parse_choice, parse_seed, parse_strategies, read_table
from kvrsim.cli.pool_options import PoolOptions


@takes(WorkloadOptions, PoolOptions)
def capacity(
    options: WorkloadOptions,
    workers: PoolOptions,
    *,
    requests: Annotated[
        str,
        typer.Option(
            "--requests",
            metavar="FILE|azure:FILE|mooncake:FILE|synthetic:SPEC",
            help="A trace, or random arrivals such as synthetic:poisson,rate=4.",
        ),
    ],
    slo_ttft: Annotated[str, typer.Option("--slo-ttft", metavar="TIME", help="Target TTFT, such as 2s.")],
    percentile: Annotated[
        str,
        typer.Option("--percentile", metavar="P", help="Percentage of requests that must meet the target, up to 100."),
    ] = "99",
    max_gpus: Annotated[
        str | None, typer.Option("--max-gpus", metavar="N", help="Largest fleet to consider. Default: 512.")
    ] = None,
    group_sizes: Annotated[
        str | None,
        typer.Option(
            "--group-sizes",
            metavar="N,N,...",
            help="Group sizes to consider. Default: 1,2,4,8 or, where the cluster has nodes, up to two of them.",
        ),
    ] = None,
    rate_scale: Annotated[
        str, typer.Option("--rate-scale", metavar="X", help="Multiply the number of requests in the same time.")
    ] = "1",
    time_compression: Annotated[
        str, typer.Option("--time-compression", metavar="X", help="Replay the same requests X times as fast.")
    ] = "1",
    price_per_gpu_hour: Annotated[
        str | None,
        typer.Option(
            "--price-per-gpu-hour",
            metavar="USD",
            help="Price of a GPU, one for all or by group size: 1=2.0,2=2.0,4=2.4,8=3.1.",
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="|".join(FLEET_OBJECTIVES), help="What to minimise.")
    ] = "gpus",
    decode: Annotated[
        str,
        typer.Option(
            "--decode", metavar="|".join(DECODES), help="Decode on another fleet, or on the last GPU of each group."
        ),
    ] = "separate",
    tpot: Annotated[
        str | None,
        typer.Option(
            "--tpot",
            metavar="TIME",
            help="Time per output token, such as 30ms: the target of the fleet that decodes, or the last GPU's time.",
        ),
    ] = None,
    kv_transfer_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-bandwidth",
            metavar="RATE",
            help="Count the KV-cache's way to the fleet that decodes; of each GPU, such as 50GB/s.",
        ),
    ] = None,
    pack_tokens: PackTokens = None,
    order: Annotated[
        str,
        typer.Option("--order", metavar="|".join(ORDERS), help="Order of the queue: first come, or fewest new tokens."),
    ] = "first-come",
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="TIME", help="Mean time between failures of a group, such as 86400s."),
    ] = None,
    repair: Annotated[str, typer.Option("--repair", metavar="TIME", help="Time to repair a failed group.")] = "600s",
    slow_groups: Annotated[
        str | None,
        typer.Option(
            "--slow-groups",
            metavar="SHARE:FACTOR",
            help="Make this share of the groups FACTOR times slower, such as 10%:1.3.",
        ),
    ] = None,
    replications: Annotated[
        str, typer.Option("--replications", metavar="N", help="Number of independent draws of a synthetic workload.")
    ] = "5",
    sure: Annotated[
        bool,
        typer.Option("--sure", help="Require the upper confidence bound, not only the estimate, to meet the target."),
    ] = False,
    uniform_only: Annotated[
        bool, typer.Option("--uniform-only", help="Consider only fleets of equal groups behind one queue.")
    ] = False,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="NAME,NAME,...|all",
            help="What groups may run, each with the fastest. Default: all without a long search.",
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            "--emit",
            metavar="|".join(DEPLOY_ENGINES),
            help="Print what launches the answer's groups on this engine. Only strategies that it has are tried.",
        ),
    ] = None,
    only_deployable: Annotated[
        str | None,
        typer.Option(
            "--only-deployable", metavar="|".join(DEPLOY_ENGINES), help="Try only strategies that this engine has."
        ),
    ] = None,
    table: Table = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write an HTML report with plots in one file.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the plots: FILE.png, FILE.svg or FILE.pdf.")
    ] = None,
    seed: Seed = "0",
    json: Json = False,
) -> None:
    """Find the smallest or cheapest fleet for a TTFT target.

    The answer includes the rule that assigns prompts to groups. If no fleet meets the target, the exit code is 1, and
    the nearest miss and the reasons are printed.

    Example: kvrsim capacity --requests synthetic:poisson,rate=4 --slo-ttft 2s --cluster h100-nvlink
    """
    number = parse_seed(seed)
    check_output(html, "html")
    check_plot(plot)
    parse_choice(emit, "emit", DEPLOY_ENGINES)
    parse_choice(only_deployable, "only_deployable", DEPLOY_ENGINES)
    pool = workers.pool()
    scenario, warnings = options.scenario()
    from planner.capacity.plan import plan_capacity
    from planner.capacity.request import make_request

    request = make_request(
        requests=requests,
        slo_ttft=slo_ttft,
        percentile=percentile,
        max_gpus=max_gpus,
        group_sizes=group_sizes,
        gpus_per_node=scenario.cluster.gpus_per_node,
        rate_scale=rate_scale,
        time_compression=time_compression,
        price_per_gpu_hour=price_per_gpu_hour,
        objective=objective,
        decode=decode,
        tpot=tpot,
        kv_transfer_bandwidth=kv_transfer_bandwidth,
        pack_tokens=pack_tokens,
        order=order,
        mtbf=mtbf,
        repair=repair,
        slow_groups=slow_groups,
        replications=replications,
        sure=sure,
        uniform_only=uniform_only,
        seed=number,
    )
    if emit is not None:
        from planner.capacity.launch import check_emit

        check_emit(request)
    from kvrsim.cli.progress import WorkProgress

    with pool, WorkProgress() as progress:
        result = plan_capacity(
            scenario,
            request,
            strategies=None if strategies is None else parse_strategies(strategies),
            table=read_table(table),
            engines=[name for name in DEPLOY_ENGINES if name in (emit, only_deployable)],
            warnings=warnings,
            pool=pool,
            on_progress=progress,
            explore=html is not None,
        )
    launch = None
    if emit is not None and result.answer is not None:
        from planner.capacity.launch import launch_of_fleet

        launch = launch_of_fleet(scenario, request, result, emit, model=options.model)
    if json:
        print_json(result.to_dict() if launch is None else launch.to_dict())
    else:
        if launch is not None:
            from kvrsim.cli.render.launch import show_launch

            show_launch(launch)
        from kvrsim.cli.render.capacity import show_capacity

        show_capacity(result)
    from planner.capacity.plots import write_plot
    from planner.capacity.report import write_report

    write_beside((html, lambda path: write_report(result, path)), (plot, lambda path: write_plot(result, path)))
    if not result.feasible:
        raise typer.Exit(1)
