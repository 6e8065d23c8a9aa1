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
from kvrsim.io.files import is_first_rank

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
    from kvrsim.runtime.exchange import run_strategy
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
        from kvrsim.cli.render.confirm import show_run

        show_run(found)
    about = {"cluster": f"{found.num_gpus} ranks, {found.conditions['device']}", "profile": None}  # it is measured
    write_beside(
        (files.trace, lambda path: found.timeline.write_chrome_trace(path, found.question, **about)),
        (files.plot, lambda path: _draw(found, path)),
    )


def _draw(found: RunResult, path: str) -> None:
    from kvrsim.cli.render.format import subtitle
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
