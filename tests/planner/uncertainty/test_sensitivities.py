"""Uncertain terms of an engine widen the interval, but its lower end stays above the time of the kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.engine import NO_HOST, Engine, EngineFit, builtin_engines, load_engine
from kvrsim.error_rule import error_rule
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.kernels.profile import load_profile
from kvrsim.notes import with_code
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.units import format_seconds
from planner.uncertainty.intervals import Interval, interval, measured_coverage
from planner.uncertainty.sensitivities import Sensitivities, sensitivities
from tests.building import executed

TERMS = ("request_s", "token_s", "step_s", "layer_s", "collective_s")
NOTHING = Engine(name="nothing", title="t", description="d", not_covered="n", host=NO_HOST)
ERRORS = {"mape": 0.02, "median_ape": 0.01, "left_out_mape": 0.03, "left_out_median_ape": 0.02}
COMPARED = EngineFit(source="s", num_rows=9, left_out="row", log_sd=0.04, coverage=0.8, **ERRORS)


def with_engine(engine: Engine | str, strategy: str = "kvr-e", **options: Any) -> tuple[Scenario, Partition]:
    """The scenario prepared for the strategy, and even chunks."""
    known = {"ctx": 2048, "gpus": 4, "profile": "a100-flash", "model": "llama-2-7b"}
    placed = place(make_scenario(**(known | options), engine=engine)[0], STRATEGIES[strategy]).placed
    return placed, Partition.even(placed.request.new_tokens, placed.cluster.num_gpus)


def ttft_s(scenario: Scenario, strategy: str, partition: Partition) -> float:
    return run_partition(executed(scenario, STRATEGIES[strategy]), partition).ttft_s


def around(engine: Engine | str, strategy: str = "kvr-e", **options: Any) -> tuple[float, Interval]:
    """TTFT with even chunks, and its interval."""
    scenario, even = with_engine(engine, strategy, **options)
    seconds = ttft_s(scenario, strategy, even)
    return seconds, interval(executed(scenario, STRATEGIES[strategy]), even, seconds)


def sensitivities_of(engine: Engine | str, strategy: str, **options: Any) -> Sensitivities:
    scenario, even = with_engine(engine, strategy, **options)
    return sensitivities(executed(scenario, STRATEGIES[strategy]), even)


@pytest.mark.parametrize("name", builtin_engines())
def test_an_interval_holds_its_prediction_whatever_the_engine(name: str) -> None:
    for strategy, gpus in (("single", 1), ("kvr-e", 4), ("tp", 4), ("pp", 4)):
        seconds, sure = around(name, strategy, gpus=gpus)
        assert sure.low_s < seconds < sure.high_s


@pytest.mark.parametrize("strategy", ["kvr-e", "tp", "pp"])
@pytest.mark.parametrize("term", TERMS)
def test_a_move_is_what_a_simulation_with_that_term_says(term: str, strategy: str) -> None:
    """The effect of a term equals the simulated difference, also if it is added to TTFT and not simulated."""
    host = replace(NO_HOST, layer_s=1e-4, request_s=0.003, token_s=1e-6, step_s=0.002, collective_s=1e-5)
    engine = replace(NOTHING, host=host, spread={term: 0.5})
    scenario, even = with_engine(engine, strategy)
    result = interval(executed(scenario, STRATEGIES[strategy]), even, 1.0).by_source
    names = {"request_s": "request", "token_s": "tokens", "step_s": "step", "layer_s": "host"}
    name = names.get(term, "collectives")
    central = ttft_s(scenario, strategy, even)
    for side, sign in (("low", -1), ("high", 1)):
        factor = math.exp(sign * 1.2816 * 0.5)
        other = replace(host, **{term: getattr(host, term) * factor})
        expected = math.log(ttft_s(scenario.with_host(other), strategy, even) / central)
        move = getattr(result[name], side) if name in result else 0.0
        assert move == pytest.approx(expected, abs=1e-9)


def test_what_an_engine_adds_cannot_be_less_than_nothing() -> None:
    """For any uncertainty, the lower end of the interval stays above the time of the kernels alone."""
    host = replace(NO_HOST, request_s=0.05)
    kernels_s, _ = around(NOTHING, "single", ctx=512, gpus=1)
    sure_of_kernels = replace(load_profile("a100-flash"), operations={}, run_to_run_log_sd=0.0)
    for log_sd in (0.5, 1.0, 3.0):
        engine = replace(NOTHING, host=host, spread={"request_s": log_sd, "model": 0.0})
        seconds, sure = around(engine, "single", ctx=512, gpus=1, profile=sure_of_kernels)
        assert kernels_s < sure.low_s < seconds < sure.high_s
        assert sure.high_s / seconds > seconds / sure.low_s
        assert sure.high_s == pytest.approx(kernels_s + 0.05 * math.exp(1.2816 * log_sd))


def test_an_engine_that_nobody_measured_may_run_other_kernels_than_the_table_has() -> None:
    profile = load_profile("a100-flash")
    fits = {kind: replace(fit, systematic_log_sd=0.2) for kind, fit in profile.operations.items()}
    other = replace(profile, operations=fits)
    own = replace(NOTHING, spread={"kernel_scale": 0.04}, fit=COMPARED)
    prior = replace(own, fit=replace(COMPARED, left_out="engine"))
    (_, of_own), (_, of_prior) = (around(engine, profile=other) for engine in (own, prior))
    assert of_own.by_source["kernels"].high <= 1.2816 * 0.04
    assert 0.9 * 1.2816 * 0.2 < of_prior.by_source["kernels"].high <= 1.2816 * 0.2


@pytest.mark.parametrize(("name", "short"), [("vllm", False), ("sglang", True), ("serving", False)])
def test_an_interval_by_shares_is_the_rule(name: str, short: bool) -> None:
    """The width follows from the engine's share of TTFT, which is what TTFT loses without the engine."""
    asked = {"ctx": 256 if short else 8192, "gpus": 4, "cluster": "8xh100", "model": "llama-3.1-8b"}
    engine = load_engine(name)
    scenario, even = with_engine(engine, "tp", **asked | {"profile": "h100-flash"})
    seconds = ttft_s(scenario, "tp", even)
    share = 1 - ttft_s(scenario.with_host(NO_HOST), "tp", even) / seconds
    rule = error_rule()
    own = rule.engine.get(name, rule.engine["other"])
    causes = [rule.floor, own * share, rule.kernels["dense"] * (1 - share)]
    causes += [rule.unknown_engine * share] * (name == "serving")
    causes += [rule.short] * short
    sure = interval(executed(scenario, STRATEGIES["tp"]), even, seconds)
    assert math.log(sure.high_s / seconds) == pytest.approx(1.2816 * math.hypot(*causes))
    assert sure.high_s / seconds == pytest.approx(seconds / sure.low_s)
    assert measured_coverage(scenario) == rule.scores["short" if short else "dense"].coverage


