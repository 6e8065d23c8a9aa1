"""`kvrsim plan`: strategies compared for one prefill, each with its best partition."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from click.exceptions import Exit

from kvrsim.arguments import Help, NoiseArgs, PlanArgs, PoolArgs, RangeArgs, ScenarioArgs, UsersArgs
from kvrsim.cli import text as lines
from kvrsim.cli.options import OUTPUT, DeployArgs, LaunchArgs, OutputArgs, PageArgs, WritablePath, pool_of, with_options
from kvrsim.cli.output import print_answer, print_json, warn_notes, write_files
from kvrsim.cli.progress import Progress
from kvrsim.errors import InputError
from kvrsim.io.schema import write_json
from kvrsim.notes import with_code, without
from kvrsim.text import printable
from kvrsim.units import format_bytes, format_seconds, format_tokens
from kvrsim.views.table import TIED, Text, columns, format_partition

if TYPE_CHECKING:
    from kvrsim.results.results import Plan, StrategyResult
    from planner.candidates import ForEngine
    from planner.deploy import Deployment
    from planner.runahead import RunaheadLaunch


class PlanOutputArgs(OutputArgs):
    """How a plan is printed."""

    explain: Annotated[bool, Help("Print all strategies, pieces, bounds, memory and notes.")] = False
    output: Annotated[
        WritablePath | None,
        Help("Write the plan, as --json prints it; kvrsim confirm measures it.", metavar="FILE", spelling=OUTPUT),
    ] = None


@with_options()
def plan(
    range_args: RangeArgs,
    options: PlanArgs,
    users: UsersArgs,
    noise: NoiseArgs,
    workers: PoolArgs,
    deploy: LaunchArgs,
    files: PageArgs,
    output: PlanOutputArgs,
) -> None:
    """Say what to run, which TTFT to promise, and what limits it.

    The exit code is 1 if no strategy fits in the GPUs' memory, or if --slo is missed.

    Example: kvrsim plan llama-3.1-70b 2x8xh100 --ctx 32k
    """
    output.check(emit=deploy.emit)
    if deploy.emit == "vllm-runahead":
        _only_with_engines(options, users, files, output)
        print_runahead(range_args, options, noise, output)
        return
    args = range_args.single()
    if vars(workers) != vars(PoolArgs()) and noise.noise is None:
        raise InputError("jobs", workers.jobs or workers.pool, "with --noise: other processes simulate its samples")
    from planner.api import plan_of
    from planner.candidates import Search

    if deploy.emit is not None:
        _check_length(args)
    timelines: Literal["all", "best"] | None = None
    if files.is_page:
        timelines = "all"
    elif files.is_given:
        timelines = "best"
    with nullcontext() if noise.noise is None else pool_of(workers) as pool, Progress() as progress:
        search = Search(on_progress=progress, engine=_engine(deploy))
        scenario, result = plan_of(args, options, noise, users, timelines=timelines, search=search, pool=pool)
    deployment = None
    if deploy.emit is not None and result.feasible and deploy.emit in result.best.engines:
        from planner.deploy import deployment_of, planned

        deployment = deployment_of(planned(scenario, result.best), deploy.emit, model=str(args.model))

    def content() -> dict[str, Any]:
        if deployment is None:
            return result.to_dict()
        return deployment.to_dict() | {"plan": result.to_dict()}

    def screen(plan: Plan) -> list[lines.Part]:
        parts = plan_screen(plan, explain=output.explain)
        if plan.feasible and not plan.measured_s:
            parts.append(lines.facts(*next_rows(str(args.model), args.profile, output.output)))
        return parts

    if deployment is not None and not output.json:
        show_deployment(deployment)
    print_answer(output, content, "strategies", lambda: screen(result))
    write_files((output.output, lambda path: write_json(path, result.to_dict())))
    timeline = result.timeline
    if timeline is not None:
        write_files(
            (files.trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (files.plot, result.write_plot),
        )
    missed = result.promise is not None and result.promise.meets is False
    if not result.feasible or missed or (deploy.emit is not None and deployment is None):
        raise Exit(1)


def print_runahead(args: RangeArgs, options: PlanArgs, noise: NoiseArgs, output: OutputArgs) -> None:
    """Print the launch of the fork of vLLM that runs KV-Runahead, with the regret of its weights."""
    from kvrsim.builder import build_scenario
    from kvrsim.noise import parse_noise
    from planner.runahead import runahead_launch

    contexts = args.range
    scenario, notes = build_scenario(ScenarioArgs(**vars(args) | {"ctx": contexts.last}))
    disturbance = noise.noise
    if isinstance(disturbance, str):
        disturbance = parse_noise(disturbance)
    strategies = options.strategies
    launch = runahead_launch(scenario, contexts, strategies=strategies, noise=disturbance, model=str(args.model))
    if output.json:
        print_json(launch.to_dict())
        return
    click.echo(printable(launch.command))
    click.echo("")
    warn_notes((*launch.notes(), *notes))
    lines.show(*runahead_screen(launch))


def runahead_screen(launch: RunaheadLaunch) -> Iterator[lines.Part]:
    """Show what the weights lose at each context, and what the chunked transport would take."""
    longest = launch.regret[-1]
    worst = max(launch.regret, key=lambda row: row.ratio)
    head = f"{launch.strategy} ({launch.transport}): first token of {format_tokens(longest.ctx)} after"
    loss = f"the weights lose at most {100 * (worst.ratio - 1):.1f} % (at {format_tokens(worst.ctx)})"
    yield lines.headline(f"{head} {format_seconds(longest.ttft_s)}; {loss} against the best of each context")
    table = columns(">context", ">TTFT", ">best weights", ">regret", "~chunks (tokens)")
    for row in launch.regret:
        times = (format_seconds(row.ttft_s), format_seconds(row.best_ttft_s))
        chunks = ", ".join(map(str, row.partition))
        table.add_row(format_tokens(row.ctx), *times, f"{100 * (row.ratio - 1):.1f} %", chunks)
    yield table
    others = [f"{name} {format_seconds(seconds)}" for name, seconds in launch.others.items()]
    rows: list[lines.Row] = [("others:", ", ".join(others) or None)]
    for pull in launch.page_pull:
        seconds = f"{format_seconds(pull.ttft_s)} to {format_seconds(pull.ttft_s + pull.history_read_s)}"
        reads = f"the first GPU reads {format_bytes(round(pull.history_bytes))} of earlier steps' pages"
        rows.append(("page_pull:", f"in steps of {format_tokens(pull.chunk_tokens)}: {seconds}; {reads}"))
    yield lines.facts(*rows)


def _only_with_engines(options: PlanArgs, users: UsersArgs, files: PageArgs, output: PlanOutputArgs) -> None:
    """Raise InputError for options that the launch of a range of contexts does not have."""
    given = {**vars(users), **vars(files), "slo": options.slo, "rate": options.rate, "output": output.output}
    usual = vars(UsersArgs()) | vars(PageArgs())
    for name, value in given.items():
        if value is not None and value != usual.get(name):
            raise InputError(name, value, "nothing with --emit vllm-runahead, which prints weights and their regret")


def _check_length(args: ScenarioArgs) -> None:
    """Raise InputError before the search if an engine would refuse the context."""
    from kvrsim.builder import build_scenario
    from planner.deploy import longest_sequence

    scenario, _ = build_scenario(args)
    longest_sequence(scenario.model, scenario.request.context_len)


def _engine(deploy: DeployArgs) -> ForEngine | None:
    """Return the engine for which the plan is made."""
    from planner.candidates import ForEngine

    name = deploy.only_deployable or deploy.emit
    if name is None:
        return None
    return ForEngine(name, only=deploy.only_deployable is not None)


def next_rows(model: str, profile: object, file: str | None) -> Iterator[lines.Row]:
    """The commands that measure the plan on its GPUs, with the plan's profile if that is a file of the user.

    file: where the plan is written; None: nowhere yet.
    """
    is_calibrated = isinstance(profile, str) and Path(profile).is_file()
    label = "next:"
    if file is None:
        commands = "this measures it" if is_calibrated else "these two measure it"
        yield label, f"the same command with -o plan.json keeps the plan; {commands} on your GPUs:"
        label = ""
    if is_calibrated:
        yield label, lines.confirm_command(file or "plan.json", model, str(profile))
        return
    yield label, lines.ShellCommand(f"kvrsim calibrate all --model {shlex.quote(model)} -o mine.json")
    yield "", lines.confirm_command(file or "plan.json", model, "mine.json")


# Notes that only --explain shows.
_DETAILS = ("memory", "paper", "even chunks", "even chunks, tied", "links, messages", "not compared")


def plan_screen(plan: Plan, *, explain: bool = False) -> list[lines.Part]:
    """Screen of a plan: what to run, what to promise and why; the question; the fastest five; further notes.

    explain: all strategies, bounds, search, memory and notes.
    """
    from kvrsim.views.plan_text import first_rows, sentences, strategies_table, tie_text

    first, *others = sentences(plan)
    default = [f"{note[0].upper()}{note[1:]}." for note in with_code(plan.warnings, "paper")]
    question = lines.header(plan.question, plan.cluster)
    head: list[lines.Part] = [lines.headline(first), *others, "", *default, *question, ""]
    if explain:
        return [*head, strategies_table(plan), "", _explanation(plan)]
    notes = lines.note_rows(without(plan.warnings, *_DETAILS))
    below = lines.facts(lines.users_row(plan.users, plan.first.mean_ttft_s), *_noise_rows(plan), *notes)
    tail: list[lines.Part] = []
    if plan.feasible:
        head += [strategies_table(plan, short=True), ""]
        ties = tie_text(plan, first_rows(plan))
        if ties:
            tail.append(ties)
    tail += _left_out(plan)
    if below.rows:
        tail.append(below)
    return [*head, *tail, Text("--explain prints all strategies, pieces, bounds and memory", style="dim")]


def _left_out(plan: Plan) -> Iterator[str]:
    """Count further strategies that fit and those that do not; name those that were not searched or not tried."""
    from kvrsim.views.plan_text import ROUGH, first_rows

    fitting = [result for result in plan.strategies if result.fits]
    misfits = [result for result in plan.strategies if not result.fits]
    if plan.feasible and not all(result.searched for result in first_rows(plan)):
        yield f"{ROUGH} not searched to the end: a search may find a faster partition."
    more = len(fitting) - len(first_rows(plan))
    if plan.feasible and more == 1:
        yield "1 more strategy fits."
    elif plan.feasible and more:
        yield f"{more} more strategies fit."
    if misfits and plan.feasible:
        fastest = min(misfits, key=lambda result: result.ttft_s)
        needs = _gib(max(rank.total for rank in fastest.memory), plan.memory_limit.nbytes)
        verb = "strategy does" if len(misfits) == 1 else "strategies do"
        yield f"{len(misfits)} {verb} not fit (the fastest, {fastest.strategy}, would need {needs})."
    names = list[str]()
    for note in with_code(plan.warnings, "not compared"):
        names += str(note.values["names"]).split(", ")
    if names:
        verb = "strategy does" if len(names) == 1 else "strategies do"
        yield f"{len(names)} {verb} not run with this model and these GPUs; --explain says why."
    for not_tried in plan.not_tried:
        yield f"Not tried: {_join(not_tried.strategies)}: {not_tried.why}."
    if plan.search.unsearched:
        unsearched = _join(plan.search.unsearched)
        yield f"The search budget ended before {unsearched}; raise --search-budget to search more."


def _gib(needed: float, limit: float) -> str:
    """Two sizes in GiB with as many digits as tell them apart: "72.2 of 71.7 GiB"."""
    for digits in range(1, 10):
        needed_text = f"{needed / 2**30:.{digits}f}"
        limit_text = f"{limit / 2**30:.{digits}f}"
        if needed_text != limit_text:
            break
    return f"{needed_text} of {limit_text} GiB"


def _explanation(plan: Plan) -> lines.Facts:
    """All further facts of the plan, for --explain."""
    search = plan.search
    limit = plan.memory_limit
    best = plan.first
    ties = None
    if plan.ties:
        ties = f"{', '.join(plan.ties)} ({TIED}: the difference is within its prediction interval)"
    effort = None
    if search.evaluations:
        partitions = f"{search.evaluations} partition{'s' * (search.evaluations != 1)} simulated"
        effort = f"{search.method}, {partitions} in {format_seconds(search.seconds)}"
    check = None
    if plan.grid_check is not None:
        grid = plan.grid_check
        check = f"check of kvr-s by the paper's grid search: {grid.evaluations} partitions, "
        check += f"{format_seconds(grid.ttft_s)} ({grid.ttft_s / grid.searched_s - 1:+.2%})"
    rough_text = None
    rough = [result.strategy for result in plan.strategies if not result.searched]
    if rough:
        reason = "they cannot be the best or the budget ended"
        rough_text = f"partitions of these are rough, because {reason}: {_join(rough)}"
    others = None
    if plan.not_compared:
        others = f"not compared, because they cannot fit: {_join(plan.not_compared)}"
    results = plan.strategies
    if plan.shortfall is not None:
        results = tuple(result for result in plan.strategies if result.strategy == plan.shortfall.strategy)
    return lines.facts(
        ("strategy:", best.title),
        *_partitions(plan),
        ("ties:", ties),
        *_kvr(plan),
        ("critical path:", ", ".join(f"{part.operation} {part.share:.0%}" for part in plan.limits)),
        ("search:", effort),
        ("", check),
        ("", rough_text),
        ("others:", others),
        *_noise_rows(plan),
        ("memory:", lines.limit_text(limit)),
        *(lines.misfit_row(result.strategy, result.memory, limit.nbytes) for result in results),
        ("rests on:", lines.rests_on_line(plan.question, lines.coverage_text(plan.interval_coverage))),
        *lines.note_rows(without(plan.warnings, "memory")),
    )


def _partitions(plan: Plan) -> Iterator[lines.Row]:
    """Rows of uneven partitions that fit, and of the best strategy's calls of attention."""
    for result in plan.strategies:
        texts = list[str]()
        if result.fits and len(set(result.partition)) > 1:
            texts.append(f"{', '.join(map(str, result.partition))} tokens{_stages(result)}")
        if result is plan.first and result.query_blocks is not None:
            texts.append(lines.blocks_text(result.query_blocks))
        yield from zip((f"{result.strategy}:", "", ""), texts, strict=False)


