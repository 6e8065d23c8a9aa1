"""The decoding fleet, and transfers of the KV-cache to it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.cli import main as cli
from kvrsim.memory import RUNTIME_BYTES
from kvrsim.model.load import load_model
from kvrsim.scenario import Scenario
from planner.capacity.decode import DecodeFleet, Decoding, Sequences, Transfer, mean_context
from planner.capacity.fleet import FleetLimits
from planner.decode import decoding_rank, step_s

LARGE = {"model": "llama-3.1-70b", "cluster": "h100-nvlink", "profile": "h100-flash"}
REQUESTS = "synthetic:poisson,rate=4,requests=300,context=lognormal:1k:0.5,max=4k,output=lognormal:150:0.5"


def large() -> Scenario:
    return make_scenario(ctx=1, gpus=1, **LARGE)[0]  # type: ignore[arg-type]


def sequences(count: int, context: int = 1000, output: int = 101, every_s: float = 0.0) -> Sequences:
    return Sequences(
        first_token_s=every_s * np.arange(count, dtype=np.float64),
        context_len=np.full(count, context),
        output_tokens=np.full(count, output),
    )


def test_a_step_reads_weights_and_caches_once() -> None:
    per_rank = decoding_rank(large(), 4)
    bytes_per_s = per_rank.cluster.gpu.hbm_bytes_per_s
    alone, more, longer = step_s(per_rank, 1, 1000), step_s(per_rank, 64, 1000), step_s(per_rank, 64, 8000)
    weights_s = per_rank.share.weight_bytes(2) / bytes_per_s
    assert weights_s < alone < 3 * weights_s
    read_s = 64 * (per_rank.share.cache_bytes(8000, 2) - per_rank.share.cache_bytes(1000, 2)) / bytes_per_s
    assert read_s < longer - more < 2.5 * read_s
    assert more < 3 * alone  # 64 sequences share the weights


def test_the_batch_is_the_largest_within_memory_and_tpot() -> None:
    scenario = large()
    loose = Decoding(scenario, FleetLimits(sizes=(2, 4)), 0.2).fleet([sequences(2000)])
    tight = Decoding(scenario, FleetLimits(sizes=(4, 8)), 0.02).fleet([sequences(2000)])
    assert isinstance(loose, DecodeFleet)
    assert isinstance(tight, DecodeFleet)
    assert loose.limited_by == "memory"
    share = decoding_rank(scenario, loose.gpus_per_group).share
    fits = [
        share.weight_bytes(2) + batch * share.cache_bytes(loose.context_tokens, 2)
        for batch in (loose.batch, loose.batch + 1)
    ]
    assert fits[0] <= scenario.memory_limit.nbytes - RUNTIME_BYTES < fits[1]
    assert tight.limited_by == "tpot"
    per_rank = decoding_rank(scenario, tight.gpus_per_group)
    assert (
        step_s(per_rank, tight.batch, tight.context_tokens)
        <= 0.02
        < step_s(per_rank, tight.batch + 1, tight.context_tokens)
    )
    for fleet in (loose, tight):
        assert fleet.replicas * fleet.batch >= 2000 > (fleet.replicas - 1) * fleet.batch
        assert fleet.num_gpus == fleet.replicas * fleet.gpus_per_group
    assert tight.num_gpus >= loose.num_gpus


def test_a_cache_leaves_behind_the_prefill() -> None:
    model = load_model("llama-3.1-70b")
    transfer = Transfer(model=model, bytes_per_s=10e9, element_bytes=2)
    lengths, ttft_s = np.array([1000, 1000, 1000]), np.array([10.0, 0.001, np.inf])
    nbytes = transfer.nbytes(lengths)
    assert nbytes == pytest.approx(model.cache_bytes(1000, 2))
    whole_s = model.cache_bytes(1000, 2) / 20e9
    after_s = transfer.after_s(lengths, ttft_s, np.full(3, 2))
    assert after_s == pytest.approx([whole_s / 80, whole_s + 0.001 / 80 - 0.001, whole_s])


def test_a_model_of_70b_gets_both_fleets() -> None:
    options: dict[str, Any] = {"requests": REQUESTS, "slo_ttft": "1s", "replications": 1, "group_sizes": "2,4", **LARGE}
    plan = kvrsim.capacity(**options, tpot="50ms", kv_transfer_bandwidth="50GB/s", price_per_gpu_hour=2.0)
    assert plan.feasible
    assert plan.answer is not None
    assert all(group.weights != "whole" for group in plan.answer.groups)
    assert plan.decode_fleet is not None
    assert plan.decode_fleet.step_s <= plan.decode_fleet.tpot_s == 0.05
    assert plan.decode_fleet.cost_per_hour == 2.0 * plan.decode_fleet.num_gpus
    assert all(growth.decode_gpus >= plan.decode_fleet.num_gpus for growth in plan.growth)
    slow = kvrsim.capacity(**options, kv_transfer_bandwidth="100MB/s")
    assert slow.answer is None or slow.answer.num_gpus > plan.answer.num_gpus
    content = json.loads(json.dumps(plan.to_dict()))
    assert 0 < content["answer"]["p50_kv_transfer_s"] <= content["answer"]["p99_kv_transfer_s"] < 0.01
    assert content["kv_transfer"]["bytes_per_s_a_gpu"] == 50e9


def test_a_tpot_that_no_group_keeps_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = f"capacity llama-7b a100-nvlink --requests {REQUESTS} --slo-ttft 5s --replications 1 --group-sizes 2"
    assert cli.main([*options.split(), "--strategies", "tp", "--tpot", "10us"]) == 1
    assert "no group decodes at 0.01 ms per token" in capsys.readouterr().out


def test_sequences_at_once_and_their_mean_context() -> None:
    decoded = sequences(10, every_s=1.0)
    assert decoded.most_at_once(0.04) == 4  # 100 steps take 4 s: the fifth sequence begins when the first ends
    assert decoded.most_at_once(0.001) == 1
    assert mean_context([decoded]) == 1051
    never = Sequences(
        first_token_s=np.array([0.0, np.inf]), context_len=np.array([10, 10]), output_tokens=np.array([5, 5])
    )
    assert never.most_at_once(1.0) == 1
