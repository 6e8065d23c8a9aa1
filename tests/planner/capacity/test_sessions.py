"""Sessions: caches of groups against lists of blocks, and hit rates at the ends of the memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from planner.capacity.deployment import fleet_deployment
from planner.capacity.fleet import GroupType
from planner.capacity.prefixes import BLOCK_TOKENS, CacheTiers, PrefixTraffic, Turns
from planner.capacity.request import make_request
from planner.capacity.search import FleetSimulator
from planner.capacity.serving import StepRequests, StepRun, run_steps
from planner.capacity.sessions import Pace
from planner.capacity.steps import StepTimes
from planner.capacity.times import StrategyPolicy, service_times
from planner.capacity.workload import RequestSource, Workload
from tests.building import examples
from tests.planner.capacity.plain_caches import PlainCaches
from validate.statements.simpy_steps import SimpySteps

BUDGET = 1024
MOST = 4  # sequences of a made group


def made_times(room_tokens: float) -> StepTimes:
    """Times that grow with tokens, sequences and keys, on a group with room for so many tokens, of a byte each."""
    tokens = np.arange(BUDGET + 1)
    return StepTimes(
        strategy="single",
        budget=BUDGET,
        most_sequences=MOST,
        room_bytes=room_tokens,
        request_s=0.0,
        token_s=0.0,
        host_s=0.0,
        tokens_s=(np.where(tokens > 0, 8 + tokens / 64, 0) / 64).tolist(),
        head_s=[number / 128 for number in range(MOST + 1)],
        decode_s=[(4 + number) / 64 for number in range(MOST + 1)],
        key_s=[1 / 2**20] * (MOST + 1),
        prefixes=(0, 1, 2**16),
        attention_s=[(tokens * (1 + prefix) / 2**26).tolist() for prefix in (0, 1, 2**16)],
    )


def sessions_of(
    turns: list[list[tuple[int, int]]], gaps_s: list[float], think_s: float, tiers: CacheTiers, shared: int = 0
) -> StepRequests:
    """Sessions, each a list of turns (new tokens, answer); the first `shared` blocks of all sessions are equal."""
    rows: list[tuple[float, int, int, int, float]] = []
    blocks: list[list[int]] = []
    start_s = 1 / 7919
    for number, (gap_s, session) in enumerate(zip(gaps_s, turns, strict=True)):
        start_s += gap_s
        before = 0
        for turn, (new, answer) in enumerate(session):
            context = before + new
            reusable = before if turn else min(shared * BLOCK_TOKENS, context - 1)
            pause_s = think_s * (1 + number / 97 + turn / 1009)
            rows.append((start_s, context, reusable, answer, pause_s if turn else 0.0))
            before = context + answer
            count = -(-before // BLOCK_TOKENS)
            blocks.append([-1 - index if index < shared else 1000 * number + index for index in range(count)])
    arrival_s, context, reusable, answer, pause_s = (np.array(column) for column in zip(*rows, strict=True))
    numbers = np.repeat(np.arange(len(turns)), [len(session) for session in turns])
    return StepRequests(
        arrival_s=arrival_s,
        new_tokens=context - reusable,
        cached_prefix=reusable,
        decode_steps=answer - 1,
        cache_bytes=(context + answer).astype(float),
        prefixes=PrefixTraffic(
            turns=Turns(session=numbers, think_s=pause_s, reusable=reusable, blocks=blocks),
            tiers=tiers,
            token_bytes=1.0,
        ),
    )


TURN = st.tuples(st.integers(1, 1500), st.integers(1, 40))
TIERS = (
    CacheTiers(),
    CacheTiers(host_bytes=4096.0, host_bytes_per_s=3000.0),
    CacheTiers(remote_bytes_per_s=1500.0),
    CacheTiers(gpu=False, host_bytes=2048.0, host_bytes_per_s=5000.0, remote_bytes_per_s=1000.0),
)


@examples(120)
@given(
    turns=st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=8),
    gap_s=st.sampled_from([0.03, 1.1]),
    think_s=st.sampled_from([0.011, 0.7, 9.0]),  # no turn arrives at the end of a step
    room=st.sampled_from([6200.0, 7000.0, 20000.0]),
    tiers=st.sampled_from(TIERS),
    shared=st.integers(0, 2),
    replicas=st.integers(1, 3),
)
def test_every_turn_takes_as_long_as_in_simpy(
    turns: list[list[tuple[int, int]]],
    gap_s: float,
    think_s: float,
    room: float,
    tiers: CacheTiers,
    shared: int,
    replicas: int,
) -> None:
    gaps_s = [gap_s * (1 + number / 7) for number in range(len(turns))]
    requests = sessions_of(turns, gaps_s, think_s, tiers, shared)
    run = run_steps(requests, made_times(room), replicas)
    copy = replace(requests, new_tokens=requests.new_tokens.copy(), cached_prefix=requests.cached_prefix.copy())
    caches = PlainCaches(copy, room, replicas)
    reference = SimpySteps(copy, made_times(room), replicas, caches).run()
    for name in ("arrival_s", "begin_s", "first_s", "last_s", "group"):
        assert getattr(run, name) == pytest.approx(getattr(reference, name), rel=1e-9), name
    hits = np.stack(list(run.hits.values()), axis=1).tolist()
    assert hits == [caches.hits[request] for request in range(len(hits))]


def rate(run: StepRun, requests: StepRequests) -> float:
    """Share of the prompt tokens that are hits."""
    return float(sum(map(np.sum, run.hits.values())) / (requests.new_tokens + requests.cached_prefix).sum())


def many(tiers: CacheTiers, **more: Any) -> StepRequests:
    rng = np.random.default_rng(3)
    turns = [[(int(rng.integers(50, 900)), int(rng.integers(1, 60))) for _ in range(6)] for _ in range(20)]
    return sessions_of(turns, [20.0] * 20, 70.0, tiers, **more)


def test_no_memory_has_no_hits_and_unlimited_memory_all() -> None:
    nothing = many(CacheTiers(gpu=False))
    assert rate(run_steps(nothing, made_times(1e6), 1), nothing) == 0
    everything = many(CacheTiers())
    turns = everything.prefixes.turns
    context = everything.new_tokens + everything.cached_prefix
    for tiers in (CacheTiers(), CacheTiers(gpu=False, remote_bytes_per_s=1e9)):
        requests = many(tiers)
        for replicas in (1, 3):
            assert rate(run_steps(requests, made_times(1e9), replicas), requests) == pytest.approx(
                turns.reusable.sum() / context.sum()
            )


def test_more_memory_never_has_fewer_hits_on_one_group() -> None:
    """Turns come one at a time, so that all memories see the same order."""
    requests = many(CacheTiers())
    spaced = replace(
        requests, arrival_s=np.argsort(np.argsort(requests.arrival_s + 90 * turn_numbers(requests))) * 30.0
    )
    order = np.argsort(spaced.arrival_s)
    assert (np.diff(spaced.arrival_s[order]) == 30).all()
    rates = [rate(run_steps(spaced, made_times(room), 1), spaced) for room in (6e3, 8e3, 1e4, 15e3, 2e4, 4e4, 1e6)]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1]
    on_host = many(CacheTiers(host_bytes=1e6, host_bytes_per_s=1e4))
    run = run_steps(replace(on_host, arrival_s=spaced.arrival_s), made_times(6e3), 1)
    assert rate(run, on_host) == pytest.approx(rates[-1])
    assert run.hits["host"].sum() > 0


def turn_numbers(requests: StepRequests) -> np.ndarray[Any, np.dtype[np.int64]]:
    assert requests.prefixes is not None
    return requests.prefixes.turns.numbers()


def test_the_block_that_is_idle_longest_leaves_first() -> None:
    """Two sessions of 2 blocks on a group with room for 3 blocks beside none that run."""
    turns = [[(1000, 24), (100, 10)], [(1000, 24), (100, 10)]]
    requests = sessions_of(turns, [10.0, 10.0], 100.0, CacheTiers())
    run = run_steps(requests, made_times(3.5 * BLOCK_TOKENS), 1)
    # The first session has 2 blocks, and the second one takes 2: the last block of the first session leaves. When its
    # next turn begins, 1 block is left, and the turn takes so much memory that all blocks of the second session leave.
    assert run.hits["gpu"].tolist() == [0, BLOCK_TOKENS, 0, 0]


def test_a_session_stays_with_its_prefix_unless_the_group_is_much_busier() -> None:
    turns = [[(1200, 20)] * 4 for _ in range(6)]
    requests = sessions_of(turns, [5.0] * 6, 20.0, CacheTiers())
    run = run_steps(requests, made_times(1e5), 3)
    by_session = run.group.reshape(6, 4)
    assert (by_session == by_session[:, :1]).all()
    assert len(set(by_session[:, 0])) == 3


def test_a_turn_leaves_its_prefix_where_a_group_is_much_busier() -> None:
    """All sessions begin with the same block, and answers are long: requests follow the block, up to a limit."""
    turns = [[(600, 10)], *[[(600, 900)]] * 12]
    requests = sessions_of(turns, [5.0, *[0.3] * 12], 1.0, CacheTiers(), shared=1)
    run = run_steps(requests, made_times(1e5), 2)
    assert run.arrival_s is not None
    most = 0
    for request, group in enumerate(run.group.tolist()):
        before = run.group[:request][run.last_s[:request] > run.arrival_s[request]]
        in_flight = np.bincount(before, minlength=2).tolist()
        assert in_flight[group] <= 2 * min(in_flight) + 4
        most = max(most, in_flight[group] - in_flight[1 - group])
    assert most >= 1
    assert set(run.group.tolist()) == {0, 1}
    assert run.hits["gpu"].sum() >= 10 * BLOCK_TOKENS


def test_on_a_shorter_scale_of_time_users_think_faster() -> None:
    fleet = FleetArgs(requests=SYNTHETIC, think_time="8s", slo_ttft="1s", replications=1)
    scenario, _ = make_scenario(ctx=4096, gpus=1, model="llama-3.1-8b", cluster="h100-nvlink")
    request = make_request(fleet, scenario)
    workloads = request.workloads()
    times = service_times(scenario, workloads, StrategyPolicy(packs=True))
    simulator = FleetSimulator(request, workloads, times)
    group = GroupType(1, colocated=True)
    for other in (simulator.faster(2.0), simulator.slower(2.0)):
        (before,) = simulator.services(group)
        (after,) = other.services(group)
        assert before.prefixes is not None
        assert after.prefixes is not None
        assert set(before.prefixes.turns.think_s) == {0.0, 8.0}
        assert set(after.prefixes.turns.think_s) == {0.0, 4.0}


CSV = """session_id,turn,arrival_s,prompt_tokens,completion_tokens
a,2,9,1300,40
a,1,1,1000,100
b,1,2,500,10
a,3,,200,10
,,5,70,7
"""
WHOLE = ', "context_mode": "message_array_with_responses"}'
AIPERF = """{"session_id": "a", "timestamp": 1000, "input_length": 1000, "output_length": 100}
{"session_id": "a", "delay": 8000, "input_length": 200, "output_length": 40}
{"session_id": "b", "timestamp": 2000, "input_length": 500, "output_length": 10}
"""
TURNS = json.dumps(
    {
        "session_id": "a",
        "turns": [
            {"text": "x" * 4000, "timestamp": 1000, "output_length": 100},
            {"texts": ["x" * 400, "x" * 400], "delay": 8000, "output_length": 40},
        ],
    }
)
PACE = Pace.parse("3s", None)


def source(path: Path, text: str, pace: Pace = PACE) -> RequestSource:
    path.write_text(text)
    return RequestSource.of(str(path), pace=pace)


def rows(workload: Workload) -> list[tuple[float, int, int, int]]:
    """Arrival, prompt, tokens in an unlimited cache, and answer of each request."""
    columns = (workload.arrival_s, workload.context_len, workload.cached_prefix, workload.output_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_table_has_whole_prompts(tmp_path: Path) -> None:
    """The third turn of a has no time, and is shorter than the prompt before it; one request has no session."""
    workload = source(tmp_path / "trace.csv", CSV).workload(0)
    assert rows(workload) == [(0, 1000, 0, 100), (1, 500, 0, 10), (4, 70, 0, 7), (8, 1300, 1100, 40), (11, 200, 0, 10)]
    assert workload.turns is not None
    assert workload.turns.numbers().tolist() == [1, 1, 1, 2, 3]
    assert workload.turns.think_s.tolist() == [0, 0, 0, 0, 3]
    assert "1 prompts are shorter" in workload.notes[0]
    assert workload.summary()["sessions"] == 3


def test_turns_of_aiperf_add_to_those_before(tmp_path: Path) -> None:
    workload = source(tmp_path / "trace.jsonl", AIPERF).workload(0)
    assert rows(workload) == [(0, 1000, 0, 100), (1, 500, 0, 10), (8, 1300, 1100, 40)]
    assert workload.turns is not None
    assert workload.turns.think_s.tolist() == [0, 0, 8]
    in_one_line = source(tmp_path / "turns.jsonl", TURNS).workload(0)
    assert rows(in_one_line) == [(0, 1000, 0, 100), (8, 1300, 1100, 40)]
    assert "4 characters" in in_one_line.notes[0]
    whole = source(tmp_path / "whole.jsonl", AIPERF.replace("}", WHOLE)).workload(0)
    assert whole.context_len.tolist() == [1000, 500, 200]


def test_hashes_are_blocks_of_a_cache(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}]
    lines += [{"timestamp": 1000, "input_length": 1500, "output_length": 5, "hash_ids": [7, 8, 9]}]
    requests = source(tmp_path / "trace.jsonl", "\n".join(map(json.dumps, lines)))
    workload = requests.workload(0)
    assert workload.turns is not None
    assert workload.turns.blocks == [[0, 1], [0, 1, 2]]
    assert workload.cached_prefix.tolist() == [0, 2 * BLOCK_TOKENS]
    assert replace(requests, simulates_cache=False).workload(0).turns is None
    without = json.dumps({"timestamp": 2000, "input_length": 10, "output_length": 5})
    some_hashes = source(tmp_path / "some.jsonl", "\n".join([*map(json.dumps, lines), without])).workload(0)
    assert some_hashes.turns is None
    assert "not all requests have hash_ids" in some_hashes.notes[0]
    of_session = source(tmp_path / "both.jsonl", json.dumps(lines[0] | {"session_id": "a"})).workload(0)
    assert of_session.notes == ("hash_ids are not used, because the requests have sessions",)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (CSV, {}, "think_time is missing"),
        (CSV, {"think_time": "lognormal:3s"}, "think_time: got 'lognormal:3s', accepted: a time"),
        (CSV, {"think_time": "uniform:3s:1s"}, "think_time: got 'uniform:3s:1s', accepted: a time"),
        (CSV.replace("arrival_s", "when")[:-9], {"think_time": "1s"}, "session_rate is missing"),
        (CSV.replace("arrival_s", "when"), {"think_time": "1s"}, "line 6: timestamp: got ''"),
        (CSV.replace("a,2,9", "a,second,9"), {"think_time": "1s"}, "line 2: turn: got 'second'"),
        (CSV.replace(",,5,70", ",,,70"), {"think_time": "1s"}, "line 6: arrival_s: got ''"),
        (AIPERF.replace("8000", '"soon"'), {}, "line 2: delay: got 'soon'"),
        (AIPERF + '{"session_id": "c", "turns": [{"delay": 1}]}', {}, "line 4"),
        ("arrival_s,context_tokens\n1,10\n", {"think_time": "1s"}, "think_time: got '1s', accepted: requests with"),
        ("arrival_s,context_tokens\n1,10\n", {"kv_cache_host": "1GB"}, "kv_cache_host: got '1000000000'"),
        ("synthetic:poisson,rate=1,turns=3,cached=0.5", {}, "cached: got '0.5', accepted: turns or cached"),
        ("synthetic:poisson,rate=1,turns=3", {}, "think_time is missing"),
        ("synthetic:poisson,rate=1,turns=1M", {"think_time": "1s"}, "requests: turns: got '20971520000 turns'"),
    ],
)
def test_bad_sessions_are_named(tmp_path: Path, text: str, options: dict[str, Any], says: str) -> None:
    requests = text
    if not text.startswith("synthetic:"):
        requests = str(tmp_path / "trace")
        Path(requests).write_text(text)
    with pytest.raises(InputError, match=says):
        kvrsim.capacity(requests=requests, slo_ttft="1s", model="llama-3.1-8b", cluster="8xh100", **options)


def test_more_traffic_is_more_sessions(tmp_path: Path) -> None:
    requests = source(tmp_path / "trace.jsonl", AIPERF)
    twice = requests.times(2).workload(0)
    assert twice.turns is not None
    assert sorted(twice.context_len.tolist()) == [500, 500, 1000, 1000, 1300, 1300]
    assert sorted(np.bincount(twice.turns.session).tolist()) == [1, 1, 2, 2]
    first = [blocks[0] for blocks, number in zip(twice.turns.blocks, twice.turns.numbers(), strict=True) if number == 1]
    assert len(set(first)) == 4
    for session in np.unique(twice.turns.session):
        turns = np.flatnonzero(twice.turns.session == session)
        assert (np.diff(twice.arrival_s[turns]) == 8).all()


SYNTHETIC = (
    "synthetic:poisson,rate=1,requests=60,turns=uniform:1:6,context=lognormal:3k:0.5,prompt=lognormal:300:1,"
    "output=lognormal:100:0.5,max=16k"
)


@pytest.mark.parametrize("tier", ["", "kv_cache_host", "kv_cache_remote"])
def test_hit_rates_are_results(tier: str) -> None:
    options: dict[str, Any] = {"requests": SYNTHETIC, "think_time": "exponential:10s", "replications": 1}
    options |= {"model": "llama-3.1-8b", "cluster": "h100-nvlink", "group_sizes": "1", "slo_ttft": "0.4s"}
    options |= {"": {}, "kv_cache_host": {tier: "50GB"}, "kv_cache_remote": {tier: "20GB/s"}}[tier]
    plan = kvrsim.capacity(**options, percentile=95, memory_fraction=0.3)
    assert plan.answer is not None
    (run,) = plan.answer.runs
    hits = plan.answer.prefix_cache
    assert hits is not None
    prompts = run.workload.context_len.sum()
    assert hits.hit_rate == pytest.approx(run.workload.cached_prefix.sum() / prompts)
    assert hits.hit_rate == pytest.approx(hits.gpu + hits.host + hits.remote)
    assert 0 < hits.hit_rate <= hits.unlimited
    assert (hits.host > 0) == (tier == "kv_cache_host")
    assert (hits.remote > 0) == (tier == "kv_cache_remote")
    if tier == "kv_cache_remote":  # it keeps everything
        assert hits.hit_rate == pytest.approx(hits.unlimited)
    assert [(times.first, times.last) for times in plan.answer.by_turn] == [(1, 1), (2, 2), (3, 4), (5, 6)]
    assert sum(times.requests for times in plan.answer.by_turn) == plan.answer.requests
    assert plan.answer.by_turn[0].hit_rate == 0
    assert run.workload.turns is not None
    ends_s = run.workload.arrival_s + run.ttft_s
    later = run.workload.turns.numbers() > 1
    assert (run.workload.arrival_s[later] > 0).all()
    assert np.isfinite(ends_s).all()
    content = plan.to_dict()
    assert content["prefix_cache"] == content["answer"]["prefix_cache"]
    assert content["by_turn"][0]["first"] == 1
    assert {growth.times for growth in plan.growth} == {1.5, 2.0, 3.0}
    deployment = fleet_deployment(plan, "vllm", model="llama-3.1-8b")
    assert any("offloading" in note for note in deployment.notes) == (tier == "kv_cache_host")
    assert any("store of KV blocks" in note for note in deployment.notes) == (tier == "kv_cache_remote")
    if not tier:
        none = kvrsim.capacity(**options, percentile=95, memory_fraction=0.3, prefix_cache="none")
        assert none.first.prefix_cache is not None
        assert none.first.prefix_cache.hit_rate == 0
        assert none.first.total_gpus >= plan.answer.total_gpus
        again = kvrsim.capacity(**options, percentile=95, memory_fraction=0.3, rate_scale=2)
        assert again.first.total_gpus == plan.growth[1].num_gpus
        shared = kvrsim.capacity(**options, percentile=95, memory_fraction=0.3, prefix_cache="unlimited")
        assert shared.first.prefix_cache is None
