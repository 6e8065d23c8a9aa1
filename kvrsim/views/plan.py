"""A plan as a table, as a figure, as a page, and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.notes import arranged, without
from kvrsim.results.results import Plan, StrategyResult
from kvrsim.units import format_seconds
from kvrsim.views import page as html
from kvrsim.views.figure import WIDTH, Head, figure_with_head, set_lanes
from kvrsim.views.gantt import draw_gantt
from kvrsim.views.plan_text import sentences, strategies_table
from kvrsim.views.style import INK, chart_style, strategy_colour
from kvrsim.views.table import Cell, format_interval, format_partition, interval_title
from kvrsim.views.timeline import SCRIPTS, LabelledTimeline, gantt_section, memory_data, memory_section, timelines_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LONGEST = 2.0  # the axis ends at the latest at this multiple of the longest bar that fits
_CHUNKS_ROOM = 24  # letters of a partition in the table of a page
_LETTER = 0.0115  # width of a letter as a share of the axes' width


def figure(plan: Plan) -> Figure:
    """Draw the timeline of the best strategy if it was recorded, or the TTFTs of all strategies."""
    line = html.question_line(plan)
    if plan.ties:
        line = f"ties with {', '.join(plan.ties)} · {line}"
    if plan.timeline is not None:
        return draw_gantt(plan.timeline, answer(plan), f"{plan.first.title} · {line}")
    return _draw_ttfts(plan, line)


def _draw_ttfts(plan: Plan, line: str) -> Figure:
    """Draw one bar per strategy in its colour, with its prediction interval; strategies that fit come first.

    The bar of a strategy that does not fit is an outline, and is cut off if it is far longer than those that fit.
    """
    rows = sorted(plan.strategies, key=lambda one: (not one.fits, one.ttft_s))
    longest_s = _LONGEST * max((one.ttft_high_s for one in rows if one.fits), default=math.inf)
    most_s = min(longest_s, max(one.ttft_high_s for one in rows))
    over = "" if plan.baseline is None else f"; ×: times as fast as {plan.baseline}"
    with chart_style():
        edge = 0.03 + 0.0085 * max(len(one.strategy) for one in rows)
        head = Head(title=answer(plan), subtitle=line, width=WIDTH)
        figure, axes = figure_with_head(head, min(10.0, max(0.6, 0.34 * len(rows))), edge)
        set_lanes(
            axes, [one.strategy for one in rows], f"seconds to the first token; lines: prediction intervals{over}"
        )
        room = 1.05
        for place, one in enumerate(rows):
            colour = strategy_colour(one.strategy).light
            label = _label(plan, one)
            face = colour if one.fits else "none"
            end_s = min(one.ttft_high_s, most_s)
            axes.barh(place, min(one.ttft_s, most_s), height=0.66, facecolor=face, edgecolor=colour, linewidth=1.2)
            if one.ttft_s > most_s:
                label += ", cut off"
            else:
                for colour, width in (("white", 3.2), (INK, 1.4)):
                    axes.plot([one.ttft_low_s, end_s], [place] * 2, color=colour, linewidth=width)
            axes.text(end_s + 0.008 * most_s, place, label, va="center", fontsize=9, color=INK)
            room = max(room, end_s / most_s + _LETTER * (len(label) + 1))
        axes.set_xlim(0, most_s * room)
    return figure


def page(plan: Plan) -> html.Page:
    """The interactive page of a plan that has its timelines."""
    if not plan.timelines:
        raise InputError("plot", "an .html page", "a plan with timelines of all strategies: plan(timeline=True)")
    return plan_page(plan)


def summary(plan: Plan) -> html.Summary:
    """Summary with one row per strategy, the fastest that fits first."""
    ties = f"The difference to {' and '.join(plan.ties)} is within the error of prediction."
    table = strategies_table(plan)
    return html.Summary(
        answer=f"{answer(plan)} ({format_interval(plan.first.ttft_low_s, plan.first.ttft_high_s)})",
        question=html.question_line(plan),
        caption="strategies",
        columns=table.columns,
        rows=table.rows,
        notes=[*([ties] if plan.ties else []), plan.provenance, *arranged(plan.warnings)],
    )


def answer(plan: Plan) -> str:
    """Summary of the plan in one line."""
    best = plan.first
    if not plan.feasible:
        return f"No strategy fits in memory; {best.strategy} would take {format_seconds(best.ttft_s)}"
    return f"{best.strategy}: first token after {format_seconds(best.ttft_s)}{_gain(plan, best)}"


def _label(plan: Plan, one: StrategyResult) -> str:
    """Label to the right of a bar."""
    gain = "" if one.speedup is None else f"  {one.speedup:.2f} ×"
    misfit = "" if one.fits or not plan.feasible else ", does not fit"
    return f"{format_seconds(one.ttft_s)}{gain}{misfit}"


def _gain(plan: Plan, one: StrategyResult) -> str:
    if plan.baseline is None or one.speedup is None or one.strategy == plan.baseline:
        return ""
    return f", {one.speedup:.2f} × as fast as {plan.baseline}"


# The page


def plan_page(plan: Plan) -> html.Page:
    """Page of a plan that has the timelines of all its strategies."""
    timelines = [
        LabelledTimeline(
            name=one.strategy, title=f"{one.strategy}, TTFT {format_seconds(one.ttft_s)}: {one.title}", timeline=found
        )
        for one in plan.strategies
        if (found := plan.timelines.get(one.strategy)) is not None
    ]
    memory = {one.strategy: one.memory for one in plan.strategies}
    return html.Page(
        title=f"Prefill of {plan.question.request()} by {plan.model} on {plan.num_gpus} GPUs",
        answer="\n".join(sentences(plan)),
        facts=html.facts_of(plan.question),
        sections=[
            gantt_section(several=len(timelines) > 1),
            html.Section(title="Strategies", lead=_bounds(plan), body=_strategies(plan)),
            memory_section(plan.memory_limit),
        ],
        notes=[
            plan.provenance,
            *arranged(without(plan.warnings, "memory")),
        ],  # the table shows which strategies do not fit
        data=timelines_data(timelines) | {"memory": memory_data(memory, plan.memory_limit)},
        scripts=SCRIPTS,
        strategies=[one.strategy for one in plan.strategies],
    )


def _bounds(plan: Plan) -> str:
    bounds = plan.bounds
    if bounds.lower_bound_s is None:
        return ""
    gap = "" if bounds.gap is None else f"; KVR-S is at most {math.ceil(1e4 * bounds.gap - 1e-9) / 100:.2f} % above"
    return f"No partition of KV-Runahead over these GPUs is faster than {format_seconds(bounds.lower_bound_s)}{gap}."


def _strategies(plan: Plan) -> html.Html:
    """The table, with the strategies' colours, and their intervals as bars."""
    table = strategies_table(plan)
    span = html.span_of([(one.ttft_low_s, one.ttft_high_s) for one in plan.strategies])
    drawn: dict[str, Callable[[StrategyResult], Cell]] = {  # cells that the page draws, by the label of their column
        "strategy": lambda result: _name_cell(plan, result),
        "partition (tokens)": _partition_cell,
        " ".join(interval_title(plan.interval_coverage).split()): lambda result: html.interval_cell(
            result, result.strategy, span
        ),
    }
    rows = [list(row) for row in table.rows]
    for place, column in enumerate(table.columns):
        if column.label in drawn:
            for result, row in zip(plan.strategies, rows, strict=True):
                row[place] = drawn[column.label](result)
    names = [one.strategy for one in plan.strategies]
    return html.table(
        table.columns, rows, caption="Strategies with their TTFT and memory", ident="strategies", row_names=names
    )


def _partition_cell(one: StrategyResult) -> Cell:
    """The chunks if there is room; all of them are in the tooltip and in the file that the page saves."""
    whole = ", ".join(map(str, one.partition))
    return Cell(shown=html.tag("span", format_partition(one.partition, room=_CHUNKS_ROOM), title=whole), value=whole)


def _name_cell(plan: Plan, one: StrategyResult) -> Cell:
    mark = " fastest" if one is plan.first and plan.feasible else " tied" if one.is_tied else ""
    name = html.join([html.strategy_name(one.strategy), html.tag("em", mark, class_="mark")])
    return Cell(shown=html.tag("span", name, title=one.title, class_="named"), value=one.strategy)
