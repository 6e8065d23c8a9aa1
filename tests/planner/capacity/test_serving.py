"""The queue of steps equals SimPy step by step, and theory; steps take as long as the model of time says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.model.load import load_model
from kvrsim.scenario import Partition
from kvrsim.strategies import get_strategy
from planner.capacity.serving import LateLimit, StepRequests, StepRun, run_steps
from planner.capacity.steps import StepTimes, usual_cache
from planner.capacity.times import StrategyPolicy
from planner.capacity.transfer import Transfer
from planner.decode import decoding_rank, step_s
from tests.building import examples
from validate.statements.simpy_steps import SimpySteps

LARGE = {"model": "llama-3.1-70b", "cluster": "h100-nvlink", "profile": "h100-flash"}
REQUESTS = "synthetic:poisson,rate=4,requests=300,context=lognormal:1k:0.5,max=4k,output=lognormal:150:0.5"
MOST = 5  # sequences of a made group


def made_times(**more: Any) -> StepTimes:
    """Times in exact binary fractions, which grow with tokens, sequences and keys."""
    fields = {
        **{"strategy": "single", "budget": 8, "most_sequences": MOST, "room_bytes": 40.0},
        **{"request_s": 0.0, "token_s": 0.0, "host_s": 0.0, "prefixes": (0, 1, 256)},
        "tokens_s": [0.0, *((8 + tokens) / 64 for tokens in range(1, 9))],
        "head_s": [number / 128 for number in range(MOST + 1)],
        "decode_s": [(4 + number) / 64 for number in range(MOST + 1)],
        "key_s": [1 / 1024] * (MOST + 1),
        "attention_s": [[tokens * (1 + prefix) / 4096 for tokens in range(9)] for prefix in (0, 1, 256)],
    }
    return StepTimes(**fields | more)


@st.composite
def made_requests(draw: st.DrawFn) -> StepRequests:
    count = draw(st.integers(1, 25))

    def column(low: int, high: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype=np.int64)

    gaps = column(1, draw(st.sampled_from([20, 400])))  # no two arrivals at a time
    new = column(0, 20)
    return StepRequests(
        arrival_s=np.cumsum(gaps) / 256 + 1 / 7919,  # no arrival at the end of a step
        new_tokens=new,
        cached_prefix=column(0, 9),
        decode_steps=np.maximum(column(0, 12), new == 0),
        cache_bytes=column(1, 30).astype(float),
    )


@examples(150)
@given(requests=made_requests(), replicas=st.integers(1, 3))
def test_every_request_takes_as_long_as_in_simpy(requests: StepRequests, replicas: int) -> None:
    times = made_times()
    run, reference = run_steps(requests, times, replicas), SimpySteps(requests, times, replicas).run()
    for name in ("begin_s", "first_s", "last_s", "group"):
        assert getattr(run, name) == pytest.approx(getattr(reference, name), rel=1e-9), name
    assert run.busy_s == pytest.approx(reference.busy_s)
    assert np.isfinite(run.last_s).all()
    assert (run.first_s <= run.last_s).all()


@examples(40)
@given(requests=made_requests(), allowed=st.integers(0, 5))
def test_a_run_that_ends_early_has_too_many_late_requests(requests: StepRequests, allowed: int) -> None:
    limit = LateLimit(ttft_s=0.5, tpot_s=0.1, allowed=allowed)

    def late(run: StepRun) -> tuple[int, int]:
        slow = ~(run.tpot_s(requests) <= limit.tpot_s)
        return int((run.first_s - requests.arrival_s > limit.ttft_s).sum()), int(slow.sum())

    whole, limited = late(run_steps(requests, made_times(), 1)), late(run_steps(requests, made_times(), 1, limit=limit))
    assert (max(limited) > allowed) == (max(whole) > allowed)
    if max(whole) <= allowed:
        assert limited == whole


def test_one_prompt_per_step_waits_as_in_an_m_d_1_queue() -> None:
    rng = np.random.default_rng(5)
    count = 40_000
    times = made_times(most_sequences=1)
    service_s = float(times.alone_s(np.array([8]), np.array([0]))[0])
    requests = StepRequests(
        arrival_s=np.cumsum(rng.exponential(2 * service_s, count)),  # a load of 0.5
        new_tokens=np.full(count, 8),
        cached_prefix=np.zeros(count, dtype=np.int64),
        decode_steps=np.zeros(count, dtype=np.int64),
        cache_bytes=np.ones(count),
    )
    wait_s = float((run_steps(requests, times, 1).begin_s - requests.arrival_s).mean())
    assert wait_s == pytest.approx(service_s / 2, rel=0.06)


def test_closed_loop_users_are_never_more_than_their_number() -> None:
    count = 60
    requests = StepRequests(
        arrival_s=np.zeros(count),
        new_tokens=np.full(count, 6),
        cached_prefix=np.zeros(count, dtype=np.int64),
        decode_steps=np.full(count, 4),
        cache_bytes=np.ones(count),
    )
    run = run_steps(requests, made_times(), 1, users=3)
    assert run.most_at_once() == 3
    assert np.isfinite(run.last_s).all()


@pytest.mark.parametrize(("name", "gpus", "engine"), [("single", 1, "none"), ("tp", 2, "vllm")])
def test_a_step_takes_as_long_as_the_same_work_in_a_simulation(name: str, gpus: int, engine: str) -> None:
    scenario, _ = make_scenario(ctx=4096, gpus=gpus, model="llama-3-8b", cluster="h100-nvlink", engine=engine)
    for new, cached in ((2500, 500), (40, 9000)):
        request = replace(scenario.request, context_len=new + cached, cached_prefix=cached)
        asked = place(replace(scenario, request=request), get_strategy(name))
        times = StepTimes.of(asked, 4096, 32768)
        ttft_s = run_partition(asked, Partition.even(new, 1)).ttft_s
        alone_s = float(times.alone_s(np.array([new]), np.array([cached]))[0])
        assert alone_s == pytest.approx(ttft_s, rel=0.015)
    rank = decoding_rank(scenario, gpus)
    for batch, context in ((1, 500), (24, 9000), (200, 2000)):
        assert times.decoding_s(1, batch, batch * context) == pytest.approx(step_s(rank, batch, context), rel=0.01)
    steps = times.steps_in(0.5, 24, 24 * 3000)
    assert times.decoding_s(steps - 1, 24, 24 * 3000) < 0.5 <= times.decoding_s(steps, 24, 24 * 3000)


@pytest.mark.parametrize("model", ["mistral-7b", "gpt-oss-20b"])
def test_steps_of_sequences_with_windows(model: str) -> None:
    """Windows limit what attention reads: steps around the usual length of a cache take as long as steps in full."""
    scenario, _ = make_scenario(ctx=4096, gpus=1, model=model, cluster="h100-nvlink", engine="vllm")
    rank = decoding_rank(scenario, 1)
    context_len = np.array([1000, 9000, 14000])
    usual = usual_cache(context_len, np.array([500, 200, 300]))
    assert usual == 8192
    times = StepTimes.of(place(scenario, get_strategy("single")), 512, 32768, usual)
    for batch in (1, 64):
        for keys in (usual // 2, usual, 2 * usual):
            assert times.decoding_s(1, batch, batch * keys) == pytest.approx(step_s(rank, batch, keys), rel=0.03)


def test_what_cannot_share_steps_is_refused() -> None:
    for name in ("kvr-e", "pp2+cp2", "pp"):
        with pytest.raises(InputError, match=r"^strategies"):
            StrategyPolicy(names=(name,), packs=True)
    scenario, _ = make_scenario(ctx=4096, gpus=2, model="llama-3-8b", cluster="h100-nvlink", engine="lmdeploy-0.1")
    with pytest.raises(InputError, match="engine"):
        StepTimes.of(place(scenario, get_strategy("tp")), 4096, 4096)


def test_a_cache_leaves_behind_the_prefill() -> None:
    model = load_model("llama-3.1-70b")
    transfer = Transfer(model=model, bytes_per_s=10e9, element_bytes=2)
    lengths, ttft_s = np.array([1000, 1000, 1000]), np.array([10.0, 0.001, np.inf])
    assert transfer.nbytes(lengths) == pytest.approx(model.cache_bytes(1000, 2))
    whole_s = model.cache_bytes(1000, 2) / 20e9
    after_s = transfer.after_s(lengths, ttft_s, np.full(3, 2))
    assert after_s == pytest.approx([whole_s / 80, whole_s + 0.001 / 80 - 0.001, whole_s])


def test_a_model_of_70b_is_served_on_the_same_gpus_or_on_two_fleets() -> None:
    options: dict[str, Any] = {"requests": REQUESTS, "slo_ttft": "1s", "replications": 1, "group_sizes": "4", **LARGE}
    plan = kvrsim.capacity(**options, tpot="50ms", strategies=["tp"], price_per_gpu_hour=2.0)
    content = json.loads(json.dumps(plan.to_dict()))
    fleets = [content["answer"], *content["alternatives"]]
    assert {fleet["serving"] for fleet in fleets} == {"split", "colocated"}
    for fleet in fleets:
        assert 0 < fleet["p50_tpot_s"] <= fleet["target_tpot_s"] <= 0.05
        assert fleet["target_ttft_s"] <= 1.0
        assert (fleet["decode"] is not None) == (fleet["serving"] == "split")
        assert fleet["total_cost_per_hour"] == pytest.approx(2.0 * fleet["total_gpus"])
    split = next(fleet for fleet in fleets if fleet["serving"] == "split")
    assert 0 < split["p50_kv_transfer_s"] <= split["p99_kv_transfer_s"] < 0.01
    assert content["kv_transfer"]["bytes_per_s_a_gpu"] == 50e9  # counted without being asked for
    assert content["answer"]["total_gpus"] == min(fleet["total_gpus"] for fleet in fleets)
    together = kvrsim.capacity(**options, tpot="50ms", colocated=True)
    assert together.answer is not None
    assert together.answer.total_gpus == min(f["total_gpus"] for f in fleets if f["serving"] == "colocated")


def test_a_tpot_that_no_group_keeps_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = f"capacity llama-7b a100-nvlink --requests {REQUESTS} --slo-ttft 5s --replications 1 --group-sizes 2"
    assert cli.main([*options.split(), "--strategies", "tp", "--tpot", "10us"]) == 1
    assert "no group decodes at 0.01 ms per token" in capsys.readouterr().out
