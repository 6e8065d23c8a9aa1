"""Launches: the engine documents every flag, each value has the right type and agrees with the plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.access import execution_of
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.candidates import Candidate, ForEngine, partition_of, strategies_to_compare
from planner.capacity.deployment import fleet_deployment
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.capacity.times import StrategyPolicy
from planner.deploy import Deployment, deployment_of
from planner.deploy_engines import deploy_engine, engines_with
from tests.building.flags import options
from tests.building.remembered import Question, remember
from validate.engine_flags import launches

LLAMA = {"model": "llama-3.1-70b", "cluster": "h100-nvlink"}
MIXTURE = {"model": "qwen3-235b-a22b", "cluster": "h200-nvlink"}
LATENT = {"model": "deepseek-v3", "cluster": "h200-nvlink"}
DEEPSEEK = ("deepseek-v3", "deepseek-v3.2")
CONTEXT = ("cp8+ep8", "cp8", "tp2+cp4+ep8", "cp8-i")


@pytest.fixture(scope="module")
def answers() -> dict[Question, Any]:
    return {}


@pytest.fixture(autouse=True)
def _remembered(answers: dict[Question, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan as JSON, as a screen and from Python is computed once."""
    remember(answers, monkeypatch)


def launched(engine: str, strategy: str, **question: Any) -> Deployment:
    scenario, _ = make_scenario(**{"ctx": "16k", "gpus": 8} | question)
    chosen = get_strategy(strategy)
    cut = partition_of(place(scenario, chosen))
    return deployment_of(Candidate.of(execution_of(scenario, chosen), cut.chunk_lens), engine, model="org/model")


@pytest.mark.slow
@pytest.mark.parametrize("engine", DEPLOY_ENGINES)
def test_flags_are_documented_and_say_the_layout(engine: str) -> None:
    """Every flag is documented and its value has the right type; sizes are those of the plan."""
    listed = list(launches(engine))
    for what, deployment, layout in listed:
        assert set(deployment.files) == ({"trtllm.yaml"} if engine == "trtllm" else set())
        assert sizes_of(engine, options(deployment), deployment.files) == (layout.num_gpus, layout.pipeline), what
    assert len(listed) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("engine", DEPLOY_ENGINES)
@pytest.mark.parametrize(("model", "group_sizes"), [("llama-3.1-8b", "1,2"), ("llama-3.1-70b", "2,4")])
def test_flags_of_fleets_are_documented(engine: str, model: str, group_sizes: str) -> None:
    traffic = "synthetic:poisson,rate=4,requests=300,context=lognormal:1k:1,max=16k,output=lognormal:150:0.5"
    scenario, _ = make_scenario(ctx=1, gpus=1, model=model, cluster="h100-nvlink")
    asked = FleetArgs(requests=traffic, slo_ttft="2s", tpot="50ms", replications=1, group_sizes=group_sizes)
    request = make_request(asked, scenario)
    plan = plan_capacity(scenario, request, StrategyPolicy(engines=(deploy_engine(engine),)))
    assert options(fleet_deployment(plan, engine, model="org/model"))


def sizes_of(engine: str, found: dict[str, str | None], files: Mapping[str, str]) -> tuple[int, int]:
    """Number of GPUs and of stages that an engine starts with these options."""

    def size(flag: str) -> int:
        return int(found.get(flag) or 1)

    if engine == "vllm":
        stages = size("--pipeline-parallel-size")
        others = ("--tensor-parallel-size", "--prefill-context-parallel-size", "--data-parallel-size")
        return math.prod(map(size, others)) * stages, stages
    if engine == "sglang":
        return size("--tp-size") * size("--pp-size") * size("--dp-size"), size("--pp-size")
    return size("--tp_size") * size("--pp_size"), size("--pp_size")


def test_uneven_pieces_are_sglangs() -> None:
    scenario, _ = make_scenario(ctx="16k", gpus=8, **LLAMA)
    uneven = replace(get_strategy("tp2+pp-s"), stage_layers=(20, 20, 20, 20))
    candidate = Candidate.of(execution_of(scenario, uneven), (6000, 5000, 4000, 1384))
    deployment = deployment_of(candidate, "sglang", model="org/model")
    result = options(deployment)
    assert (result["--tp-size"], result["--pp-size"]) == ("2", "4")
    assert "--enable-dynamic-chunking" in result
    assert result["--chunked-prefill-size"] == str(47 * 128)  # a multiple of every page size
    assert any("6000, 5000, 4000, 1384" in note for note in deployment.notes)
    with pytest.raises(InputError, match=r"not tp2\+pp-s .*which sglang 0.5.23 has; here it has single"):
        deployment_of(candidate, "vllm", model="org/model")


def test_types_and_experts() -> None:
    assert options(launched("vllm", "tp", **LLAMA, dtype="fp8"))["--quantization"] == "fp8"
    assert options(launched("sglang", "tp", **LLAMA, dtype="fp16"))["--dtype"] == "auto"
    assert "--enable-expert-parallel" in options(launched("vllm", "tp+ep", **MIXTURE))
    assert options(launched("sglang", "tp", **MIXTURE, expert_parallel=True))["--ep-size"] == "8"
    result = options(launched("sglang", "tp4+cp2+edp2", **MIXTURE))
    assert [result[flag] for flag in ("--tp-size", "--attn-cp-size", "--moe-dp-size")] == ["8", "2", "2"]
    result = options(launched("sglang", "cp8+ep8", **LATENT))
    assert [result[flag] for flag in ("--attn-cp-size", "--ep-size", "--moe-a2a-backend")] == ["8", "8", "deepep"]
    result = options(launched("sglang", "dp8+ep8", **LATENT))
    assert [result[flag] for flag in ("--tp-size", "--attn-dp-size", "--ep-size")] == ["8", "8", "8"]
    assert "enable_attention_dp: true" in launched("trtllm", "dp8+ep8", **LATENT).files["trtllm.yaml"]


