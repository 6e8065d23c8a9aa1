"""Ties: an error that two strategies share does not make them one; what only one of them has does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.kernels.sensitivity import ATTENTION
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from planner.uncertainty.intervals import interval_of
from planner.uncertainty.intervals import is_indistinguishable as tied
from planner.uncertainty.sensitivities import UNKNOWN, Sensitivities, Sensitivity, sensitivities
from tests.building import Draws, any_scenario, draws, examples

sides = st.tuples(st.floats(-0.5, 0.0), st.floats(0.0, 0.5)).map(lambda pair: Sensitivity(*pair))
apart = st.floats(0.0, 0.3)
any_moves = st.builds(
    lambda of, ratio_log_sd: Sensitivities(by_source=of, ratio_log_sd=ratio_log_sd),
    st.dictionaries(st.sampled_from(["host", "links", "table and clock", ATTENTION]), sides),
    apart,
)
ttft_s = st.floats(1e-4, 1e3)


def moved(strategy: str, scenario: Scenario) -> Sensitivities:
    """With even chunks."""
    placed = for_strategy(scenario, STRATEGIES[strategy])
    even = Partition.even(scenario.request.new_tokens, placed.cluster.num_gpus)
    return sensitivities(placed, STRATEGIES[strategy], even)


@given(found=any_moves, seconds=ttft_s)
def test_an_interval_holds_its_prediction(found: Sensitivities, seconds: float) -> None:
    sure = interval_of(found, seconds)
    assert sure.low_s <= seconds <= sure.high_s


@given(found=any_moves, seconds=ttft_s, cause=sides)
def test_one_more_cause_never_narrows_it(found: Sensitivities, seconds: float, cause: Sensitivity) -> None:
    one, more = (
        interval_of(each, seconds) for each in (found, replace(found, by_source={**found.by_source, "new": cause}))
    )
    assert more.low_s <= one.low_s
    assert one.high_s <= more.high_s


@given(found=any_moves, seconds=ttft_s)
def test_what_can_only_add_widens_one_side(found: Sensitivities, seconds: float) -> None:
    one = interval_of(found, seconds)
    more = interval_of(replace(found, by_source={**found.by_source, "new": Sensitivity(0.0, 0.5)}), seconds)
    assert more.low_s == one.low_s
    assert more.high_s > one.high_s


@given(found=any_moves, seconds=ttft_s)
def test_a_strategy_ties_with_itself(found: Sensitivities, seconds: float) -> None:
    assert tied(found, found, seconds, seconds)


@given(found=any_moves, seconds=ttft_s)
def test_what_is_slower_by_a_third_is_no_tie_where_all_errors_are_shared(found: Sensitivities, seconds: float) -> None:
    shared = replace(found, ratio_log_sd=UNKNOWN.ratio_log_sd)
    assert not tied(shared, shared, seconds, 1.3 * seconds)


@given(one=any_moves, other=any_moves, seconds=ttft_s, near=st.floats(1.0, 2.0), far=st.floats(1.0, 2.0))
def test_what_is_slower_ties_less(
    one: Sensitivities, other: Sensitivities, seconds: float, near: float, far: float
) -> None:
    near, far = sorted((near, far))
    assert tied(one, other, seconds, near * seconds) or not tied(one, other, seconds, far * seconds)


def test_what_only_the_slower_one_has_makes_a_tie() -> None:
    """Links may be better than thought, and only the slower strategy waits for them."""
    alone = Sensitivities(by_source={"host": Sensitivity(-0.5, 0.5)}, ratio_log_sd=0.0)
    waits = Sensitivities(by_source={"host": Sensitivity(-0.5, 0.5), "links": Sensitivity(-0.1, 0.1)}, ratio_log_sd=0.0)
    assert tied(alone, waits, 1.0, math.exp(0.09))
    assert not tied(alone, waits, 1.0, math.exp(0.11))
    hidden = replace(waits, by_source={**waits.by_source, "links": Sensitivity(0.0, 0.1)})
    assert not tied(alone, hidden, 1.0, math.exp(0.01)), "links can only make the slower one slower still"
    assert tied(hidden, alone, 1.0, math.exp(0.09)), "they may make the faster one slower"


@given(rng=draws())
@examples(20)
def test_moves_of_any_scenario_hold_the_prediction(rng: Draws) -> None:
    scenario = any_scenario(rng, topologies=("switch", "chain", "bus"))
    sure = interval_of(moved("kvr-e", scenario), 1.0)
    assert sure.low_s <= 1.0 <= sure.high_s


def test_a_table_that_is_off_as_a_whole_makes_no_ties() -> None:
    scenario, _ = make_scenario(ctx="16k", gpus=4, model="llama-3-8b", profile="a100-flash", engine="none")
    profile = scenario.profile
    assert profile is not None
    fits = profile.operations
    off = {kind: replace(fits[kind], systematic_log_sd=0.3) for kind in ("gemm", "attention", "elementwise")}
    unsure = replace(scenario, profile=replace(profile, operations={**fits, **off}))
    tsp, kvr = moved("tsp", unsure), moved("kvr-e", unsure)
    assert tsp.by_source["table and clock"].high > 0.25
    assert not tied(kvr, tsp, 1.0, 1.1)


@pytest.mark.parametrize("profile", ["a100-eager", "a100-flash"])
def test_links_that_nobody_measured_make_more_ties(profile: str) -> None:
    """TSP waits for all of K and V, KVR for what is left of it: slower links move one more than the other."""
    measured, _ = make_scenario(ctx="8k", gpus=4, model="llama-7b", profile=profile, engine="none")
    nominal, _ = make_scenario(
        ctx="8k", gpus=4, model="llama-7b", profile=profile, link_bandwidth="20GB/s", engine="none"
    )
    least = [_tellable(one) for one in (measured, nominal)]
    assert least[1] > 1.01 * least[0]


def _tellable(scenario: Scenario) -> float:
    """The least ratio of TSP's TTFT over one GPU's that is no tie."""
    alone, tsp = moved("single", scenario), moved("tsp", scenario)
    return next(1 + step / 1000 for step in range(2000) if not tied(alone, tsp, 1.0, 1 + step / 1000))


def test_a_strategy_under_two_names_ties() -> None:
    twin = replace(STRATEGIES["ring"], name="twin")
    plan = kvrsim.plan(ctx="8k", gpus=4, strategies=["ring", twin], profile="a100-flash", model="llama-3-8b")
    assert plan.ties == ("twin",)
