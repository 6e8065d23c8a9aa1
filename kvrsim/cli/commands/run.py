"""`kvrsim run`: one strategy's prefill, and tokens decoded from its KV cache, measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from kvrsim.arguments import Arguments, ChunkLens, Help, MeasuredArgs, Read, Tokens, quantity
from kvrsim.cli.options import HardwareArgs, Json, PageArgs, hardware_of, require_torch, with_options
from kvrsim.cli.output import print_result, warn_once, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, facts, header, headline, note_rows
from kvrsim.io.annotations import Range
from kvrsim.io.files import is_first_rank
from kvrsim.scenario import ROOFLINE
from kvrsim.units import format_seconds, parse_bytes
from kvrsim.views.table import Text, format_partition, narrowing

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.run import RunResult

_STRATEGY = (
    "Strategy: single, tsp, kvr-e, kvr-s, kvr-b, kvr-direct, ring, striped, zigzag, zigzag-ring, ulysses, tp, pp, pp-s,"
    " or kvr-p with --partition."
)
_PARTITION = (
    "New tokens of each rank or piece. Default: the strategy's own; kvr-s, pp and pp-s search it with --profile."
)
MessageBytes = Annotated[int, Read(quantity(parse_bytes)), Range(least=2**10, most=2**30)]
FIXED = {"prefix_placement": "all", "expert_parallel": False, "expert_imbalance": None}


class RunArgs(Arguments):
    """What is run besides prefills, and beside them."""

    output_tokens: Annotated[
        Tokens,
        Help(
            "Tokens to generate; those after the first are decoded from the prefill's KV cache.",
            metavar="N",
            section="Question",
        ),
    ] = 1
    check: Annotated[
        bool, Help("Compare logits and tokens with those of transformers in one process.", section="Measurement")
    ] = False
    host_memory: Annotated[
        bool,
        Help(
            "Send between GPUs through host memory (NCCL_P2P_DISABLE), as in the paper's runs at 10 GB/s.",
            section="Machine",
        ),
    ] = False
    side_traffic: Annotated[
        MessageBytes | None,
        Help(
            "During the prefills, other processes send messages of SIZE in both directions between a random pair of "
            "neighbours, as the paper's noisy sidecar.",
            metavar="SIZE",
            section="Machine",
        ),
    ] = None


@with_options(fixed=FIXED)
def run(
    args: MeasuredArgs,
    hardware: HardwareArgs,
    options: RunArgs,
    files: PageArgs,
    *,
    strategy: Annotated[str, Help(_STRATEGY, metavar="NAME", section="Question")],
    partition: Annotated[ChunkLens | None, Help(_PARTITION, metavar="LEN,LEN,...", section="Question")] = None,
    json: Json = False,
) -> None:
    """Measure one strategy's prefill on this machine.

    With --output-tokens, the rank that holds the KV cache after the prefill goes on to decode from it. The command
    starts the ranks itself, or runs as one rank of torchrun. With --check, the exit code is 1 if tokens or logits are
    not those of one process.

    Example: kvrsim run --model tiny-llama --strategy kvr-e --ctx 1k --gpus 2
    """
    from kvrsim.runtime.plan import check_decoding, run_strategy

    check_decoding(run_strategy(strategy), options.output_tokens)
    require_torch()
    from planner.confirm.hardware import Reporter
    from planner.confirm.run import run_here

    scenario, warnings = _scenario(args, hardware.device)
    machine = replace(
        hardware_of(hardware, args, scenario),
        output_tokens=options.output_tokens,
        host_memory=options.host_memory,
        side_traffic_bytes=options.side_traffic,
    )
    with Progress("planning and starting ranks", is_timed=True) as progress:
        result = run_here(
            scenario,
            machine,
            strategy=strategy,
            partition=partition,
            check_logits=options.check,
            warnings=warnings,
            reporter=Reporter(note=warn_once, progress=progress),
        )
    if not is_first_rank():
        return
    print_result(result.to_dict(), *run_screen(result), json=json)
    about = {"cluster": f"{result.num_gpus} ranks, {result.conditions['device']}", "profile": None}  # not predicted
    write_files(
        (files.trace, lambda path: result.timeline.write_chrome_trace(path, result.question, **about)),
        (files.plot, result.write_plot),
    )
    if result.reasons:
        raise Exit(1)


def _scenario(args: MeasuredArgs, device: str) -> tuple[Scenario, tuple[str, ...]]:
    """Build the scenario and its notes; without a profile, dtype and attention suit this machine."""
    from kvrsim.builder import build_scenario

    if args.profile is not None:
        return build_scenario(args)
    from kvrsim.runtime.host import chosen_device

    dtype = args.dtype or ("fp32" if chosen_device(device) == "cpu" else "fp16")
    changes = {"profile": "roofline", "dtype": dtype, "attention": args.attention or "sdpa"}
    return build_scenario(MeasuredArgs(**vars(args) | changes))[0], ()


def run_screen(result: RunResult) -> list[Part]:
    """Screen of a run: TTFT and its spread, and one row per rank."""
    from kvrsim.views.run import ranks_table

    timing = result.timing
    question = result.question
    partition = result.plan.partition.chunk_lens
    count = len(timing.ttft_s)
    gpus = f"{result.num_gpus} rank{'s' * (result.num_gpus != 1)}"
    slowest_s = max(rank["compute_s"] + rank["wait_s"] for rank in result.to_dict()["per_rank"])
    parts = f"of an additional prefill with timers, {format_seconds(slowest_s)} on the slowest rank"
    measured = f"measured, median of {count}; spread {format_seconds(timing.iqr_s)} (IQR)"
    predicted = None
    chunks = None
    logits = None
    if result.predicted_s is not None:
        predicted = f"{format_seconds(result.predicted_s)} ({result.predicted_s / timing.median_s - 1:+.1%})"
    if result.chunk_per_rank and len(partition) > 1:
        chunks = f"{format_partition(partition, room=10**6)} tokens"
    if (difference := timing.difference) is not None:
        largest = f"{difference.logits:.2g} of {difference.logits_scale:.2g}"
        logits = f"differ from one process's by at most {largest}"
    tpot = None
    if result.tpot_s is not None:
        steps = len(result.decoding.step_s)
        tpot = f"{format_seconds(result.tpot_s)} per token, median of {steps} decoded"
    answer = facts(
        ("TTFT:", headline(f"{result.strategy.name} on {gpus}, {format_seconds(timing.median_s)} {measured}")),
        ("TPOT:", tpot),
        ("predicted:", predicted),
        ("partition:", chunks),
        *((Text("NOT EQUAL:", style="red"), reason) for reason in result.reasons),
    )
    conditions = dict(result.conditions)
    weights = conditions.pop("weights")
    machine = "; ".join(f"{name} {value}" for name, value in conditions.items())
    table = facts(
        ("compute, wait:", parts),
        ("KV cache:", result.kv_cache),
        ("tokens:", tokens_text(result)),
        ("logits:", logits),
        ("weights:", weights),
        ("machine:", machine),
        *note_rows(result.warnings),
    )
    first, _ = header(question, question.cluster)
    by = () if question.profile == ROOFLINE else (f"predicted by profile {question.profile}", *question.engine_text())
    second = Text(" · ".join((f"measured on {result.conditions['device']}", *by)), style="dim")
    return [answer, "", first, second, "", narrowing(ranks_table(result), "sent", "tokens"), "", table]


_MOST_TOKENS = 16  # tokens that the screen shows


def tokens_text(result: RunResult) -> str:
    """The first generated tokens of the first prompt, and whether they were compared."""
    tokens = result.decoding.tokens[0]
    shown = " ".join(map(str, tokens[:_MOST_TOKENS]))
    more = f" and {len(tokens) - _MOST_TOKENS} more" if len(tokens) > _MOST_TOKENS else ""
    difference = result.timing.difference
    if difference is None:
        return f"{shown}{more}"
    if difference.first_unequal is None:
        return f"{shown}{more}, equal to those of transformers in one process"
    return f"{shown}{more}, not equal to those of transformers in one process"
