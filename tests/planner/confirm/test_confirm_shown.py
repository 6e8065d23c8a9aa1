"""A confirmation on the screen: the answer first, no figure cut at any width, every target that is not met named."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from kvrsim.cli import text as layout
from kvrsim.cli.commands.confirm import show_confirmation
from planner.confirm.confirm import ClockDrift
from tests.planner.confirm.test_result import candidate, confirmation

FIGURES = re.compile(r"\d[\d.,]*")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[layout.Part]:
    """Of a plan's choice that was predicted twice as long as it took, on a machine whose clock has drifted."""
    parts: list[layout.Part] = []

    def noted(found: Sequence[layout.Part], width: int, *, terminal: bool) -> str:
        parts.extend(found)
        return ""

    monkeypatch.setattr(layout, "page", noted)
    drift = ClockDrift(num_tokens=48, predicted_s=2.0, samples_s=(1.0, 1.0, 1.0))
    chosen = candidate("kvr-s", 2.0, (1.0, 1.01, 1.02), drift_corrected_s=1.0)
    other = candidate("tsp", 3.0, (1.5, 1.51, 1.52), drift_corrected_s=1.5)
    show_confirmation(confirmation(chosen, other, drift=drift))
    monkeypatch.undo()
    return parts


def test_the_answer_is_first(shown: list[layout.Part]) -> None:
    lines = layout.page(shown, 118, terminal=False).splitlines()
    assert re.match(r".*measured:.* kvr-s on 2 GPUs, TTFT 1.01 s measured \(IQR 10.0 ms\); predicted 2.00 s", lines[0])
    answer = " ".join("\n".join(lines).split("\n\n")[0].split())
    assert "1 target NOT met" in answer
    assert "none: the plan's choice, kvr-s, was the fastest" in answer
    assert "calibrate again" in answer


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_figure_is_cut(width: int, shown: list[layout.Part]) -> None:
    whole = set(FIGURES.findall(layout.page(shown, 10**4, terminal=True)))
    text = re.sub(r"\x1b\[[0-9;]*m", "", layout.page(shown, width, terminal=True))
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert set(FIGURES.findall(text)) <= whole
    assert "…" not in text
