"""What `kvrsim run --requests` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvrsim.cli.render.layout import columns, facts, show
from kvrsim.units import format_seconds, format_tokens

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
    table = facts()
    table.add_row("arrivals:", measured.arrivals)
    rounds = len(found.throughputs_per_s)
    table.add_row("throughput:", f"{measured.throughput_per_s:.3g} per second, median of {rounds}")
    if predicted is not None:
        table.add_row("predicted:", f"{predicted.throughput_per_s:.3g} per second ({found.throughput_error:+.1%})")
    table.add_row("utilisation:", ", ".join(f"{share:.0%}" for share in measured.utilisation))
    if found.logits_error is not None:
        shown = f"{found.logits_error:.2g} of {found.logits_scale:.2g}"
        table.add_row("logits:", f"of all prompts differ from one process's by at most {shown}")
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    length = format_tokens(found.context_len)
    title = f"{len(measured.ttft_s)} prompts of {length} tokens by {found.model}, measured: {found.strategy}"
    show(Text(title, style="bold"), "", rows, "", table)
