"""`kvrsim calibrate compute`, `links` and `all` on a made-up machine with known rates, and on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvrsim
from calibrate.data import Measurement, read_measurements, read_origin
from calibrate.measure.campaign import Seconds
from calibrate.measure.compute import ComputeBench, Point, compute_rows, grid, traffic_of
from calibrate.measure.forward import ComputeSetup, ForwardTimer
from calibrate.measure.links import LinkBench, LinkPoint, link_points
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.profile import load_profile
from kvrsim.model.gemm import Gemm
from kvrsim.runtime.marks import MarkRecorder
from tests.building.commands import answer, refusal, run

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}
FLOPS_PER_S, BYTES_PER_S, SMALL_BYTES_PER_S, SCORE_S = 4e10, 8e9, 8e10, 2e-9
DEVICE = GpuSpec(
    name="made-up-cpu", memory_bytes=2**33, hbm_bytes_per_s=1e10, peak_flops={"fp32": 2e11}, num_sms=1, source="made up"
)
LINK_BYTES_PER_S, LATENCY_S = 2e9, 1e-4


class MadeUpBench(ComputeBench):
    """Layers on a made-up machine whose times follow from known rates."""

    def points(self) -> Sequence[Point]:
        return grid(self.setup.max_context, self.setup.kernels)

    def expected_s(self, point: Point) -> float:
        return 1e-3

    def sample(self, point: Point) -> Seconds:
        at = point
        layer = self.setup.model.layers[0]
        products = {(gemm.in_features, gemm.out_features): _product_s(at.chunk, gemm) for gemm in _gemms(layer)}
        moved = 2.0 * at.chunk * self.setup.model.layer_cache_bytes(1, 4) / BYTES_PER_S
        unmasked = 0.5 * at.chunk if at.prefix == 0 else at.chunk + at.prefix
        small = {op: 2 * at.chunk * nbytes / SMALL_BYTES_PER_S for op, nbytes in traffic_of(self.setup.model).items()}
        parts = {
            "attention": 1e-5 + self.setup.model.num_attention_heads * at.chunk * unmasked * SCORE_S,
            "before_attention": sum(_product_s(at.chunk, gemm) for gemm in layer.mixer.projections)
            + small["norm"]
            + small["rotary"],
            "after_attention": sum(_product_s(at.chunk, gemm) for gemm in (*layer.mixer.output, *layer.mlp))
            + small["norm"]
            + small["activation"]
            + small["residual"],
            "cache_append": moved,
        }
        return {
            **parts,
            **small,
            **{f"gemm {fan_in} {fan_out}": seconds for (fan_in, fan_out), seconds in products.items()},
            "layer": sum(parts.values()),
            "prepare": 1e-4,
            "head": 1e-4,
        }

    def rows(self, samples: Mapping[Point, Sequence[Seconds]]) -> list[Measurement]:
        return compute_rows(samples, self.setup.model, dtype=self.setup.dtype, device="made-up CPU, 1 thread")


def _gemms(layer: Any) -> list[Gemm]:
    return [*layer.mixer.projections, *layer.mixer.output, *layer.mlp]


def _product_s(tokens: int, gemm: Gemm) -> float:
    return 2.0 * tokens * gemm.in_features * gemm.out_features / FLOPS_PER_S


class MadeUpLinks(LinkBench):
    """Made-up links on which messages do not share bandwidth."""

    def sample(self, point: LinkPoint) -> Mapping[str, float]:
        result = point
        if result.collective:
            others = (result.num_ranks or 2) - 1
            step_s = LATENCY_S + result.nbytes / (others + 1) / LINK_BYTES_PER_S
            return {result.collective: others * step_s * (2 if result.kind == "reduce" else 1)}
        if result.kind == "issue":
            return {"send": 1e-5, "receive": 1e-5}
        seconds = LATENCY_S + result.nbytes / LINK_BYTES_PER_S
        return {f"{src}>{dst}": seconds for src, dst in result.flows}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(setup: ComputeSetup) -> MadeUpBench:
        return MadeUpBench(setup, ForwardTimer(setup, MarkRecorder()))

    monkeypatch.setattr("calibrate.measure.compute.ComputeBench.build", build)
    monkeypatch.setattr("calibrate.measure.links.LinkBench", MadeUpLinks)
    monkeypatch.setattr("calibrate.measure.compute.spec_of", lambda *_: DEVICE)


@pytest.mark.usefixtures("made_up")
def test_all_makes_a_profile_that_predicts_the_machine(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.json"
    options = ("--model", config, "--ctx", "2k", "--ranks", 4, "--minutes", 0.5)
    made = answer(capsys, "calibrate", "all", "-o", output, *options)
    assert made["measured"]["layers"]["rows"] > 100
    assert all(Path(name).exists() for name in made["files"].values())
    names = {path.name for path in tmp_path.iterdir()}
    beside = {"mine.json", "mine.compute.csv", "mine.links.csv"}
    assert names == beside | {"tiny.json"}
    profile = load_profile(output)
    assert profile.valid.dtypes == ("fp32",)
    assert profile.cluster is not None
    assert (profile.cluster.num_gpus, profile.cluster.topology) == (4, "switch")
    assert profile.links.bandwidth_bytes_per_s == pytest.approx(LINK_BYTES_PER_S, rel=0.05)
    layer = kvrsim.load_model(config).layers[0]
    for context in (700, 1900):
        products = sum(_product_s(context, gemm) for gemm in _gemms(layer))
        attention = 1e-5 + 4 * context * 0.5 * context * SCORE_S
        steps = traffic_of(kvrsim.load_model(config))
        small = 2 * context * (sum(steps.values()) + steps["norm"] - steps["embedding"]) / SMALL_BYTES_PER_S
        expected = 4 * (products + attention + small)
        result = kvrsim.simulate(strategy="single", gpus=1, ctx=context, model=str(config), profile=str(output))
        assert result.ttft_s == pytest.approx(expected, rel=0.05)


def test_layers_and_links_of_this_machine(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compute, links = tmp_path / "c.csv", tmp_path / "l.csv"
    quick = ("--minutes", 0.05)
    out, _ = run(
        capsys, "calibrate", "compute", "--device", "cpu", "--model", config, "--ctx", 128, "-o", compute, *quick
    )
    assert str(compute) in "".join(out.split())
    rows = read_measurements(compute)
    assert {"gemm", "attention", "layer", "norm", "cache_append", "head"} <= {row.operation for row in rows}
    origin = read_origin(compute)
    assert origin is not None
    assert origin["model"]["hidden_size"] == 256
    assert set(origin["versions"]) >= {"python", "torch", "transformers"}
    made = answer(capsys, "calibrate", "links", "--ranks", 2, "--max-bytes", "64KiB", "-o", links, *quick)
    assert made["rows"] == len(read_measurements(links)) > 5
    content = read_origin(links)
    assert content is not None
    assert content["topology"] in ("switch", "bus")
    assert {point.kind for point in link_points(2, "gloo", 2**16)} >= {"send", "gather"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("all", "-o", "profile.txt"), "--output"),
        (("all", "-o", "x.json", "--links", "a.csv", "--link", "nvlink4"), "--link"),
        (("compute", "-o", "x.csv", "--model", "mixtral-8x7b"), "--model"),
        (("compute", "-o", "x.csv", "--dtype", "fp8"), "--dtype"),
        (("compute", "-o", "x.csv", "--attention", "sdpa,sdpa"), "--attention"),
        (("compute", "-o", "x.csv", "--minutes", "0"), "--minutes"),
        (("links", "-o", "x.csv", "--ranks", "1"), "--ranks"),
        (("links", "-o", "x.csv", "--timeout", "60"), "--timeout"),
    ],
)
def test_mistakes_get_one_line(
    tmp_path: Path,
    arguments: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in refusal(capsys, "calibrate", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_without_torch_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = refusal(capsys, "calibrate", "compute", "-o", tmp_path / "x.csv")
    assert "error: torch: got 'no such module', accepted: " in line
    assert "pip install '.[hardware]' in a checkout" in line
