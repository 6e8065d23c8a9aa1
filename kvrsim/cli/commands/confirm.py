"""`kvrsim confirm`: a plan's candidates run on this machine, compared with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from kvrsim.arguments import Arguments, Help, MeasuredArgs, Read, Share, strategy_list, written
from kvrsim.cli.commands.run import FIXED
from kvrsim.cli.options import OUTPUT, HardwareArgs, OutputArgs, PageArgs, WritablePath, hardware_of, with_options
from kvrsim.cli.output import print_answer, print_json, print_result, warn_once, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, facts, header, headline, likely, note_rows
from kvrsim.errors import ABSENT, InputError, KvrsimError
from kvrsim.io.annotations import Range
from kvrsim.io.files import is_first_rank
from kvrsim.units import format_count, format_seconds
from kvrsim.views.table import Text

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.hardware import Hardware
    from planner.confirm.result import Confirmation
    from planner.confirm.search import Chunks, HardwareSearch, SearchedPartition

NOT_MET = 1  # exit code if a target is not met or a rank fails
_STARTING = "planning and starting ranks"
StrategyNames = Annotated[list[str], Read(strategy_list)]  # of the shipped strategies


class ConfirmArgs(Arguments):
    """What is measured, and its targets."""

    strategies: Annotated[
        StrategyNames | None,
        Help(
            "Strategies to measure, such as ring,tp,kvr-s; all: every strategy that the planner compares and that "
            "runs here. Default: single,tsp,kvr-e,kvr-s.",
            metavar="NAMES|all",
            section="Question",
        ),
    ] = None
    max_regret: Annotated[
        Share,
        Help(
            "Fail if the plan's choice is significantly slower than the fastest candidate, by more than this share.",
            metavar="SHARE",
            section="Target",
        ),
    ] = written("3%")
    max_error: Annotated[
        Share,
        Help("Fail if the median error of the predictions is larger than this.", metavar="SHARE", section="Target"),
    ] = written("7%")
    max_logit_error: Annotated[
        Share | None,
        Help(
            "Fail if logits differ by more than this share of the largest. Default: depends on the dtype.",
            metavar="SHARE",
            section="Target",
        ),
    ] = None
    top: Annotated[
        int,
        Range(least=1, most=1000),
        Help("Number of KVR partitions: the plan's, and the K - 1 next best.", metavar="K", section="Search"),
    ] = 3
    search: Annotated[
        bool,
        Help(
            "Search a faster partition with measured TTFTs, from the plan's partition on; needs --output.",
            section="Search",
        ),
    ] = False
    minutes: Annotated[
        float,
        Range(above=0, most=24 * 60),
        Help("Approximate time limit of --search, in minutes.", metavar="M", section="Search"),
    ] = 5
    virtual: Annotated[
        bool | None,
        Help(
            "Run all ranks in turn on one device and model the messages. Default: if there are too few devices.",
            section="Measurement",
            spelling=("--virtual/--no-virtual",),
        ),
    ] = None
    output: Annotated[
        WritablePath | None,
        Help("Write the partition found by --search as a partition table.", metavar="FILE", spelling=OUTPUT),
    ] = None


@with_options(fixed=FIXED)
def confirm(
    args: MeasuredArgs, hardware: HardwareArgs, options: ConfirmArgs, files: PageArgs, answer: OutputArgs
) -> None:
    """Measure a plan's candidates on this machine.

    The runs are interleaved. Prints the errors of the predictions. The exit code is 1 if a target is not met: the
    plan's choice, the predictions, or the logits.

    Example: kvrsim confirm --model tiny-llama --ctx 1k --gpus 2 --profile here.json
    """
    answer.check(search=options.search)
    if options.output is not None and not options.search:
        raise InputError("output", options.output, "nothing without --search, which writes a partition table")
    if args.profile is None:
        raise InputError("profile", ABSENT, "a profile of this machine; kvrsim calibrate all makes one")
    from kvrsim.builder import build_scenario

    scenario, warnings = build_scenario(args)
    machine = hardware_of(hardware, args, scenario)
    if options.search:
        output = _checked_output(options, files)
        for warning in warnings:
            warn_once(warning)
        _search(scenario, machine, options.minutes, output, json=answer.json)
        return
    from kvrsim.views.confirm import write_traces
    from planner.confirm.confirm import confirm as measure
    from planner.confirm.hardware import Reporter
    from planner.confirm.result import Targets

    try:
        with Progress(_STARTING, is_timed=True) as progress:
            result = measure(
                scenario,
                machine,
                strategies=options.strategies,
                top=options.top,
                virtual=options.virtual,
                targets=Targets(
                    regret=options.max_regret, median_error=options.max_error, logits=options.max_logit_error
                ),
                warnings=warnings,
                reporter=Reporter(note=warn_once, progress=progress),
            )
    except KvrsimError as error:
        if answer.json and error.exit_code == NOT_MET and is_first_rank():  # for example, a rank failed
            print_json({"candidates": [], "ok": False, "reasons": [str(error)]})
        raise
    if is_first_rank():
        print_answer(answer, result.to_dict, "candidates", lambda: confirmation_screen(result))
        write_files((files.trace, lambda path: write_traces(result, path)), (files.plot, result.write_plot))
    if not result.ok:
        raise Exit(NOT_MET)


def _checked_output(options: ConfirmArgs, files: PageArgs) -> Path:
    """Return the file of --search; raise InputError where it is absent, or where an option means nothing beside it."""
    unused = {"strategies": options.strategies, "virtual": options.virtual, "trace": files.trace, "plot": files.plot}
    for name, value in unused.items():
        if value:
            raise InputError(name, value, "nothing with --search, which measures partitions")
    if options.output is None:
        raise InputError("output", ABSENT, "a file for the partition table that --search writes")
    return Path(options.output)


def _search(scenario: Scenario, machine: Hardware, minutes: float, output: Path, *, json: bool) -> None:
    """Search for a partition on the machine, and print it."""
    from planner.confirm.hardware import Reporter
    from planner.confirm.search import search_here

    with Progress(_STARTING, is_timed=True) as progress:
        reporter = Reporter(note=warn_once, progress=progress)
        result = search_here(scenario, machine, minutes=minutes, output=output, reporter=reporter)
    if is_first_rank():
        print_result(result.to_dict(), *search_screen(result), json=json)


_SHOWN_WRONG = 3  # largest number of wrongly ordered pairs that are listed


def confirmation_screen(result: Confirmation) -> list[Part]:
    """Screen of a confirmation: regret, order and errors, then a row per candidate by predicted TTFT."""
    from kvrsim.views.confirm import candidates_table

    answer = facts(
        ("measured:", headline(_ttft_line(result))),
        ("regret:", _regret(result)),
        ("order:", _order(result)),
        ("error:", f"{result.median_error:.1%}: |predicted / measured - 1|, median of the candidates"),
        *((Text("NOT MET:", style="red"), reason) for reason in result.reasons),
    )
    logits = None
    if result.max_logit_error is not None:
        logits = f"differ from one process's by at most {result.max_logit_error:.2g}"
    conditions = dict(result.conditions)
    weights = conditions.pop("weights")
    table = facts(
        ("logits:", logits),
        ("weights:", weights),
        ("machine:", "; ".join(f"{name} {value}" for name, value in conditions.items())),
        *note_rows(result.warnings),
    )
    return [answer, "", *header(result.question, result.cluster), "", candidates_table(result), "", table]


def _ttft_line(result: Confirmation) -> str:
    """The plan's choice: its measured and predicted TTFT, and whether all targets are met."""
    choice = result.choice
    gpus = format_count(result.num_gpus, "GPU")
    measured = f"{format_seconds(choice.median_s)} measured (IQR {format_seconds(choice.timing.iqr_s)})"
    interval = likely(choice.prediction.ttft_low_s, choice.predicted_s, choice.prediction.ttft_high_s, None)
    predicted = f"predicted {interval}, {choice.rel_error:+.1%}"
    met = "all targets met"
    if not result.ok:
        met = f"{format_count(len(result.reasons), 'target')} NOT met"
    return f"{choice.strategy} on {gpus}, TTFT {measured}; {predicted}; {met}"


