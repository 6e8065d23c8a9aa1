"""Pipelines whose stages split the context: cases with one stage or one context rank, and their memory."""

from __future__ import annotations

import pytest
from hypothesis import given

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.memory import memory_of
from kvrsim.scenario import Partition
from kvrsim.strategies import get_strategy, names_in_all
from tests.building import Draws, any_divisible, draws, examples, executed


@given(rng=draws())
@examples(15)
def test_one_stage_and_one_piece_are_zigzag(rng: Draws) -> None:
    scenario = any_divisible(rng)
    whole = Partition(chunk_lens=(scenario.request.new_tokens,))
    even = Partition.even(scenario.request.new_tokens, 4)
    one, zigzag = (
        run_partition(executed(scenario, get_strategy("pp+cp4")), whole),
        run_partition(executed(scenario, get_strategy("zigzag")), even),
    )
    assert one.finish_s == pytest.approx(zigzag.finish_s, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "same"), [("tp2+cp4", "tp2+zigzag"), ("cp8", "zigzag"), ("tp2+pp4", "tp2+pp"), ("tp8", "tp")]
)
def test_sizes_that_other_names_have(name: str, same: str) -> None:
    one, other = (kvrsim.simulate(gpus=8, ctx="16k", strategy=each) for each in (name, same))
    assert (one.strategy, one.ttft_s, one.per_rank, one.layers) == (name, other.ttft_s, other.per_rank, other.layers)


def test_context_ranks_hold_the_whole_cache_of_their_layers() -> None:
    """Context ranks also hold the weights of their stage, and a piece's K and V until these are in the cache."""
    scenario, _ = make_scenario(ctx="64k", gpus=8, model="llama-3-8b", cluster="h100-nvlink")
    cut = Partition.even(2**16, 4)
    placed = [
        place(on, get_strategy(name)).placed
        for on, name in ((scenario, "tp2+pp2+cp2"), (scenario.on_gpus(4), "tp2+pp2"))
    ]
    split, whole = (
        memory_of(executed(one, get_strategy(name)), cut)
        for one, name in zip(placed, ("tp2+pp2+cp2", "tp2+pp2"), strict=True)
    )
    stages = [whole[index // 4 * 2] for index in range(8)]
    assert [part.weights for part in split] == [part.weights for part in stages]
    assert [part.kv_cache for part in split] == [part.kv_cache for part in stages]
    assert all(2 * part.activations == stage.activations for part, stage in zip(split, stages, strict=True))
    piece = 2**14 * scenario.model.kv_bytes_per_token(2) // scenario.model.num_hidden_layers // 2
    assert {part.gathered - stage.gathered // 2 for part, stage in zip(split, stages, strict=True)} == {piece}
    assert [part.logits > 0 for part in split] == 6 * [False] + 2 * [True]


def test_hybrids_that_fill_the_machine() -> None:
    """Stages with several context ranks never cross the border of a node."""

    def with_context(gpus: int, per_node: int | None = None) -> set[str]:
        return {name for name in names_in_all(gpus, per_node) if "cp" in name}

    assert with_context(8) == {"pp4+cp2", "pp2+cp4", "tp2+pp2+cp2"}
    assert with_context(2) == set()
    assert with_context(6) == {"pp3+cp2"}
    nodes = with_context(32, 8)
    assert {"pp4+cp8", "tp4+pp4+cp2"} <= nodes
    assert not {"pp2+cp16", "tp8+pp2+cp2"} & nodes
