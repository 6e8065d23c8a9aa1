"""Browser tests of the parts that all pages share: escaped text, content policy, sorted tables, charts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrsim.views.page import CHARTS, Page, Section, join, table, tag
from kvrsim.views.table import Cell, Column
from tests.building.browser import Opened

pytestmark = pytest.mark.browser
NASTY = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> \u2028 & \"'`${1}"


def column(page: Opened, number: int) -> list[str]:
    code = "return [...document.querySelectorAll('#t tbody tr')].map((row) => row.cells[arguments[0]].textContent)"
    found: list[str] = page.script(code, number)
    return found


def test_tables_sort_by_value_and_keep_what_is_missing_last(opened: Callable[..., Opened]) -> None:
    rows = [
        ["b", Cell(shown="2 ms", value=2e-3)],
        ["a", Cell(shown="1 s", value=1.0)],
        ["c", Cell(shown="none")],
        ["d", Cell(shown="30 µs", value=3e-5)],
    ]
    body = table([Column(title="name"), Column(title="time", number=True)], rows, caption="times", ident="t")
    page = opened(Page(title="Tables", sections=[Section(title="One", body=body)]))
    page.click("#t th:nth-child(2) button")
    assert column(page, 0) == ["d", "b", "a", "c"]
    assert page.find("#t th:nth-child(2)").get_attribute("aria-sort") == "ascending"
    page.click("#t th:nth-child(2) button")
    assert column(page, 0) == ["a", "b", "d", "c"]
    page.click("#t th:nth-child(1) button")
    assert column(page, 0) == ["a", "b", "c", "d"]


def test_names_of_others_are_text(opened: Callable[..., Opened]) -> None:
    body = table([Column(title=NASTY)], [[NASTY]], caption=NASTY, ident="t")
    page = opened(
        Page(
            title=NASTY,
            answer=NASTY,
            facts={NASTY: NASTY},
            notes=[NASTY],
            sections=[Section(title=NASTY, lead=NASTY, body=body)],
            data={NASTY: NASTY},
        )
    )
    assert page.driver.title.split() == NASTY.split()
    assert page.script("return document.querySelectorAll('img, #content script').length") == 0
    page.script("kv.ready((data) => { window.held = data; })")
    page.until("return window.held")
    assert page.script("return held") == {NASTY: NASTY}


def test_the_policy_refuses_scripts_styles_and_requests_of_others(opened: Callable[..., Opened]) -> None:
    page = opened(Page(title="Policy"))
    page.script("""
        const add = (name, about) => document.body.append(Object.assign(document.createElement(name), about));
        add('script', {textContent: 'window.taken = true'});
        add('style', {textContent: 'body { display: none }'});
        add('img', {src: 'https://example.org/x.png'});
        fetch('https://example.org/').catch(() => { window.refused = true; });
    """)
    page.until("return window.refused")
    assert page.script("return [window.taken ?? false, getComputedStyle(document.body).display]") == [False, "block"]
    refused = page.errors()  # reading the log empties it
    assert len(refused) >= 4
    assert all("Content Security Policy" in line for line in refused)
    assert page.requests() == []


def test_a_chart_zooms_switches_series_and_reads_out_values(opened: Callable[..., Opened]) -> None:
    xs = [float(x) for x in range(1, 101)]
    data = {"xs": xs, "tsp": [x * x for x in xs], "kvr": [x * 0.5 * x for x in xs]}
    page = opened(
        Page(
            title="Chart",
            sections=[Section(title="One", body=tag("div", id="c", class_="chart"))],
            data=data,
            scripts=CHARTS,
        )
    )
    page.script("""
        kv.ready((data) => {
          window.chart = kv.chart(document.getElementById('c'), {
            label: 'a chart', xs: data.xs,
            x: {title: 'context', format: kv.tokens}, y: {title: 'TTFT', format: kv.seconds},
            series: [{name: 'tsp', colour: '--strategy-tsp', values: data.tsp, low: data.kvr, high: data.tsp},
                     {name: 'kvr-s', colour: '--strategy-kvr-s', values: data.kvr, points: true}],
            marks: [{axis: 'y', value: 5000, text: kv.seconds, drag: (value) => { window.target = value; }}]});
        })""")
    page.until("return window.chart && chart.plot()")
    shown = "const {min, max} = chart.plot().scales.x; return [min, max]"
    whole = page.script(shown)
    page.wheel("#c .u-over", 300, 100, -300)
    near = page.script(shown)
    assert whole[0] < near[0] < near[1] < whole[1]
    page.press("#c .chart", "0")
    assert page.script(shown) == whole
    page.drag("#c .u-over", 200, page.script("return chart.plot().valToPos(5000, 'y')"), 0, 40)
    assert page.script("return window.target") < 5000
    page.press("#c .chart", "\ue014")
    assert "tsp" in page.text("#kv-tip")
    page.click("#c .legend button")
    assert page.script("return chart.plot().series[1].show") is False


def test_a_script_that_fails_says_so(opened: Callable[..., Opened]) -> None:
    page = opened(Page(title="Broken", sections=[Section(title="One", body=join(["text"]))]))
    page.script("kv.ready(() => { throw new Error('no such lane'); })")
    page.until("return document.querySelector('.broken')")
    assert "no such lane" in page.text(".broken")
    assert any("no such lane" in line for line in page.errors())
