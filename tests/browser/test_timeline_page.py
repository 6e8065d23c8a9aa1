"""Browser tests of the page of timelines: zoom, hover, drag, keys, dark and narrow windows."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrsim.builder import make_scenario
from kvrsim.results.results import Plan
from kvrsim.views.page import Page
from kvrsim.views.plan import plan_page
from planner.plan import make_plan
from tests.building.browser import PHONE, Opened

pytestmark = pytest.mark.browser
CANVAS = "#gantt canvas"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four strategies on four GPUs."""
    scenario, _ = make_scenario(model="llama-7b", gpus=4, ctx="8k")
    return make_plan(scenario, strategies=["tsp", "kvr-s", "ring", "ulysses"], timelines="all")


@pytest.fixture(scope="module")
def page(plan: Plan) -> Page:
    return plan_page(plan)


def shown_s(page: Opened) -> tuple[float, float]:
    """Start and end of the time range that the canvas shows, in seconds."""
    data = page.script("return {...document.querySelector(arguments[0]).dataset}", CANVAS)
    return float(data["from"]), float(data["to"])


def test_the_wheel_zooms_with_ctrl_alone_and_shift_drag_moves(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    whole = shown_s(seen)
    seen.wheel(CANVAS, 400, 100, -300, ctrl=False)
    assert shown_s(seen) == whole
    seen.wheel(CANVAS, 400, 100, -300)
    near = shown_s(seen)
    assert whole[0] < near[0] < near[1] < whole[1]
    seen.drag(CANVAS, 400, 100, -100, shift=True)
    moved = shown_s(seen)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    seen.press(CANVAS, "0")
    assert shown_s(seen) == whole


def test_a_dragged_range_sums_what_the_timeline_has_in_it(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    seen.drag(CANVAS, 300, 100, 200)
    begin, end = seen.script("return kvTimelineChart.marked.range")
    assert shown_s(seen)[1] > end > begin
    expected = seen.script(
        """
        const [from, until] = arguments;
        const { kinds, lanes } = kvTimelineChart.panels()[0].timeline;
        const inside = ({ start, end }, at) => Math.max(0, Math.min(until, end[at]) - Math.max(from, start[at]));
        return lanes.flatMap((lane) => [...lane.kind].map((kind, at) => (
          kinds[kind].name === 'attention' ? inside(lane, at) : 0))).reduce((a, b) => a + b)""",
        begin,
        end,
    )
    rows = list(csv.reader(seen.script("return kv.csv(document.querySelector('#times table'))").splitlines()))
    column = rows[0].index("attention (s)")
    assert rows[-1][0] == "all ranks"
    assert (
        float(rows[-1][column])
        == pytest.approx(expected)
        == pytest.approx(sum(float(row[column]) for row in rows[1:-1]))
    )
    seen.click("#zoom-range")
    assert shown_s(seen) == pytest.approx((begin, end), rel=1e-6)


def test_the_address_holds_what_is_searched_shown_and_selected(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    seen.script("above.value = '2'; above.dispatchEvent(new Event('change')); kvTimelineChart.to(0.02, 0.04)")
    seen.script("kvTimelineChart.select([0.025, 0.03])")
    seen.press("#find", *"attention rank 1", "\ue007")
    found = seen.text("#found")
    assert found.startswith("1 of ")
    seen.press("#find", "\ue007")
    focused = (
        "const {panel, place} = kvTimelineChart.marked.focused; return kvTimelineChart.panels()[panel].lanes[place]"
    )
    assert seen.script(f"{focused}.lane.rank") == 1
    seen.until("return location.hash === `#${kv.view.all()}`")
    view = [*shown_s(seen), *seen.script("return kvTimelineChart.marked.range")]
    address = seen.script("return location.href")
    seen.driver.get("about:blank")
    seen.driver.get(address)
    seen.until("return document.documentElement.dataset.drawn === 'true'")
    seen.settle()
    assert [*shown_s(seen), *seen.script("return kvTimelineChart.marked.range")] == pytest.approx(view)
    assert seen.script("return above.value") == "2"
    assert seen.text("#found").split()[0] == found.split()[-1]


def test_the_critical_path_is_what_the_plan_says_limits_it(
    opened: Callable[..., Opened], page: Page, plan: Plan
) -> None:
    """The page shows the plan's shares of the critical path; the seconds along its line add up to TTFT."""
    seen = opened(page)
    shares = ", ".join(f"{one.operation} {100 * one.share:.0f} %" for one in plan.limits[:4])
    assert seen.text("#limits p") == f"Critical path of {plan.first.strategy}: {shares}."
    total = "return kvTimelineChart.panels()[0].timeline.path.reduce((sum, one) => sum + one.seconds, 0)"
    assert seen.script(total) == pytest.approx(plan.first.ttft_s)


def test_charts_and_tables_are_saved(opened: Callable[..., Opened], page: Page, plan: Plan, tmp_path: Path) -> None:
    seen = opened(page)
    seen.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    count = len(seen.script("return [...document.querySelectorAll('section .save')].map((one) => one.click())"))
    while len(files := [file for file in sorted(tmp_path.iterdir()) if file.suffix in (".png", ".csv")]) < count:
        time.sleep(0.05)
    pictures = [file for file in files if file.suffix == ".png"]
    assert [file.name.split("-")[0] for file in pictures] == ["memory", "timelines"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)
    (table,) = tmp_path.glob("strategies*.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert {row["strategy"]: float(row["TTFT (s)"]) for row in rows} == {
        one.strategy: one.ttft_s for one in plan.strategies
    }


def test_hover_and_keys_say_what_an_operation_is(opened: Callable[..., Opened], page: Page) -> None:
    seen = opened(page)
    x, y = seen.script("return kvTimelineChart.pointOf(0, 0, 3)")
    seen.hover(CANVAS, x, y)
    told = seen.text("#kv-tip")
    assert all(word in told for word in ("operation", "rank", "layer", "start", "duration", "basis")), told
    seen.press(CANVAS, *("\ue014" * 4), "\ue015")  # right arrow four times, down arrow
    assert "duration" in seen.script("return document.getElementById('kv-said').textContent")
    seen.press(CANVAS, "\ue00c")  # Escape key
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
    seen.click("#strategies th:nth-child(6) button")  # column of peak memory
    assert sorted(seen.script(names)) == sorted(by_ttft)
    peaks = seen.script(
        "return [...document.querySelectorAll('#strategies tbody tr')].map((row) => Number(row.cells[5].dataset.value))"
    )
    assert peaks == sorted(peaks)
    assert seen.script("return [...document.querySelectorAll('#memory h3')].map((name) => name.textContent)") == [
        one["name"] for one in page.data["timelines"][:2]
    ]
    seen.click("#timelines summary")
    assert seen.script("return document.querySelectorAll('#times tbody tr').length") == 10
