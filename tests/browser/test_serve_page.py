"""Browser tests of the pages of `kvrsim serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.building.browser import Opened
from tests.building.server import running_server

pytestmark = pytest.mark.browser
ANSWERED = """return document.querySelectorAll('#top tbody tr').length > 0
    && document.getElementById('state').textContent === ''"""


@pytest.fixture
def served(browser: Any) -> Iterator[Opened]:
    with running_server("secret") as address:
        browser.get_log("browser")  # discards messages of earlier pages
        browser.get(f"{address}#model=llama-3-8b&cluster=h100-nvlink&gpus=2&ctx=4k&strategies=tsp%2Ctp")
        page = Opened(browser, address)
        page.until(ANSWERED)
        yield page


@contextmanager
def inside(page: Opened, selector: str) -> Iterator[None]:
    """Select the frame of an inner page after the page has been drawn; select the outer page at the end."""
    page.until("return document.querySelector(arguments[0])", selector)
    page.driver.switch_to.frame(page.find(selector))
    page.until("return document.documentElement.dataset.drawn === 'true'")
    yield
    page.driver.switch_to.default_content()


def ask(page: Opened, name: str, value: str) -> None:
    box = page.find(f"#ask-{name}")
    box.clear()
    box.send_keys(value)
    page.script("document.getElementById('ask').dataset.answered = ''")
    page.click("#ask button[type=submit]")
    page.until("return document.getElementById('ask').dataset.answered !== ''")
    page.until(ANSWERED)


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
    served.click("#pins button")
    assert served.script("return document.querySelectorAll('#pins li, #compared iframe').length") == 1


def test_a_wrong_value_is_one_line_on_the_page(served: Opened) -> None:
    box = served.find("#ask-gpus")
    box.clear()
    box.send_keys("many")
    served.click("#ask button[type=submit]")
    served.until("return document.getElementById('state').classList.contains('bad')")
    assert served.text("#state").startswith("gpus: got 'many'")


def test_the_details_are_the_page_of_the_plan(served: Opened) -> None:
    served.click("#kv-theme")
    with inside(served, "#details-page iframe"):
        assert "tsp" in served.text("#strategies")
        served.until("return document.documentElement.dataset.theme === 'dark'")
    errors = [
        entry
        for entry in served.driver.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]
    assert errors == []
