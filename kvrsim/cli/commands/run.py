"""`kvrsim run`: one strategy's prefill, measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvrsim.arguments import REQUIRED, MeasuredArgs, chunk_lens, option, switch, text
from kvrsim.cli.options import JSON, HardwareArgs, PageArgs, hardware_of, require_torch, takes
from kvrsim.cli.output import print_json, warn_once, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import facts, headline, measured_header, show
from kvrsim.io.files import is_first_rank
from kvrsim.units import format_seconds
from kvrsim.views.table import Text, format_partition, narrowing

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.run import RunResult

_STRATEGY = (
    "Strategy: single, tsp, kvr-e, kvr-s, kvr-b, kvr-direct, ring, striped, zigzag, zigzag-ring, ulysses, tp, pp, pp-s,"
    " or kvr-p with --partition."
)
_PARTITION = "New tokens of each rank or piece. Default: the strategy's own; kvr-s, pp, pp-s search by --profile."
FIXED = {"prefix_placement": "all", "expert_parallel": False, "expert_imbalance": None}


@takes(MeasuredArgs, HardwareArgs, PageArgs, fixed=FIXED)
def run(
    args: MeasuredArgs,
    hardware: HardwareArgs,
    files: PageArgs,
    *,
    strategy: Any = option("NAME", _STRATEGY, "Question", text, REQUIRED),
    partition: Any = option("LEN,LEN,...", _PARTITION, "Question", chunk_lens),
    check: Any = switch("Compare logits and KV cache with those of one process.", "Measurement"),
    json: Any = JSON,
) -> None:
    """Measure one strategy's prefill on this machine.

    It starts the ranks itself, or runs as one rank of torchrun.

    Example: kvrsim run --model tiny-llama --strategy kvr-e --ctx 1k --gpus 2
    """
    from kvrsim.runtime.plan import run_strategy

    run_strategy(strategy)
    require_torch()
    from planner.confirm.hardware import Reporter
    from planner.confirm.run import run_here

    scenario, warnings = _scenario(args, hardware.device)
    machine = hardware_of(hardware, args, scenario)
    with Progress("planning and starting ranks", is_timed=True) as progress:
        result = run_here(
            scenario,
            machine,
            strategy=strategy,
            partition=partition,
            check_logits=check,
            warnings=warnings,
            reporter=Reporter(note=warn_once, progress=progress),
        )
    if not is_first_rank():
        return
    if json:
        print_json(result.to_dict())
    else:
        show_run(result)
    about = {"cluster": f"{result.num_gpus} ranks, {result.conditions['device']}", "profile": None}  # it is measured
    write_files(
        (files.trace, lambda path: result.timeline.write_chrome_trace(path, result.question, **about)),
        (files.plot, result.write_plot),
    )


def _scenario(args: MeasuredArgs, device: str) -> tuple[Scenario, tuple[str, ...]]:
    """Build the scenario and its notes as a prediction does; without a profile, use the defaults of a run here."""
    from kvrsim.builder import build_scenario

    if args.profile is not None:
        return build_scenario(args)
    from kvrsim.runtime.host import chosen_device

    dtype = args.dtype or ("fp32" if chosen_device(device) == "cpu" else "fp16")
    return build_scenario(replace(args, profile="roofline", dtype=dtype, attention=args.attention or "sdpa"))[0], ()


def show_run(result: RunResult) -> None:
    """One row per rank, then TTFT and its spread."""
    from planner.confirm.run_views import ranks_table

    rows, timing, partition = ranks_table(result), result.timing, result.plan.partition.chunk_lens
    answer, table, count = facts(), facts(), len(timing.ttft_s)
    gpus = f"{result.num_gpus} GPU{'s' * (result.num_gpus != 1)}"
    measured = (
        f"{format_seconds(timing.median_s)} measured, median of {count}; spread {format_seconds(timing.iqr_s)} (IQR)"
    )
    answer.add_row("TTFT:", headline(f"{result.strategy.name} on {gpus}, {measured}"))
    if result.predicted_s is not None:
        error = result.predicted_s / timing.median_s - 1
        answer.add_row("predicted:", f"{format_seconds(result.predicted_s)} ({error:+.1%})")
    if result.chunk_per_rank and len(partition) > 1:
        answer.add_row("partition:", f"{format_partition(partition, room=10**6)} tokens")
    if (difference := timing.difference) is not None:
        largest = f"{difference.logits:.2g} of {difference.logits_scale:.2g}"
        kept = f"KV cache by at most {difference.kv_cache:.2g}"
        table.add_row("logits:", f"differ from one process's by at most {largest}; {kept}")
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in result.conditions.items()))
    for warning in result.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    args = measured_header(result.question, result.conditions)
    show(answer, "", *args, "", narrowing(rows, "sent", "tokens"), "", table)
