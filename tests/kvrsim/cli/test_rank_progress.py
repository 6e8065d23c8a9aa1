"""What ranks report is a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from kvrsim.cli import progress as module
from kvrsim.cli.progress import RankProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(module, "FIRST_LINE_S", 0.1)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with RankProgress() as progress:
        if screen.isatty():
            time.sleep(0.3)  # until a frame is drawn
        progress(0, 3, "prefills")
        time.sleep(0.3)
        progress(1, 3, "prefills")
        time.sleep(0.3)
        progress(0, 2, "logits compared")
        time.sleep(0.3)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_the_bar_counts_and_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    assert re.search(r"1 of 3 prefills, about \d+ s more", text)
    assert "starting ranks" in text
    assert "0 of 2 logits compared" in text
    assert "3 of 3" not in text


def test_elsewhere_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(io.StringIO(), monkeypatch).splitlines()
    assert lines[0].startswith("kvrsim: 1 of 3 prefills, about")
    assert len(lines) <= 2
