"""One browser per session, and fixtures that check every page after its test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrsim.views.page import Page, write_page
from tests.building.browser import DESKTOP, PHONE, NoBrowserError, Opened, start

REQUIRED = "KVRSIM_BROWSER"  # if this variable is 1, tests fail without a browser; otherwise they are skipped


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, started once per session."""
    try:
        driver = start()
    except NoBrowserError as missing:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, and {missing}")
        pytest.skip(str(missing))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open a Page or a file; after the test, no text may overflow, and there must be no errors and no requests."""
    pages: list[Opened] = []

    def open_page(page: Page | Path, size: tuple[int, int] = DESKTOP) -> Opened:
        path = page if isinstance(page, Path) else tmp_path / "page.html"
        if isinstance(page, Page):
            write_page(page, path)
        pages.append(Opened.at(browser, path, size))
        return pages[-1]

    yield open_page
    for page in pages[-1:]:
        found = page.overflows()
        page.resize(*(PHONE if page.script("return innerWidth") != PHONE[0] else DESKTOP))
        page.settle()
        assert found + page.overflows() == []
        page.prefers("light")
        assert page.errors() == []
        assert page.requests() == []
