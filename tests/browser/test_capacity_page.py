"""Browser tests of the page of a capacity plan: target and price are dragged, the queue is zoomed; dark and narrow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvrsim
from kvrsim.views.capacity import page as capacity_page
from planner.capacity.result import CapacityPlan, FleetAnswer
from tests.building.browser import Opened

pytestmark = pytest.mark.browser
OVER = "#fleets .u-over"
SMALL = "synthetic:bursty,rate=6,requests=600,context=lognormal:1k:0.8,max=4k"


@pytest.fixture(scope="module")
def plan() -> CapacityPlan:
    return kvrsim.capacity(
        model="llama-7b",
        cluster="a100-nvlink",
        requests=SMALL,
        slo_ttft="1s",
        group_sizes="1,2,4",
        replications=2,
        price_per_gpu_hour=2,
        strategies=["single", "tsp", "tp"],
    )


def cheapest(plan: CapacityPlan, target_s: float) -> FleetAnswer:
    met = [one for one in plan.tried if one.target_ttft_s <= target_s]
    return min(met, key=lambda one: (one.num_gpus, one.target_ttft_s))


def read_off(page: Opened) -> str:
    return page.text("#read-off .card:first-child .answer")


def test_the_answer_is_read_off_at_first(opened: Callable[..., Opened], plan: CapacityPlan) -> None:
    page = opened(capacity_page(plan))
    assert plan.answer is not None
    assert read_off(page).startswith(f"{plan.answer.num_gpus} GPU")
    page.hover(OVER, 300, 150)
    assert "utilisation" in page.text("#kv-tip")


def test_the_target_is_dragged(opened: Callable[..., Opened], plan: CapacityPlan) -> None:
    page = opened(capacity_page(plan))
    y = page.script("return kvFleets.chart.plot().valToPos(kvFleets.state.target, 'y')")
    page.drag(OVER, 500, y, 0, 60)
    target_s = page.script("return kvFleets.state.target")
    assert target_s < 0.9 * plan.slo_ttft_s
    fleet = cheapest(plan, target_s)
    assert (
        read_off(page)
        == f"{fleet.num_gpus} GPU{'s' * (fleet.num_gpus > 1)}, ${2 * fleet.num_gpus} per hour: {fleet.describe()}"
    )
    assert page.find(".slider input[aria-label='Target TTFT']").get_attribute("aria-valuetext").endswith("s")


def test_the_price_is_dragged(opened: Callable[..., Opened], plan: CapacityPlan) -> None:
    page = opened(capacity_page(plan))
    paid = "return [kvFleets.state.budget, document.querySelector('#read-off .card:last-child .answer').textContent]"
    before = page.script(paid)
    x = page.script("return kvFleets.chart.plot().valToPos(kvFleets.state.budget, 'x')")
    page.drag(OVER, x, 40, 200)
    after = page.script(paid)
    assert after[0] > before[0]
    assert after[1] != before[1]


def test_the_queue_and_the_ttfts_are_zoomed_together(opened: Callable[..., Opened], plan: CapacityPlan) -> None:
    page = opened(capacity_page(plan))
    shown = "return kvQueue.charts.map((one) => [one.plot().scales.x.min, one.plot().scales.x.max])"
    whole = page.script(shown)
    page.drag("#queue .chart .u-over", 100, 60, 200)
    near, other = page.script(shown)
    assert near == other
    assert near[1] - near[0] < 0.5 * (whole[0][1] - whole[0][0])
    page.click("#queue .group button:nth-child(3)")
    again = page.script(shown)[0]
    assert again == pytest.approx(whole[0], abs=1.0)
