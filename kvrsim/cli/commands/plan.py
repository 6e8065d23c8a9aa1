"""`kvrsim plan`: strategies compared for one prefill, each with its best partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from kvrsim.arguments import NoiseArgs, PlanArgs, PoolArgs, ScenarioArgs, UsersArgs
from kvrsim.cli.options import DeployArgs, OutputArgs, PageArgs, pool_of, takes
from kvrsim.cli.output import print_answer, warn, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import (
    Facts,
    add_misfits,
    add_notes,
    add_users,
    blocks_text,
    coverage_text,
    facts,
    header,
    headline,
    likely,
    limit_text,
    mean_change,
    rests_on_line,
    round_up_percent,
    show,
    stages_text,
)
from kvrsim.errors import InputError
from kvrsim.notes import without
from kvrsim.text import printable
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.table import (
    TIED,
    baseline_title,
    format_partition,
    strategies_table,
)

if TYPE_CHECKING:
    from kvrsim.noise import Distribution
    from kvrsim.results.results import Plan, Shortfall, StrategyResult
    from planner.deploy import Launch


@takes(ScenarioArgs, PlanArgs, UsersArgs, NoiseArgs, PoolArgs, DeployArgs, PageArgs, OutputArgs)
def plan(
    args: ScenarioArgs,
    compared: PlanArgs,
    users: UsersArgs,
    noise: NoiseArgs,
    workers: PoolArgs,
    deploy: DeployArgs,
    files: PageArgs,
    output: OutputArgs,
) -> None:
    """Compare strategies for one prefill, each at its best.

    KVR-S's partition comes with a proven bound. By default, plan compares KVR-S and the strategies that need no search;
    --strategies all adds the others. The exit code is 1 if no strategy fits in the GPUs' memory.

    Example: kvrsim plan --ctx 16k --gpus 8 --model llama-3-8b --cluster h100-nvlink
    """
    output.check(emit=deploy.emit)
    if workers != PoolArgs() and noise.noise is None:
        raise InputError("jobs", workers.jobs or workers.backend, "with --noise: other processes simulate its samples")
    from kvrsim.builder import build_scenario
    from planner.api import disturbance_of, table_of
    from planner.candidates import Search
    from planner.decode import with_users
    from planner.plan import make_plan

    disturbance = disturbance_of(noise)
    search = Search(method=compared.method, stride=compared.stride, table=table_of(compared.table))
    scenario, warnings = build_scenario(args)
    names = compared.strategies
    if within := deploy.only_deployable or (deploy.emit if names is None else None):
        from planner.deploy import only_deployable

        names = list(only_deployable(scenario, within, names, "only_deployable" if deploy.only_deployable else "emit"))
    with pool_of(workers) as pool, Progress() as progress:
        result = make_plan(
            scenario,
            strategies=names,
            search=replace(search, on_progress=progress),
            disturbance=None if disturbance is None else replace(disturbance, pool=pool),
            timelines="all" if files.is_page else "best" if files.is_given else None,
            warnings=warnings,
            seed=noise.seed,
        )
    result = with_users(result, scenario, users)
    launch = None
    if deploy.emit is not None:
        from planner.deploy import launch_of

        best = result.first
        launch = launch_of(scenario, deploy.emit, best.strategy, best.partition, model=args.model, layers=best.layers)
    print_answer(output, (launch or result).to_dict, "strategies", lambda: show_plan(result, launch))
    if timeline := result.timeline:
        write_files(
            (files.trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (files.plot, result.write_plot),
        )
    if not result.feasible:
        raise typer.Exit(1)


_MOST_EXPLAINED = 6  # strategies, up to which the memory of each one that does not fit is listed


def show_plan(plan: Plan, launch: Launch | None = None) -> None:
    """The best strategy, the question, one row per strategy, then bounds, search, memory and notes."""
    if launch is not None:
        show_launch(launch)
    answer, table, search, limit = facts(), facts(), plan.search, plan.memory_limit
    answer.add_row("best:", headline(_headline(plan)))
    add_users(answer, plan.users, plan.first.mean_ttft_s)
    for label, line in (*_best_facts(plan), *_engines(plan)):
        answer.add_row(label, line)
    for label, line in (*_pipelines(plan), *_kvr(plan)):
        table.add_row(label, line)
    if search.evaluations:
        partitions = f"{search.evaluations} partition{'s' * (search.evaluations != 1)}"
        table.add_row("search:", f"{search.method}, {partitions} simulated in {format_seconds(search.seconds)}")
    if plan.not_compared and plan.feasible:
        table.add_row("others:", f"not compared: {_listed(plan.not_compared)} (--strategies all)")
    _add_noise(table, plan)
    table.add_row("memory:", limit_text(limit))
    for result in plan.strategies:
        nearest = plan.shortfall is not None and plan.shortfall.strategy == result.strategy
        if nearest or (plan.feasible and len(plan.strategies) <= _MOST_EXPLAINED):
            add_misfits(table, result.strategy, result.memory, limit.nbytes)
    table.add_row("rests on:", rests_on_line(plan.question, coverage_text(plan.interval_coverage)))
    add_notes(table, without(plan.warnings, "memory"))  # the table and the lines above say what does not fit
    show(answer, "", *header(plan.question, plan.cluster), "", strategies_table(plan), "", table)


def _headline(plan: Plan) -> str:
    """What to run and how fast it is; where nothing fits, how much is missing."""
    best = plan.first
    gpus = f"{plan.num_gpus} GPU{'s' * (plan.num_gpus != 1)}"
    if not plan.feasible:
        return plan.misfit
    text = f"{best.strategy} on {gpus}, TTFT "
    text += likely(best.ttft_low_s, best.ttft_s, best.ttft_high_s, plan.interval_coverage)
    if plan.yardstick is not None and best.speedup is not None and round(best.speedup, 2) != 1:
        text += f", {best.speedup:.2f}× as fast as {baseline_title(plan.yardstick)}"
    return text


def _best_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """About the best strategy: its partition, ties and bound; where nothing fits, what would."""
    best = plan.first
    if plan.shortfall is not None:
        yield from _would_fit(plan.shortfall, plan.not_compared)
        return
    yield "strategy:", best.title
    if best.approximate is not None:
        yield "approximate:", best.approximate
    if best.layers is None and len(best.partition) > 1:
        yield "partition:", f"{format_partition(best.partition, room=10**6)} tokens"
    if best.query_blocks is not None:
        yield "", blocks_text(best.query_blocks)
    if plan.ties:
        yield "ties:", f"{', '.join(plan.ties)} ({TIED}: the difference is within its prediction interval)"
    bound = plan.bounds.best
    if bound is not None and bound.strategy != "kvr-s":
        gap, lower = round_up_percent(bound.gap), format_seconds(bound.lower_bound_s)
        yield "bound:", f"at most {gap} % slower than the best of its partitions (proven lower bound {lower})"
    if plan.yardstick not in (None, "tsp") and any(one.strategy == "tsp" and not one.fits for one in plan.strategies):
        yield "speed-up:", f"over {baseline_title(str(plan.yardstick))}, because TSP does not fit"


def _would_fit(short: Shortfall, not_compared: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What fits after a change of the question."""
    label = "would fit:"
    for one in short.would_fit:
        gpus = f"{one.num_gpus} GPU{'s' * (one.num_gpus != 1)}"
        yield label, f"{one.strategy} on {gpus}, {one.dtype}, {format_bytes(one.peak_bytes)} a GPU: {one.change}"
        label = ""
    if not short.would_fit:
        yield label, "no strategy without a long search, and none on up to 16 times the GPUs"
    if not_compared:
        yield "others:", f"not compared: {_listed(not_compared)} (--strategies all)"


