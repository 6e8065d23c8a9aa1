"""Chromium without a window, and a class whose methods do what the reader of a page does.

The fixture `browser` of tests/browser/conftest.py starts Chromium once per session. The fixture `opened` opens a page;
after the test it fails if the page reported an error, requested another file, or has text that overflows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver", "chromium-driver", "chromium.chromedriver")
PHONE, DESKTOP = (390, 844), (1280, 900)
_WAIT_S = 600.0  # a busy machine draws slowly

# Elements that contain text and that extend beyond the window or are cut off by a box.
_OVERFLOWS = """
const wide = document.documentElement.clientWidth;
const unseen = ".hidden, .skip, script, style, #kv-tip, option, svg, [hidden]";
const found = [];
for (const element of document.body.querySelectorAll("*")) {
  if (element.closest(unseen) || !element.getClientRects().length) continue;
  if (![...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
  const told = `${element.tagName} "${element.textContent.slice(0, 60)}"`;
  if (!element.closest(".scrolls") && element.getBoundingClientRect().right > wide + 1) found.push(`beyond: ${told}`);
  const cuts = getComputedStyle(element).overflowX !== "visible" && element.tagName !== "SELECT";
  if (cuts && element.scrollWidth > element.clientWidth + 1) found.push(`cut off: ${told}`);
}
const width = document.documentElement.scrollWidth;
if (width > wide + 1) found.push(`the page is ${width} px wide, the window ${wide}`);
return found;
"""


class NoBrowserError(Exception):
    """Raised if Chromium, its driver or selenium is missing."""


def start() -> Any:
    """Start Chromium and return its driver; raises NoBrowserError if one of the programs is missing."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise NoBrowserError("selenium is not installed") from None
    program = next(filter(None, map(shutil.which, NAMES)), None)
    driver = next(filter(None, map(shutil.which, DRIVERS)), None)
    if program is None or driver is None:
        name = "Chromium" if program is None else "chromedriver"
        raise NoBrowserError(f"{name} is not installed; on Debian: apt install chromium chromium-driver")
    options = Options()
    options.binary_location = program
    switches = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
    for switch in (*switches.split(), "--window-size={},{}".format(*DESKTOP)):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_script_timeout(_WAIT_S)
    chrome.set_page_load_timeout(_WAIT_S)
    return chrome


@dataclass
class Opened:
    """An open page; all selectors are CSS selectors."""

    driver: Any
    address: str

    @classmethod
    def at(cls, driver: Any, path: Path, size: tuple[int, int] = DESKTOP) -> Opened:
        """Open a file in a window of this size, with empty logs, and wait until the page has been drawn."""
        for kind in ("browser", "performance"):
            driver.get_log(kind)
        page = cls(driver, path.resolve().as_uri())
        page.resize(*size)
        driver.get(page.address)
        page.until("return document.readyState === 'complete' && document.documentElement.dataset.drawn === 'true'")
        page.settle()
        return page

    # -- actions of a reader

    def script(self, code: str, *arguments: Any) -> Any:
        """Run JavaScript and return its result."""
        return self.driver.execute_script(code, *arguments)

    def until(self, code: str, *arguments: Any) -> None:
        """Wait until the JavaScript expression returns a true value."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, _WAIT_S, 0.02).until(lambda _: self.script(code, *arguments), code)

    def settle(self) -> None:
        """Wait until the browser has drawn two more frames."""
        code = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(true)))"
        self.driver.execute_async_script(code)

    def find(self, selector: str) -> Any:
        """The element of a selector."""
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.find(selector).text)

    def click(self, selector: str) -> None:
        """Click an element."""
        element = self.find(selector)
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        self.settle()

    def press(self, selector: str, *keys: str) -> None:
        """Put the focus on an element and press keys."""
        self.script("arguments[0].focus()", self.find(selector))
        for key in keys:
            self._act(lambda actions, key=key: actions.send_keys(key))

    def hover(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a point of an element; x, y: CSS pixels from the top left corner of the element."""
        self._at(selector, x, y, lambda actions: actions)

    def drag(self, selector: str, x: float, y: float, by: float, down: float = 0, *, shift: bool = False) -> None:
        """Press the mouse button at a point of an element, move by (`by`, `down`) CSS pixels and release the button."""

        def move(actions: Any) -> Any:
            half = (by / 2, down / 2)
            return actions.click_and_hold().move_by_offset(*half).move_by_offset(*half).release()

        self._at(selector, x, y, move, "\ue008" if shift else None)

    def wheel(self, selector: str, x: float, y: float, delta: int, *, ctrl: bool = True) -> None:
        """Turn the mouse wheel at a point of an element; delta < 0 scrolls up. ctrl: whether the Ctrl key is held."""
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        left, top = self._offset(selector, x, y)
        origin = ScrollOrigin.from_element(self.find(selector), left, top)
        self._act(lambda actions: actions.scroll_from_origin(origin, 0, delta), "\ue009" if ctrl else None)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window's content, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefers(self, scheme: str) -> None:
        """Set the colour scheme that the system prefers: "light" or "dark"."""
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        self.settle()

    # -- checks of a page

    def errors(self) -> list[str]:
        """Errors of scripts and violations of the content policy since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page requested, without its own address and those that its content policy blocked."""
        urls: dict[str, str] = {}
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            about = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                urls[about["requestId"]] = about["request"]["url"].partition("#")[0]
            elif event["method"] == "Network.loadingFailed" and about.get("blockedReason") == "csp":
                urls.pop(about["requestId"], None)
        return [url for url in urls.values() if url != self.address and not url.startswith("data:")]

    def overflows(self) -> list[str]:
        """Texts that extend beyond the window or are cut off."""
        result: list[str] = self.script(_OVERFLOWS)
        return result

    def _act(self, what: Callable[[Any], Any], key: str | None = None) -> None:
        """Perform an action, with a key held if one is given."""
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver, duration=0)
        if key is not None:
            actions.key_down(key)
        what(actions)
        if key is not None:
            actions.key_up(key)
        actions.perform()
        self.settle()

    def _at(self, selector: str, x: float, y: float, then: Callable[[Any], Any], key: str | None = None) -> None:
        left, top = self._offset(selector, x, y)
        element = self.find(selector)
        self._act(lambda actions: then(actions.move_to_element_with_offset(element, left, top)), key)

    def _offset(self, selector: str, x: float, y: float) -> tuple[int, int]:
        """Offset of a point from the middle of the element, as Selenium expects it."""
        code = """
            arguments[0].scrollIntoView({block: 'center'});
            const {width, height} = arguments[0].getBoundingClientRect();
            return [width, height];
        """
        width, height = self.script(code, self.find(selector))
        return round(x - width / 2), round(y - height / 2)
