"""`kvrsim confirm`: a plan's candidates run on this machine, beside what was predicted of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli import machine_options as machine
from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import MeasuredOptions, takes
from kvrsim.cli.outputs import print_json, resumable, tell_once, write_beside
from kvrsim.cli.parsing import check_output, parse_strategies
from kvrsim.cli.progress import RankProgress
from kvrsim.cli.run_options import PageOptions
from kvrsim.cli.text import (
    Hint,
    Text,
    columns,
    facts,
    format_interval,
    format_partition,
    header,
    headline,
    likely,
    narrowing,
    show,
)
from kvrsim.errors import InputError, KvrsimError
from kvrsim.io.files import is_first_rank
from kvrsim.units import format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.hardware import Hardware
    from planner.confirm.result import Confirmation, Targets
    from planner.confirm.search import Searched

NOT_MET = 1  # exit code: a target, or a rank that failed


@takes(MeasuredOptions, machine.HardwareOptions, PageOptions, AnswerOptions)
def confirm(
    options: MeasuredOptions,
    hardware: machine.HardwareOptions,
    files: PageOptions,
    answers: AnswerOptions,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="NAMES|all",
            help="Strategies to measure, such as ring,tp,kvr-s; all: every one that the planner ranks and that runs"
            " here. Default: single,tsp,kvr-e,kvr-s.",
        ),
    ] = None,
    top: Annotated[
        str, typer.Option("--top", metavar="K", help="Number of KVR partitions: the plan's, and the K - 1 next best.")
    ] = "3",
    virtual: Annotated[
        bool | None,
        typer.Option(
            "--virtual/--no-virtual",
            help="Run all ranks in turn on one device and model the messages. Default: if there are too few devices.",
        ),
    ] = None,
    max_regret: Annotated[
        str,
        typer.Option(
            "--max-regret",
            metavar="SHARE",
            help="Fail if the plan's choice is slower than the fastest candidate by more, significantly.",
        ),
    ] = "3%",
    max_error: Annotated[
        str, typer.Option("--max-error", metavar="SHARE", help="Fail if the median error of the predictions is larger.")
    ] = "7%",
    max_logit_error: Annotated[
        str | None,
        typer.Option(
            "--max-logit-error",
            metavar="SHARE",
            help="Fail if logits differ by more than this share of the largest. Default: depends on the dtype.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Search a faster partition by measuring, starting from the plan's; needs --output."
        ),
    ] = False,
    minutes: Annotated[
        str, typer.Option("--minutes", metavar="M", help="Approximate time limit of --search, in minutes.")
    ] = "5",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the partition found by --search as a partition table."
        ),
    ] = None,
) -> None:
    """Measure a plan's candidates on this machine.

    The runs are interleaved. Prints the errors of the predictions. The exit code is 1 if a target is not met: the
    plan's choice, the predictions, or the logits.

    Example: kvrsim confirm --ctx 1k --gpus 2 --profile here.json
    """
    from kvrsim.units import parse_count

    answers.check(search=search)
    names = None if strategies is None else parse_strategies(strategies)
    best = parse_count(top, "top", maximum=1000)
    targets = _targets(max_regret, max_error, max_logit_error)
    files.check()
    check_output(output, "output")
    if output is not None and not search:
        raise InputError("output", output, "nothing without --search, which writes a partition table")
    if options.profile is None:
        raise InputError("profile", "nothing", "a profile of this machine; kvrsim calibrate all makes one")
    scenario, warnings = options.scenario()
    chosen = hardware.hardware(options, scenario)
    if search:
        if names is not None:
            raise InputError("strategies", strategies, "nothing with --search, which measures partitions")
        _search(scenario, chosen, minutes, output, warnings, virtual=virtual, files=files, json=answers.json)
        return
    from planner.confirm.confirm import confirm as run

    told: dict[str, Any] = dict(targets=targets, warnings=warnings, on_note=tell_once)
    try:
        with RankProgress() as progress:
            found = run(scenario, chosen, strategies=names, top=best, virtual=virtual, on_progress=progress, **told)
    except KvrsimError as error:
        if answers.json and error.exit_code == NOT_MET and is_first_rank():  # a rank that failed, say
            print_json({"candidates": [], "ok": False, "reasons": [str(error)]})
        raise
    if is_first_rank():
        _show(found, files, answers)
    if not found.ok:
        raise typer.Exit(NOT_MET)


def _targets(regret: str, error: str, logits: str | None) -> Targets:
    from kvrsim.units import parse_share
    from planner.confirm.result import Targets

    return Targets(
        regret=parse_share(regret, "max_regret"),
        error=parse_share(error, "max_error"),
        logits=None if logits is None else parse_share(logits, "max_logit_error"),
    )


def _show(found: Confirmation, files: PageOptions, answers: AnswerOptions) -> None:
    if not answers.printed(found.to_dict, "candidates"):
        from kvrsim.cli.commands.confirm import show_confirmation

        show_confirmation(found)
    from planner.confirm.timelines import write_plot, write_traces

    write_beside(
        (files.trace, lambda path: write_traces(found, path)), (files.plot, lambda path: write_plot(found, path))
    )


def _search(
    scenario: Scenario,
    hardware: Hardware,
    minutes: str,
    output: str | None,
    warnings: tuple[str, ...],
    *,
    virtual: bool | None,
    files: PageOptions,
    json: bool,
) -> None:
    """The search on the machine."""
    from planner.confirm.search import SUFFIX, search_here

    for argument, value in (("virtual", virtual), ("trace", files.trace), ("plot", files.plot)):
        if value:
            raise InputError(argument, value, "nothing with --search, which measures partitions")
    if output is None:
        raise InputError("output", "nothing", "a file for the partition table that --search writes")
    for warning in warnings:
        tell_once(warning)
    from kvrsim.units import parse_number

    wanted: dict[str, Any] = dict(minutes=parse_number(minutes, "minutes", above=0, most=24 * 60), output=Path(output))
    with resumable(Path(output + SUFFIX)), RankProgress() as progress:
        found = search_here(scenario, hardware, **wanted, on_note=tell_once, on_progress=progress)
    if not is_first_rank():
        return
    if json:
        print_json(found.to_dict())
    else:
        from kvrsim.cli.commands.confirm import show_search

        show_search(found)


# -- A confirmation and a search on the machine, for people; imported only where no JSON is asked for.

_SHOWN_WRONG = 3  # pairs that were measured in another order than predicted


def show_confirmation(found: Confirmation) -> None:
    """One row per candidate, the one predicted to be the fastest first; then orders, regret and errors."""
    rows = columns("strategy\n", "partition\n(tokens)")
    columns(
        *("predicted\n", "prediction\ninterval", "measured\nmedian", "spread\n(IQR)", "error\n"),
        *("predicted\nplace", "measured\nplace"),
        numbers=True,
        into=rows,
    )
    pairs = zip(found.candidates, found.places(), strict=True)
    for one, places in sorted(pairs, key=lambda pair: pair[0].predicted_s):
        rows.add_row(
            one.strategy,
            format_partition(one.partition),
            format_seconds(one.predicted_s),
            format_interval(one.predicted_low_s, one.predicted_high_s),
            format_seconds(one.median_s),
            format_seconds(one.iqr_s),
            f"{one.rel_error:+.1%}",
            str(places["predicted_rank"]),
            str(places["measured_rank"]),
            style="bold" if one is found.choice else None,
        )
    answer, table = facts(), facts()
    answer.add_row("measured:", headline(_measured(found)))
    answer.add_row("regret:", _regret(found))
    answer.add_row("order:", _order(found))
    answer.add_row("error:", f"{found.median_error:.1%}: |predicted / measured - 1|, median of the candidates")
    for reason in found.reasons:
        answer.add_row(Text("NOT MET:", style="red"), reason)
    if found.drift is not None and found.median_error_after_drift is not None:
        tokens, error = format_tokens(found.drift.num_tokens), found.median_error_after_drift
        fast = f"{found.drift.speed:.2f} times as fast as when calibrated ({tokens} tokens on every rank at once)"
        table.add_row("clock drift:", f"{fast}; corrected for that, the error is {error:.1%}")
    if found.max_logit_error is not None:
        table.add_row("logits:", f"differ from one process's by at most {found.max_logit_error:.2g}")
    table.add_row("TSP:", found.tsp)
    table.add_row("measured:", "; ".join(found.measured))
    if found.modelled:
        table.add_row("modelled:", "; ".join(found.modelled))
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    narrower = narrowing(rows, "spread", "predicted\nplace", "measured\nplace", "prediction", "partition")
    show(answer, "", *header(found.question, found.cluster), "", narrower, "", table)


def _measured(found: Confirmation) -> str:
    """The plan's choice: what was measured and predicted, and whether it meets the targets."""
    choice, gpus = found.choice, f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    measured = f"{format_seconds(choice.median_s)} measured (IQR {format_seconds(choice.iqr_s)})"
    said = likely(choice.predicted_low_s, choice.predicted_s, choice.predicted_high_s, None)
    predicted = f"predicted {said}, {choice.rel_error:+.1%}"
    met = "all targets met" if found.ok else f"{len(found.reasons)} target{'s' * (len(found.reasons) != 1)} NOT met"
    return f"{choice.strategy} on {gpus}, TTFT {measured}; {predicted}; {met}"