def _engines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Which engines have the best strategy; where none does, the fastest one that some have."""
    best = plan.first
    can = [one for one in plan.strategies if one.engines and one.fits and one.approximate is None]
    if best.fits and best.engines:
        yield "engines:", f"{_named(best)}: --emit {'|'.join(best.engines)} prints the launch"
    elif best.fits:
        text = f"none that was looked at has {best.strategy}"
        if can:
            other = min(can, key=lambda one: one.ttft_s)
            text += f"; {_named(other)}, TTFT {format_seconds(other.ttft_s)}"
        yield "engines:", text


def _named(result: StrategyResult) -> str:
    return f"{result.strategy} is in {', '.join(f'{name} ({version})' for name, version in result.engines.items())}"


def _pipelines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pieces and stages of the searched pipelines and of the best strategy, and the bound of the searched ones."""
    for result in plan.strategies:
        if result.layers is None or (result.bound is None and result is not plan.first):
            continue
        yield f"{result.strategy}:", stages_text(result.partition, result.layers)
        if (bound := result.bound) is not None:
            gap, lower = round_up_percent(bound.gap), format_seconds(bound.lower_bound_s)
            text = f"at most {gap} % slower than the best pieces and stages (proven lower bound {lower})"
            if bound.gap_as_chosen != bound.gap:
                text += f"; {round_up_percent(bound.gap_as_chosen)} % for the mean step, which it was searched for"
            yield "", text