def _order(result: Confirmation) -> str:
    """Count the pairs of candidates that differ significantly, and those that the prediction orders in the same way."""
    from planner.confirm.result import LEAST_SAMPLES

    number = len(result.candidates)
    significant = len(result.significant_pairs)
    wrong = result.wrong_pairs
    repeats = len(result.choice.timing.ttft_s)
    if repeats < LEAST_SAMPLES:
        text = f"{format_count(repeats, 'measurement')} of each show no spread"
        return f"not compared: {text}, --repeats {LEAST_SAMPLES} or more do"
    pairs = number * (number - 1) // 2
    if pairs and not significant:
        return f"none of {pairs} pairs differ by more than their spreads"
    text = f"{significant - len(wrong)} of {significant} significant pairs predicted right, of {pairs} pairs"
    if not wrong:
        return text
    swaps = "; ".join(f"{fast} is faster than {slow}" for fast, slow in wrong[:_SHOWN_WRONG])
    more = ", ..." if len(wrong) > _SHOWN_WRONG else ""
    return f"{text}; not predicted: {swaps}{more}"


def _regret(result: Confirmation) -> str:
    """Slowdown of the plan's choice relative to the fastest candidate, with their names."""
    choice = result.choice.strategy
    best = result.best.strategy
    if result.choice is result.best:
        return f"none: the plan's choice, {choice}, was the fastest"
    significant = "significant" if result.regret_beyond_spread else "not significant"
    amount = f"{result.regret:.1%} ± {result.regret_spread:.1%}"
    return f"{amount}: the plan's choice, {choice}, was slower than {best}, the fastest ({significant})"


def search_screen(result: SearchedPartition) -> list[Part]:
    """Screen of a search: the fastest measured partition, and the number of measurements."""
    search = result.search
    question = result.question
    best = _partition_line(search, search.best)
    plan = _partition_line(search, search.seed)
    table = facts(
        ("best:", headline(f"{best} measured")),
        ("gain:", f"{result.gain:.1%} over the plan's partition"),
        ("plan:", f"{plan} measured"),
        ("search:", f"{result.partitions} partitions, {result.prefills} prefills, {search.ended}"),
        ("written:", result.output),
    )
    return [table, "", *header(question, question.cluster)]


def _partition_line(search: HardwareSearch, chunks: Chunks) -> str:
    return f"{', '.join(map(str, chunks))}, TTFT {format_seconds(search.median_s(chunks))}"
