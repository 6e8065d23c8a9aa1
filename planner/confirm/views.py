"""A confirmation as a figure, a page, a notebook summary and a trace: predicted and measured timelines together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.results.timeline import Timeline, write_trace
from kvrsim.units import format_seconds, format_tokens
from kvrsim.views import gantt
from kvrsim.views import page as html
from kvrsim.views.figure import WIDTH, Head
from kvrsim.views.page import Html, Page, Section, Summary
from kvrsim.views.style import variable
from kvrsim.views.table import Cell, Column, Table, format_interval, format_partition, seconds_cell
from kvrsim.views.timeline import SCRIPTS, LabelledTimeline, gantt_section, memory_data, memory_section, timelines_data
from planner.confirm.result import Confirmation, MeasuredCandidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANES = 0.5  # height per rank in a timeline, inches
_GAP = 0.8  # distance between two timelines, inches


def figure(confirmation: Confirmation) -> Figure:
    """Draw the predicted timeline of the plan's choice above the measured one."""
    from matplotlib.figure import Figure

    one, question = confirmation.choice, confirmation.question
    timelines = [(f"predicted, {format_seconds(one.predicted_s)}", one.predicted)]
    if one.timing.timeline is not None:
        median = f"median of {len(one.timing.ttft_s)}: {format_seconds(one.median_s)}"
        timelines.append((f"{_origin(confirmation)}; {median}", one.timing.timeline))
    setting = (
        question.model,
        f"{format_tokens(question.context_len)} tokens",
        question.cluster.describe(),
        f"{question.attention} attention",
        f"profile {question.profile}",
    )
    head = Head(
        title=f"{one.strategy}: {', '.join(map(str, one.partition))} tokens, predicted {one.rel_error:+.1%}",
        subtitle=" · ".join(setting),
        width=WIDTH,
        entries=gantt.legend_entries([span for _, timeline in timelines for span in timeline.spans]),
    )
    lanes = min(10.0, max(0.9, one.predicted.num_ranks * _LANES))
    height = len(timelines) * lanes + (len(timelines) - 1) * _GAP + head.height + 1.0
    figure = Figure(figsize=(WIDTH, height))
    edges: dict[str, Any] = dict(left=0.07, right=0.985, top=1 - (head.height + 0.4) / height, bottom=0.55 / height)
    grid = figure.add_gridspec(len(timelines), 1, hspace=_GAP / lanes, **edges)
    end_s = max(timeline.end_s for _, timeline in timelines)
    for row, (title, timeline) in enumerate(timelines):
        gantt.draw_timeline(figure.add_subplot(grid[row, 0]), timeline, end_s, title=title)
    head.draw(figure)
    return figure


def write_traces(confirmation: Confirmation, path: str | Path) -> None:
    """Write trace events atomically: one timeline after another, the plan's choice first."""

    def named() -> Iterator[tuple[str, Timeline]]:
        real = "measured" if confirmation.mode == "ranks" else "composed of measured parts"
        for one in _choice_first(confirmation):
            label = f"{one.strategy} {','.join(map(str, one.partition))}"
            yield f"{label}, predicted", one.predicted
            if one.timing.timeline is not None:
                yield f"{label}, {real}", one.timing.timeline

    write_trace([(name, one.spans, one.rank_names) for name, one in named()], path, confirmation.question)


def page(confirmation: Confirmation) -> Page:
    """Return the interactive page, with the plan's choice first."""
    ordered = _choice_first(confirmation)
    memory = {one.strategy: one.prediction.memory for one in ordered if one.prediction.memory}
    question, limit = confirmation.question, confirmation.memory_limit
    error = f"Median error of the predictions: {confirmation.median_error:.1%}."
    lead = f"{error} Bars are the intervals of the predictions; a line across marks what was measured."
    return Page(
        title=f"Prefill of {question.request()} by {question.model}: predicted and measured",
        answer=answer(confirmation),
        facts=html.facts_of(question),
        sections=[
            gantt_section(several=True),
            Section(title="Candidates", lead=lead, body=_candidates(confirmation)),
            *([memory_section(limit)] if memory else []),
        ],
        notes=[
            f"Machine: {html.in_words(confirmation.conditions)}",
            *confirmation.reasons,
            *confirmation.warnings,
        ],
        data=timelines_data(list(_timelines(confirmation, ordered)))
        | ({"memory": memory_data(memory, limit)} if memory else {}),
        scripts=SCRIPTS,
        strategies=[_family(one) for one in confirmation.candidates],
    )


