"""Launches of the fork of vLLM with KV-Runahead: its configuration's rules, weights for a range, and refusals."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import ttft_s
from kvrsim.noise import parse_noise
from kvrsim.strategies import get_strategy
from kvrsim.units import parse_range
from planner.runahead import RunaheadLaunch, build, cut, cut_in_blocks, runahead_launch

TRANSPORTS = {"full_kv_collective", "prefix_p2p", "direct_p2p", "page_pull"}


def broken_rules(additional_config: Any, ranks: int) -> list[str]:
    """The rules of the fork's parser (vllm/config/pcp_runahead.py) that a configuration breaks."""
    raw = additional_config["pcp_runahead"]
    partition = raw.get("partition", {})
    weights = partition.get("weights", [])
    owners = list(range(ranks))
    if "segments" in partition:
        weights = [segment.get("weight", 1.0) for segment in partition["segments"]]
        owners = [segment["pcp_rank"] for segment in partition["segments"]]
    rules = {
        "only these keys": set(raw) <= {"transport", "partition", "runtime"},
        "a known transport": raw.get("transport", "prefix_p2p") in TRANSPORTS,
        "weights or segments": set(partition) in ({"weights"}, {"segments"}),
        "a weight per rank": len(weights) == ranks,
        "positive weights": all(isinstance(one, float) and math.isfinite(one) and one > 0 for one in weights),
        "each rank owns a segment": set(owners) == set(range(ranks)),
        "one segment per rank but with page_pull": sorted(owners) == list(range(ranks)),
        "segments have two keys": all(set(one) <= {"weight", "pcp_rank"} for one in partition.get("segments", [])),
    }
    return [rule for rule, holds in rules.items() if not holds]


def launch(contexts: str = "4k:32k", *, gpus: int = 4, noise: str = "", **question: Any) -> RunaheadLaunch:
    strategies = question.pop("strategies", None)
    fields = {"model": "llama-3.1-8b", "cluster": "h100-nvlink"} | question
    scenario, _ = make_scenario(ctx="32k", gpus=gpus, **fields)
    disturbance = parse_noise(noise) if noise else None
    return runahead_launch(scenario, parse_range(contexts, "ctx"), strategies=strategies, noise=disturbance, model="m")


@pytest.mark.parametrize("strategy", ["tsp", "kvr-e", "kvr-s", "kvr-direct"])
@pytest.mark.parametrize("noise", ["", "slow-gpu:1x1.4"])
def test_the_configuration_keeps_the_rules_of_the_forks_parser(strategy: str, noise: str) -> None:
    result = launch("8k", strategies=[strategy], noise=noise)
    option, text = result.args
    assert option == "--additional-config"
    assert broken_rules(json.loads(text), 4) == []
    words = shlex.split(result.command)
    assert words[words.index(option) + 1] == text
    assert int(words[words.index("--prefill-context-parallel-size") + 1]) == 4
    assert int(words[words.index("--max-num-batched-tokens") + 1]) >= 8192, "a prompt is one step"
    assert set(build()["flags"]) <= set(words)


def test_the_rules_see_a_wrong_configuration() -> None:
    good = launch("8k", strategies=["kvr-s"]).config
    for change in (
        {"transport": "ring"},
        {"partition": {"weights": [1.0, 1.0, 1.0]}},
        {"partition": {"weights": [1.0, 0.0, 1.0, 1.0]}},
        {"partition": {"segments": [{"weight": 1.0, "pcp_rank": rank} for rank in (0, 1, 2, 2)]}},
        {"chunks": 4},
    ):
        assert broken_rules({"pcp_runahead": good["pcp_runahead"] | change}, 4)


@given(weights=st.lists(st.floats(0.1, 100), min_size=2, max_size=9), tokens=st.integers(9, 10**6))
def test_the_cut_is_that_of_largest_remainders(weights: list[float], tokens: int) -> None:
    total = sum(weights)
    ideal = [tokens * weight / total for weight in weights]
    chunks = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (chunks[rank] - ideal[rank], rank))
    for rank in by_remainder[: tokens - sum(chunks)]:
        chunks[rank] += 1
    result = cut(np.array([weights]), tokens)[0]
    assert result.sum() == tokens
    assert np.all(np.abs(result - np.array(ideal)) < 1 + 1e-6)
    assert result.tolist() == chunks or np.min(np.abs(np.array(ideal) - np.rint(ideal))) < 1e-6  # rounding errors


