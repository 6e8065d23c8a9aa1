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
    one = confirmation.choice
    pair = list(islice(_timelines(confirmation), 2))
    head = Head(
        title=f"{one.strategy}: {', '.join(map(str, one.partition))} tokens, predicted {one.rel_error:+.1%}",
        subtitle=html.question_line(confirmation),
        width=WIDTH,
        entries=gantt.legend_entries([span for each in pair for span in each.timeline.spans]),
    )
    lanes = min(10.0, max(0.9, one.predicted.num_ranks * _LANE_INCHES))
    with chart_style():
        figure, lower = figure_with_head(head, 2 * lanes + _GAP_INCHES, left=0.07)
        left, bottom, width, height = lower.get_position().bounds
        share = height * lanes / (2 * lanes + _GAP_INCHES)
        lower.set_position((left, bottom, width, share))
        upper = figure.add_axes((left, bottom + height - share, width, share))
        end_s = max(each.timeline.end_s for each in pair)
        for axes, each in zip((upper, lower), pair, strict=True):
            gantt.draw_timeline(axes, each.timeline, end_s, title=each.title)
    return figure


def write_traces(confirmation: Confirmation, path: str | Path) -> None:
    """Write trace events atomically: one timeline after another, the plan's choice first."""
    traces = [(one.title, one.timeline.spans, one.timeline.rank_names) for one in _timelines(confirmation)]
    write_trace(traces, path, confirmation.question)


def page(confirmation: Confirmation) -> Page:
    """Return the interactive page, with the plan's choice first."""
    memory = {one.strategy: one.prediction.memory for one in confirmation.candidates if one.prediction.memory}
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
        strategies=[_family(one) for one in confirmation.candidates],
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
    for one in sorted(confirmation.candidates, key=lambda one: one is not confirmation.choice):
        name = f"{one.strategy} {format_partition(one.partition, room=100)}"
        timeline = one.timing.timeline
        assert timeline is not None
        yield LabelledTimeline(
            name=f"{one.strategy}, predicted",
            title=f"{name}, predicted: TTFT {format_seconds(one.predicted_s)}",
            timeline=replace(one.predicted, shares={}),  # the page sums both paths by the same kinds
            memory=one.strategy,
        )
        yield LabelledTimeline(
            name=f"{one.strategy}, measured",
            title=f"{name}, {origin}: median of {len(one.timing.ttft_s)} TTFTs {format_seconds(one.median_s)}",
            timeline=timeline,
            memory=one.strategy,
            basis=origin,
        )


def _family(one: MeasuredCandidate) -> str:
    """Return the strategy that determines the colour of a candidate: kvr-s for "kvr-s #2"."""
    return one.strategy.partition(" #")[0]


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
    for one in sorted(confirmation.candidates, key=lambda one: one.predicted_s):
        low_s = one.prediction.ttft_low_s
        high_s = one.prediction.ttft_high_s
        rows.add_row(
            one.strategy,
            format_partition(one.partition),
            seconds_cell(one.predicted_s),
            Cell(shown=format_interval(low_s, high_s), value=high_s),
            seconds_cell(one.median_s),
            seconds_cell(one.timing.iqr_s),
            Cell(shown=f"{one.rel_error:+.1%}", value=one.rel_error),
            style="bold" if one is confirmation.choice else None,
        )
    return rows


def _candidates(confirmation: Confirmation) -> Html:
    """Return the table as HTML, with coloured names and bars for the intervals."""
    table = candidates_table(confirmation)
    ordered = sorted(confirmation.candidates, key=lambda one: one.predicted_s)
    ends = [(one.prediction.ttft_low_s, one.prediction.ttft_high_s, one.median_s) for one in ordered]
    span = html.span_of([(min(three), max(three)) for three in ends])
    artists = []
    for one, (_, chunks, predicted, _, *rest) in zip(ordered, table.rows, strict=True):
        name = Cell(shown=html.strategy_name(one.strategy, colour_of=_family(one)), value=one.strategy)
        bars = html.interval_cell(one.prediction, _family(one), span, measured=one.median_s)
        artists.append((name, chunks, predicted, bars, *rest))
    return html.table(table.columns, artists, caption="Candidates, predicted and measured", ident="candidates")
