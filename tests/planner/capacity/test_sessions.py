"""Sessions: caches of groups against lists of blocks, and hit rates at the ends of the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.capacity.prefixes import BLOCK_TOKENS, CacheTiers, PrefixTraffic, Turns
from planner.capacity.serving import StepRequests, StepRun, run_steps
from planner.capacity.steps import StepTimes
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
