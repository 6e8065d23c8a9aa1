"""Two profiles side by side: the same one does not differ, a faster one does, by as much as it is faster."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.fit.report import DiffRow, compare_profiles
from kvrsim.cli.main import main
from kvrsim.kernels.profile import builtin_profiles, load_profile
from kvrsim.model.load import load_model
from kvrsim.units import scale

LLAMA = load_model("llama-7b")


def faster(profile: Any, factor: float) -> Any:
    """Every rate of device, host and links."""
    kernels = profile.kernels
    attention = {name: scale(rates, 1 / factor) for name, rates in kernels.attention.items()}
    links, host = profile.links, profile.host
    return replace(
        profile,
        kernels=replace(
            kernels,
            gemm=scale(kernels.gemm, 1 / factor),
            attention=attention,
            elementwise=scale(kernels.elementwise, 1 / factor),
        ),
        host=replace(host, layer_s=host.layer_s / factor, resume_s=host.resume_s / factor),
        links=replace(
            links,
            bandwidth_bytes_per_s=links.bandwidth_bytes_per_s * factor,
            latency_s=links.latency_s / factor,
            short_bytes_per_s=links.short_bytes_per_s and links.short_bytes_per_s * factor,
            gather=links.gather and scale(links.gather, 1 / factor),
        ),
    )


@pytest.mark.parametrize("name", builtin_profiles())
def test_a_profile_does_not_differ_from_itself(name: str) -> None:
    profile = load_profile(name)
    rows = compare_profiles(profile, profile, LLAMA)
    assert len(rows) >= 10
    assert {row.ratio for row in rows} == {1.0}
    assert not any(row.differs for row in rows)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_every_time_over_k(factor: float) -> None:
    profile = load_profile("h100-flash")
    rows = compare_profiles(profile, faster(profile, factor), LLAMA)
    for row in rows:
        assert row.ratio == pytest.approx(1 / factor, rel=1e-6), row.operation
    assert all(row.differs for row in rows if not row.operation.startswith("host"))


def test_parts_add_up_to_their_layer() -> None:
    for name in builtin_profiles():
        rows = compare_profiles(load_profile(name), load_profile(name), LLAMA)
        first = next(index for index, row in enumerate(rows) if row.operation.startswith("layer"))
        assert sum(row.a_s for row in rows[first + 1 : first + 4]) == pytest.approx(rows[first].a_s)


def test_a_difference_counts_from_the_errors_on() -> None:
    near = DiffRow(operation="x", a_s=1.0, b_s=math.exp(0.12), log_sd=0.1)
    assert not near.differs
    assert replace(near, log_sd=0.09).differs
    assert DiffRow(operation="x", a_s=0.0, b_s=1.0, log_sd=9.0).differs
    assert DiffRow(operation="x", a_s=0.0, b_s=1.0, log_sd=9.0).ratio is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_profile("a100-flash").write(tmp_path / "mine.json")
    assert main(["profiles", "diff", "a100-flash", "h100-flash"]) == 0
    printed = capsys.readouterr().out
    assert "layer of llama-7b" in printed
    assert "B / A" in printed
    assert main(["profiles", "diff", "a100-flash", str(tmp_path / "mine.json"), "--model", "llama-3-8b", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["a"], told["model"], told["dtypes"]) == ("a100-flash", "llama-3-8b", ["fp16", "fp16"])
    assert not any(one["differs"] for one in told["operations"])
