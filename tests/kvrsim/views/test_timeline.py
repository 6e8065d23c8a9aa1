"""Timelines in pages: the data that the script reads equals the simulated spans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.executors.access import execution_of
from kvrsim.results.timeline import Span, Timeline
from kvrsim.strategies import STRATEGIES
from kvrsim.views.timeline import LabelledTimeline, legend, to_data
from planner.candidates import Search
from planner.plan import make_plan, span_count
from tests.building import examples

SPANS = st.builds(
    lambda rank, kind, start, length, layer: Span(
        rank=rank,
        kind=kind,
        op={"compute": "attention", "wait": "stall", "transfer": "KV"}[kind],  # type: ignore[arg-type]
        name=kind,
        layer=layer,
        start_s=start,
        end_s=start + length,
        peer=rank + 1 if kind == "transfer" else None,
        nbytes=1e6 if kind == "transfer" else None,
    ),
    st.integers(0, 3),
    st.sampled_from(["compute", "wait", "transfer"]),
    st.floats(0, 100),
    st.floats(1e-6, 10),
    st.none() | st.integers(0, 99),
)


def read_back(data: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Read the data in the same way as assets/spans.js."""
    result = []
    for lane in data["lanes"]:
        clock = 0
        for kind, layer, gap, ticks in zip(lane["kind"], lane["layer"], lane["gap"], lane["ticks"], strict=True):
            start, clock = clock + gap, clock + gap + ticks
            about = data["kinds"][kind]
            times = start * data["tick_s"], clock * data["tick_s"]
            result.append((lane["rank"], lane["link"], layer, about["name"], about["peer"], about["bytes"], *times))
    return result


@examples(40)
@given(spans=st.lists(SPANS, max_size=40))
def test_spans_come_back_to_within_a_tick(spans: list[Span]) -> None:
    timeline = Timeline(strategy="tsp", num_ranks=4, spans=tuple(spans))
    data = to_data(LabelledTimeline(name="tsp", title="tsp", timeline=timeline))
    tick_s = data["tick_s"]
    assert tick_s <= max(1e-9, timeline.end_s / 2**31)
    ticks = sorted(read_back(data), key=lambda row: row[-2])
    options = sorted(spans, key=lambda span: (span.start_s, span.end_s))
    assert len(ticks) == len(options)
    lanes = sorted((span.rank, span.kind == "transfer", -1 if span.layer is None else span.layer) for span in spans)
    assert sorted(row[:3] for row in ticks) == lanes
    for row, span in zip(ticks, sorted(options, key=lambda span: round(span.start_s / tick_s)), strict=True):
        assert abs(row[-2] - span.start_s) <= tick_s
    assert sum(row[-1] - row[-2] for row in ticks) <= sum(span.duration_s for span in spans) + 2 * tick_s * len(spans)


def test_colours_of_a_legend_are_those_that_are_drawn() -> None:
    run = kvrsim.simulate(strategy="kvr-s", gpus=2, ctx="1k", timeline=True)
    assert run.timeline is not None
    data = to_data(LabelledTimeline(name="kvr-s", title="", timeline=run.timeline))
    assert {variable for _, variable in legend([run.timeline])} == {kind["colour"] for kind in data["kinds"]}


@pytest.mark.parametrize("name", ["tsp", "kvr-e", "kvr-direct", "ring", "zigzag", "ulysses", "tp", "pp"])
def test_the_count_of_spans_is_never_too_small(name: str) -> None:
    scenario, _ = make_scenario(gpus=2, ctx="512")
    candidate = Search().candidate(execution_of(scenario, STRATEGIES[name]))
    assert len(candidate.timeline.spans) <= span_count(candidate.program)


def test_timelines_beyond_the_room_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.plan.MOST_SPANS", 1)
    scenario, _ = make_scenario(gpus=2, ctx="1k")
    plan = make_plan(scenario, strategies=["tsp", "kvr-s"], timelines="all")
    assert list(plan.timelines) == [plan.best.strategy]
    assert any("no timeline of" in note for note in plan.warnings)