def _stages(result: StrategyResult) -> str:
    if result.layers is None:
        return ""
    return f"; stages of {format_partition(result.layers, room=4 * len(result.layers))} layers"


def _bound_text(gap: float, lower_s: float, of: str) -> str:
    lower = f"proven lower bound {format_seconds(lower_s)}"
    return f"at most {lines.round_up_percent(gap)} % slower than the best {of} ({lower})"


def _kvr(plan: Plan) -> Iterator[lines.Row]:
    """Rows of the bounds of KVR-S, if it is compared and fits, and of a best strategy such as tp2+kvr-s."""
    bounds = plan.bounds
    kvr = next((result for result in plan.strategies if result.strategy == "kvr-s"), None)
    if bounds.best is not None and bounds.best.strategy != "kvr-s" and plan.feasible:
        yield "bound:", _bound_text(bounds.best.gap, bounds.best.lower_bound_s, "of its partitions")
    if kvr is None or not kvr.fits:
        return
    if bounds.gap is not None and bounds.lower_bound_s is not None:
        of = "partition of KV-Runahead over single GPUs"
        yield "kvr-s bound:", _bound_text(bounds.gap, bounds.lower_bound_s, of)
    if bounds.ttft_no_comm_s is None or bounds.ttft_star_s is None:
        return
    no_comm = f"TTFT({plan.num_gpus}) without communication {format_seconds(bounds.ttft_no_comm_s)}"
    yield "", f"{no_comm}; TTFT*({plan.num_gpus}) by the paper's formula {format_seconds(bounds.ttft_star_s)}"