def test_a_longer_prompt_is_surer() -> None:
    """The engine's share of TTFT falls with the length, and with it the width; both sums of a mixture are wider."""
    widths = {}
    for model in ("llama-3.1-8b", "qwen3-30b-a3b"):
        for ctx in ("1k", "8k", "64k"):
            _, sure = around("vllm", "tp", ctx=ctx, model=model, cluster="8xh100", profile="h100-flash")
            widths[model, ctx] = sure.high_s / sure.low_s
    assert widths["llama-3.1-8b", "1k"] > widths["llama-3.1-8b", "8k"] > widths["llama-3.1-8b", "64k"]
    assert widths["llama-3.1-8b", "64k"] < 1.9
    assert widths["qwen3-30b-a3b", "64k"] > widths["llama-3.1-8b", "64k"]


def test_scaled_kernels_are_less_sure() -> None:
    """The H20 has the rates of the H100, scaled; the A100 of 40 GB computes as that of 80 GB."""
    widths = {}
    for gpu in ("h20", "h100", "a100-40gb", "a100-80gb"):
        run = kvrsim.simulate(strategy="tp", ctx="16k", gpus=8, cluster=f"8x{gpu}", model="llama-3.1-8b", engine="vllm")
        widths[gpu] = math.log(run.ttft_high_s / run.ttft_low_s)
        assert ("GPU, not measured" in run.interval_causes) is (gpu == "h20")
    assert widths["h20"] > 1.2 * widths["h100"]
    assert widths["a100-40gb"] == pytest.approx(widths["a100-80gb"], rel=0.1)


