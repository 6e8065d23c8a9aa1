"""A confirmation as a figure, a page, a notebook summary and a trace: predicted and measured timelines together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvrsim.results.timeline import write_trace
from kvrsim.units import format_seconds
from kvrsim.views import gantt
from kvrsim.views import page as html
from kvrsim.views.figure import WIDTH, Head, figure_with_head
from kvrsim.views.page import Html, Page, Section, Summary
from kvrsim.views.style import chart_style
from kvrsim.views.table import Cell, Column, Table, format_interval, format_partition, seconds_cell
from kvrsim.views.timeline import SCRIPTS, LabelledTimeline, gantt_section, memory_data, memory_section, timelines_data
from planner.confirm.result import Confirmation, MeasuredCandidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANE_INCHES = 0.5  # height per rank in a timeline
_GAP_INCHES = 0.8  # distance between two timelines


def figure(confirmation: Confirmation) -> Figure:
    """Draw the predicted timeline of the plan's choice above the measured one."""
    choice = confirmation.choice
    predicted, measured = islice(_timelines(confirmation), 2)
    chunks = ", ".join(map(str, choice.partition))
    head = Head(
        title=f"{choice.strategy}: {chunks} tokens, predicted {choice.rel_error:+.1%}",
        subtitle=html.question_line(confirmation),
        width=WIDTH,
        entries=gantt.legend_entries([*predicted.timeline.spans, *measured.timeline.spans]),
    )
    lanes = min(10.0, max(0.9, choice.predicted.num_ranks * _LANE_INCHES))
    with chart_style():
        figure, lower = figure_with_head(head, 2 * lanes + _GAP_INCHES, left=0.07)
        left, bottom, width, height = lower.get_position().bounds
        share = height * lanes / (2 * lanes + _GAP_INCHES)
        lower.set_position((left, bottom, width, share))
        upper = figure.add_axes((left, bottom + height - share, width, share))
        end_s = max(predicted.timeline.end_s, measured.timeline.end_s)
        gantt.draw_timeline(upper, predicted.timeline, end_s, title=predicted.title)
        gantt.draw_timeline(lower, measured.timeline, end_s, title=measured.title)
    return figure


def write_traces(confirmation: Confirmation, path: str | Path) -> None:
    """Write trace events atomically: one timeline after another, the plan's choice first."""
    traces = []
    for labelled in _timelines(confirmation):
        timeline = labelled.timeline
        traces.append((labelled.title, timeline.spans, timeline.rank_names))
    write_trace(traces, path, confirmation.question)


def page(confirmation: Confirmation) -> Page:
    """Return the interactive page, with the plan's choice first."""
    memory = {}
    for candidate in confirmation.candidates:
        if candidate.prediction.memory:
            memory[candidate.strategy] = candidate.prediction.memory
    question = confirmation.question
    limit = confirmation.memory_limit
    error = f"Median error of the predictions: {confirmation.median_error:.1%}."
    lead = f"{error} Bars are the intervals of the predictions; a line across marks what was measured."
    return Page(
        title=f"Prefill of {question.request()} by {question.model}: predicted and measured",
        answer=answer(confirmation),
        facts=html.facts_of(question),
        sections=[
            gantt_section(several=True),
            Section(title="Candidates", lead=lead, body=_candidates(confirmation)),
            memory_section(limit),
        ],
        notes=[f"Machine: {html.in_words(confirmation.conditions)}", *confirmation.reasons, *confirmation.warnings],
        data=timelines_data(list(_timelines(confirmation))) | {"memory": memory_data(memory, limit)},
        scripts=SCRIPTS,
        strategies=[_family(candidate) for candidate in confirmation.candidates],
    )


def summary(confirmation: Confirmation) -> Summary:
    """Return the notebook's table."""
    rows = candidates_table(confirmation)
    return Summary(
        answer=answer(confirmation),
        question=html.question_line(confirmation),
        caption="candidates",
        columns=rows.columns,
        rows=rows.rows,
        notes=(*confirmation.reasons, *confirmation.warnings),
    )


def verdict(confirmation: Confirmation) -> str:
    """Whether the plan's best was the best, in one sentence."""
    choice = confirmation.choice
    fastest = confirmation.best
    number = len(confirmation.candidates)
    if confirmation.best_was_best is None:
        assert confirmation.plan is not None
        measured = f"of the {number} measured, {fastest.strategy} was the fastest: {format_seconds(fastest.median_s)}"
        return f"The plan's best, {confirmation.plan.best}, was not measured; {measured}."
    if choice is fastest:
        return f"The plan's best, {choice.strategy}, was the fastest of {number}: {format_seconds(choice.median_s)}."
    difference = f"{fastest.strategy} was {confirmation.regret:.1%} faster"
    if confirmation.best_was_best:
        return f"The plan's best, {choice.strategy}, was one of the fastest: {difference}, within the spread."
    return f"The plan's best, {choice.strategy}, was not the fastest: {difference}."


