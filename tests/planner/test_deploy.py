"""Launches: the engine documents every flag, each value has the right type and agrees with the plan."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.candidates import ForEngine, Search, partition_of, strategies_to_compare
from planner.capacity.launch import launch_of_fleet
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.capacity.times import StrategyPolicy
from planner.deploy import Launch, launch_of, output_room
from planner.deploy_engines import deploy_engine, engines_with
from tests.building.flags import options, read_flags
from validate.engine_flags import launches

LLAMA = {"model": "llama-3.1-70b", "cluster": "h100-nvlink"}
MIXTURE = {"model": "qwen3-235b-a22b", "cluster": "h200-nvlink"}
LATENT = {"model": "deepseek-v3", "cluster": "h200-nvlink"}
DEEPSEEK = ("deepseek-v3", "deepseek-v3.2")
CONTEXT = ("cp8+ep8", "cp8", "tp2+cp4+ep8", "cp8-i")


def launched(engine: str, strategy: str, **question: Any) -> Launch:
    scenario, _ = make_scenario(**{"ctx": "16k", "gpus": 8} | question)
    from kvrsim.compile import for_strategy

    chosen = get_strategy(strategy)
    cut = partition_of(for_strategy(scenario, chosen), chosen)
    return launch_of(scenario, engine, strategy, cut.chunk_lens, model="org/model")


@pytest.mark.slow
@pytest.mark.parametrize("engine", DEPLOY_ENGINES)
def test_flags_are_documented_and_say_the_layout(engine: str) -> None:
    """Every flag is documented and its value has the right type; sizes are those of the plan."""
    listed = list(launches(engine))
    for what, launch, layout in listed:
        expected = {"trtllm.yaml"} if engine == "trtllm" else {"node.sh"} if "--nnodes" in launch.args else set()
        assert set(launch.files) == expected
        assert sizes_of(engine, options(launch), launch.files) == (layout.num_gpus, layout.pipeline), what
    assert len(listed) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("engine", DEPLOY_ENGINES)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
def test_flags_of_fleets_are_documented(engine: str, model: str) -> None:
    traffic = "synthetic:poisson,rate=4,requests=300,context=lognormal:1k:1,max=16k,output=lognormal:150:0.5"
    scenario, _ = make_scenario(ctx=1, gpus=1, model=model, cluster="h100-nvlink")
    request = make_request(FleetArgs(requests=traffic, slo_ttft="2s", tpot="50ms", replications=1), scenario)
    plan = plan_capacity(scenario, request, StrategyPolicy(engines=(deploy_engine(engine),)))
    assert options(launch_of_fleet(plan, engine, model="org/model"))


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
    uneven, pieces = get_strategy("tp2+pp-s"), (6000, 5000, 4000, 1384)
    launch = launch_of(scenario, "sglang", uneven, pieces, model="org/model", layers=(20, 20, 20, 20))
    result = options(launch)
    assert (result["--tp-size"], result["--pp-size"]) == ("2", "4")
    assert "--enable-dynamic-chunking" in result
    assert result["--chunked-prefill-size"] == str(47 * 128)  # a multiple of every page size
    assert any("6000, 5000, 4000, 1384" in note for note in launch.notes)
    with pytest.raises(InputError, match=r"not tp2\+pp-s .*which sglang 0.5.23 has; here it has single"):
        launch_of(scenario, "vllm", uneven, pieces, model="org/model")


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


def test_lengths_end_where_the_positions_do() -> None:
    """The model's positions limit the length of a sequence; longer prompts and plans that do not fit are refused."""
    assert options(launched("vllm", "tp", **LLAMA, ctx="128k"))["--max-model-len"] == "131072"
    assert options(launched("vllm", "tp", **LLAMA, ctx="64k"))["--max-model-len"] == str(65536 + 1024)
    with pytest.raises(InputError, match="at most 8192 tokens"):
        launched("vllm", "tp", model="llama-3-70b", cluster="h100-nvlink", ctx="16k")
    with pytest.raises(InputError, match="a plan that fits: tp needs"):
        launched("vllm", "tp", model="deepseek-v3", cluster="h100-nvlink", ctx="16k")


