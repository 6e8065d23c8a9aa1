"""Browser tests of the page of a confirmation: both timelines, the choice of two candidates, and their differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrsim.builder import make_scenario
from kvrsim.results.question import Question
from kvrsim.results.results import StrategyPrediction
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.plan import RunPlan, Timing
from kvrsim.scenario import Partition
from kvrsim.views.confirm import page as confirmation_page
from kvrsim.views.page import Page
from planner.confirm.result import Confirmation, MeasuredCandidate, Targets
from planner.simulate import run_simulation
from tests.building.browser import Opened

pytestmark = pytest.mark.browser
SLOWER = 1.25  # measured time / predicted time


def stretched(timeline: Timeline) -> Timeline:
    """The timeline with all times multiplied by SLOWER."""
    spans = (replace(span, start_s=SLOWER * span.start_s, end_s=SLOWER * span.end_s) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans), bases=())


@pytest.fixture(scope="module")
def page() -> Page:
    """Two strategies on two GPUs; the "measurements" are slowed simulations."""
    scenario, _ = make_scenario(gpus=2, ctx="2k")
    candidates = []
    for name in ("kvr-s", "tsp"):
        run = run_simulation(scenario, strategy=name, record=["timeline"])
        assert run.timeline is not None
        prediction = StrategyPrediction(
            strategy=name,
            partition=run.partition,
            ttft_s=run.ttft_s,
            ttft_low_s=run.ttft_low_s,
            ttft_high_s=run.ttft_high_s,
            fits=run.fits,
            memory=run.memory,
        )
        plan = RunPlan(strategy="kvr", partition=Partition(chunk_lens=run.partition))
        candidate = MeasuredCandidate(
            prediction=prediction,
            timing=Timing(plan=plan, ttft_s=(SLOWER * run.ttft_s,) * 3, timeline=stretched(run.timeline)),
            predicted=run.timeline,
        )
        candidates.append(candidate)
    found = Confirmation(
        question=Question.of(scenario),
        mode="ranks",
        candidates=tuple(candidates),
        chosen=0,
        conditions={"device": "<made up>"},
        targets=Targets(median_error=1.0),
        warnings=(),
    )
    return confirmation_page(found)


def test_predicted_is_above_measured_on_one_axis(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    ends = seen.script("return kvTimelineChart.panels().map(({ timeline }) => [timeline.name, timeline.end_s])")
    (first, predicted_s), (second, measured_s) = ends
    assert (first, second) == ("kvr-s, predicted", "kvr-s, measured")
    assert measured_s == pytest.approx(SLOWER * predicted_s)
    assert seen.script("return kvTimelineChart.range()") == [0, measured_s]
    x, y = seen.script("return kvTimelineChart.pointOf(1, 0, 2)")
    seen.hover("#gantt canvas", x, y)
    assert "measured" in seen.text("#kv-tip")
    seen.script("above.value = '3'; above.dispatchEvent(new Event('change'))")
    names = seen.script("return kvTimelineChart.panels().map(({ timeline }) => timeline.name)")
    assert names == ["tsp, measured", "kvr-s, measured"]
    assert seen.script("return [...document.querySelectorAll('#memory h3')].map((one) => one.textContent)") == [
        "tsp",
        "kvr-s",
    ]


def test_candidates_have_their_errors(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    seen.click("#candidates th:nth-child(2) button")
    rows = seen.script("return [...document.querySelectorAll('#candidates tbody tr')].map((row) => row.textContent)")
    assert len(rows) == 2
    assert all("-20.0%" in row for row in rows)
    assert "<made up>" in seen.text(".notes")
