"""A simulation as a table, as a figure, as a page, and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.results.results import SimResult
from kvrsim.results.timeline import Timeline
from kvrsim.strategies import get_strategy
from kvrsim.units import format_seconds
from kvrsim.views.gantt import draw_gantt
from kvrsim.views.page import Page, Section, Summary, facts_of, question_line, table
from kvrsim.views.style import variable
from kvrsim.views.table import format_interval, interval_title, ranks_table
from kvrsim.views.timeline import SCRIPTS, LabelledTimeline, gantt_section, memory_data, memory_section, timelines_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(result: SimResult) -> Figure:
    """Timeline of each rank."""
    subtitle = " · ".join(filter(None, (_title(result), question_line(result))))
    return draw_gantt(_timeline(result), answer(result), subtitle)


def _timeline(result: SimResult) -> Timeline:
    if result.timeline is None:
        raise InputError("plot", "a simulation without a timeline", "one of simulate(timeline=True)")
    return result.timeline


def summary(result: SimResult) -> Summary:
    """Summary with one row per rank."""
    table = ranks_table(result)
    return Summary(
        answer=f"{answer(result)} ({format_interval(result.ttft_low_s, result.ttft_high_s)})",
        question=question_line(result),
        caption="ranks",
        columns=table.columns,
        rows=table.rows,
        notes=result.warnings,
    )


def answer(result: SimResult) -> str:
    """Summary of the simulation in one line."""
    missed = "" if result.fits else ", but does not fit in memory"
    return f"{result.strategy}: first token after {format_seconds(result.ttft_s)}{missed}"


def _title(result: SimResult) -> str:
    """Title of the strategy; empty if it came from a file that no longer exists."""
    try:
        return get_strategy(str(result.question.to_dict().get("strategy", result.strategy))).title
    except InputError:
        return ""


def page(result: SimResult) -> Page:
    """The interactive page."""
    rows = ranks_table(result)
    timelines = [LabelledTimeline(name=result.strategy, title=answer(result), timeline=_timeline(result))]
    memory = {result.strategy: [rank.memory for rank in result.per_rank]}
    name = " ".join(interval_title(result.interval_coverage).split())
    likely = f"{name} {format_interval(result.ttft_low_s, result.ttft_high_s)}"
    return Page(
        title=f"Prefill of {result.question.request()} by {result.model} on {result.cluster.num_gpus} GPUs",
        answer=f"{result.strategy}: TTFT {format_seconds(result.ttft_s)} ({likely}).",
        facts=facts_of(result.question),
        sections=[
            gantt_section(several=False),
            Section(
                title="Ranks",
                body=table(rows.columns, rows.rows, caption="Ranks with their times and memory", ident="ranks"),
            ),
            memory_section(result.memory_limit),
        ],
        notes=result.warnings,
        data=timelines_data(timelines)
        | {"memory": memory_data(memory, result.memory_limit), "colour": variable("strategy", result.strategy)},
        scripts=SCRIPTS,
        strategies=[result.strategy],
    )
