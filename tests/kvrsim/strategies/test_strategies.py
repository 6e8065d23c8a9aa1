"""Counts of the paper: dot products and K, V entries of its figures, and traffic of its equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.attention_map import AttentionMap
from kvrsim.compile import build_program
from kvrsim.kernels.attention import EagerRates
from kvrsim.program import AllGather, Compute, Program, Send, computes_s
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy, names_in_all, names_with_spread_experts
from tests.building import examples, executed


def scenario_of(tokens: int, gpus: int, **options: Any) -> Scenario:
    """Llama 7B whose attention takes one second per element of the score matrix and no time for traffic."""
    scenario, _ = kvrsim.make_scenario(ctx=tokens, gpus=gpus, **options)
    assert scenario.profile is not None
    model = scenario.model
    flops_per_s = 4.0 * model.num_attention_heads * model.head_dim
    attention = {"eager": EagerRates(flops_per_s=flops_per_s, bytes_per_s=1e30, start_s=0.0)}
    kernels = replace(scenario.profile.kernels, attention=attention)
    return replace(scenario, profile=replace(scenario.profile, kernels=kernels))


def program_of(scenario: Scenario, name: str, chunks: Sequence[int]) -> Program:
    return build_program(executed(scenario, STRATEGIES[name]), [np.array([float(chunk)]) for chunk in chunks])


def dot_products(program: Program, rank: int) -> float:
    """Dot products of QK^T in one layer: the elements of the score matrix that the rank computes."""
    ops = [op for layer, op in program.ops(rank) if layer == 0 and isinstance(op, Compute)]
    return next(op.device_s.item() for op in ops if op.name == "attention")


def moved_tokens(scenario: Scenario, program: Program) -> float:
    """Tokens whose K, V cross links in one layer, over all ranks; a gathered piece crosses p - 1 links."""
    ranks = program.num_ranks
    nbytes = 0.0
    for rank in range(ranks):
        for layer, op in program.ops(rank):
            if layer == 0 and isinstance(op, Send | AllGather):
                nbytes += op.nbytes.item() * (ranks - 1 if isinstance(op, AllGather) else 1)
    return nbytes / scenario.model.layer_cache_bytes(1, scenario.request.dtype_bytes)


@pytest.mark.slow
@given(chunks=st.lists(st.integers(1, 500), min_size=1, max_size=8), cached=st.integers(0, 500))
@examples(20)
def test_dot_products_and_traffic(chunks: list[int], cached: int) -> None:
    """KVR computes chunk x (prefix + chunk) and sends K and V of new tokens up to each chunk's end (Fig. 5).

    TSP computes chunk x whole context, masked or not, and each piece crosses p - 1 links (Fig. 4).
    """
    total, ends = cached + sum(chunks), np.cumsum(chunks)
    scenario = scenario_of(total, len(chunks), cached_prefix=cached)
    kvr, tsp = (program_of(scenario, name, chunks) for name in ("kvr-s", "tsp"))
    for rank, chunk in enumerate(chunks):
        assert dot_products(kvr, rank) == pytest.approx(chunk * (cached + ends[rank]), rel=1e-12)
        assert dot_products(tsp, rank) == pytest.approx(chunk * total, rel=1e-12)
    assert moved_tokens(scenario, kvr) == sum(ends[:-1])
    assert moved_tokens(scenario, tsp) == (len(chunks) - 1) * sum(chunks)
    if not cached:
        for program, gathers in ((kvr, False), (tsp, True)):
            counted = AttentionMap(chunks=tuple(chunks), gathers=gathers)
            assert list(counted.dot_products) == pytest.approx(
                [dot_products(program, rank) for rank in range(len(chunks))]
            )
            assert counted.kv_entries == 2 * moved_tokens(scenario, program)


def test_a_window_sends_only_its_tail(config: Any) -> None:
    model = config(model_type="mistral", sliding_window=3)
    scenario = replace(scenario_of(9, 3), model=model)
    program = program_of(scenario, "kvr-s", (4, 3, 2))
    assert moved_tokens(scenario, program) == 3 + 3


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_closed_form(gpus: int) -> None:
    """TTFT*(p) = TTFT(1) / 2 x (1 / p + 1 / p^2) (Eq. 4); results are never below the lower bound."""
    plan = kvrsim.plan(ctx="4k", gpus=gpus, strategies=["single", "kvr-s"])
    single = next(result for result in plan.strategies if result.strategy == "single")
    assert plan.bounds.ttft_star_s == pytest.approx(single.ttft_s / 2 * (1 / gpus + 1 / gpus**2))
    kvr = next(result for result in plan.strategies if result.strategy == "kvr-s")
    assert plan.bounds.lower_bound_s <= kvr.ttft_s * (1 + 1e-12)
    assert plan.bounds.ttft_no_comm_s <= kvr.ttft_s
    assert plan.bounds.gap == pytest.approx(kvr.ttft_s / plan.bounds.lower_bound_s - 1)


@pytest.mark.parametrize(
    ("name", "called", "sizes"),
    [
        ("tp4+pp2+cp2", "tp4+pp2+cp2", (4, 2, 2)),
        ("pp+cp4", "pp+cp4", (1, 4, 4)),
        ("tp1+pp1+cp16", "cp16", (1, 1, 16)),
        ("pp16-s", "pp16-s", (1, 16, 1)),
        ("tp", "tp", (16, 1, 1)),
        ("single", "single", (1, 1, 1)),
    ],
)
def test_sizes(name: str, called: str, sizes: tuple[int, int, int]) -> None:
    """Sizes of tensor, pipeline and context parallelism on 16 GPUs; a size of 1 splits nothing."""
    assert get_strategy(name).name == called
    degrees = get_strategy(name).degrees.on(1 if name == "single" else 16)
    assert (degrees.tensor, degrees.pipeline, degrees.context) == sizes


@pytest.mark.parametrize(
    ("name", "gpus", "says"),
    [
        ("tp", 3, "32 heads"),
        ("tp4+ring", 6, "6 GPUs divide into"),
        ("pp", 33, "at most 32 stages"),
        ("tp4+ulysses", 24, "8 heads and 8 KV heads"),
        ("tp4+pp2+cp2", 8, "product is 8 GPUs, not tensor 4 x pipeline 2 x context 2"),
    ],
)
def test_gpus_that_do_not_do(name: str, gpus: int, says: str) -> None:
    with pytest.raises(kvrsim.InputError, match=says) as caught:
        kvrsim.simulate(strategy=name, ctx="4k", gpus=gpus)
    assert caught.value.parameter == "strategies"


def test_all_ranks_what_can_run() -> None:
    """Strategies that fit come first, then TTFT decides; a warning names strategies that cannot run."""
    plan = kvrsim.plan(ctx="2k", gpus=6, strategies=["all"], model="llama-30b")
    order = [(not one.fits, one.ttft_s) for one in plan.strategies]
    assert order == sorted(order)
    assert plan.best == plan.strategies[0]
    names = [one.strategy for one in plan.strategies]
    assert {"single", "ring", "zigzag", "pp", "tp2+kvr-s", "pp3+cp2"} <= set(names)
    assert "tp" not in names
    assert [note for note in plan.warnings if note.startswith("not compared: tp, tp6+pp1 (accepted: groups")]
    by_name = {one.strategy: one for one in plan.strategies}
    assert len(by_name["tp2+kvr-s"].memory) == len(by_name["tp2+kvr-s"].wait_s) == 6
    assert len(by_name["tp2+kvr-s"].partition) == 3


@pytest.mark.parametrize("name", ["ring", "zigzag-ring", "zigzag", "tp", "pp", "tp2+kvr-s", "ulysses", "kvr-direct"])
def test_a_breakdown_adds_up(name: str) -> None:
    """The parts and waits of the last rank add up to TTFT."""
    run = kvrsim.simulate(strategy=name, ctx="1k", gpus=4, breakdown=True)
    assert run.breakdown is not None
    last = max(row.rank for row in run.breakdown.rows)
    seconds = sum(row.seconds for row in run.breakdown.rows if row.rank == last)
    assert seconds == pytest.approx(run.ttft_s, rel=1e-9)


def test_titles_explain_names_in_four_to_eight_words() -> None:
    for strategy in STRATEGIES.values():
        assert 4 <= len(strategy.title.split()) <= 8, strategy.name
    assert len({strategy.title for strategy in STRATEGIES.values()}) == len(STRATEGIES)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tp2+zigzag", ("tensor parallelism by 2", STRATEGIES["zigzag"].title)),
        ("tp4+pp-s", ("tensor parallelism by 4", STRATEGIES["pp-s"].title)),
        ("tp8+pp1", ("tensor parallelism by 8", "chunked prefill")),
        ("tp2+pp2+cp4", ("tensor parallelism by 2", "2 stages", "context over 4 ranks")),
        ("dp2+tp8+ep16", ("prompts over 2 groups", "tensor parallelism by 8", "experts spread")),
    ],
)
def test_titles_of_hybrids_are_composed(name: str, parts: tuple[str, ...]) -> None:
    title = get_strategy(name).title
    assert all(part in title for part in parts)


@pytest.mark.parametrize(("num_gpus", "per_node"), [(1, None), (2, 1), (8, None), (16, 8), (32, 8)])
def test_the_name_of_a_compared_layout_names_it_again(num_gpus: int, per_node: int | None) -> None:
    """A row of a plan is simulated again by its name."""
    for name in (*names_in_all(num_gpus, per_node), *names_with_spread_experts(num_gpus, per_node)):
        strategy = get_strategy(name)
        assert get_strategy(strategy.name) == strategy


@pytest.mark.parametrize("name", ["kvr-s", "kvr-direct"])
def test_what_messages_take_from_their_sender(name: str) -> None:
    """Copies of all K and V that a rank sends, at the rate of copies; the last rank sends nothing."""
    chunks = (500, 300, 200)
    scenario = scenario_of(1000, 3)
    assert scenario.profile is not None
    links = replace(scenario.profile.links, message_copies=3.0, sends="overlap")
    rate = scenario.profile.kernels.elementwise.copy
    copying = replace(scenario, profile=replace(scenario.profile, links=links))
    free = replace(scenario, profile=replace(scenario.profile, links=replace(links, message_copies=0.0)))
    stopping = replace(copying, profile=replace(scenario.profile, links=replace(links, sends="rendezvous")))
    slow = scenario.with_own_links(1e9)
    holding = replace(slow, profile=replace(scenario.profile, links=replace(links, sends="sender")))
    busy_s = [computes_s(program_of(one, name, chunks)) for one in (copying, free, stopping, holding)]
    sent = {"kvr-s": (500, 800, 0), "kvr-direct": (1000, 300, 0)}[name]
    for rank, tokens in enumerate(sent):
        nbytes = tokens * scenario.model.layer_cache_bytes(1, 2)
        expected = scenario.model.num_hidden_layers * 3.0 * 2 * nbytes / rate
        assert busy_s[0][rank] - busy_s[1][rank] == pytest.approx(expected, rel=1e-4, abs=1e-9)
        assert busy_s[2][rank] == pytest.approx(busy_s[1][rank]), "messages that stop computation take their own time"
        leaves_s = scenario.model.num_hidden_layers * nbytes / 1e9  # longer than the copies
        assert busy_s[3][rank] - busy_s[1][rank] == pytest.approx(leaves_s, rel=1e-4, abs=1e-9)
