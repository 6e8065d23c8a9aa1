"""An engine fitted to prefills that another, known engine made: its terms, errors, and profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvrsim
from calibrate.prefills.fit import (
    CasePredictor,
    EngineTerms,
    PrefillCase,
    PrefillFit,
    check_prefills,
    fit_prefills,
    make_cases,
)
from calibrate.prefills.rows import PrefillRow
from kvrsim.builder import make_scenario
from kvrsim.engine import Engine, HostRates, load_engine
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import CalibrationProfile, load_profile
from kvrsim.scenario import Partition
from planner.candidates import partition_of
from planner.uncertainty.intervals import Interval, interval

PROFILE = load_profile("h100-flash")
PRIOR = Engine(
    name="prior",
    title="made up",
    description="Made up.",
    not_covered="Everything.",
    host=HostRates(layer_s=1e-4, gather_piece_s=0.0, request_s=5e-3, token_s=5e-7),
    spread={"request_s": 1.0, "token_s": 1.0, "layer_s": 1.0, "kernel_scale": 0.1, "model": 0.05},
)
TRUTH = replace(
    PRIOR, host=replace(PRIOR.host, layer_s=8e-4, request_s=1.2e-2, token_s=1e-6), kernel_scale={PROFILE.gpu: 1.08}
)
LENGTHS = (128, 256, 1024, 2048, 4096, 8192)


def row(context_len: int, **about: object) -> PrefillRow:
    fields = {"model": "llama-2-7b", "num_gpus": 1, "batch": 1, "cached_prefix": 0} | about
    return PrefillRow(ttft_s=1.0, where=f"rows.csv, line {context_len}", context_len=context_len, **fields)  # type: ignore[arg-type]


def cases_of(rows: list[PrefillRow], engine: Engine = PRIOR) -> tuple[PrefillCase, ...]:
    return make_cases(rows, PROFILE, partition_of, {"engine": engine}).cases


def measured(engine: Engine, lengths: tuple[int, ...] = LENGTHS, noise: float = 0.0) -> tuple[PrefillCase, ...]:
    """Cases with the prior engine and the times of another engine."""
    rng = np.random.default_rng(5)
    seconds = [case.ttft_s() * np.exp(noise * rng.standard_normal()) for case in cases_of([*map(row, lengths)], engine)]
    return cases_of([replace(row(length), ttft_s=one) for length, one in zip(lengths, seconds, strict=True)])


def wide(execution: Execution, partition: Partition, ttft_s: float) -> Interval:
    return Interval(low_s=ttft_s / 10, high_s=ttft_s * 10, by_source={})


def narrow(execution: Execution, partition: Partition, ttft_s: float) -> Interval:
    return Interval(low_s=ttft_s, high_s=ttft_s, by_source={})


def fitted(cases: Sequence[PrefillCase], prior: Engine = PRIOR, **options: Any) -> PrefillFit:
    return fit_prefills(cases, PROFILE, prior, name="mine", source="rows.csv", **{"interval_of": wide} | options)


@pytest.fixture(scope="module")
def fit() -> PrefillFit:
    return fitted(measured(TRUTH))


def test_terms_of_a_known_engine_are_recovered(fit: PrefillFit) -> None:
    values = {term.prior.name: term.value for term in fit.terms}
    assert values["layer_s"] == pytest.approx(8e-4, rel=0.05)
    assert values["request_s"] == pytest.approx(1.2e-2, rel=0.15)
    assert values["kernel_scale"] == pytest.approx(1.08, rel=0.02)
    assert {term.prior.name for term in fit.terms if term.identified} >= {"layer_s", "request_s", "kernel_scale"}
    assert all(term.span[0] < term.value < term.span[1] for term in fit.terms)


def test_errors_fall_and_hold_on_rows_left_out(fit: PrefillFit) -> None:
    assert fit.before.median_ape > 0.1
    assert fit.after.mape < 0.01
    assert fit.left_out.median_ape < 0.03
    assert fit.after.mape <= fit.left_out.mape < fit.before.mape


@pytest.mark.slow
def test_slower_kernels_are_not_taken_for_seconds_of_tokens() -> None:
    """Slower kernels change kernel_scale, not token_s; otherwise a model with other kernels would be mispredicted."""
    prior = load_engine("serving")
    slow = replace(prior, kernel_scale={"other": 1.3 * prior.scale_on(PROFILE.gpu)})
    lengths = (1024, 2048, 4096, 8192, 16384)
    seconds = [case.ttft_s() for case in cases_of([*map(row, lengths)], slow)]
    rows = [replace(row(length), ttft_s=one) for length, one in zip(lengths, seconds, strict=True)]
    fit = fitted(cases_of(rows, prior), prior)
    (predicted,), (true,) = (cases_of([row(8192, model="llama-2-13b")], one) for one in (fit.engine, slow))
    assert predicted.ttft_s() == pytest.approx(true.ttft_s(), rel=0.03)


def test_rows_of_one_layout_never_narrow_another() -> None:
    """Exact rows of tensor parallelism on a node narrow its interval, but not that of a pipeline over two nodes."""
    prior = load_engine("serving")
    rows = [row(length, num_gpus=8, strategy="tp") for length in (1024, 4096, 16_384, 65_536)]
    exact = [replace(one, ttft_s=case.ttft_s()) for one, case in zip(rows, cases_of(rows, prior), strict=True)]
    fit = fitted(cases_of(exact, prior), prior)
    assert fit.engine.layouts == ("tensor",)
    assert fit.profile.valid.context_len == (1, 65_536)
    kinds = {"tp": ("8xh100", 8), "pp": ("2x8xh100", 16), "tp4+pp2": ("8xh100", 8), "zigzag": ("8xh100", 8)}
    ratios = {}
    for name, (cluster, gpus) in kinds.items():
        asked = {"strategy": name, "model": "llama-2-7b", "ctx": "64k", "cluster": cluster, "gpus": gpus}
        before, after = (kvrsim.simulate(**asked, profile=one) for one in (PROFILE, fit.profile))
        widths = [math.log(one.ttft_high_s / one.ttft_low_s) for one in (before, after)]
        ratios[name] = widths[1] / widths[0]
    assert ratios.pop("tp") < 0.7
    assert min(ratios.values()) >= 1


def test_the_profile_predicts_as_the_fit_does(fit: PrefillFit) -> None:
    again = CalibrationProfile.read(JsonObject(fields=fit.profile.to_dict(), where="mine.json"))
    assert again.name == "mine"
    cases = make_cases([*map(row, LENGTHS)], again, partition_of).cases
    assert [case.ttft_s() for case in cases] == pytest.approx(fit.solution.after_s, rel=2e-3)


def test_terms_on_groups_of_gpus_are_those_of_the_scenario() -> None:
    """A case gives the same time whether its engine is set when it is made or later."""
    rows = [row(4096, num_gpus=8, strategy="tp"), row(4096, num_gpus=8, strategy="tp2+kvr-e")]
    terms = EngineTerms.of(PROFILE, PRIOR)
    values = {"layer_s": 8e-4, "request_s": 1.2e-2, "token_s": 1e-6, "kernel_scale": 1.08}
    for early, late in zip(cases_of(rows, TRUTH), cases_of(rows), strict=True):
        assert late.on(terms.scenario_with(late.scenario, values)).ttft_s() == pytest.approx(early.ttft_s())
        assert terms.scenario_with(late.scenario, values).host == TRUTH.host


def test_costs_that_points_share_are_those_of_each_point() -> None:
    """Values in any order give the times of a case that is made with these values alone."""
    cases = cases_of([row(4096, num_gpus=8, strategy="tp"), row(1024)])
    terms = EngineTerms.of(PROFILE, PRIOR)
    medians = np.array([prior.median for prior in terms.priors])
    predict = CasePredictor(terms, cases)
    for factors in (1.0, 1.0 + 0.1 * np.eye(len(medians)), 0.9):
        for values in np.atleast_2d(medians * factors):
            alone = [case.on(terms.scenario_with(case.scenario, terms.named(values))).ttft_s() for case in cases]
            assert predict(values).tolist() == alone


@pytest.mark.slow
def test_seconds_a_token_are_found_where_the_prior_knows_none() -> None:
    """The prior has no seconds per token; rows of several lengths show them, rows of one length cannot."""
    unknowing = replace(PRIOR, host=replace(PRIOR.host, token_s=0.0))
    client = replace(TRUTH, host=replace(TRUTH.host, token_s=1.5e-5))
    cases = [case.on(replace(case.scenario, engine=unknowing)) for case in measured(client)]
    result = fitted(cases, unknowing)
    assert result.engine.host.token_s == pytest.approx(1.5e-5, rel=0.2)
    alone = fitted(cases[:1], unknowing)
    assert alone.engine.host.token_s == 0.0


def test_check_reports_errors_and_coverage() -> None:
    cases = measured(TRUTH)
    result = check_prefills(cases, interval).to_dict()
    assert result["n"] == len(result["rows"]) == 6
    sizes = [abs(one["predicted_s"] / one["measured_s"] - 1) for one in result["rows"]]
    assert [abs(one["rel_error"]) for one in result["rows"]] == pytest.approx(sizes)
    assert result["mape"] == pytest.approx(np.mean(sizes))
    assert result["median_ape"] == pytest.approx(np.median(sizes))
    inside = [one["low_s"] <= one["measured_s"] <= one["high_s"] for one in result["rows"]]
    assert result["coverage"] == pytest.approx(np.mean(inside))
    assert all(one["low_s"] <= one["predicted_s"] <= one["high_s"] for one in result["rows"])


def test_rows_of_another_gpu_are_left_out() -> None:
    rows = [row(512, gpu="A100-SXM-80GB"), row(1024, gpu="H100"), row(2048, gpu="A100-SXM-80GB"), row(64, gpu="A800")]
    result = make_cases(rows, PROFILE, partition_of, {"engine": PRIOR})
    assert [case.row.context_len for case in result.cases] == [1024]
    assert result.notes[:2] == (
        "2 rows of A100-SXM-80GB left out: profile h100-flash is of h100",
        "1 row of A800 left out: profile h100-flash is of h100",
    )


def test_a_row_that_cannot_be_simulated_names_its_line() -> None:
    with pytest.raises(InputError, match="line 1024: model: got 'no-such-model'"):
        cases_of([row(1024, model="no-such-model")])
    with pytest.raises(InputError, match="line 1024: strategies: got 'tp7'"):
        cases_of([row(1024, num_gpus=7, strategy="tp")])


def test_the_profile_names_the_cluster_of_the_rows(fit: PrefillFit) -> None:
    """The fit stores the cluster, and a plan with the profile uses it by default."""
    assert fit.profile.cluster is None
    result = make_cases([row(1024)], PROFILE, partition_of, {"engine": PRIOR})
    assert result.cluster is not None
    assert (result.cluster.name, result.cluster.num_gpus) == ("h100-nvlink", 8)
    with_cluster = fitted(result.cases, cluster=result.cluster)
    assert make_scenario(ctx=1024, profile=with_cluster.profile)[0].cluster.gpu.name == PROFILE.gpu


def test_coverage_is_that_of_intervals_around_predictions_without_the_row() -> None:
    cases = measured(TRUTH, (1024, 4096))

    for interval_of, coverage in ((wide, 1.0), (narrow, 0.0)):
        result = fitted(cases, interval_of=interval_of)
        assert result.engine.fit is not None
        assert result.engine.fit.coverage == coverage
        assert result.profile.engine == result.engine
