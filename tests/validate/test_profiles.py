"""The page about profiles agrees with the profiles, and its measurements are read."""

from __future__ import annotations

import re
from pathlib import Path

from calibrate.data import read_measurements
from kvrsim.kernels.profile import builtin_profiles, load_profile
from validate.profiles import PAGE, page
from validate.results import body

TEXT = PAGE.read_text()


def test_the_page_is_that_of_the_profiles() -> None:
    lines = page([load_profile(name) for name in builtin_profiles()])
    assert "\n".join(lines).rstrip() + "\n" == body(TEXT), "python -m validate.profiles rewrites it"


def test_the_measurements_shown_are_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```csv\n(.*?)^```", TEXT, re.M | re.S)
    (tmp_path / "kernels.csv").write_text(block)
    rows = read_measurements(tmp_path / "kernels.csv")
    assert [row.operation for row in rows] == ["gemm", "attention", "norm", "send_recv", "host_layer"]
