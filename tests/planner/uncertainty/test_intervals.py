"""Intervals contain the prediction, are wider if less is known, and follow from the profile's errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.kernels.attention import ATTENTION
from kvrsim.kernels.profile import OperationFit, load_profile
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from planner.uncertainty.intervals import Interval, interval, interval_of
from planner.uncertainty.intervals import is_indistinguishable as tied
from planner.uncertainty.sensitivities import UNKNOWN, Sensitivities, Sensitivity
from tests.building import Draws, any_scenario, draws, examples, executed

KVR = STRATEGIES["kvr-e"]


def of(scenario: Scenario) -> Interval:
    """The interval of even chunks around a prediction of 1 s."""
    return interval(
        executed(scenario, KVR), Partition.even(scenario.request.new_tokens, scenario.cluster.num_gpus), 1.0
    )


def width(scenario: Scenario) -> float:
    sure = of(scenario)
    assert sure.low_s <= 1.0 <= sure.high_s
    return math.log(sure.high_s / sure.low_s) / 2


def above(scenario: Scenario) -> dict[str, float]:
    """Log standard deviations above the prediction, by cause."""
    return {name: move.high / 1.2816 for name, move in of(scenario).by_source.items()}


def flash(**options: Any) -> Scenario:
    return make_scenario(
        **({"ctx": 8192, "gpus": 4, "profile": "a100-flash", "model": "llama-3-8b", "engine": "none"} | options)
    )[0]


def test_of_a_profile_fitted_to_ttfts_it_is_their_error() -> None:
    profile = load_profile("a100-eager")
    assert profile.residual is not None
    scenario = make_scenario(ctx=8192, gpus=4)[0]
    assert width(scenario) == pytest.approx(math.log1p(profile.residual.p80_ape))


def test_what_an_operation_does_not_move_does_not_widen_it() -> None:
    log_sd = above(flash())
    assert {"gemm", "attention", "elementwise", "host", "links", "run to run"} <= set(log_sd)
    assert log_sd["gemm"] > 0.005
    assert log_sd["host"] < 0.001  # long chunks hide the host time
    fits = flash().profile.operations  # type: ignore[union-attr]
    assert log_sd["attention"] < fits["attention"].log_sd  # attention is a part of TTFT
    assert log_sd["gemm"] < fits["gemm"].log_sd  # errors of several shapes are independent


def with_systematic(scenario: Scenario, log_sd: float | None) -> Scenario:
    """The scenario with a common error of products and attention."""
    profile = scenario.profile
    assert profile is not None
    fits = {kind: replace(fit, systematic_log_sd=None) for kind, fit in profile.operations.items()}
    fits |= {kind: replace(fits[kind], systematic_log_sd=log_sd) for kind in ("gemm", "attention")}
    return replace(scenario, profile=replace(profile, operations=fits))


def test_an_error_of_the_table_moves_all_products_and_attention_together() -> None:
    """The error is common to all shapes, so nearly all of TTFT changes by it."""
    scenario = flash(gpus=1)
    assert "table and clock" not in of(with_systematic(scenario, None)).by_source
    move = of(with_systematic(scenario, 0.05)).by_source["table and clock"]
    most = 1.2816 * 0.05
    assert 0.9 * most < move.high < most
    assert -most < move.low < -0.9 * most
    assert (
        width(with_systematic(scenario, 0.1))
        > width(with_systematic(scenario, 0.05))
        > width(with_systematic(scenario, None))
    )


def test_links_that_hold_nothing_up_can_only_make_it_longer() -> None:
    """If messages are hidden behind computation, slower links cost more than faster links gain."""
    move = of(flash(ctx=16384, link_bandwidth="30GB/s")).by_source["links"]
    assert move.high > -move.low >= 0


def test_a_machine_that_was_seen_to_vary_makes_it_wider() -> None:
    profile = load_profile("a100-flash")
    widths = [width(flash(profile=replace(profile, run_to_run_log_sd=spread))) for spread in (None, 0.001, 0.1, 0.3)]
    assert widths[0] == widths[1] < widths[2] < widths[3], "never narrower than what serving engines vary by"
    assert widths[3] > 1.28 * 0.3


def test_a_roofline_is_a_limit() -> None:
    sure = of(make_scenario(ctx=8192, gpus=4, profile="roofline")[0])
    assert sure.low_s == 1.0
    assert sure.high_s > 2.0


@given(rng=draws())
@examples(40)
def test_any_profile_has_one(rng: Draws) -> None:
    """The interval is finite and contains the prediction; a profile without errors adds no cause."""
    scenario = any_scenario(rng, roofline=False, topologies=("switch", "chain", "bus"))
    assert 0 < width(scenario) < 50
    profile = scenario.profile
    known = {
        kind: OperationFit(source="x", num_rows=1, mape=0.0, cross_validated_mape=0.0, log_sd=0.0, seen={})
        for kind in profile.operations
    }
    sure = of(replace(scenario, profile=replace(profile, operations=known)))
    kinds = "gemm", "attention", "elementwise", "host", "table and clock"
    assert not set(kinds) & set(sure.by_source)


sides = st.tuples(st.floats(-0.5, 0.0), st.floats(0.0, 0.5)).map(lambda pair: Sensitivity(*pair))
apart = st.floats(0.0, 0.3)
factors = st.floats(1.0, 2.0)
any_sensitivities = st.builds(
    lambda of, ratio_log_sd: Sensitivities(by_source=of, ratio_log_sd=ratio_log_sd),
    st.dictionaries(st.sampled_from(["host", "links", "table and clock", ATTENTION]), sides),
    apart,
)
ttft_s = st.floats(1e-4, 1e3)


@given(found=any_sensitivities, seconds=ttft_s)
def test_an_interval_holds_its_prediction(found: Sensitivities, seconds: float) -> None:
    sure = interval_of(found, seconds)
    assert sure.low_s <= seconds <= sure.high_s


@given(found=any_sensitivities, seconds=ttft_s, cause=sides)
def test_one_more_cause_never_narrows_it(found: Sensitivities, seconds: float, cause: Sensitivity) -> None:
    one, more = (
        interval_of(each, seconds) for each in (found, replace(found, by_source={**found.by_source, "new": cause}))
    )
    assert more.low_s <= one.low_s
    assert one.high_s <= more.high_s


@given(found=any_sensitivities, seconds=ttft_s)
def test_a_strategy_ties_with_itself(found: Sensitivities, seconds: float) -> None:
    assert tied(found, found, seconds, seconds)


@given(found=any_sensitivities, seconds=ttft_s)
def test_what_is_slower_by_a_third_is_no_tie_where_all_errors_are_shared(found: Sensitivities, seconds: float) -> None:
    shared = replace(found, ratio_log_sd=UNKNOWN.ratio_log_sd)
    assert not tied(shared, shared, seconds, 1.3 * seconds)


@given(one=any_sensitivities, other=any_sensitivities, seconds=ttft_s, near=factors, far=factors)
def test_what_is_slower_ties_less(
    one: Sensitivities, other: Sensitivities, seconds: float, near: float, far: float
) -> None:
    near, far = sorted((near, far))
    assert tied(one, other, seconds, near * seconds) or not tied(one, other, seconds, far * seconds)


def test_what_only_the_slower_one_has_makes_a_tie() -> None:
    """The strategies tie if faster links could make the slower one as fast; the faster one does not wait for links."""
    alone = Sensitivities(by_source={"host": Sensitivity(-0.5, 0.5)}, ratio_log_sd=0.0)
    waits = Sensitivities(by_source={"host": Sensitivity(-0.5, 0.5), "links": Sensitivity(-0.1, 0.1)}, ratio_log_sd=0.0)
    assert tied(alone, waits, 1.0, math.exp(0.09))
    assert not tied(alone, waits, 1.0, math.exp(0.11))
    hidden = replace(waits, by_source={**waits.by_source, "links": Sensitivity(0.0, 0.1)})
    assert not tied(alone, hidden, 1.0, math.exp(0.01)), "links can only make the slower one slower still"
    assert tied(hidden, alone, 1.0, math.exp(0.09)), "they may make the faster one slower"