def test_data_groups_on_several_nodes_exchange_tokens_by_all_to_all() -> None:
    """As they are simulated: inside a node, engines gather all tokens, which is their default."""
    two_nodes = LATENT | {"cluster": "2x8xh200", "gpus": 16}
    result = options(launched("sglang", "dp16+ep16", **two_nodes))
    assert result["--moe-a2a-backend"] == "deepep"
    deployment = launched("vllm", "dp16+ep16", **two_nodes)
    assert options(deployment)["--all2all-backend"] == "deepep_high_throughput"
    assert any("DeepEP" in note for note in deployment.notes)
    assert "--all2all-backend" not in options(launched("vllm", "dp8+ep8", **LATENT))


def test_lengths_end_where_the_positions_do() -> None:
    """The model's positions limit the length of a sequence; longer prompts and plans that do not fit are refused."""
    assert options(launched("vllm", "tp", **LLAMA, ctx="128k"))["--max-model-len"] == "131072"
    assert options(launched("vllm", "tp", **LLAMA, ctx="64k"))["--max-model-len"] == "65537"
    with pytest.raises(InputError, match="at most 8192 tokens"):
        launched("vllm", "tp", model="llama-3-70b", cluster="h100-nvlink", ctx="16k")
    with pytest.raises(InputError, match="a plan that fits: tp needs"):
        launched("vllm", "tp", model="deepseek-v3", cluster="h100-nvlink", ctx="16k")


def test_sglang_binds_sizes_of_latents() -> None:
    """In SGLang, context ranks of latent attention need ep over all GPUs, and interleaving needs sparse attention."""
    latent, sparse = (make_scenario(ctx="16k", gpus=8, cluster="h200-nvlink", model=model)[0] for model in DEEPSEEK)
    sglang = deploy_engine("sglang")
    has = {
        name: [sglang.has(execution_of(scenario, get_strategy(name))) for scenario in (latent, sparse)]
        for name in CONTEXT
    }
    assert has == {
        "cp8+ep8": [True, False],
        "cp8": [False, False],
        "tp2+cp4+ep8": [False, False],
        "cp8-i": [False, True],
    }


def test_what_no_engine_has() -> None:
    dense, _ = make_scenario(ctx="4k", gpus=8, model="llama-3.1-8b", cluster="h100-nvlink")
    executions = {name: execution_of(dense, strategy) for name, strategy in STRATEGIES.items()}
    launched_by_some = {name for name, execution in executions.items() if engines_with(execution)}
    assert launched_by_some == {"single", "tp", "pp", "pp-s"}
    latent, _ = make_scenario(ctx="4k", gpus=8, model="deepseek-v3", cluster="b200-nvlink5")
    assert list(engines_with(execution_of(latent, get_strategy("zigzag+ep")))) == ["vllm", "sglang"]
    assert list(engines_with(execution_of(latent, get_strategy("tp4+cp2+ep8")))) == ["vllm"]
    staged = execution_of(latent, get_strategy("tp2+pp2+cp2+ep4"))
    assert "vllm" not in engines_with(staged), "its manager of context ranks refuses a pipeline"
    mixture, _ = make_scenario(ctx="4k", gpus=8, model="qwen3-235b-a22b", cluster="h100-nvlink")
    assert list(engines_with(execution_of(mixture, get_strategy("tp2+pp2+cp2")))) == ["sglang"]
    with pytest.raises(InputError, match=r"^emit: got 'vllm'.*not kvr-s .* no engine .* has; here it has single"):
        launched("vllm", "kvr-s", model="llama-3-8b")
    scenario, _ = make_scenario(ctx="4k", gpus=4)
    only = ForEngine("trtllm", only=True)
    with pytest.raises(
        InputError, match=r"^strategies: got 'kvr-s,ring', accepted: what trtllm .* has here: single, tp"
    ):
        strategies_to_compare(scenario, ("kvr-s", "ring"), engine=only)
    assert [one.name for one in strategies_to_compare(scenario, ("kvr-s", "tp"), engine=only).strategies] == ["tp"]


def run(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> tuple[str, str]:
    ask: Sequence[str] = ("plan", "--gpus", "4", "--ctx", "8k", "--model", "llama-3-8b", "--cluster", "h100-nvlink")
    ask = (*ask, "--search-budget", "0.1s")
    assert cli.main([*ask, *arguments]) == code
    out, err = capsys.readouterr()
    return out, err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--emit", "sglang", "--strategies", "kvr-s,tp,pp")
    out, err = run(capsys, 0, *few, "--json")
    content = json.loads(out)
    assert {"engine", "version", "args", "files", "notes"} <= set(content)
    assert (content["engine"], content["version"]) == ("sglang", "0.5.23")
    out, err = run(capsys, 0, *few)
    assert out.splitlines()[0] == content["command"]
    assert err.startswith("kvrsim: note: ")
    assert "places the cached prefix" not in err
    _, err = run(capsys, 0, *few, "--cached-prefix", "2k", "--prefix-placement", "host:20GB/s")
    assert "no flag here places the cached prefix (host:20GB/s)" in err
    out, _ = run(capsys, 0, "--only-deployable", "trtllm", "--json")
    assert {one["strategy"] for one in json.loads(out)["strategies"]} == {"single", "tp", "pp", "tp2+pp", "tp4+pp1"}
