"""The page of routed experts: gates on its figures, and how its lines are made."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from calibrate.fit.solver import Comparison
from kvrsim.profile.profile import builtin_profiles, load_profile
from kvrsim.profile.rates.experts import POWER_LAW_LOAD_SD
from validate.kernels.experts import PAGE, SPREAD, EngineLine, SpreadLine, TypeLine, load_sd, page, spread_lines

TABLES = {
    section.partition("\n")[0]: [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]
    for section in PAGE.read_text().split("\n### ")[1:]
}


def percent(cell: str) -> float:
    return float(cell.rstrip("%"))


def test_grouped_products_are_nearer_than_dense_ones() -> None:
    """Of every type of every profile; half of the calls of held-out models within 20 %."""
    flash = [name for name in builtin_profiles() if name.endswith("-flash")]
    assert set(flash) <= set(TABLES)
    for name in flash:
        rates = load_profile(name).kernels.experts
        assert rates is not None
        kinds = [row[0].strip("`") for row in TABLES[name]]
        assert set(kinds) == {"half", *rates.types}
        for row in TABLES[name]:
            held_out, dense = percent(row[3]), percent(row[9])
            assert held_out < min(20, dense)
            assert float(row[5]) < float(row[10]), "log sd"


def test_the_imbalance_explains_the_busiest_gpu() -> None:
    """Long calls of skewed routing are off by at most a tenth in the median, not by a fifth and more."""
    rows = [row for name, found in TABLES.items() if ", trtllm" in name for row in found if "power law" in row[1]]
    assert len(rows) == 2 * (3 + 3 + 4)
    for row in rows:
        assert abs(percent(row[5])) < 10
        assert abs(percent(row[5])) < abs(percent(row[4])) + 1
    assert np.median([percent(row[4]) for row in rows]) < -20


def test_the_default_law_is_the_collectors() -> None:
    assert load_sd(1.01, 8192) == pytest.approx(POWER_LAW_LOAD_SD, abs=0.005)
    assert load_sd(1.2, 8192) > load_sd(1.01, 8192) > load_sd(1.01, 1024)


def test_lines() -> None:
    errors = Comparison(label="x", measured_s=np.array([1.0, 2.0]), predicted_s=np.array([1.1, 2.2])).errors()
    one = TypeLine(
        profile="p", kind="half", kernel="a_b", held_out=errors, long=errors, routings=(errors,) * 3, dense=errors
    )
    assert one.cells()[:5] == ("`half`", "a b", "2", "10.0%", "10.0%")
    two = SpreadLine(
        profile="p",
        kind="half",
        exponent=1.2,
        num_rows=5,
        imbalance=1.5,
        even=-0.3,
        uneven=0.0,
        uneven_error=0.1,
    )
    three = EngineLine(profile="p", kind="half", ratios=np.array([1.0, 2.0, 0.5, 1.2]))
    assert three.cells() == ("p", "`half`", "4", "1.10", "25%", "25%")
    text = page([one], [("p", 0.1)], [three], [two])
    for line in (one, two, three):
        assert f"| {' | '.join(line.cells())} |" in text
    assert "p 11%" in text


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="the tables are not installed")
@pytest.mark.slow
def test_the_page_is_what_the_tables_say() -> None:
    name = "h200-flash"
    lines = list(spread_lines(name, load_profile(name)))
    found = TABLES[next(title for title in TABLES if title.startswith(f"{name}, "))]
    assert [list(line.cells()) for line in lines] == found
    assert name in SPREAD