def test_weights_of_one_context_are_the_best_ones_at_ends_of_blocks() -> None:
    result = launch("32k", strategies=["kvr-s"])
    (row,) = result.regret
    assert row.ratio < 1.003
    assert all(tokens % 16 == 0 for tokens in row.partition)
    assert row.partition[0] > 1.3 * row.partition[-1]


def test_weights_of_a_range_lose_less_than_those_of_any_of_its_contexts() -> None:
    result = launch("4k:32k", strategies=["kvr-s"])
    assert [row.ctx for row in result.regret] == [4096, 8192, 16384, 32768]
    worst = max(row.ratio for row in result.regret)
    assert worst > 1.0
    for length in (4096, 32768):
        scenario, _ = make_scenario(ctx=length, gpus=4, model="llama-3.1-8b", cluster="h100-nvlink")
        alone = runahead_launch(scenario, parse_range(str(length), "ctx"), strategies=["kvr-s"], model="m")
        ratios = []
        for row in result.regret:
            other, _ = make_scenario(ctx=row.ctx, gpus=4, model="llama-3.1-8b", cluster="h100-nvlink")
            execution = execution_of(other, get_strategy("kvr-s"))
            seconds = float(ttft_s(execution, cut(np.array([alone.weights], dtype=float), row.ctx))[0])
            ratios.append(seconds / row.best_ttft_s)
        assert worst <= max(ratios) + 1e-9


def test_a_slow_gpu_gets_a_smaller_chunk_and_the_best_place() -> None:
    even = launch("16k", strategies=["kvr-s"])
    slow = launch("16k", strategies=["kvr-s"], noise="slow-gpu:1x1.5")
    place = slow.ranks.index(1)
    assert sorted(slow.ranks) == [0, 1, 2, 3]
    assert slow.weights[place] < even.weights[place]
    kept = launch("16k", strategies=["kvr-s"], noise="slow-gpu:3x1.5")
    assert kept.regret[0].ttft_s == pytest.approx(slow.regret[0].ttft_s), "which GPU is slow does not matter"


def test_steps_of_the_chunked_transport() -> None:
    result = launch("32k", strategies=["kvr-direct"])
    assert [pull.chunk_tokens for pull in result.page_pull] == [8192, 16384]
    smaller, larger = result.page_pull
    assert smaller.ttft_s > larger.ttft_s > result.regret[0].ttft_s, "a step has fewer tokens to balance"
    chunks = cut_in_blocks(result.weights, 8192)
    later = 3 * sum(chunks[1:])  # the pages of three steps that the first GPU lacks
    scenario, _ = make_scenario(ctx="32k", gpus=4, model="llama-3.1-8b", cluster="h100-nvlink")
    assert smaller.history_bytes == pytest.approx(later * scenario.model.kv_bytes_per_token(2))
    assert all(tokens % 16 == 0 for tokens in chunks)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"strategies": ["tp2+kvr-s"]}, "strategies.*TP = 1"),
        ({"strategies": ["pp"]}, "strategies.*PP = 1"),
        ({"strategies": ["zigzag"]}, "strategies.*no such transport"),
        ({"cached_prefix": 1024}, "cached_prefix.*no prefix cache"),
        ({"model": "qwen3-30b-a3b", "expert_parallel": True}, "expert_parallel.*EP is off"),
        ({"model": "llama-3.1-405b"}, "ctx.*all weights on each GPU"),
        ({"noise": "jitter:0.1"}, "noise.*slow-gpu"),
        ({"engine": "sglang"}, "emit.*sglang"),
        ({"gpus": 1}, "gpus.*at least 2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_build_cannot_run_is_refused_with_the_reason(question: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        launch("32k", **question)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "llama-3.1-8b", "4xh100", "--ctx", "4k:8k", "--emit", "vllm-runahead"]
    assert cli.main([*ask, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["args"][0] == "--additional-config"
    assert [(row["ctx"], row["ratio"] >= 1) for row in content["regret"]] == [(4096, True), (8192, True)]
    assert cli.main([*ask, "--strategies", "kvr-s"]) == 0
    output, errors = capsys.readouterr()
    assert output.startswith("vllm serve llama-3.1-8b --prefill-context-parallel-size 4 ")
    assert "--enforce-eager" in errors
    assert cli.main(ask[:-2]) == 2, "a range needs --emit vllm-runahead"
    assert "kvrsim map --ctx takes several" in capsys.readouterr().err
    assert cli.main([*ask, "--slo", "1s"]) == 2
