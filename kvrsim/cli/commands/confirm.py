"""`kvrsim confirm`: a plan's candidates run on this machine, compared with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import Exit

from kvrsim.arguments import Arguments, Context, Count, Help, MeasuredArgs, Read, Share, strategy_list, written
from kvrsim.cli.commands.run import FIXED
from kvrsim.cli.options import OUTPUT, HardwareArgs, OutputArgs, PageArgs, WritablePath, hardware_of, with_options
from kvrsim.cli.output import print_answer, print_json, print_result, warn_once, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, facts, header, headline, likely, note_rows
from kvrsim.errors import ABSENT, InputError, KvrsimError
from kvrsim.io.annotations import Range
from kvrsim.io.files import is_first_rank
from kvrsim.io.schema import write_json
from kvrsim.units import format_count, format_seconds
from kvrsim.views.table import Text

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.hardware import Hardware
    from planner.confirm.result import Confirmation
    from planner.confirm.saved import SavedPlan
    from planner.confirm.search import Chunks, HardwareSearch, SearchedPartition

_RANKS = 2  # ranks without a saved plan
NOT_MET = 1  # exit code if a target is not met or a rank fails
_STARTING = "planning and starting ranks"
StrategyNames = Annotated[list[str], Read(strategy_list)]  # of the shipped strategies


_Ranks = Annotated[Count | None, Help("Number of ranks. Default: the plan's, or 2.", metavar="N", section="Question")]
_Batch = Annotated[
    Count | None, Help("Sequences prefilled together. Default: the plan's, or 1.", metavar="N", section="Question")
]


class PlannedArgs(MeasuredArgs):
    """Arguments of a measured scenario, which a saved plan may give."""

    ctx: Annotated[
        Context | None,
        Help(
            "Context length in tokens: 16k is 16384. Required without a saved plan.", metavar="LEN", section="Question"
        ),
    ] = None  # type: ignore[assignment]
    gpus: _Ranks = None  # type: ignore[assignment]
    batch: _Batch = None  # type: ignore[assignment]

    def filled(self, plan: SavedPlan | None) -> MeasuredArgs:
        """The arguments with the values of the plan, and with defaults. Raises InputError if they contradict it."""
        values = vars(self)
        if plan is not None:
            values = self._planned(plan)
        elif self.ctx is None:
            raise InputError("ctx", ABSENT, "a context length, such as 4k; or a plan: kvrsim confirm plan.json")
        defaults: dict[str, Any] = {"gpus": _RANKS, "batch": 1}
        given = {name: value for name, value in values.items() if value is not None}
        return MeasuredArgs(**values | defaults | given)

    def _planned(self, plan: SavedPlan) -> dict[str, Any]:
        """The arguments with the values of the plan. Raises InputError if another length, number or batch is given."""
        values = dict(vars(self))
        if values["model"] == plan.file:
            values["model"] = plan.model
        for name, planned in (("ctx", plan.context_len), ("gpus", plan.num_gpus), ("batch", plan.batch)):
            if values[name] not in (None, planned):
                raise InputError(name, values[name], f"{planned}, as in {plan.file}")
            values[name] = planned
        for name, setting in (("dtype", plan.dtype), ("attention", plan.attention)):
            if values[name] is None:
                values[name] = setting
        values["cached_prefix"] = values["cached_prefix"] or plan.cached_prefix
        return values


class ConfirmArgs(Arguments):
    """What is measured, and its targets."""

    strategies: Annotated[
        StrategyNames | None,
        Help(
            "Strategies to measure, such as ring,tp,kvr-s; all: every strategy that the planner compares and that "
            "runs here. Default: the plan's fastest, kvr-s, tsp and single; without a saved plan single,tsp,kvr-e,"
            "kvr-s.",
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
        int | None,
        Range(least=1, most=1000),
        Help(
            "Number of a saved plan's fastest strategies (default 5); without one, number of KVR partitions: the best, "
            "and the K - 1 next best (default 3).",
            metavar="K",
            section="Search",
        ),
    ] = None
    plan: Annotated[
        str | None,
        Help(
            "A plan that kvrsim plan -o FILE wrote, as MODEL; needed if --model gives the path of its model.",
            metavar="FILE",
            section="Question",
        ),
    ] = None
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
        Help(
            "Write the confirmation, as --json prints it, for kvrsim plan --confirmed and kvrsim compare. With "
            "--search: write the partition found as a partition table.",
            metavar="FILE",
            spelling=OUTPUT,
        ),
    ] = None


@with_options(fixed=FIXED)
def confirm(
    planned: PlannedArgs, hardware: HardwareArgs, options: ConfirmArgs, files: PageArgs, answer: OutputArgs
) -> None:
    """Measure a plan's candidates on this machine.

    MODEL may be a plan that kvrsim plan -o FILE wrote; without one, a plan is made now. The runs are interleaved. Says
    whether the plan's best was the best, and the errors of the predictions. The exit code is 1 if a target is not met:
    the plan's choice, the predictions, or the logits.

    Example: kvrsim confirm plan.json --profile here.json -o confirmed.json
    """
    answer.check(search=options.search)
    plan = _saved_plan(planned, options)
    args = planned.filled(plan)
    if args.profile is None:
        raise InputError("profile", ABSENT, "a profile of this machine; kvrsim calibrate all makes one")
    from kvrsim.builder import build_scenario

    try:
        scenario, warnings = build_scenario(args)
    except InputError as error:
        if plan is not None and error.parameter == "model" and planned.model == plan.file:
            accepted = f"the path of the plan's model: kvrsim confirm --plan {plan.file} --model PATH"
            raise InputError("model", plan.model, accepted) from None
        raise
    machine = hardware_of(hardware, args, scenario)
    if options.search:
        output = _checked_output(options, files)
        for warning in warnings:
            warn_once(warning)
        _search(scenario, machine, options.minutes, output, json=answer.json)
        return
    from kvrsim.views.confirm import write_traces
    from planner.confirm.confirm import Choice
    from planner.confirm.confirm import confirm as measure
    from planner.confirm.hardware import Reporter
    from planner.confirm.result import Targets

    try:
        with Progress(_STARTING, is_timed=True) as progress:
            result = measure(
                scenario,
                machine,
                choice=Choice(strategies=options.strategies, top=options.top, plan=plan),
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
        write_files(
            (options.output, lambda path: write_json(path, result.to_dict())),
            (files.trace, lambda path: write_traces(result, path)),
            (files.plot, result.write_plot),
        )
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


def _saved_plan(args: PlannedArgs, options: ConfirmArgs) -> SavedPlan | None:
    """The plan in the file that --plan or MODEL names; None: MODEL is a model."""
    from planner.confirm.saved import SavedPlan

    if options.plan is not None:
        plan = SavedPlan.read(options.plan, "plan")
        if plan is None:
            raise InputError("plan", options.plan, "a plan that kvrsim plan -o FILE wrote")
        return plan
    if not isinstance(args.model, str):
        return None
    file = Path(args.model)
    if file.name == "config.json":
        return None
    if file.is_file() or file.suffix == ".json":
        return SavedPlan.read(args.model, "plan")
    return None


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
    from kvrsim.views.confirm import candidates_table, verdict

    planned = None
    if result.plan is not None:
        planned = f"{result.plan.file}, made with profile {result.plan.profile}"
    answer = facts(
        ("answer:", headline(verdict(result))),
        ("plan:", planned),
        ("measured:", _ttft_line(result)),
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
