"""Browser tests of the pages of `kvrsim serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.building.browser import DESKTOP, PHONE, Opened
from tests.building.server import running_server

pytestmark = pytest.mark.browser
ANSWERED = "return document.getElementById('ask').dataset.answered === arguments[0]"
TIMES = """
const heads = (row) => [...row.closest('table').tHead.rows[0].cells];
const find = (row, title) => heads(row).findIndex((head) => head.textContent.startsWith(title));
return [...document.querySelectorAll(arguments[0])].map((row) => ['strategy', 'TTFT'].map((title) =>
  row.cells[find(row, title)].textContent.trim().split(/ (?!m?s)/)[0]));
"""
FIRST = "model=llama-3-8b&cluster=h100-nvlink&ctx=4k&gpus=2&strategies=tsp%2Ctp"


@pytest.fixture
def address() -> Iterator[str]:
    with running_server("secret") as address:
        yield address


@pytest.fixture
def served(browser: Any, address: str) -> Iterator[Opened]:
    browser.get_log("browser")  # discards messages of earlier pages
    browser.get(f"{address}#{FIRST}")
    page = Opened(browser, address)
    page.resize(*DESKTOP)
    page.until(ANSWERED, FIRST)
    yield page
    browser.get("about:blank")  # its requests end before the server does


@contextmanager
def inside(page: Opened, selector: str) -> Iterator[None]:
    """Select the frame of an inner page after the page has been drawn; select the outer page at the end."""
    page.until("return document.querySelector(arguments[0])", selector)
    page.driver.switch_to.frame(page.find(selector))
    page.until("return location.href !== 'about:blank' && document.documentElement.dataset.drawn === 'true'")
    yield
    page.driver.switch_to.default_content()


def fill(page: Opened, name: str, value: str) -> None:
    """Write into a field without leaving it."""
    box = page.find(f"#ask-{name}")
    box.clear()
    box.send_keys(value)


def ask(page: Opened, name: str, value: str) -> None:
    """Change a field, ask, and wait for the answer."""
    fill(page, name, value)
    page.click("#ask button[type=submit]")
    page.until("return document.getElementById('ask').dataset.answered.includes(arguments[0])", f"{name}={value}")


def test_the_address_is_the_question_and_the_pins_are_compared(served: Opened) -> None:
    assert served.find("#ask-model").get_attribute("value") == "llama-3-8b"
    served.click("#pin")
    ask(served, "ctx", "8k")
    assert "ctx=8k" in served.script("return location.hash")
    served.click("#pin")
    served.until("return document.querySelectorAll('#pins li').length === 2")
    with inside(served, "#compared iframe"):
        assert (
            served.script("return kv.csv(document.querySelectorAll('table')[1])") == "question,A,B\ncontext,4096,8192"
        )
    with inside(served, "#details-page iframe"):
        served.script("kvTimelineChart.to(0.01, 0.02)")
    served.until("return location.hash.includes('view=zoom')")
    address = served.script("return location.href")
    served.driver.get("about:blank")
    served.driver.get(address)
    served.until("return document.querySelectorAll('#pins li').length === 2")
    assert served.find("#ask-ctx").get_attribute("value") == "8k"
    with inside(served, "#details-page iframe"):
        assert served.script("return kvTimelineChart.range()") == pytest.approx([0.01, 0.02])
    served.click("#pins li button:last-child")
    assert served.script("return document.querySelectorAll('#pins li, #compared iframe').length") == 1


def test_an_address_without_a_question_is_an_example_with_an_answer(browser: Any, address: str) -> None:
    browser.get(address)
    page = Opened(browser, address)
    page.until("return document.getElementById('ask').dataset.answered")
    assert page.text("#best .answer").startswith("Run ")
    assert page.find("#ask-ctx").get_attribute("value") == "32k"
    assert not page.script("return document.querySelectorAll('.bad').length")
    assert page.find("#ask-gpus").get_attribute("placeholder") == "8"  # the number that the answer used
    browser.get("about:blank")


def test_pins_during_a_search_are_answered_and_compared(served: Opened) -> None:
    for ctx in ("6k", "7k"):
        fill(served, "ctx", ctx)
        served.click("#pin")  # leaves the field: the search begins with this click
    with inside(served, "#compared iframe"):
        assert "6144" in served.text("body")
        assert "7168" in served.text("body")
    served.until("return document.getElementById('ask').dataset.answered.includes('ctx=7k')")
    assert not served.script("return document.querySelectorAll('.bad').length")
    with inside(served, "#details-page iframe"):
        assert "7168" in served.script("return document.body.textContent")


def test_details_never_show_an_older_question_than_the_fields(served: Opened) -> None:
    served.until("return document.querySelector('#details-page iframe')")
    fill(served, "model", "llama-3.1-405b")
    served.click("#ask button[type=submit]")
    assert not served.script("return document.querySelectorAll('#details-page iframe').length")
    assert "llama-3.1-405b" in served.script("return location.hash")


def test_the_answer_and_the_details_show_the_same_times(served: Opened) -> None:
    shown = served.script(TIMES, "#top tbody tr")
    with inside(served, "#details-page iframe"):
        assert dict(served.script(TIMES, "#strategies tbody tr")) == dict(shown)


def test_a_launch_is_a_command_on_the_page(served: Opened) -> None:
    ask(served, "only_deployable", "vllm")
    served.click("#launches summary")
    assert served.text("#launches .command-line").startswith("vllm serve")


def test_the_table_of_strategies_is_not_cut_on_a_narrow_window(served: Opened) -> None:
    served.resize(800, 900)
    ask(served, "strategies", "")
    with inside(served, "#details-page iframe"):
        code = (
            "const box = document.querySelector('#strategies').parentElement; return box.scrollWidth - box.clientWidth"
        )
        assert served.script(code) == 0
    served.resize(*DESKTOP)


def test_advice_is_a_button_that_asks(served: Opened) -> None:
    fill(served, "strategies", "")
    fill(served, "model", "llama-3.1-70b")
    ask(served, "ctx", "32k")
    served.until("return document.querySelector('#advice button')")
    advice = served.text("#advice button")
    assert "--" not in advice
    served.click("#advice button")
    served.until("return document.querySelector('#best')?.textContent.startsWith('Run ')")


def test_a_wrong_value_is_one_line_on_the_page_and_marks_its_field(served: Opened) -> None:
    fill(served, "gpus", "many")
    served.click("#ask button[type=submit]")
    served.until("return document.getElementById('state').classList.contains('bad')")
    assert served.text("#state").startswith("gpus: got 'many'")
    assert served.find("#ask-gpus").get_attribute("aria-invalid") == "true"


def test_the_details_are_the_page_of_the_plan_without_a_second_head(served: Opened) -> None:
    served.click("#kv-theme")
    with inside(served, "#details-page iframe"):
        assert "tsp" in served.text("#strategies")
        served.until("return document.documentElement.dataset.theme === 'dark'")
        assert not served.find("#kv-theme").is_displayed()
        height = served.script("return document.body.scrollHeight")
    served.until("return document.querySelector('#details-page iframe').clientHeight >= arguments[0]", height)
    assert served.overflows() == []
    served.resize(*PHONE)
    served.settle()
    assert served.overflows() == []
    errors = [
        entry
        for entry in served.driver.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]
    assert errors == []