def test_output_tokens_have_room_beside_the_plan() -> None:
    """The KV cache of the longest sequence fits; a plan that fills the memory has room for fewer output tokens."""
    scenario, _ = make_scenario(ctx="64k", gpus=1, model="llama-3.1-8b", cluster="h100-nvlink")
    planned = Search().candidate(scenario, get_strategy("single"))
    assert output_room(planned) == 1024
    for share in (1.0001, 1.0005, 1.001):  # of the memory that the plan needs
        fraction = share * planned.memory[0].total / scenario.memory_limit.gpu_memory_bytes
        tight = Search().candidate(replace(scenario, memory_fraction=fraction), get_strategy("single"))
        room = output_room(tight)
        assert 1 <= room < 1024
        (rank,) = tight.memory
        token_bytes = rank.kv_cache / 65536
        assert rank.total + room * token_bytes <= tight.per_rank.memory_limit.nbytes
        assert rank.total + (room + 1) * token_bytes > tight.per_rank.memory_limit.nbytes


FRACTION = {"sglang": "--mem-fraction-static", "trtllm": "--free_gpu_memory_fraction"}


@pytest.mark.parametrize("engine", FRACTION)
@pytest.mark.parametrize(
    ("strategy", "question"),
    [
        ("tp", LLAMA | {"ctx": "64k"}),
        ("tp2+pp", LLAMA | {"ctx": "13070"}),
        ("tp+ep", MIXTURE | {"ctx": "32k", "memory_fraction": 0.95}),
        ("tp", {"model": "deepseek-v3.2", "cluster": "h200-nvlink", "ctx": "128k"}),
    ],
    ids=str,
)
def test_memory_fractions_leave_room_for_activations(engine: str, strategy: str, question: dict[str, Any]) -> None:
    """What the engine allocates for the fraction holds the planned KV cache, and all is within --memory-fraction."""
    scenario, _ = make_scenario(**({"gpus": 8} | question))
    planned = Search().candidate(scenario, get_strategy(strategy))
    launch = launch_of(scenario, engine, planned.strategy, planned.partition.chunk_lens, model="org/model")
    fraction = float(options(launch)[FRACTION[engine]] or 0)
    total = scenario.cluster.gpu.memory_bytes
    slack = 1e-4 * total  # the fraction has four digits
    for rank in planned.memory:
        peak = max(rank.activations, rank.scores, rank.logits) + rank.gathered
        if engine == "sglang":
            cache = fraction * (total - rank.runtime) - rank.weights
        else:
            cache = fraction * (total - rank.runtime - rank.weights - peak)
        assert cache >= rank.kv_cache - slack
        assert rank.weights + cache + peak + rank.runtime <= scenario.memory_limit.nbytes + slack
    assert fraction < scenario.memory_fraction


