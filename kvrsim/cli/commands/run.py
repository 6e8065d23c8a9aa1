"""`kvrsim run`: one strategy's prefill, measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli import machine_options as machine
from kvrsim.cli.options import Json, MeasuredOptions, takes
from kvrsim.cli.outputs import print_json, tell_once, write_beside
from kvrsim.cli.parsing import parse_chunks
from kvrsim.cli.progress import RankProgress
from kvrsim.cli.run_options import TimelineOptions
from kvrsim.cli.text import Text, columns, facts, format_partition, headline, measured_header, narrowing, show
from kvrsim.io.files import is_first_rank
from kvrsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.run import RunResult


@takes(MeasuredOptions, machine.HardwareOptions, TimelineOptions)
def run(
    options: MeasuredOptions,
    hardware: machine.HardwareOptions,
    files: TimelineOptions,
    *,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="Strategy: single, tsp, kvr-e, kvr-s, kvr-b, kvr-direct, ring, striped, zigzag, zigzag-ring, ulysses,"
            " tp, pp, pp-s, or kvr-p with --partition.",
        ),
    ],
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="LEN,LEN,...",
            help="New tokens of each rank or piece. Default: the strategy's own; kvr-s, pp, pp-s search by --profile.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare logits and KV cache with those of one process.")
    ] = False,
    generate: Annotated[
        str | None, typer.Option("--generate", metavar="N", help="Decode N more tokens on the last rank, greedily.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure one strategy's prefill on this machine.

    It starts the ranks itself, or runs as one rank of torchrun.

    Example: kvrsim run --strategy kvr-e --ctx 1k --gpus 2
    """
    from kvrsim.runtime.plan import run_strategy
    from kvrsim.units import parse_count

    run_strategy(strategy)
    tokens = 0 if generate is None else parse_count(generate, "generate", maximum=2**20)
    chunks = parse_chunks(partition)
    files.check()
    machine.require_torch()
    scenario, warnings = _scenario(options, hardware.device)
    chosen = hardware.hardware(options, scenario)
    from planner.confirm.run import run_here

    wanted: dict[str, Any] = dict(strategy=strategy, partition=chunks, check_logits=check, generate=tokens)
    with RankProgress() as progress:
        found = run_here(scenario, chosen, **wanted, warnings=warnings, on_note=tell_once, on_progress=progress)
    if is_first_rank():
        _show(found, files, json=json)


def _scenario(options: MeasuredOptions, device: str) -> tuple[Scenario, tuple[str, ...]]:
    """As for a prediction, with its notes; without a profile, what a plain run on this device takes."""
    if options.profile is not None:
        return options.scenario()
    from kvrsim.runtime.host import chosen_device

    dtype = options.dtype or ("fp32" if chosen_device(device) == "cpu" else "fp16")
    kernel = options.attention or "sdpa"
    return replace(options, profile="roofline", dtype=dtype, attention=kernel).scenario()[0], ()


def _show(found: RunResult, files: TimelineOptions, *, json: bool) -> None:
    if json:
        print_json(found.to_dict())
    else:
        show_run(found)
    about = {"cluster": f"{found.num_gpus} ranks, {found.conditions['device']}", "profile": None}  # it is measured
    write_beside(
        (files.trace, lambda path: found.timeline.write_chrome_trace(path, found.question, **about)),
        (files.plot, lambda path: _draw(found, path)),
    )


def _draw(found: RunResult, path: str) -> None:
    from kvrsim.cli.text import subtitle
    from kvrsim.units import format_seconds
    from kvrsim.views.gantt import write_gantt

    device = f"measured on {found.num_gpus} ranks, {found.conditions['device']}"
    line = subtitle(
        found.model, found.context_len, (device, f"{found.attention} attention", found.dtype, "shown: one more prefill")
    )
    write_gantt(
        found.timeline,
        path,
        title=f"{found.strategy}: first token after {format_seconds(found.ttft_s)}, measured",
        subtitle=line,
    )


def show_run(found: RunResult) -> None:
    """One row per rank, then TTFT and its spread."""
    rows = columns("rank", "tokens", "compute", "wait", "sent", numbers=True)
    values = found.to_dict()["per_rank"]
    chunks = found.partition if found.chunk_a_rank else (found.context_len,) * len(values)
    tokens = [*[0] * (len(values) - len(chunks)), *chunks]
    for row, chunk in zip(values, tokens, strict=True):
        times = (format_seconds(row["compute_s"]), format_seconds(row["wait_s"]))
        rows.add_row(str(row["rank"]), str(chunk), *times, format_bytes(row["sent_bytes"]))
    answer, table, count = facts(), facts(), len(found.samples_s)
    gpus = f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    measured = f"{format_seconds(found.ttft_s)} measured, median of {count}; spread {format_seconds(found.iqr_s)} (IQR)"
    answer.add_row("TTFT:", headline(f"{found.strategy} on {gpus}, {measured}"))
    if found.predicted_s is not None:
        error = found.predicted_s / found.ttft_s - 1
        answer.add_row("predicted:", f"{format_seconds(found.predicted_s)} ({error:+.1%})")
    if found.chunk_a_rank and len(found.partition) > 1:
        answer.add_row("partition:", f"{format_partition(found.partition, room=10**6)} tokens")
    if found.logits_error is not None:
        shown = f"{found.logits_error:.2g} of {found.logits_scale:.2g}; KV cache by at most {found.kv_cache_error:.2g}"
        table.add_row("logits:", f"differ from one process's by at most {shown}")
    for row in found.generated:
        table.add_row("tokens:", " ".join(map(str, row)))
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    asked = measured_header(found.question, found.conditions)
    show(answer, "", *asked, "", narrowing(rows, "sent", "tokens"), "", table)
