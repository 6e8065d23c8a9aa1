"""A simulation as a figure, as a page, and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.results.results import SimResult
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.figure import Share, draw_ranks
from kvrsim.views.gantt import draw_gantt
from kvrsim.views.page import Column, Page, Summary, interval, question_line
from kvrsim.views.timeline import simulation_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(result: SimResult) -> Figure:
    """What each rank does when, where that was recorded; else how long each computes and waits."""
    subtitle = " · ".join(filter(None, (_title(result), question_line(result))))
    if result.timeline is not None:
        return draw_gantt(result.timeline, answer(result), subtitle)
    shares = [Share(computes_s=rank.compute_s, waits_s=rank.wait_s) for rank in result.per_rank]
    return draw_ranks(shares, answer(result), subtitle)


def page(result: SimResult) -> Page:
    """The interactive page, of a simulation that has its timeline."""
    if result.timeline is None:
        raise InputError("plot", "an .html page", "a simulation with a timeline: simulate(timeline=True)")
    return simulation_page(result, answer(result))


def summary(result: SimResult) -> Summary:
    """Ranks, in order."""
    titles = ("rank", "new tokens", "computes", "waits", "sends", "memory")
    return Summary(
        answer=f"{answer(result)} ({interval(result.ttft_low_s, result.ttft_high_s)})",
        question=question_line(result),
        caption="ranks",
        columns=[Column(title=title, number=True) for title in titles],
        rows=[
            (
                str(rank.rank),
                str(rank.chunk_len),
                format_seconds(rank.compute_s),
                format_seconds(rank.wait_s),
                format_bytes(rank.sent_bytes),
                format_bytes(rank.memory.total),
            )
            for rank in result.per_rank
        ],
        notes=result.warnings,
    )


def answer(result: SimResult) -> str:
    """In one line."""
    missed = "" if result.fits else ", but does not fit in memory"
    return f"{result.strategy}: first token after {format_seconds(result.ttft_s)}{missed}"


def _title(result: SimResult) -> str:
    """Of the strategy, where it can be found again; empty where a file had it that is no longer there."""
    try:
        return get_strategy(str(result.question.to_dict().get("strategy", result.strategy))).title
    except InputError:
        return ""
