"""The comparison of attention to windows with tables."""

from __future__ import annotations

import pandas as pd
import pytest

from validate.kernels import windows

CALLS = pd.DataFrame({"isl": [512, 4096, 16384], "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128})


def test_a_window_makes_long_calls_short() -> None:
    """In proportion to the prompt, not to its square; none longer than without a window."""
    narrow = windows.predicted_s("h100-flash", CALLS, 128)
    whole = windows.predicted_s("h100-flash", CALLS, None)
    assert (narrow <= whole).all()
    assert whole[2] / narrow[2] > 10
    assert narrow[2] / narrow[1] < 4.2
    assert windows.predicted_s("h100-flash", CALLS, 10**6) == pytest.approx(whole)


def test_the_committed_page_holds_what_the_text_says() -> None:
    """Without the window, times were twice to five times the measured ones on the kernels that profiles stand for."""
    rows = [line.split(" | ") for line in windows.PAGE.read_text().splitlines() if "-flash |" in line]
    own = [row for row in rows if "triton" not in row[2] and int(row[3]) <= 1024]
    assert len(own) >= 8
    for row in own:
        ratio, without = float(row[6]), float(row[9].rstrip(" |"))
        assert 0.75 < ratio < 1.15 < without, row


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("calibrate.importers.tables._PACKAGE", "no_such_package")
    assert windows.main() == 2
    assert "aiconfigurator-core" in capsys.readouterr().err
