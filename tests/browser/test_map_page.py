"""Browser tests of the page of a map: winners, colours, pointer, sliders, keys, dark and narrow windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import kvrsim
from kvrsim.views.map import page as map_page
from planner.map.map import StrategyMap
from tests.building.browser import Opened

pytestmark = pytest.mark.browser
GRID = "#by-gpus svg"
NAMES = ("single", "tsp", "kvr-s", "zigzag", "tp")


@pytest.fixture(scope="module")
def found() -> StrategyMap:
    return kvrsim.map_strategies(ctx="1k,4k,32k", gpus="2,8", link_bandwidths=["50GB/s", "200GB/s"], strategies=NAMES)


def winners(page: Opened) -> list[tuple[str, list[str]]]:
    """Name of the winner and of its ties for each cell where a strategy fits, as the page computes them."""
    code = """
        const name = (index) => arguments[0][index];
        return kvMap.winners().map((one) => one && [name(one.best), one.ties.map(name)]).filter(Boolean);
    """
    return [(best, ties) for best, ties in page.script(code, list(NAMES))]


@pytest.mark.parametrize("off", [(), ("zigzag", "kvr-s")])
def test_who_wins_among_those_that_are_on_is_what_a_map_of_them_says(
    opened: Callable[..., Opened], found: StrategyMap, off: tuple[str, ...]
) -> None:
    page = opened(map_page(found))
    for name in off:
        page.click(f".switches [data-key='{NAMES.index(name)}']")
    rest = replace(found, points=tuple(point for point in found.points if point.strategy not in off))
    expected = [(winner.strategy, sorted(winner.ties)) for winner in rest.winners()]
    assert [(best, sorted(ties)) for best, ties in winners(page)] == expected


def test_the_pointer_and_a_click_show_a_place_in_full(opened: Callable[..., Opened], found: StrategyMap) -> None:
    page = opened(map_page(found))
    before = page.text("#said")
    x, y = page.script("""
        const cell = document.querySelector("#by-gpus .cell[data-x='0'][data-y='0']");
        const box = cell.getBoundingClientRect(), svg = cell.ownerSVGElement.getBoundingClientRect();
        return [box.x - svg.x + box.width / 2, box.y - svg.y + box.height / 2];
    """)
    page.hover(GRID, x, y)
    assert "GPU-seconds" in page.text("#kv-tip")
    assert page.text("#said").startswith("1k tokens, 2 GPUs")
    page.hover("h1", 5, 5)
    assert page.text("#said") == before
    page.click("#by-gpus .cell[data-x='0'][data-y='0']")
    page.hover("h1", 5, 5)
    assert page.text("#said").startswith("1k tokens, 2 GPUs")
    assert page.text("#ranking tr.best").split()[0] == "single"


def test_sliders_and_arrow_keys_move_through_the_places(opened: Callable[..., Opened], found: StrategyMap) -> None:
    page = opened(map_page(found))
    page.press(".slider input[aria-label='Links']", "\ue012")  # left arrow
    assert "links of 50.0 GB/s" in page.text("#said")
    assert "50.0 GB/s" in page.text("#by-context h3")
    page.press(GRID, "\ue015", "\ue012")  # down arrow, left arrow
    kept = page.script("return kvMap.kept")
    assert (kept["g"], kept["b"]) == (0, 0)
    context = page.script("return document.querySelector('.slider input').getAttribute('aria-valuetext')")
    assert page.text("#said").startswith(f"{context} tokens, 2 GPUs")
    assert page.script("return document.getElementById('kv-said').textContent") == page.text("#said")


def test_the_address_holds_the_place_the_colours_and_what_is_off(
    opened: Callable[..., Opened], found: StrategyMap
) -> None:
    page = opened(map_page(found))
    assert page.script("return location.hash") == ""
    page.click("[data-key=lead]")
    page.press(".slider input[aria-label='Links']", "\ue012")
    page.click(f".switches [data-key='{NAMES.index('tp')}']")
    page.until("return location.hash && location.hash === `#${kv.view.all()}`")
    seen = winners(page), page.text("#said")
    address = page.script("return location.href")
    page.driver.get("about:blank")
    page.driver.get(address)
    page.until("return document.documentElement.dataset.drawn === 'true'")
    assert (winners(page), page.text("#said")) == seen
    assert page.find("[data-key=lead]").get_attribute("aria-pressed") == "true"


def test_where_no_strategy_is_on_the_page_says_so(opened: Callable[..., Opened], found: StrategyMap) -> None:
    page = opened(map_page(found))
    page.click(".switches .every:last-child")
    assert "none of the strategies that are on fits in memory" in page.text("#said")
    assert not page.script("return kvMap.winners().some(Boolean)")
    page.click(f".switches [data-key='{NAMES.index('tp')}']")
    assert {best for best, _ in winners(page)} == {"tp"}
