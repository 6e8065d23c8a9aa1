"""Pipelines by waves of stages: as the executor of programs runs them."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.executors.batch import run_batch
from kvrsim.executors.run import finish_of
from kvrsim.executors.stages.waves import run_stages
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import per_rank_scenario
from tests.building import Draws, any_partition, any_placed, draws, examples


def assert_as_programs(placed: Scenario, name: str, cuts: list[tuple[int, ...]]) -> None:
    strategy, chunks = get_strategy(name), columns(cuts)
    found = run_stages(placed, strategy, chunks, placed.cluster, placed.cost)
    assert found is not None
    by_program = run_batch(build_program(placed, strategy, chunks), placed.cluster)
    assert found == pytest.approx(by_program, rel=1e-12, abs=0)
    assert (finish_of(placed, strategy, chunks) == found).all()


@pytest.mark.parametrize("name", ["pp", "tp2+pp", "pp2+cp2"])
@given(rng=draws())
@examples(40)
def test_any_pieces_as_the_program_runs_them(name: str, rng: Draws) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy, topologies=("switch", "chain", "nodes"))
    if run_stages(placed, strategy, columns(cut), placed.cluster, placed.cost) is None:
        return  # layers of an MLP alone do not wait for other context ranks
    least = strategy.context_size or 1
    more = [any_partition(rng, placed.request.new_tokens, len(cut)) for _ in range(2)]
    assert_as_programs(placed, name, [cut, *(one for one in more if min(one) >= least)])


@pytest.mark.parametrize("name", ["pp", "pp8+cp2", "tp2+pp4+cp2"])
@pytest.mark.parametrize("profile", ["a100-eager", "h100-flash"])
def test_many_layers_on_two_machines(name: str, profile: str) -> None:
    """Links of two kinds, and layers that are not walked one by one once they advance alike."""
    scenario, _ = make_scenario(
        model="llama-3-70b", cluster="h100-2x8-ndr400", gpus=16, ctx=4096, profile=profile, dtype="bf16"
    )
    placed = per_rank_scenario(scenario, get_strategy(name))
    assert_as_programs(placed, name, [(1024, 1024, 2048), (4000, 90, 6), (7, 2000, 2089)])


def test_what_waits_for_more_takes_the_program() -> None:
    """A cached prefix that comes from elsewhere."""
    scenario, _ = make_scenario(
        model="llama-3-8b", cluster="h100-nvlink", gpus=2, ctx=4096, cached_prefix=1024, prefix_placement="host"
    )
    strategy = get_strategy("pp")
    placed = per_rank_scenario(scenario, strategy)
    assert run_stages(placed, strategy, columns((1000, 2072)), placed.cluster, placed.cost) is None
    assert finish_of(placed, strategy, columns((1000, 2072)))[-1, 0] > 0
