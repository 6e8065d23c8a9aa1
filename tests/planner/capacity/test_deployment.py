"""Launches of fleets: one server per kind of group with documented flags, and one for the decoding fleet."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvrsim.builder import make_scenario
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli import main as cli
from kvrsim.executors.access import execution_of
from kvrsim.strategies import get_strategy
from planner.capacity.times import StrategyPolicy
from planner.deploy_engines import deploy_engine
from tests.building.flags import read_flags

# Short prompts fit groups of one GPU; the few long prompts need groups of four.
ASK = ("--model", "llama-3.1-8b", "--cluster", "h100-nvlink", "--slo-ttft", "2s", "--group-sizes", "1,4")
CHEAP = ("--price-per-gpu-hour", "1=1,4=3", "--objective", "cost", "--strategies", "single,tp")
ROWS = [(0.01 * number, 48_000 if number % 100 == 0 else 700, 20) for number in range(400)]


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, code: int, *arguments: str) -> tuple[str, str]:
    trace = tmp_path / "trace.csv"
    lines = [f"{arrival_s:.3f},{context},{output}" for arrival_s, context, output in ROWS]
    trace.write_text("\n".join(["arrival_s,context_tokens,output_tokens", *lines, ""]))
    assert cli.main(["capacity", "--requests", str(trace), *ASK, *arguments]) == code
    return capsys.readouterr()


@pytest.mark.parametrize("engine", DEPLOY_ENGINES)
def test_a_server_for_each_kind_of_group(capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str) -> None:
    options = ("--percentile", "100", "--tpot", "50ms", *CHEAP, "--json")
    fleet = json.loads(run(capsys, tmp_path, 0, "--only-deployable", engine, *options)[0])
    content = json.loads(run(capsys, tmp_path, 0, "--emit", engine, *options)[0])
    assert (content["engine"], content["version"]) == (engine, deploy_engine(engine).version)
    groups = fleet["answer"]["groups"]
    assert [group["gpus_per_group"] for group in groups] == [1, 4]
    names = ["prefill-1", "prefill-2", "decode"]
    read: dict[str, dict[str, str | None]] = {}
    for name, group in zip(names, [*groups, fleet["decode_fleet"]], strict=True):
        _, about, command = content["files"][f"{name}.sh"].splitlines()
        assert about.startswith(f"# {group['replicas']} server")
        args = shlex.split(command.removeprefix("exec "))[len(deploy_engine(engine).launcher) :]
        read[name] = read_flags(engine, args)
        assert (f"{name}.yaml" in content["files"]) == (engine == "trtllm") == (f"{name}.yaml" in args)
    assert read["prefill-1"] == read_flags(engine, content["args"])
    steps, lengths, roles, sequences = {
        "vllm": ("--max-num-batched-tokens", "--max-model-len", "--kv-transfer-config", "--max-num-seqs"),
        "sglang": ("--chunked-prefill-size", "--context-length", "--disaggregation-mode", "--max-running-requests"),
        "trtllm": ("--max_num_tokens", "--max_seq_len", "--config", "--max_batch_size"),
    }[engine]
    longest, step = groups[0]["context_range"][1], int(read["prefill-1"][steps] or 0)
    assert longest <= step < longest + 256  # a step is a whole number of cache pages
    assert step < int(read["prefill-2"][steps] or 0)
    assert {int(one[lengths] or 0) for one in read.values()} == {48_020}
    assert all(roles in one for one in read.values())
    assert int(read["decode"][sequences] or 0) == fleet["decode_fleet"]["batch"]
    assert any(note.startswith("a router sends each prompt") for note in content["notes"])


def test_a_group_of_an_engine_runs_one_strategy() -> None:
    scenario, _ = make_scenario(ctx="8k", gpus=4, model="deepseek-v3", cluster="b200-nvlink5")
    engine = deploy_engine("vllm")
    layouts = StrategyPolicy(engines=(engine,)).layouts(scenario)
    assert {"tp", "pp", "tp2+pp", "zigzag", "tp2+zigzag"} <= set(layouts)
    assert all([one.name for one in strategies] == [name] for name, strategies in layouts.items())
    assert all(engine.has(execution_of(scenario, get_strategy(name))) for name in layouts)
    assert "single" not in layouts
    assert "kvr-s" not in StrategyPolicy(engines=(engine,)).left_out(scenario)


@pytest.mark.parametrize(
    ("requests", "options", "words"),
    [
        ("context=140000,max=1m", ("--emit", "vllm"), "--requests: got 'a prompt of 140000 tokens'"),
        ("context=1k", ("--emit", "vllm", "--engine", "sglang"), "--emit: got 'vllm', accepted: sglang"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    requests: str,
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr("planner.capacity.plan.plan_capacity", lambda *_, **__: pytest.fail("a search"))
    question = ("--requests", f"synthetic:poisson,rate=1,requests=20,{requests}", *ASK)
    assert cli.main(["capacity", *question, *options]) == 2
    assert words in capsys.readouterr().err


def test_outputs_beyond_the_last_position_do_not_prevent_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    requests = "synthetic:poisson,rate=0.2,requests=10,context=131000,output=500,max=128k"
    options = ("--slo-ttft", "100s", "--group-sizes", "4", "--replications", "1", "--emit", "vllm", "--json")
    assert cli.main(["capacity", "llama-3.1-8b", "h100-nvlink", "--requests", requests, *options]) == 0
    content = json.loads(capsys.readouterr().out)
    args = read_flags("vllm", content["args"])
    assert args["--max-model-len"] == "131072"
    assert any("131072 positions" in note for note in content["notes"])
