"""Pages of prefills: the timelines, memory, and strategies of a plan or a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrsim.pages.html import tag
from kvrsim.pages.page import Page, Section
from kvrsim.pages.timeline import Shown, legend, to_data
from kvrsim.results.question import Question
from kvrsim.results.results import Plan, SimResult
from kvrsim.units import format_seconds

SCRIPTS = ("spans.js", "gantt.js", "timeline.js")


def plan_page(plan: Plan) -> Page:
    """Of a plan whose timelines are recorded."""
    titles = {
        one.strategy: f"{one.strategy}: {one.title}, TTFT {format_seconds(one.ttft_s)}" for one in plan.strategies
    }
    shown = [Shown(name=name, title=titles[name], timeline=timeline) for name, timeline in plan.timelines.items()]
    return _page(f"Prefill of {plan.question.request()} by {plan.model}", plan.question, shown, plan.warnings)


def simulation_page(result: SimResult, title: str) -> Page:
    """Of a simulation whose timeline is recorded; title: of its lanes."""
    assert result.timeline is not None, "the timeline was asked for"
    shown = [Shown(name=result.strategy, title=title, timeline=result.timeline)]
    return _page(f"Prefill of {result.question.request()} by {result.model}", result.question, shown, result.warnings)


def _page(title: str, question: Question, shown: Sequence[Shown], notes: Sequence[str]) -> Page:
    return Page(
        title=title,
        facts=facts_of(question),
        sections=[Section(title="Timeline", body=tag("div", id="gantt", class_="chart"))],
        notes=notes,
        data={"timelines": [to_data(one) for one in shown], "legend": legend(one.timeline for one in shown)},
        scripts=SCRIPTS,
    )


def facts_of(question: Question) -> dict[str, str]:
    """Every part of a question, in words."""
    return {name.replace("_", " "): _words(value) for name, value in question.to_dict().items() if value is not None}


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)
