"""`kvrsim predictor`: a table of TTFT by new tokens, cached prefix and batch, from which routers look up TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import Exit

from kvrsim.arguments import Count, Help, PredictorArgs, Tokens, TokensOrZero
from kvrsim.cli.help import CommandGroup
from kvrsim.cli.limits import NOT_MET, LimitArgs, verdict_json, verdict_line
from kvrsim.cli.options import OUTPUT, BuildArgs, Json, Sources, WritablePath, pool_of, with_options
from kvrsim.cli.output import print_result, warn, warn_notes
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import facts, headline
from kvrsim.errors import InputError
from kvrsim.units import format_seconds
from kvrsim.version import __version__
from kvrsim.views.table import format_interval

if TYPE_CHECKING:
    from calibrate.prefills.fit import PrefillCheck
    from calibrate.prefills.rows import PrefillRow
    from planner.predictor.predictor import TtftPredictor

app = CommandGroup()
_STRATEGY = "Strategy of the GPUs; best: the fastest one that fits and that some engine has."


@app.command("build")
@with_options(fixed={"cached_prefix": 0, "prefix_placement": "all"})
def build(
    args: PredictorArgs,
    workers: BuildArgs,
    *,
    output: Annotated[WritablePath, Help("Write the predictor, as JSON.", metavar="FILE", spelling=OUTPUT)],
    strategy: Annotated[str, Help(_STRATEGY, metavar="best|NAME|FILE.py:NAME", section="Question")] = "best",
    json: Json = False,
) -> None:
    """Simulate a grid of new tokens, cached prefixes and batches.

    It takes seconds for a strategy such as tp, half a minute for best, and longer for large batches.

    Example: kvrsim predictor build llama-3.1-8b 8xh100 --ctx 32k --strategy tp -o ttft.json
    """
    from kvrsim.builder import build_scenario
    from kvrsim.io.schema import to_json
    from kvrsim.strategies import get_strategy
    from planner.predictor.build import BEST, make_predictor

    if strategy != BEST:
        get_strategy(strategy)
    scenario, notes = build_scenario(args)
    with pool_of(workers, every_core=True) as pool, Progress() as progress:
        predictor = make_predictor(scenario, strategy=strategy, pool=pool, on_progress=progress)
    predictor.write(output)
    warn_notes(notes)
    if predictor.batch[-1] < args.batch:
        ended = f"note: --time-budget {workers.time_budget:g}s ended"
        warn(f"{ended}: batches above {predictor.batch[-1]} are left out; a longer time adds them")
    knots = len(predictor.new_tokens) * len(predictor.cached_prefix) * len(predictor.batch)
    about: dict[str, Any] = {
        "prefills": knots * len(predictor.strategies),
        "strategies": [one.strategy for one in predictor.strategies],
        "longest_context": predictor.longest_context,
        "longest_batch": predictor.batch[-1],
    }
    question = {"question": predictor.question, "version": __version__, "cluster": to_json(scenario.cluster)}
    longest = predictor.longest_context
    most = f"up to {longest} tokens, batch {predictor.batch[-1]}"
    grid = f"{about['prefills']} prefills of {', '.join(about['strategies'])}, {most}"
    lines = facts(("predictor:", grid), ("written:", output))
    print_result(question | {"output": output, **about}, lines, json=json)


@app.command("lookup")
@with_options()
def lookup(
    *,
    file: Annotated[str, Help("A file that kvrsim predictor build has written.", metavar="PREDICTOR", positional=True)],
    ctx: Annotated[Tokens, Help("Context length in tokens: 16k is 16384.", metavar="LEN", section="Question")],
    cached_prefix: Annotated[
        TokensOrZero,
        Help("Leading tokens of the context whose K and V are already cached.", metavar="LEN", section="Question"),
    ] = 0,
    batch: Annotated[
        Count, Help("Number of sequences prefilled together, each of --ctx tokens.", metavar="N", section="Question")
    ] = 1,
    json: Json = False,
) -> None:
    """Print the TTFT of a prefill, with its interval.

    It is interpolated between simulated prefills.

    Example: kvrsim predictor lookup ttft.json --ctx 9000 --cached-prefix 512
    """
    from planner.predictor.predictor import load_predictor

    predictor = load_predictor(file, "PREDICTOR")
    estimate = predictor.predict(ctx=ctx, cached_prefix=cached_prefix, batch=batch)
    question = {name: predictor.question[name] for name in ("model", "num_gpus", "profile", "engine")}
    question["cluster"] = predictor.question["cluster"]["name"]
    interval = format_interval(estimate.ttft_low_s, estimate.ttft_high_s)
    ttft = f"{estimate.strategy}, {format_seconds(estimate.ttft_s)} (prediction interval {interval})"
    gpus = "1 GPU" if question["num_gpus"] == 1 else f"{question['num_gpus']} GPUs"
    prefill = f"{question['model']} on {gpus} of {question['cluster']}"
    basis = f"profile {question['profile']}, engine {question['engine']}"
    screen = facts(("TTFT:", headline(ttft)), ("of:", f"{prefill}, {basis}"))
    print_result(estimate.to_dict() | question, screen, json=json)


@app.command("check")
@with_options()
def check(
    limits: LimitArgs,
    *,
    file: Annotated[str, Help("A file that kvrsim predictor build has written.", metavar="PREDICTOR", positional=True)],
    logs: Annotated[
        Sources, Help("Measured prefills, as kvrsim calibrate prefills reads them.", metavar="LOG...", positional=True)
    ],
    columns: Annotated[
        str | None,
        Help(
            "Columns of a CSV file, as in kvrsim calibrate prefills.", metavar="ROLE=COLUMN,...", section="Measurement"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say whether a predictor still holds for logged prefills.

    Rows of other models or numbers of GPUs, and rows outside the predictor's grid, are left out. The exit code is 1 if
    a limit is not met.

    Example: kvrsim predictor check ttft.json log.csv --max-median-error 10%
    """
    from calibrate.prefills.rows import read_prefills
    from kvrsim.cli.commands.calibrate import rows_screen
    from planner.predictor.predictor import load_predictor

    predictor = load_predictor(file, "PREDICTOR")
    question = predictor.question
    defaults = {"model": question["model"], "num_gpus": question["num_gpus"], "batch": 1, "cached_prefix": 0}
    rows = read_prefills(logs, defaults, "LOG", columns=columns)
    checked, notes = check_rows(predictor, rows.rows)
    notes = (*rows.notes, *notes)
    warn_notes(notes)
    verdict = limits.wanted.check(checked)
    holds = all(limit.ok for limit in verdict)
    content = {"ok": holds, "limits": verdict_json(verdict), **checked.to_dict(), "warnings": list(notes)}
    basis = ("predictor:", f"{file}, built by kvrsim {predictor.kvrsim_version}")
    print_result(content, verdict_line(verdict, len(checked.rows)), "", *rows_screen(checked, basis), json=json)
    if not holds:
        raise Exit(NOT_MET)


