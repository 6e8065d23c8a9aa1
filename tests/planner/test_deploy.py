"""Launches: every flag is one that the engine documents, with a value of its kind, and says what the plan says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvrsim.builder import make_scenario
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.candidates import partition_of
from planner.deploy import Degrees, Launch, degrees_of, engines_with, launch_of, names_for, only_deployable
from tests.building.flags import options
from validate.engine_flags import QUESTIONS


def launched(engine: str, strategy: str, **question: Any) -> Launch:
    scenario, _ = make_scenario(**{"ctx": "16k", "gpus": 8} | question)
    from kvrsim.compile import for_strategy

    chosen = get_strategy(strategy)
    cut = partition_of(for_strategy(scenario, chosen), chosen)
    return launch_of(scenario, engine, strategy, cut.chunk_lens, model="org/model")


@pytest.mark.parametrize("engine", DEPLOY_ENGINES)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: "-".join(map(str, question.values())))
def test_flags_are_documented(engine: str, question: dict[str, Any]) -> None:
    scenario, _ = make_scenario(**{"ctx": "16k", "gpus": 8} | question)
    names = names_for(scenario, engine, "emit")
    assert "tp" in names
    for name in names:
        pieces = (8192, 8192 - scenario.request.cached_prefix) if "pp" in name else (1,) * 8
        launch = launch_of(scenario, engine, name, pieces, model="org/model")
        found = options(launch)
        degrees = degrees_of(name, scenario.num_gpus)
        assert degrees is not None
        sizes = [int(value) for flag, value in found.items() if value and flag.endswith(("-parallel-size", "p_size"))]
        sizes += [int(found[flag] or 1) for flag in ("--tp-size", "--pp-size") if flag in found]
        product = 1
        for size in sizes if engine != "trtllm" else sizes[:2]:
            product *= size
        assert product == (scenario.num_gpus if name != "single" else 1)
        assert set(launch.files) == ({"trtllm.yaml"} if engine == "trtllm" else set())
        assert launch.command.endswith("0.9") or "--nnodes" in found or engine == "trtllm"


def test_uneven_pieces_are_sglangs() -> None:
    scenario, _ = make_scenario(ctx="16k", gpus=8)
    uneven, pieces = replace(STRATEGIES["pp"], name="tp2+pp-s", title="searched pieces"), (6000, 5000, 4000, 1384)
    launch = launch_of(scenario, "sglang", uneven, pieces, model="org/model", layers=(9, 8, 8, 7))
    found = options(launch)
    assert (found["--tp-size"], found["--pp-size"]) == ("2", "4")
    assert "--enable-dynamic-chunking" in found
    assert found["--chunked-prefill-size"] == "6000"
    assert any("6000, 5000, 4000, 1384" in note for note in launch.notes)
    assert any("SGLANG_PP_LAYER_PARTITION=9,8,8,7" in note for note in launch.notes)
    with pytest.raises(InputError, match=r"not tp2\+pp-s, which sglang 0.5.23 has; here it has single"):
        launch_of(scenario, "vllm", uneven, pieces, model="org/model")


def test_types_and_experts() -> None:
    assert options(launched("vllm", "tp", **QUESTIONS[2]))["--quantization"] == "fp8"
    assert options(launched("sglang", "tp", **QUESTIONS[1]))["--dtype"] == "bfloat16"
    assert "--enable-expert-parallel" in options(launched("vllm", "tp", **QUESTIONS[3]))
    assert options(launched("sglang", "tp", **QUESTIONS[3]))["--ep-size"] == "8"
    found = options(launched("sglang", "tp2+zigzag", **QUESTIONS[3]))
    assert (found["--tp-size"], found["--attn-cp-size"], found["--cp-strategy"]) == ("8", "4", "zigzag")


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("single", Degrees()),
        ("tp", Degrees(tensor=8)),
        ("pp-s", Degrees(pipeline=8, uneven_pieces=True)),
        ("tp2+pp2+cp2", Degrees(tensor=2, pipeline=2, context=2)),
        ("tp4+zigzag", Degrees(tensor=4, context=2)),
        ("kvr-s", None),
    ],
)
def test_degrees(name: str, degrees: Degrees | None) -> None:
    assert degrees_of(name, 8) == degrees


def test_what_no_engine_has() -> None:
    dense, _ = make_scenario(ctx="4k", gpus=8, model="llama-3-8b", cluster="h100-nvlink")
    assert {name for name, one in STRATEGIES.items() if engines_with(one, dense)} == {"single", "tp", "pp", "pp-s"}
    latent, _ = make_scenario(ctx="4k", gpus=8, model="deepseek-v3", cluster="b200-nvlink5")
    assert list(engines_with(get_strategy("zigzag"), latent)) == ["vllm", "sglang"]
    mixture, _ = make_scenario(ctx="4k", gpus=8, model="qwen3-235b-a22b", cluster="h100-nvlink")
    assert list(engines_with(get_strategy("tp2+pp2+cp2"), mixture)) == ["sglang"]
    with pytest.raises(InputError, match=r"^emit: got 'vllm'.*not kvr-s, which no engine .* has; here it has single"):
        launched("vllm", "kvr-s", model="llama-3-8b")
    scenario, _ = make_scenario(ctx="4k", gpus=4)
    with pytest.raises(InputError, match=r"^strategies: got 'kvr-s,ring', accepted: what trtllm \(main"):
        only_deployable(scenario, "trtllm", ("kvr-s", "ring"), "only_deployable")
    assert only_deployable(scenario, "trtllm", ("kvr-s", "tp"), "only_deployable") == ("tp",)


def run(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> tuple[str, str]:
    ask: Sequence[str] = ("plan", "--gpus", "4", "--ctx", "8k", "--model", "llama-3-8b", "--cluster", "h100-nvlink")
    assert cli.main([*ask, *arguments]) == code
    out, err = capsys.readouterr()
    return out, err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, 0, "--emit", "sglang", "--json")
    told = json.loads(out)
    assert {"engine", "version", "args", "files", "notes"} <= set(told)
    assert (told["engine"], told["version"]) == ("sglang", "0.5.23")
    out, err = run(capsys, 0, "--emit", "sglang")
    assert out.splitlines()[0] == told["command"]
    assert err.startswith("kvrsim: note: ")
    assert "places the cached prefix" not in err
    _, err = run(capsys, 0, "--emit", "sglang", "--cached-prefix", "2k", "--prefix-placement", "host:20GB/s")
    assert "no flag here places the cached prefix (host:20GB/s)" in err
    out, _ = run(capsys, 0, "--only-deployable", "trtllm", "--json")
    assert {one["strategy"] for one in json.loads(out)["strategies"]} == {"single", "tp", "pp", "tp2+pp"}


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("--emit", "tgi"), "--emit: got 'tgi', accepted: one of vllm, sglang, trtllm"),
        (("--only-deployable", "vllm", "--strategies", "kvr-s"), "--strategies: got 'kvr-s', accepted: what vllm"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], start: str) -> None:
    out, err = run(capsys, 2, *arguments)
    assert out == ""
    assert err.startswith(f"kvrsim: error: {start}")
    assert len(err.splitlines()) == 1