@pytest.mark.parametrize(
    ("strategy", "model", "gpus", "is_wide"),
    [("pp", "llama-3.1-8b", 8, True), ("tp", "llama-3.1-8b", 8, False), ("tp", "deepseek-v3", 8, True)],
)
def test_a_wide_interval_says_why(strategy: str, model: str, gpus: int, is_wide: bool) -> None:
    """The note's cause has the largest square of all, its share is that of the squares, and its range the rule's."""
    run = kvrsim.simulate(strategy=strategy, ctx="16k", gpus=gpus, cluster="8xh100", model=model, engine="vllm")
    notes = with_code(run.warnings, "interval")
    assert bool(notes) is is_wide is (run.ttft_high_s >= 2 * run.ttft_low_s)
    if not is_wide:
        return
    squares = {name: math.log1p(high) ** 2 for name, (_, high) in run.interval_causes.items()}
    values = notes[0].values
    largest = max(squares, key=lambda name: squares[name])
    assert largest == ("a pipeline, not measured" if strategy == "pp" else "kernels")
    assert values["share"] == pytest.approx(squares[largest] / sum(squares.values()))
    half_width = 1.2816 * error_rule().calibrated
    assert values["low"] == format_seconds(run.ttft_s * math.exp(-half_width))
    assert values["high"] == format_seconds(run.ttft_s * math.exp(half_width))
    assert half_width < math.log(run.ttft_high_s / run.ttft_s)


def test_answers_say_what_their_intervals_held() -> None:
    plan = kvrsim.plan(ctx="2k", gpus=2, strategies=["tsp"])
    residual = load_profile("a100-eager").residual
    assert residual is not None
    assert plan.interval_coverage == plan.to_dict()["interval_coverage"] == residual.coverage
    run = kvrsim.simulate(ctx="2k", gpus=2, strategy="tsp", profile="a100-flash", engine=NOTHING)
    assert run.to_dict()["interval_coverage"] is None
    widths = [high - low for low, high in run.interval_causes.values()]
    assert widths == pytest.approx(sorted(widths, reverse=True), rel=0.1)


KINDS = {"qwen3.5-35b-a3b": "gated delta rule", "nemotron-3-nano-30b-a3b": "Mamba-2"}


@pytest.mark.parametrize(
    ("model", "profile", "basis"),
    [
        ("qwen3.5-35b-a3b", "h200-flash", "interpolated"),
        ("nemotron-3-nano-30b-a3b", "h200-flash", "extrapolated"),  # no table has the scan of Mamba-2
        ("qwen3.5-35b-a3b", "a100-flash", "extrapolated"),  # counted without rates
    ],
)
def test_the_basis_of_a_scan(model: str, profile: str, basis: str) -> None:
    cluster = "h200-nvlink" if profile.startswith("h200") else "a100-nvlink"
    run = kvrsim.simulate(
        strategy="kvr-e", ctx="16k", gpus=2, model=model, profile=profile, cluster=cluster, breakdown=True
    )
    assert run.breakdown is not None
    rows = [row for row in run.breakdown.rows if row.kind == "recurrence"]
    assert {row.rank for row in rows} == {0, 1}
    assert {row.what for row in rows} == {KINDS[model]}
    assert {row.basis for row in rows} == {basis}
    assert all(row.roofline_share is not None and 0 < row.roofline_share < 1 for row in rows)


@pytest.mark.parametrize("engine", ["none", "vllm-2023"])
def test_an_interval_widens_by_the_recurrence(engine: str) -> None:
    """The recurrence also widens intervals of engines whose prefills were compared, unless these had such models."""
    options = {"strategy": "kvr-e", "ctx": "16k", "gpus": 2, "cluster": "h200-nvlink", "engine": engine}
    run = kvrsim.simulate(model="qwen3.5-27b", **options)
    assert "recurrence" not in kvrsim.simulate(model="qwen3.5-27b", **options | {"engine": "sglang"}).interval_causes
    for cause in ("recurrence",) if engine != "none" else ("recurrence", "table and clock"):
        low, high = run.interval_causes[cause]
        assert low < -0.001
        assert high > 0.001
    assert "recurrence" not in kvrsim.simulate(model="qwen3-32b", **options).interval_causes