def summary(confirmation: Confirmation) -> Summary:
    """Return the notebook's table."""
    rows = candidates_table(confirmation)
    return Summary(
        answer=answer(confirmation),
        question=f"{confirmation.question.model}, {confirmation.question.request()}",
        caption="candidates",
        columns=rows.columns,
        rows=rows.rows,
        notes=(*confirmation.reasons, *confirmation.warnings),
    )


def answer(confirmation: Confirmation) -> str:
    """Return the answer in one line."""
    choice, best = confirmation.choice, confirmation.best
    text = f"The plan's choice, {choice.strategy}: predicted {format_seconds(choice.predicted_s)}, measured"
    text += f" {format_seconds(choice.median_s)} ({choice.rel_error:+.1%})."
    if best is choice:
        return f"{text} No candidate is faster."
    beyond = "significantly" if confirmation.regret_beyond_spread else "within the spread"
    return f"{text} {best.strategy} is {confirmation.regret:.1%} faster, {beyond}."


def _origin(confirmation: Confirmation) -> str:
    """Describe the origin of a measured timeline."""
    return "one measured prefill" if confirmation.mode == "ranks" else "composed of measured parts"


def _choice_first(confirmation: Confirmation) -> list[MeasuredCandidate]:
    return sorted(confirmation.candidates, key=lambda one: one is not confirmation.choice)


def _timelines(confirmation: Confirmation, ordered: list[MeasuredCandidate]) -> Iterator[LabelledTimeline]:
    origin = _origin(confirmation)
    for one in ordered:
        title = f"{one.strategy}, predicted: TTFT {format_seconds(one.predicted_s)}"
        yield LabelledTimeline(
            name=f"{one.strategy}, predicted", title=title, timeline=one.predicted, memory=one.strategy
        )
        if one.timing.timeline is not None:
            median = f"median of {len(one.timing.ttft_s)} TTFTs {format_seconds(one.median_s)}"
            yield LabelledTimeline(
                name=f"{one.strategy}, measured",
                title=f"{one.strategy}, {origin}: {median}",
                timeline=one.timing.timeline,
                memory=one.strategy,
                basis="measured" if confirmation.mode == "ranks" else origin,
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
        low_s, high_s = one.prediction.ttft_low_s, one.prediction.ttft_high_s
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
    rows, ordered = candidates_table(confirmation), sorted(confirmation.candidates, key=lambda one: one.predicted_s)
    ends = [(one.prediction.ttft_low_s, one.prediction.ttft_high_s, one.median_s) for one in ordered]
    span = html.span_of([(min(three), max(three)) for three in ends])
    drawn = []
    for one, (low_s, high_s, _), row in zip(ordered, ends, rows.rows, strict=True):
        family, (_, chunks, predicted, interval, *rest) = _family(one), row
        assert isinstance(interval, Cell)
        bar = html.interval_bar(
            low_s, one.predicted_s, high_s, span, variable("strategy", family), measured=one.median_s
        )
        name = Cell(shown=html.strategy_name(one.strategy, colour_of=family), value=one.strategy)
        bars = Cell(shown=html.tag("span", bar, interval.shown, class_="range"), value=high_s)
        drawn.append((name, chunks, predicted, bars, *rest))
    return html.table(rows.columns, drawn, caption="Candidates, predicted and measured", ident="candidates")
