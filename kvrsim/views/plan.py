"""A plan as a figure, as a page, and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.results.results import Plan, StrategyResult
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.figure import Bar, draw_ttfts
from kvrsim.views.gantt import draw_gantt
from kvrsim.views.page import Column, Page, Summary, interval, question_line
from kvrsim.views.timeline import plan_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(plan: Plan) -> Figure:
    """What the best strategy does when, where that was recorded; else the TTFTs of all strategies."""
    line = question_line(plan)
    if plan.ties:
        line = f"cannot be told from {', '.join(plan.ties)} · {line}"
    if plan.timeline is not None:
        return draw_gantt(plan.timeline, answer(plan), f"{plan.best.title} · {line}")
    bars = [
        Bar(
            strategy=one.strategy,
            label=_label(plan, one),
            seconds=one.ttft_s,
            low_s=one.ttft_low_s,
            high_s=one.ttft_high_s,
            fits=one.fits,
        )
        for one in _ranked(plan)
    ]
    over = "" if plan.yardstick is None else f"; ×: times as fast as {plan.yardstick}"
    unit = f"seconds to the first token; lines: prediction intervals{over}"
    return draw_ttfts(bars, answer(plan), line, unit=unit)


def page(plan: Plan) -> Page:
    """The interactive page, of a plan that has its timelines."""
    if not plan.timelines:
        raise InputError("plot", "an .html page", "a plan with timelines of all strategies: plan(timeline=True)")
    return plan_page(plan)


def summary(plan: Plan) -> Summary:
    """Strategies, the fastest that fits first."""
    over = plan.yardstick or "-"
    titles = ("strategy", "TTFT", "prediction interval", f"speed-up over {over}", "memory of the fullest GPU", "fits")
    ties = f"The difference to {' and '.join(plan.ties)} is within the error of prediction."
    return Summary(
        answer=f"{answer(plan)} ({interval(plan.best.ttft_low_s, plan.best.ttft_high_s)})",
        question=question_line(plan),
        caption="strategies",
        columns=[Column(title=title, number=place in (1, 2, 3, 4)) for place, title in enumerate(titles)],
        rows=[
            (
                one.strategy,
                format_seconds(one.ttft_s),
                interval(one.ttft_low_s, one.ttft_high_s),
                "" if one.speedup is None else f"{one.speedup:.2f}",
                format_bytes(max(rank.total for rank in one.memory)),
                "yes" if one.fits else "no",
            )
            for one in _ranked(plan)
        ],
        notes=[*([ties] if plan.ties else []), plan.rests_on, *plan.warnings],
    )


def answer(plan: Plan) -> str:
    """In one line."""
    best = plan.best
    if not plan.feasible:
        return f"No strategy fits in memory; {best.strategy} would take {format_seconds(best.ttft_s)}"
    return f"{best.strategy}: first token after {format_seconds(best.ttft_s)}{_gain(plan, best)}"


def _label(plan: Plan, one: StrategyResult) -> str:
    """Behind a bar."""
    gain = "" if one.speedup is None else f"  {one.speedup:.2f} ×"
    about = [
        *([] if one.fits or not plan.feasible else ["does not fit"]),
        *(["approximate"] if one.approximate else []),
    ]
    return ", ".join((f"{format_seconds(one.ttft_s)}{gain}", *about))


def _gain(plan: Plan, one: StrategyResult) -> str:
    if plan.yardstick is None or one.speedup is None or one.strategy == plan.yardstick:
        return ""
    return f", {one.speedup:.2f} × as fast as {plan.yardstick}"


def _ranked(plan: Plan) -> list[StrategyResult]:
    return sorted(plan.strategies, key=lambda one: (not one.fits, one.ttft_s))
