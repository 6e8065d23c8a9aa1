"""Defaults of a request: profile, engine, dtype; names and sizes of models and clusters."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import kvrsim
from kvrsim.builder import PAPER_MODELS
from kvrsim.cli import main as cli
from kvrsim.hardware import Cluster, builtin_gpus, load_cluster
from kvrsim.kernels.attention import FlashRates
from kvrsim.kernels.profile import builtin_profiles, load_profile
from kvrsim.model.load import builtin_models, load_model
from kvrsim.notes import with_code


def scenario(
    model: str, cluster: str | Cluster | None = None, **options: Any
) -> tuple[kvrsim.Scenario, tuple[str, ...]]:
    return kvrsim.make_scenario(ctx="2k", model=model, cluster=cluster, **options)


@pytest.mark.parametrize("model", builtin_models())
@pytest.mark.parametrize("cluster", [None, "a100-nvlink", "a800-nvlink"])
def test_only_the_papers_models_on_its_gpu_have_its_kernels(model: str, cluster: str | None) -> None:
    one, notes = scenario(model, cluster)
    paper = model in PAPER_MODELS
    assert one.profile_name == ("a100-eager" if paper else "a100-flash")
    assert one.engine_name == ("none" if paper else "serving")
    assert bool(with_code(notes, "paper")) == paper
    (text,) = with_code(notes, "paper", "default profile")
    assert paper or "--profile a100-eager" in text
    assert bool(with_code(notes, "default cluster")) == (cluster is None and not paper)


@pytest.mark.parametrize("profile", [name for name in builtin_profiles() if load_profile(name).cluster is None])
def test_a_cluster_that_is_not_named_has_the_profiles_gpu(profile: str) -> None:
    without_cluster, notes = scenario("llama-3.1-8b", profile=profile)
    assert without_cluster.cluster.gpu.name == load_profile(profile).gpu
    assert not with_code(notes, "GPU")
    assert without_cluster.cluster.name in with_code(notes, "default cluster")[0]


@pytest.mark.parametrize(
    ("cluster", "profile", "scaled"),
    [
        ("a100-40gb-nvlink", "a100-flash", True),
        ("h20-nvlink", "h100-flash", True),
        ("h800-nvlink", "h100-flash", False),
    ],
)
def test_siblings_have_the_kernels_of_the_gpu_that_was_measured(cluster: str, profile: str, scaled: bool) -> None:
    one, notes = scenario("llama-3.1-8b", cluster)
    assert (one.profile_name, one.engine_name) == (profile, "serving")
    assert bool(with_code(notes, "sibling")) == scaled
    ttft_s = kvrsim.simulate(ctx="8k", model="llama-3.1-8b", cluster=cluster, gpus=1, strategy="single").ttft_s
    base = {"a100-flash": "a100-nvlink", "h100-flash": "h100-nvlink"}[profile]
    measured_s = kvrsim.simulate(ctx="8k", model="llama-3.1-8b", cluster=base, gpus=1, strategy="single").ttft_s
    low, high = {"a100-40gb-nvlink": (1, 1.34), "h20-nvlink": (2, 1 / 0.149), "h800-nvlink": (1, 1)}[cluster]
    assert low - 1e-12 <= ttft_s / measured_s <= high + 1e-12


def test_a_power_limit_slows_a_long_prefill_by_at_most_its_root() -> None:
    """Arithmetic takes most of the time, memory and host the rest; a named profile keeps its times."""
    full = load_cluster("h100-nvlink", 1)
    limited = replace(full, power_limit_w=448.0)
    notes = scenario("llama-3.1-8b", limited)[1]

    def ttft_s(cluster: Cluster, **more: Any) -> float:
        return kvrsim.simulate(ctx="16k", model="llama-3.1-8b", cluster=cluster, strategy="single", **more).ttft_s

    assert 1.1 < ttft_s(limited) / ttft_s(full) < 1 / 0.8 + 1e-9
    assert ttft_s(limited, profile="h100-flash") == ttft_s(full)
    assert with_code(notes, "power limit")[0].startswith("power limit of 448 W instead")
    assert with_code(scenario("llama-3.1-8b", limited, profile="h100-flash")[1], "power limit, profile")
    assert scenario("llama-3.1-8b", limited)[0].has_scaled_kernels


def test_the_dtype_is_the_checkpoints() -> None:
    assert scenario("llama-3.1-8b", "h100-nvlink")[0].request.dtype == "bf16"
    assert scenario("llama-7b")[0].request.dtype == "fp16"
    assert scenario("llama-3.1-8b", "h100-nvlink", dtype="fp16")[0].request.dtype == "fp16"
    as_bf16, as_fp16 = (
        kvrsim.simulate(ctx="2k", model="llama-3.1-8b", cluster="8xh100", strategy="tp", dtype=dtype).ttft_s
        for dtype in ("bf16", "fp16")
    )
    assert as_bf16 == as_fp16


@pytest.mark.parametrize(
    ("given", "shape", "positions"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", 131072),
        ("llama-3.3-70b", "llama-3.1-70b", 131072),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", 8192),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b", 262144),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3", 163840),
        ("openai/gpt-oss-120b", "gpt-oss-120b", 131072),
    ],
)
def test_hugging_face_ids_have_the_catalogues_shapes(given: str, shape: str, positions: int) -> None:
    model, known = load_model(given), load_model(shape)
    assert (model.num_parameters, model.layers) == (known.num_parameters, known.layers)
    assert model.max_position_embeddings == positions
    notes = scenario(given, "8xh200")[1]
    assert bool(with_code(notes, "shape")) == (model.name != shape)


@pytest.mark.parametrize("given", ["nobody/no-such-model", "meta-llama/Llama-9-70B", "a/b/llama-3.1-8b"])
def test_unknown_ids_are_refused(given: str) -> None:
    with pytest.raises(kvrsim.InputError, match="model: got"):
        load_model(given)


@pytest.mark.parametrize(
    ("size", "gpu", "num_gpus", "per_node"),
    [
        ("h100", "h100", 8, None),
        ("8xH100", "h100", 8, None),
        ("2xa100", "a100-80gb", 2, None),
        ("a100-40gb", "a100-40gb", 8, None),
        ("2x8xh100", "h100", 16, 8),
        ("16xh200", "h200", 16, 8),
        ("2x4xb200", "b200", 8, 4),
        ("4xh800", "h100", 4, None),
    ],
)
def test_a_size_is_a_cluster(size: str, gpu: str, num_gpus: int, per_node: int | None) -> None:
    one, notes = scenario("llama-3.1-8b", size)
    assert (one.cluster.gpu.name, one.num_gpus, one.cluster.gpus_per_node) == (gpu, num_gpus, per_node)
    assert bool(with_code(notes, "network")) == (per_node is not None)
    if size == "2x8xh100":
        assert one.cluster.network == kvrsim.load_cluster("h100-2x8-ndr400").network


@pytest.mark.parametrize(
    ("size", "meant"),
    [("8h100", "8xh100"), ("8xh1000", "8xh100"), ("2x8xh10", "2x8xh100"), ("4xgh200", "4xh200"), ("8b200", "8xb200")],
)
def test_a_misspelt_size_suggests_one_that_is_a_cluster(size: str, meant: str) -> None:
    with pytest.raises(kvrsim.InputError, match="cluster: got") as caught:
        scenario("llama-3.1-8b", size)
    assert caught.value.guess == meant
    assert f"did you mean {meant}?" in str(caught.value)
    assert scenario("llama-3.1-8b", meant)[0].num_gpus >= 4


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(kvrsim.InputError, match="cluster: got 'mi300x'") as caught:
        scenario("llama-3.1-8b", "mi300x")
    assert caught.value.guess is None
    assert all(gpu in str(caught.value) for gpu in builtin_gpus())


@pytest.mark.parametrize(("cluster", "gpus"), [("8xh100", 9), ("2xh100", 4), ("4xl40s", 3), ("a100-nvlink", 100)])
def test_more_gpus_than_a_switch_has_name_a_cluster_that_has_them(cluster: str, gpus: int) -> None:
    try:
        assert scenario("llama-3.1-8b", cluster, gpus=gpus)[0].num_gpus == gpus
    except kvrsim.InputError as error:
        proposed = re.search(r"`cluster` (\S+),", error.accepted)
        assert proposed is not None
        assert scenario("llama-3.1-8b", proposed[1], gpus=gpus)[0].num_gpus == gpus


@pytest.mark.parametrize("size", ["0xh100", "9x9xh100", "2x8xz100", "8x", "1x2x3xh100"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(kvrsim.InputError, match="cluster: got"):
        scenario("llama-3.1-8b", size)


def test_model_and_cluster_may_be_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ctx", "1k", "--json"]
    answers = []
    for names in (["llama-3.1-8b", "2xh100"], ["--model", "llama-3.1-8b", "--cluster", "2xh100"]):
        assert cli.main(["simulate", *names, "--strategy", "tp", *options]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert cli.main(["plan", "llama-3.1-8b", "--model", "llama-7b", *options]) == 2
    assert "--model: got 'llama-3.1-8b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("capacity", "--requests", "synthetic:poisson,rate=1", "--slo-ttft", "1s"),
        ("predictor", "build", "-o", "ttft.json"),
    ],
)
def test_what_others_pay_for_has_no_default_model(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command]) == 2
    assert "--model is missing" in capsys.readouterr().err
    assert cli.main([*command, "--model", "llama-3.1-8b"]) == 2
    assert "--cluster is missing" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "is_limit"), [(2.0, False), (1.0, True), (0.9, False), (0.1, True)])
def test_a_limit_of_attention_that_changes_no_time_is_named(factor: float, is_limit: bool) -> None:
    """The note comes exactly where an edited limit leaves the TTFT as it was."""
    profile = load_profile("h100-flash")
    flash = profile.kernels.attention["flash"]
    assert isinstance(flash, FlashRates)
    edited = replace(flash, flops_per_s=factor * flash.flops_per_s)
    kernels = replace(profile.kernels, attention={"flash": edited})
    question = {"ctx": "32k", "model": "llama-3.1-8b", "gpus": 1, "strategy": "single"}
    before = kvrsim.simulate(profile=profile, **question)
    after = kvrsim.simulate(profile=replace(profile, kernels=kernels), **question)
    is_named = bool(with_code(after.warnings, "attention limit"))
    is_changed = after.ttft_s != before.ttft_s
    assert is_named == (not is_changed and factor != 1.0)
    assert is_changed == (is_limit and factor != 1.0)


def test_half_the_time_of_its_tiles_makes_attention_faster() -> None:
    """What the note proposes has an effect."""
    profile = load_profile("h100-flash")
    flash = profile.kernels.attention["flash"]
    assert isinstance(flash, FlashRates)
    halves = {name: getattr(flash, name) / 2 for name in ("block_s", "softmax_s", "tile_s")}
    faster = replace(flash, flops_per_s=2 * flash.flops_per_s, **halves)
    kernels = replace(profile.kernels, attention={"flash": faster})
    question = {"ctx": "32k", "model": "llama-3.1-8b", "gpus": 1, "strategy": "single"}
    before_s = kvrsim.simulate(profile=profile, **question).ttft_s
    assert kvrsim.simulate(profile=replace(profile, kernels=kernels), **question).ttft_s < 0.9 * before_s
