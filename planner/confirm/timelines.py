"""Predicted and measured timelines of candidates: a plot of the plan's choice, and a trace of all for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrsim.results.timeline import Timeline, write_trace
from kvrsim.units import format_seconds, format_tokens
from kvrsim.views.figure import Head, check_suffix, is_page, save_figure
from kvrsim.views.gantt import (
    WIDTH,
    draw_arrows,
    draw_lanes,
    lane_axes,
    legend_entries,
    mark_first_token,
    number_layers,
)
from kvrsim.views.style import styled
from planner.confirm.result import Candidate, Confirmation


def write_plot(confirmation: Confirmation, path: str | Path) -> None:
    """Draw the choice's predicted timeline above the measured one, as PNG, SVG or PDF by the path's suffix.

    As HTML: a page with the timelines of all candidates.
    """
    if is_page(path):
        from kvrsim.views.page import write_page
        from planner.confirm.page import confirmation_page

        write_page(confirmation_page(confirmation), path)
        return
    check_suffix(path)
    with styled():
        save_figure(_drawn(confirmation), path)


def _drawn(confirmation: Confirmation) -> Any:
    from matplotlib.figure import Figure

    one = confirmation.choice
    timelines = _titled_timelines(one, confirmation.mode == "virtual")
    title = f"{one.strategy}: {', '.join(map(str, one.partition))} tokens, predicted {one.rel_error:+.1%}"
    setting = (
        confirmation.model,
        f"{format_tokens(confirmation.context_len)} tokens",
        confirmation.cluster.describe(),
        f"{confirmation.attention} attention",
        f"profile {confirmation.profile}",
    )
    entries = legend_entries([span for _, timeline in timelines for span in timeline.spans])
    head = Head(title=title, subtitle=" · ".join(setting), width=WIDTH, entries=entries)
    lanes = min(10.0, max(0.9, one.predicted.num_ranks * 0.5))  # inches
    gap = 0.8
    height = len(timelines) * lanes + (len(timelines) - 1) * gap + head.height + 1.0
    figure = Figure(figsize=(WIDTH, height))
    edges: dict[str, Any] = dict(left=0.07, right=0.985, top=1 - (head.height + 0.4) / height, bottom=0.55 / height)
    grid = figure.add_gridspec(len(timelines), 1, hspace=gap / lanes, **edges)
    end_s = max(timeline.end_s for _, timeline in timelines)
    for row, (title, timeline) in enumerate(timelines):
        axes = figure.add_subplot(grid[row, 0])
        draw_lanes(axes, timeline.spans, 0.0, end_s)
        draw_arrows(axes, [span for span in timeline.spans if span.kind == "transfer"], 0.0, end_s)
        number_layers(axes, timeline.spans, 0.0, end_s)
        lane_axes(axes, timeline, 0.0, end_s, title=title)
        mark_first_token(axes, timeline)
    head.draw(figure)
    return figure


def _titled_timelines(one: Candidate, virtual: bool) -> list[tuple[str, Timeline]]:
    """Timelines with titles; the measured one is of a single prefill, its title names the median of all."""
    shown = "composed of measured parts" if virtual else "one measured prefill"
    found = [(f"predicted, {format_seconds(one.predicted_s)}", one.predicted)]
    if one.measured is not None:
        found.append((f"{shown}; median of {len(one.samples_s)}: {format_seconds(one.median_s)}", one.measured))
    return found


def write_traces(confirmation: Confirmation, path: str | Path) -> None:
    """Write trace events atomically: one timeline after another, the plan's choice first."""
    named = [(name, one.spans, one.rank_names) for name, one in _timelines(confirmation)]
    write_trace(named, path, confirmation.question)


def _timelines(confirmation: Confirmation) -> Iterator[tuple[str, Timeline]]:
    real = "measured" if confirmation.mode == "ranks" else "composed of measured parts"
    for one in sorted(confirmation.candidates, key=lambda one: one is not confirmation.choice):
        label = f"{one.strategy} {','.join(map(str, one.partition))}"
        yield f"{label}, predicted", one.predicted
        if one.measured is not None:
            yield f"{label}, {real}", one.measured