def answer(confirmation: Confirmation) -> str:
    """Return the answer in one line."""
    choice = confirmation.choice
    best = confirmation.best
    text = f"The plan's choice, {choice.strategy}: predicted {format_seconds(choice.predicted_s)}, measured"
    text += f" {format_seconds(choice.median_s)} ({choice.rel_error:+.1%})."
    if best is choice:
        return f"{text} No candidate is faster."
    beyond = "significantly" if confirmation.regret_beyond_spread else "within the spread"
    return f"{text} {best.strategy} is {confirmation.regret:.1%} faster, {beyond}."


def _timelines(confirmation: Confirmation) -> Iterator[LabelledTimeline]:
    """Yield the predicted and the measured timeline of each candidate, the plan's choice first."""
    origin = "measured" if confirmation.mode == "ranks" else "composed of measured parts"
    others = [candidate for candidate in confirmation.candidates if candidate is not confirmation.choice]
    for candidate in (confirmation.choice, *others):
        strategy = candidate.strategy
        name = f"{strategy} {format_partition(candidate.partition, room=100)}"
        timeline = candidate.timing.timeline
        assert timeline is not None
        yield LabelledTimeline(
            name=f"{strategy}, predicted",
            title=f"{name}, predicted: TTFT {format_seconds(candidate.predicted_s)}",
            timeline=replace(candidate.predicted, shares={}),  # the page sums both paths by the same kinds
            memory=strategy,
        )
        number = len(candidate.timing.ttft_s)
        yield LabelledTimeline(
            name=f"{strategy}, measured",
            title=f"{name}, {origin}: median of {number} TTFTs {format_seconds(candidate.median_s)}",
            timeline=timeline,
            memory=strategy,
            basis=origin,
        )


def _family(candidate: MeasuredCandidate) -> str:
    """Return the strategy that determines the colour of a candidate: kvr-s for "kvr-s #2"."""
    return candidate.strategy.partition(" #")[0]


def candidates_table(confirmation: Confirmation) -> Table:
    """Return one row per candidate, in order of predicted TTFT; the plan's choice is in bold."""
    columns = [
        Column(title="strategy\n"),
        Column(title="partition\n(tokens)", rank=2, hint="tokens per rank or piece"),
        Column(title="predicted\n", number=True),
        Column(title="prediction\ninterval", number=True, rank=3),
        Column(title="measured\nmedian", number=True),
        Column(title="spread\n(IQR)", number=True, rank=6, hint="interquartile range of the measured TTFTs"),
        Column(title="error\n", number=True, hint="predicted over measured, less 1"),
    ]
    rows = Table(columns=columns)
    for candidate in _by_prediction(confirmation):
        low_s = candidate.prediction.ttft_low_s
        high_s = candidate.prediction.ttft_high_s
        rows.add_row(
            candidate.strategy,
            format_partition(candidate.partition),
            seconds_cell(candidate.predicted_s),
            Cell(shown=format_interval(low_s, high_s), value=high_s),
            seconds_cell(candidate.median_s),
            seconds_cell(candidate.timing.iqr_s),
            Cell(shown=f"{candidate.rel_error:+.1%}", value=candidate.rel_error),
            style="bold" if candidate is confirmation.choice else None,
        )
    return rows


def _by_prediction(confirmation: Confirmation) -> list[MeasuredCandidate]:
    """Return the candidates in order of predicted TTFT."""
    return sorted(confirmation.candidates, key=lambda candidate: candidate.predicted_s)


def _candidates(confirmation: Confirmation) -> Html:
    """Return the table as HTML, with coloured names and bars for the intervals."""
    table = candidates_table(confirmation)
    ordered = _by_prediction(confirmation)
    ends = []
    for candidate in ordered:
        seconds = (candidate.prediction.ttft_low_s, candidate.prediction.ttft_high_s, candidate.median_s)
        ends.append((min(seconds), max(seconds)))
    span = html.span_of(ends)
    rows = []
    for candidate, (_, chunks, predicted, _, *rest) in zip(ordered, table.rows, strict=True):
        family = _family(candidate)
        name = Cell(shown=html.strategy_name(candidate.strategy, colour_of=family), value=candidate.strategy)
        bars = html.interval_cell(candidate.prediction, family, span, measured=candidate.median_s)
        rows.append((name, chunks, predicted, bars, *rest))
    return html.table(table.columns, rows, caption="Candidates, predicted and measured", ident="candidates")