def _join(names: Sequence[str]) -> str:
    """List names; hybrids are counted: "kvr-direct, pp and 8 hybrids such as tp2+kvr-s"."""
    plain = [name for name in names if "+" not in name]
    hybrids = [name for name in names if "+" in name]
    if len(hybrids) < 2:
        return ", ".join([*plain, *hybrids])
    return f"{', '.join(plain)}{' and ' * bool(plain)}{len(hybrids)} hybrids such as {hybrids[0]}"


def _noise_rows(plan: Plan) -> Iterator[lines.Row]:
    """The distributions of TTFT under noise."""
    if plan.noise is not None:
        yield "noise:", plan.noise.noise.describe()
    for result in plan.strategies:
        noisy = result.noisy
        if noisy is None:
            continue
        times = [f"{name} {format_seconds(getattr(noisy, name).value_s)}" for name in ("mean", "p50", "p95", "p99")]
        yield "", f"{result.strategy}: {', '.join(times)}; {lines.mean_change(noisy)}"


def show_deployment(deployment: Deployment) -> None:
    """Print the command, then its files; notes go to standard error."""
    click.echo(printable(deployment.command))
    for name, text in deployment.files.items():
        click.echo(f"\n# {printable(name)}\n{text.rstrip()}")
    click.echo("")
    warn_notes(deployment.notes)