def _order(found: Confirmation) -> str:
    """How many pairs are ordered by measurement, and how many of them by prediction as well."""
    orders = found.orders
    if orders.num_pairs and not orders.significant:
        return f"none of {orders.num_pairs} pairs differ by more than their spreads"
    wrong = "; ".join(f"{fast} is faster than {slow}" for fast, slow in orders.wrong[:_SHOWN_WRONG])
    more = ", ..." if len(orders.wrong) > _SHOWN_WRONG else ""
    text = f"{orders.right} of {len(orders.significant)} significant pairs predicted right, of {orders.num_pairs} pairs"
    return f"{text}; not predicted: {wrong}{more}" if wrong else text


def _regret(found: Confirmation) -> str:
    """How much slower the plan's choice was than the fastest candidate, both by name."""
    choice, best = found.choice.strategy, found.best.strategy
    if found.choice is found.best:
        return f"none: the plan's choice, {choice}, was the fastest"
    significant = "significant" if found.regret_beyond_spread else "not significant"
    amount = f"{found.regret:.1%} ± {found.regret_spread:.1%}"
    return f"{amount}: the plan's choice, {choice}, was slower than {best}, the fastest ({significant})"


def show_search(found: Searched) -> None:
    """The fastest measured partition, and the cost of the search."""
    table, best, seed = facts(), found.best, found.seed
    table.add_row(
        "best:", headline(f"{', '.join(map(str, best.partition))}, TTFT {format_seconds(best.median_s)} measured")
    )
    table.add_row("gain:", f"{found.gain:.1%} over the plan's partition")
    table.add_row("plan:", f"{', '.join(map(str, seed.partition))}, {format_seconds(seed.median_s)} measured")
    table.add_row("search:", f"{found.num_partitions} partitions, {found.num_prefills} prefills, {found.ended}")
    table.add_row("written:", found.output)
    table_file = shlex.quote(found.output)
    look_up = Hint(
        f"kvrsim table lookup {table_file} --gpus {found.question.num_gpus} --ctx {found.question.context_len}"
    )
    show(table, "", *header(found.question, found.question.cluster), look_up)
