"""`kvrsim calibrate` makes profiles from measurement files; every mistake gives a one-line error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrsim
from calibrate.data import Measurement, read_measurements, write_measurements
from calibrate.fit.attention import PRESETS, AttentionRows
from calibrate.fit.links import SendRates
from kvrsim.hardware import load_gpu
from kvrsim.kernels.gemm import GemmRates, Product, Tile
from kvrsim.kernels.profile import load_profile
from tests.building.commands import answer, refusal, screen

DEVICE = "NVIDIA A100-SXM4-80GB"


def row(operation: str, seconds: float, **fields: Any) -> Measurement:
    about = {"kernel": "some", "device": DEVICE, "dtype": "bf16", "source": "made up"}
    return Measurement(operation=operation, median_s=float(seconds), **(about | fields))


def compute_rows() -> list[Measurement]:
    tiles = (
        Tile(rows=128, cols=128, flops_share=1.0, start_s=5e-6),
        Tile(rows=64, cols=64, flops_share=0.8, start_s=1e-6),
    )
    gemm = GemmRates(flops_per_s=250e12, bytes_per_s=1.3e12, launch_s=4e-6, concurrent_tiles=108, tiles=tiles)
    rows = []
    for shape in ((4096, 12288), (4096, 4096), (11008, 4096)):
        for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
            seconds = gemm.form_s(np.array(float(tokens)), Product(*shape), 2)
            rows.append(row("gemm", float(seconds), tokens=tokens, in_features=shape[0], out_features=shape[1]))
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    calls = [
        row("attention", 1.0, chunk=chunk, prefix=prefix, **heads)
        for chunk in (128, 256, 512, 1024, 2048, 4096)
        for prefix in (0, 2048, 4096)
    ]
    times = AttentionRows.of(calls).predicted_s(PRESETS["fa2"].rates(load_gpu("a100-80gb"), {}))
    for call, seconds in zip(calls, times, strict=True):
        rows.append(row("attention", float(seconds), kernel="flash", chunk=call.chunk, prefix=call.prefix, **heads))
    return rows


def link_rows() -> list[Measurement]:
    sizes = np.array([2.0**power for power in range(14, 26)])
    times = SendRates(bandwidth_bytes_per_s=210e9, latency_s=1e-5, short_bytes_per_s=3e11).seconds(sizes)
    return [
        row("send_recv", float(seconds), bytes=int(size), ranks=2, nodes=1)
        for size, seconds in zip(sizes, times, strict=True)
    ]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_measurements(tmp_path / "compute.csv", compute_rows())
    write_measurements(tmp_path / "links.csv", link_rows())
    return tmp_path


def test_fit_writes_a_profile_that_plans(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = ("--compute", files / "compute.csv", "--links", files / "links.csv")
    wanted = ("-o", files / "mine.json", "--attention-kernel", "fa2")
    out = screen(capsys, "calibrate", "fit", *sources, *wanted)
    assert "matrix products" in out
    assert "made up" in out
    profile = load_profile(files / "mine.json")
    assert (profile.name, profile.gpu, profile.links.link) == ("mine", "a100-80gb", "nvlink3")
    assert profile.links.bandwidth_bytes_per_s == pytest.approx(210e9, rel=0.02)
    assert {"source", "devices", "attention kernels", "dtypes"} <= set(profile.provenance)
    assert kvrsim.__version__ in profile.provenance["fitted"]
    plan = ["plan", "--gpus", "2", "--ctx", "2k", "--profile", files / "mine.json"]
    assert answer(capsys, *plan)["best"]["ttft_s"] > 0


def test_fit_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("-o", files / "mine.json", "--attention-kernel", "fa2", "--name", "ours")
    report = answer(capsys, "calibrate", "fit", "--compute", files / "compute.csv", *wanted)
    assert report["profile"] == "ours"
    assert report["operations"]["gemm"]["mape"] < 0.02
    assert report["operations"]["send_recv"]["num_rows"] == 0


def test_import_reads_several_sources(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = (f"{files / 'compute.csv'}?gpu=A100", files / "links.csv")
    wanted = ("-o", files / "mine.json", "--measurements", files / "all.csv", "--attention-kernel", "fa2")
    screen(capsys, "calibrate", "import", *sources, *wanted)
    assert read_measurements(files / "all.csv") == compute_rows() + link_rows()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fit --compute compute.csv", "--output is missing"),
        ("fit --compute links.csv -o p.json", "--gpu: got 'nothing for no gemm or attention rows'"),
        ("fit --compute compute.csv -o missing/p.json", "--output: got 'missing/p.json'"),
        ("import -o p.json", "SOURCE... is missing"),
        ("import compute.csv?colour=red -o p.json", "SOURCE...: got 'compute.csv?colour=red'"),
        ("bake", "command of kvrsim calibrate: got 'bake', accepted: compute, links, all, fit, import"),
    ],
)
def test_a_mistake_costs_one_line(
    files: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert f"kvrsim: error: {message}" in refusal(capsys, "calibrate", *arguments.split())
    assert not (files / "p.json").exists()