def started(launch: Launch, folder: Path, rank: int) -> list[str]:
    """Arguments with which the script of a launch starts its engine on a node."""
    program = deploy_engine(launch.engine).launcher[0]
    stub = folder / program
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    script = folder / "node.sh"
    script.write_text(launch.files["node.sh"])
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NODE_RANK": str(rank), "MASTER_ADDR": "10.0.0.7"}
    done = subprocess.run(["sh", str(script)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


TWO_NODES = {"model": "llama-3.1-70b", "cluster": "2x8xh100", "gpus": 16}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_script_starts_each_node(engine: str, tmp_path: Path) -> None:
    """The first node gets the printed arguments with its address, the second its rank; without them nothing starts."""
    launch = launched(engine, "tp8+pp", **TWO_NODES)
    modules = list(deploy_engine(engine).launcher[1:])
    first = [word.replace("FIRST_NODE", "10.0.0.7") for word in launch.args]
    assert started(launch, tmp_path, 0) == [*modules, *first]
    found = read_flags(engine, started(launch, tmp_path, 1)[len(modules) :])
    assert found.pop("--node-rank") == "1"
    assert ("--headless" in found) == (engine == "vllm")
    found.pop("--headless", None)
    expected = read_flags(engine, first)
    assert expected.pop("--node-rank") == "0"
    assert found == expected
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            ["sh", str(tmp_path / "node.sh")], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True
        )


def test_mpi_starts_all_nodes_at_once() -> None:
    launch = launched("trtllm", "tp8+pp", **TWO_NODES)
    words = launch.command.split()
    assert words[:1] + words[words.index("-n") :][:4] == ["mpirun", "-n", "16", "-N", "8"]
    assert not any("NODE_RANK" in note for note in launch.notes)
    assert launched("trtllm", "tp", **LLAMA).command.startswith("trtllm-serve ")


def test_a_strategy_of_one_gpu_is_on_one_node() -> None:
    launch = launched("vllm", "single", **TWO_NODES | {"model": "llama-3.1-8b"})
    assert not launch.files
    assert "--nnodes" not in launch.args


def test_a_flag_that_is_not_the_planned_step_is_explained() -> None:
    scenario, _ = make_scenario(gpus=8, ctx=8 * 817, **LLAMA)
    launch = launch_of(scenario, "vllm", "tp4+pp", (817,) * 8, model="org/model")
    assert options(launch)["--max-num-batched-tokens"] == "896"
    assert [note for note in launch.notes if "817" in note and "896" in note]
    scenario, _ = make_scenario(gpus=8, ctx=8 * 896, **LLAMA)
    launch = launch_of(scenario, "vllm", "tp4+pp", (896,) * 8, model="org/model")
    assert not [note for note in launch.notes if "896" in note]


def test_sglang_binds_sizes_of_latents() -> None:
    """In SGLang, context ranks of latent attention need ep over all GPUs, and interleaving needs sparse attention."""
    latent, sparse = (make_scenario(ctx="16k", gpus=8, cluster="h200-nvlink", model=model)[0] for model in DEEPSEEK)
    sglang = deploy_engine("sglang")
    has = {name: [sglang.has(get_strategy(name), one) for one in (latent, sparse)] for name in CONTEXT}
    assert has == {
        "cp8+ep8": [True, False],
        "cp8": [False, False],
        "tp2+cp4+ep8": [False, False],
        "cp8-i": [False, True],
    }


def test_what_no_engine_has() -> None:
    dense, _ = make_scenario(ctx="4k", gpus=8, model="llama-3.1-8b", cluster="h100-nvlink")
    assert {name for name, one in STRATEGIES.items() if engines_with(one, dense)} == {"single", "tp", "pp", "pp-s"}
    latent, _ = make_scenario(ctx="4k", gpus=8, model="deepseek-v3", cluster="b200-nvlink5")
    assert list(engines_with(get_strategy("zigzag+ep"), latent)) == ["vllm", "sglang"]
    mixture, _ = make_scenario(ctx="4k", gpus=8, model="qwen3-235b-a22b", cluster="h100-nvlink")
    assert list(engines_with(get_strategy("tp2+pp2+cp2"), mixture)) == ["sglang"]
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
    assert cli.main([*ask, *arguments]) == code
    out, err = capsys.readouterr()
    return out, err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, 0, "--emit", "sglang", "--json")
    content = json.loads(out)
    assert {"engine", "version", "args", "files", "notes"} <= set(content)
    assert (content["engine"], content["version"]) == ("sglang", "0.5.23")
    out, err = run(capsys, 0, "--emit", "sglang")
    assert out.splitlines()[0] == content["command"]
    assert err.startswith("kvrsim: note: ")
    assert "places the cached prefix" not in err
    _, err = run(capsys, 0, "--emit", "sglang", "--cached-prefix", "2k", "--prefix-placement", "host:20GB/s")
    assert "no flag here places the cached prefix (host:20GB/s)" in err
    out, _ = run(capsys, 0, "--only-deployable", "trtllm", "--json")
    assert {one["strategy"] for one in json.loads(out)["strategies"]} == {"single", "tp", "pp", "tp2+pp", "tp4+pp1"}