def test_what_was_fitted_to_whole_prefills_has_the_kernels_errors_in_it() -> None:
    """Errors of single kernels count only in differences between strategies."""
    compared = replace(NOTHING, spread={"kernel_scale": 0.04, "model": 0.03}, fit=replace(COMPARED, log_sd=0.03))
    _, sure = around(compared)
    assert set(sure.by_source) == {"kernels", "model"}
    assert sure.by_source["model"].high == pytest.approx(1.2816 * 0.03)
    assert 0.9 * 1.2816 * 0.04 < sure.by_source["kernels"].high <= 1.2816 * 0.04
    between = sensitivities_of(compared, "kvr-e").in_differences
    assert {"attention", "elementwise", "gemm"} <= {getattr(cause, "kind", cause) for cause in between}
    _, unsure = around(NOTHING)
    assert {"gemm", "attention", "elementwise", "run to run"} <= set(unsure.by_source)
    assert measured_coverage(with_engine(NOTHING)[0]) is None
    assert measured_coverage(with_engine(replace(NOTHING, fit=COMPARED))[0]) == 0.8
    _, from_fit = around(replace(NOTHING, fit=COMPARED))
    assert from_fit.by_source["model"].high == pytest.approx(1.2816 * 0.04)


def test_no_engine_is_surer_than_the_floor() -> None:
    """Except where single rows were left out: the others show the same machine."""
    floor = error_rule().floor
    for left_out, log_sd, expected in (("setting", 0.01, floor), ("row", 0.01, 0.01), ("setting", 0.2, 0.2)):
        engine = replace(NOTHING, fit=replace(COMPARED, left_out=left_out, log_sd=log_sd))
        _, sure = around(engine)
        assert sure.by_source["model"].high == pytest.approx(1.2816 * expected)


def test_exact_rows_say_nothing_of_another_layout() -> None:
    """For a layout that no row has, an engine's interval is at least that of the rule."""
    engine = replace(NOTHING, fit=replace(COMPARED, log_sd=0.001), layouts=("tensor",))
    (_, tensor), (_, context) = (around(engine, strategy) for strategy in ("tp", "kvr-e"))
    assert tensor.by_source["model"].high == pytest.approx(1.2816 * 0.001)
    rule = error_rule()
    assert context.by_source["model"].high >= 1.2816 * math.hypot(rule.floor, rule.kernels["dense"])
    assert context.by_source["a context that GPUs split, not measured"].high > 0


LAYOUTS = {
    "single": (1, ()),
    "pp": (8, ("pipeline",)),
    "zigzag": (8, ("context",)),
    "tp4+pp2": (8, ("tensor", "pipeline")),
    "tp8+pp2": (16, ("tensor", "pipeline", "nodes")),
    "tp": (16, ("tensor", "nodes")),
    "tp8+kvr-s": (16, ("tensor", "context", "nodes")),
}


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_only_what_no_measured_prefill_has_widens_the_interval(strategy: str) -> None:
    """An interval is as if the layout were measured, or wider, and it says so; the estimate does not change."""
    gpus, kinds = LAYOUTS[strategy]
    engine = load_engine("vllm")
    asked = {"model": "llama-3.1-70b", "cluster": "2x8xh100" if gpus > 8 else "8xh200", "ctx": "16k", "gpus": gpus}
    results = {
        known: kvrsim.simulate(strategy=strategy, engine=replace(engine, layouts=known), **asked)
        for known in (None, kinds, ("tensor",), ())
    }
    widths = {known: math.log(one.ttft_high_s / one.ttft_low_s) for known, one in results.items()}
    assert len({one.ttft_s for one in results.values()}) == 1
    assert widths[kinds] == widths[None]
    for known in (("tensor",), ()):
        missing = set(kinds) - set(known)
        assert (widths[known] > widths[None]) is bool(missing)
        assert bool(with_code(results[known].warnings, "layout")) is bool(missing)
    assert widths[()] >= widths["tensor",]


def test_long_contexts_of_dense_models_are_no_extrapolation() -> None:
    """Dense models were compared up to 512k tokens, mixtures and latents to 128k; windows in mixtures were not."""
    flash = {"strategy": "zigzag", "gpus": 8, "cluster": "8xh100"}
    for model, ctx, is_noted in (
        ("llama-3.1-8b", "128k", False),
        ("llama-3.1-8b", "512k", False),
        ("llama-3.1-8b", "1m", True),
        ("mixtral-8x7b", "128k", False),
        ("deepseek-v3", "128k", False),
        ("deepseek-v3", "256k", True),
        ("gpt-oss-120b", "128k", True),
        ("deepseek-v3.2", "128k", True),
    ):
        result = kvrsim.simulate(model=model, ctx=ctx, **flash)
        assert bool(with_code(result.warnings, "context-range")) is is_noted
        assert ("extrapolation" in result.interval_causes) is is_noted
    eager = kvrsim.simulate(strategy="tsp", gpus=8, ctx="32k")
    assert with_code(eager.warnings, "context-range")