def check_rows(predictor: TtftPredictor, rows: Sequence[PrefillRow]) -> tuple[PrefillCheck, tuple[str, ...]]:
    """The rows that the predictor can answer, each with its prediction, and notes on the others.

    Times without a unit are taken in the one that agrees with the predictions. Raises InputError if no row is left.
    """
    from statistics import median

    from calibrate.prefills.fit import PrefillCheck, RowCheck
    from calibrate.prefills.limits import UNITS_S, likely_unit

    question = predictor.question
    checks = dict[bool, list[RowCheck]]({True: [], False: []})  # by whether the unit is known
    left_out = dict[str, int]()
    for row in rows:
        try:
            if (row.model, row.num_gpus) != (question["model"], question["num_gpus"]):
                raise InputError("model", row.model, f"{question['model']} on {question['num_gpus']} GPUs")
            sizes = {"ctx": row.context_len or 0, "cached_prefix": row.cached_prefix or 0, "batch": row.batch or 1}
            estimate = predictor.predict(**sizes)
        except InputError as error:
            left_out[error.accepted] = left_out.get(error.accepted, 0) + 1
            continue
        check = RowCheck(
            case=replace(row, strategy=estimate.strategy).case,
            measured_s=row.ttft_s,
            predicted_s=estimate.ttft_s,
            low_s=estimate.ttft_low_s,
            high_s=estimate.ttft_high_s,
        )
        checks[row.unitless is None].append(check)
    notes = [f"{count} row{'s' * (count > 1)} left out; accepted: {accepted}" for accepted, count in left_out.items()]
    unitless = checks[False]
    if unitless:
        ratio = median(check.measured_s / check.predicted_s for check in unitless)
        unit = likely_unit(ratio)
        notes.append(f"times without a unit are taken to be in {unit}, which agree with the predictor")
        unitless = [replace(check, measured_s=check.measured_s * UNITS_S[unit]) for check in unitless]
    answered = (*checks[True], *unitless)
    if not answered:
        raise InputError("LOG", f"{len(rows)} rows", f"a row that the predictor answers: {'; '.join(left_out)}")
    return PrefillCheck(rows=answered), tuple(notes)
