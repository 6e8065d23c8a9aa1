"""What `kvrsim run --requests` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvrsim.cli.render.confirm import next_of_run
from kvrsim.cli.render.format import headline, measured_header
from kvrsim.cli.render.layout import Shrinkable, columns, facts, show
from kvrsim.units import format_seconds

if TYPE_CHECKING:
    from planner.confirm.prompts import MeasuredPrompts


def show_prompts(found: MeasuredPrompts) -> None:
    """One row a prompt, measured and predicted; then throughput and how busy ranks were."""
    rows = columns("prompt", "arrives", "begins", "TTFT", "predicted", numbers=True)
    measured, predicted = found.measured, found.predicted
    for number, (time_s, queue_s, ttft_s) in enumerate(
        zip(measured.arrivals_s, measured.queue_s, measured.ttft_s, strict=True)
    ):
        said = "" if predicted is None else format_seconds(predicted.ttft_s[number])
        times = [format_seconds(one) for one in (time_s, time_s + queue_s, ttft_s)]
        rows.add_row(str(number), *times, said)
    answer, table = facts(), facts()
    rounds, count = len(found.throughputs_per_s), len(measured.ttft_s)
    gpus = f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    speed = f"{measured.throughput_per_s:.3g} prompts per second measured, median of {rounds}"
    answer.add_row("throughput:", headline(f"{found.strategy} on {gpus}, {speed}"))
    if predicted is not None:
        answer.add_row("predicted:", f"{predicted.throughput_per_s:.3g} per second ({found.throughput_error:+.1%})")
    answer.add_row("prompts:", f"{count}, {measured.arrivals}")
    table.add_row("utilisation:", ", ".join(f"{share:.0%}" for share in measured.utilisation))
    if found.logits_error is not None:
        shown = f"{found.logits_error:.2g} of {found.logits_scale:.2g}"
        table.add_row("logits:", f"of all prompts differ from one process's by at most {shown}")
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    show(
        answer,
        "",
        *measured_header(found.question, found.conditions),
        "",
        Shrinkable(rows, ("begins",)),
        "",
        table,
        next_of_run(found.question),
    )