def _kvr(plan: Plan) -> Iterator[tuple[str, str]]:
    """The bound of KV-Runahead over single GPUs; other strategies may be faster than it."""
    bounds, num_gpus = plan.bounds, plan.num_gpus
    lower = None if bounds.lower_bound_s is None else f"proven lower bound {format_seconds(bounds.lower_bound_s)}"
    label = "kvr-s:" if bounds.gap is not None else "bounds:"
    chunks = next((result.partition for result in plan.strategies if result.strategy == "kvr-s"), ())
    if plan.first.strategy != "kvr-s" and len(set(chunks)) > 1:
        yield label, f"partition {', '.join(map(str, chunks))}"
        label = ""
    if bounds.gap is not None:
        gap = round_up_percent(bounds.gap)
        yield label, f"at most {gap} % slower than the best partition of KV-Runahead over single GPUs ({lower})"
        label = ""
    elif lower is not None:
        yield label, f"{lower} of KV-Runahead over single GPUs"
        label = ""
    no_comm = f"TTFT({num_gpus}) without communication {format_seconds(bounds.ttft_no_comm_s)}"
    yield label, f"{no_comm}; TTFT*({num_gpus}) by the paper's formula {format_seconds(bounds.ttft_star_s)}"


def _listed(names: Sequence[str]) -> str:
    """Names, hybrids by their kind: "kvr-direct, pp and 8 hybrids such as tp2+kvr-s"."""
    plain = [name for name in names if "+" not in name]
    hybrids = [name for name in names if "+" in name]
    if not hybrids:
        return ", ".join(plain)
    return f"{', '.join(plain)} and {len(hybrids)} hybrids such as {hybrids[0]}"


def _add_noise(table: Facts, plan: Plan) -> None:
    """The distributions of TTFT under noise."""
    if plan.noise is None:
        return
    table.add_row("noise:", plan.noise.noise.describe())
    for result in plan.strategies:
        if result.noisy is not None:
            table.add_row("", f"{result.strategy}: {_summary(result.noisy)}")


def _summary(noisy: Distribution) -> str:
    parts = (f"{name} {format_seconds(getattr(noisy, name).value_s)}" for name in ("mean", "p50", "p95", "p99"))
    return f"{', '.join(parts)}; {mean_change(noisy)}"


def show_launch(launch: Launch) -> None:
    """The command first, then its files; notes go to standard error."""
    typer.echo(printable(launch.command))
    for name, text in launch.files.items():
        typer.echo(f"\n# {printable(name)}\n{text.rstrip()}")
    typer.echo("")
    for note in launch.notes:
        warn(f"note: {note}")
