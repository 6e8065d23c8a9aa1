"""The page of timelines, driven as a reader would: zoom, hover, drag, keys, dark and narrow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrsim.builder import make_scenario
from kvrsim.views.page import Page
from kvrsim.views.plan import plan_page
from planner.plan import make_plan
from tests.building.browser import PHONE, Opened

pytestmark = pytest.mark.browser
CANVAS = "#gantt canvas"


@pytest.fixture(scope="module")
def page() -> Page:
    """Four strategies on four GPUs."""
    scenario, _ = make_scenario(model="llama-7b", gpus=4, ctx="8k")
    plan = make_plan(scenario, strategies=["tsp", "kvr-s", "ring", "ulysses"], timelines="all")
    return plan_page(plan)


def shown_s(page: Opened) -> tuple[float, float]:
    """The seconds that the canvas shows."""
    data = page.script("return {...document.querySelector(arguments[0]).dataset}", CANVAS)
    return float(data["from"]), float(data["to"])


def test_wheel_keys_and_drag_change_what_is_shown(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    whole = shown_s(seen)
    seen.wheel(CANVAS, 400, 100, -300)
    near = shown_s(seen)
    assert whole[0] < near[0] < near[1] < whole[1]
    seen.drag(CANVAS, 400, 100, -100)
    moved = shown_s(seen)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    seen.press(CANVAS, "0")
    assert shown_s(seen) == whole
    seen.drag(CANVAS, 300, 100, 200)  # of the whole, a drag selects
    chosen = shown_s(seen)
    assert whole[0] < chosen[0] < chosen[1] < whole[1]


def test_hover_and_keys_say_what_an_operation_is(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    x, y = seen.script("return kvTimelineChart.pointOf(0, 0, 3)")
    seen.hover(CANVAS, x, y)
    told = seen.text("#kv-tip")
    assert all(word in told for word in ("operation", "rank", "layer", "start", "duration", "basis")), told
    seen.press(CANVAS, *("\ue014" * 4), "\ue015")  # right, down
    assert "duration" in seen.script("return document.getElementById('kv-said').textContent")
    seen.press(CANVAS, "\ue00c")  # Escape
    assert seen.script("return document.getElementById('kv-tip').hidden")


def test_on_a_phone_any_two_timelines_are_stacked(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page, PHONE)
    panels = "return kvTimelineChart.panels().map((panel) => panel.timeline.name)"
    first = seen.script(panels)
    assert len(first) == 2
    seen.script("below.value = '3'; below.dispatchEvent(new Event('change'))")
    assert seen.script(panels) == [first[0], page.data["timelines"][3]["name"]]


def test_the_table_of_strategies_sorts_and_memory_follows_the_timelines(
    opened: Callable[..., Opened], page: Page
) -> None:
    seen = opened(page)
    names = "return [...document.querySelectorAll('#strategies tbody tr')].map((row) => row.dataset.name)"
    by_ttft = seen.script(names)
    seen.click("#strategies th:nth-child(6) button")  # peak memory
    assert sorted(seen.script(names)) == sorted(by_ttft)
    peaks = seen.script(
        "return [...document.querySelectorAll('#strategies tbody tr')].map((row) => Number(row.cells[5].dataset.value))"
    )
    assert peaks == sorted(peaks)
    assert seen.script("return [...document.querySelectorAll('#memory h3')].map((name) => name.textContent)") == [
        one["name"] for one in page.data["timelines"][:2]
    ]
    seen.click("#timelines summary")
    assert seen.script("return document.querySelectorAll('#times tbody tr').length") == 8
