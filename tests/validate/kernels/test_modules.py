"""Whole modules of latent and sparse attention beside the sum of their parts: gates on the page, and how it is made."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import numpy as np
import pytest

from kvrsim.profile.profile import builtin_profiles, load_profile
from validate.kernels.modules import PAGE, SYSTEMS, TABLES, Line, lines, page

ROWS = [
    (section.partition("\n")[0], [cell.strip() for cell in line.strip("|").split("|")])
    for section in PAGE.read_text().split("\n## ")[1:]
    for line in section.splitlines()
    if line.startswith("| ") and not line.startswith("| model")
]


def made(ratios: list[float], heads: list[float]) -> Line:
    return Line(
        profile="h200-flash",
        what="latent, all keys",
        framework="trtllm/1.0",
        model="M",
        ratios=np.array(ratios),
        heads=np.array(heads),
        prefix=np.array([0.0, 65536.0, 0.0]),
    )


def test_a_line_says_how_far_the_sum_is() -> None:
    line = made([0.8, 0.9, 1.2], [8.0, 8.0, 64.0])
    assert line.ratio == pytest.approx(0.9)
    assert line.error == pytest.approx((0.2 + 0.1 + 0.2) / 3)
    assert line.cells() == ("M", "latent, all keys", "trtllm", "3", "0.90", "16.7%", "0.85", "1.20", "0.90")
    assert made([1.0, 1.0, 1.0], [8.0] * 3).of(np.zeros(3, dtype=bool)) == "-"
    assert f"| {' | '.join(line.cells())} |" in page([line])
    assert page([line]).count("## ") == 1


def test_the_page_has_every_profile_with_rates_of_its_own() -> None:
    found = dict.fromkeys(name for name, _ in ROWS)
    assert list(found) == list(SYSTEMS)
    assert set(found) == {name for name in builtin_profiles() if load_profile(name).kernels.sparse is not None}
    for (name, _), (other, _) in pairwise(ROWS):
        assert list(SYSTEMS).index(name) <= list(SYSTEMS).index(other)


@pytest.mark.parametrize(("name", "cells"), ROWS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_sums_are_near_whole_modules(name: str, cells: list[str]) -> None:
    """Nothing was fitted to most of them. On Hopper, by the engine of the tables of kernels, within 7 %."""
    _, what, engine, _, ratio, error, *_ = cells
    assert 0.65 < float(ratio) < 1.2
    if name in ("h100-flash", "h200-flash") and engine == "sglang" and what == "latent, 2048 keys":
        assert float(error.rstrip("%")) < 7


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core")
def test_the_page_is_what_the_command_writes() -> None:
    tables = [table for table in TABLES if table[0] == "dsa_context_module"]
    text = PAGE.read_text()
    for line in lines("h200-flash", tables):
        assert f"| {' | '.join(line.cells())} |" in text
