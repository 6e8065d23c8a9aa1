"""A measured prefill as a figure, a page and a notebook's summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.units import format_bytes, format_seconds
from kvrsim.views import page as html
from kvrsim.views.gantt import draw_gantt
from kvrsim.views.page import Page, Summary
from kvrsim.views.table import Table, columns
from kvrsim.views.timeline import SCRIPTS, LabelledTimeline, gantt_section, timelines_data
from planner.confirm.run import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(result: RunResult) -> Figure:
    """Draw one measured prefill."""
    return draw_gantt(result.timeline, answer(result), _setting(result))


def page(result: RunResult) -> Page:
    """Return the interactive page of one measured prefill."""
    name = result.strategy.name
    timeline = LabelledTimeline(name=name, title=answer(result), timeline=result.timeline, basis="measured")
    return Page(
        title=f"Prefill of {result.question.request()} by {result.model}: measured",
        answer=answer(result),
        facts=html.facts_of(result.question),
        sections=[gantt_section(several=False)],
        notes=[f"Machine: {html.in_words(result.conditions)}", *result.warnings],
        data=timelines_data([timeline]),
        scripts=SCRIPTS,
        strategies=[name],
    )


def summary(result: RunResult) -> Summary:
    """Return the notebook's table."""
    rows = ranks_table(result)
    notes = result.warnings
    return Summary(
        answer=answer(result),
        question=_setting(result),
        caption="ranks",
        columns=rows.columns,
        rows=rows.rows,
        notes=notes,
    )


def answer(result: RunResult) -> str:
    """Return the answer in one line."""
    count = len(result.timing.ttft_s)
    median_s = result.timing.median_s
    return f"{result.strategy.name}: first token after {format_seconds(median_s)}, median of {count} measured"


def ranks_table(result: RunResult) -> Table:
    """Return one row per rank: its tokens, and its seconds and bytes in the additional prefill."""
    rows = columns(">rank", ">tokens", ">compute", ">wait", ">sent")
    values = result.to_dict()["per_rank"]
    partition = result.plan.partition.chunk_lens
    chunks = partition if result.chunk_per_rank else (result.context_len,) * len(values)
    for row, chunk in zip(values, [*[0] * (len(values) - len(chunks)), *chunks], strict=True):
        times = (format_seconds(row["compute_s"]), format_seconds(row["wait_s"]))
        rows.add_row(str(row["rank"]), str(chunk), *times, format_bytes(row["sent_bytes"]))
    return rows


def _setting(result: RunResult) -> str:
    question = result.question
    device = result.conditions["device"]
    machine = f"{result.num_gpus} ranks, {device}"
    return " · ".join((question.model, question.request(), machine, f"{question.attention} attention", question.dtype))
