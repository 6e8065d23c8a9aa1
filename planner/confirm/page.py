"""The page of a confirmation: predicted and measured timelines of the candidates on one axis, and their errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvrsim.units import format_seconds
from kvrsim.views.page import (
    Cell,
    Column,
    Html,
    Page,
    Section,
    facts_of,
    in_words,
    interval,
    interval_bar,
    partition,
    seconds_cell,
    span_of,
    strategy_name,
    table,
    tag,
)
from kvrsim.views.style import variable
from kvrsim.views.timeline import SCRIPTS, Shown, gantt_section, memory_data, memory_section, timelines_data
from planner.confirm.result import Candidate, Confirmation


def confirmation_page(found: Confirmation) -> Page:
    """Of a confirmation; the plan's choice is shown first."""
    choice, best = found.choice, found.best
    ordered = sorted(found.candidates, key=lambda one: one is not choice)
    memory = {one.strategy: one.memory for one in ordered if one.memory}
    limit = found.memory_limit if memory else None
    return Page(
        title=f"Prefill of {found.question.request()} by {found.model}: predicted and measured",
        answer=_answer(found, choice, best),
        facts=facts_of(found.question),
        sections=[
            gantt_section(several=True),
            Section(title="Candidates", lead=_errors(found), body=_candidates(found)),
            *([] if limit is None else [memory_section(limit)]),
        ],
        notes=[
            *_parts("Measured", found.measured),
            *_parts("Modelled", found.modelled),
            f"Machine: {in_words(found.conditions)}",
            *found.reasons,
            *found.warnings,
        ],
        data=timelines_data(list(_shown(found, ordered)))
        | ({} if limit is None else {"memory": memory_data(memory, limit)}),
        scripts=SCRIPTS,
        strategies=[_family(one) for one in found.candidates],
    )


def _shown(found: Confirmation, ordered: list[Candidate]) -> Iterator[Shown]:
    real = "one measured prefill" if found.mode == "ranks" else "composed of measured parts"
    for one in ordered:
        title = f"{one.strategy}, predicted: TTFT {format_seconds(one.predicted_s)}"
        about: dict[str, Any] = dict(memory=one.strategy)
        yield Shown(name=f"{one.strategy}, predicted", title=title, timeline=one.predicted, **about)
        if one.measured is not None:
            title = f"{one.strategy}, {real}: median of {len(one.samples_s)} TTFTs {format_seconds(one.median_s)}"
            about["basis"] = "measured" if found.mode == "ranks" else real
            yield Shown(name=f"{one.strategy}, measured", title=title, timeline=one.measured, **about)


def _answer(found: Confirmation, choice: Candidate, best: Candidate) -> str:
    said = f"The plan's choice, {choice.strategy}: predicted {format_seconds(choice.predicted_s)}, measured"
    said += f" {format_seconds(choice.median_s)} ({choice.rel_error:+.1%})."
    if best is choice:
        return f"{said} No candidate is faster."
    beyond = "significantly" if found.regret_beyond_spread else "within the spread"
    return f"{said} {best.strategy} is {found.regret:.1%} faster, {beyond}."


def _errors(found: Confirmation) -> str:
    error = f"Median error of the predictions: {found.median_error:.1%}."
    return f"{error} Bars are the intervals of the predictions; a line across marks what was measured."


def _parts(label: str, parts: tuple[str, ...]) -> list[str]:
    return [f"{label}: {'; '.join(parts)}"] if parts else []


def _family(one: Candidate) -> str:
    """The strategy whose colour a candidate has: "kvr-s #2" is one of kvr-s."""
    return one.strategy.partition(" #")[0]


def _candidates(found: Confirmation) -> Html:
    ends = [(one.predicted_low_s, one.predicted_high_s, one.median_s) for one in found.candidates]
    span = span_of([(min(three), max(three)) for three in ends])
    columns = (
        Column(title="candidate"),
        Column(title="predicted", number=True),
        Column(title="prediction interval"),
        Column(title="measured", number=True, hint="median"),
        Column(title="spread", number=True, hint="interquartile range of the measured TTFTs", rank=2),
        Column(title="error", number=True, hint="predicted over measured, less 1"),
        Column(title="place predicted", number=True, rank=2),
        Column(title="place measured", number=True, rank=2),
        Column(title="tokens a rank or piece", rank=2),
    )
    pairs = sorted(zip(found.candidates, found.places(), strict=True), key=lambda pair: pair[0].predicted_s)
    rows = [_row(one, places, span) for one, places in pairs]
    return table(columns, rows, caption="Candidates, predicted and measured", ident="candidates")


def _row(one: Candidate, places: Mapping[str, Any], span: tuple[float, float]) -> list[str | Cell]:
    ends = one.predicted_low_s, one.predicted_high_s
    bar = interval_bar(
        ends[0], one.predicted_s, ends[1], span, variable("strategy", _family(one)), measured=one.median_s
    )
    return [
        Cell(shown=strategy_name(one.strategy, colour_of=_family(one)), value=one.strategy),
        seconds_cell(one.predicted_s),
        Cell(shown=tag("span", bar, interval(*ends), class_="range"), value=ends[1]),
        seconds_cell(one.median_s),
        seconds_cell(one.iqr_s),
        Cell(shown=f"{one.rel_error:+.1%}", value=one.rel_error),
        str(places["predicted_rank"]),
        str(places["measured_rank"]),
        partition(one.partition),
    ]
