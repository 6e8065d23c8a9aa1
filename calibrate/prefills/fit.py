"""PrefillFit: an engine fitted to whole prefills, its errors, and the profile that holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.prefills.cases import PrefillCase
from calibrate.prefills.check import IntervalOf
from calibrate.prefills.solve import Array, Prior, Solution, solve
from calibrate.prefills.terms import MODEL, SUSTAINED_SHARE, EngineTerms, with_clock
from kvrsim.engine import TERMS, Engine, EngineFit
from kvrsim.hardware import Cluster
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT, CalibrationProfile
from kvrsim.version import __version__

_SPANNED = 4  # times as many tokens in the longest prompt as in the shortest: enough to tell a token's seconds
_IDENTIFIED = 0.5**0.5  # of the prior's width: below, the rows say more of a term than the prior does


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedTerm:
    """A term of the engine, before and after the rows."""

    prior: Prior
    value: float
    log_sd: float  # standard deviation of its logarithm, after the rows

    @property
    def identified(self) -> bool:
        """Whether the rows say more of it than the prior does."""
        return self.log_sd < _IDENTIFIED * self.prior.log_sd

    @property
    def span(self) -> tuple[float, float]:
        """The ends of the 80 % interval of its value."""
        factor = float(np.exp(DEVIATES_OF_80_PERCENT * self.log_sd))
        return self.value / factor, self.value * factor

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        low, high = self.span
        return {
            "name": self.prior.name,
            "prior": self.prior.median,
            "prior_log_sd": self.prior.log_sd,
            "value": self.value,
            "low": low,
            "high": high,
            "identified": self.identified,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Absolute relative errors of some predictions, as fractions."""

    median_ape: float
    mape: float

    @classmethod
    def of(cls, predicted_s: Array, measured_s: Array) -> Errors:
        """predicted / measured - 1, its size."""
        size = np.abs(predicted_s / measured_s - 1)
        return cls(median_ape=float(np.median(size)), mape=float(np.mean(size)))

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values."""
        return {"median_ape": self.median_ape, "mape": self.mape}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFit:
    """Terms, errors before and after, and errors of rows that were left out."""

    profile: CalibrationProfile  # with the fitted engine
    engine: Engine
    terms: tuple[FittedTerm, ...]
    cases: tuple[str, ...]  # of each row, in words
    measured_s: Array
    before_s: Array  # seconds of each row with the engine that the prior is
    solution: Solution

    @property
    def before(self) -> Errors:
        """With the engine that the prior is."""
        return Errors.of(self.before_s, self.measured_s)

    @property
    def after(self) -> Errors:
        """Of the rows that the terms were fitted to."""
        return Errors.of(self.solution.after_s, self.measured_s)

    @property
    def left_out(self) -> Errors:
        """Each row predicted with terms that were fitted without it."""
        return Errors.of(self.solution.left_out_s, self.measured_s)

    def applied(self, case: PrefillCase) -> PrefillCase:
        """The case with the fitted engine and clock."""
        profile = case.scenario.profile
        assert profile is not None, "a roofline has no engine"
        fitted = replace(profile, kernels=self.profile.kernels)
        return replace(case, scenario=replace(case.scenario, engine=self.engine, profile=fitted))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        assert self.engine.fit is not None, "fit_prefills sets it"
        rows = zip(
            self.cases, self.measured_s, self.before_s, self.solution.after_s, self.solution.left_out_s,
            strict=True,
        )  # fmt: skip
        names = ("case", "measured_s", "before_s", "after_s", "left_out_s")
        return {
            "profile": self.profile.name,
            "n": len(self.cases),
            "terms": [term.to_dict() for term in self.terms],
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "left_out": self.left_out.to_dict(),
            "left_out_log_sd": self.engine.fit.log_sd,
            "left_out_coverage": self.engine.fit.coverage,
            "rows": [dict(zip(names, (case, *map(float, seconds)), strict=True)) for case, *seconds in rows],
        }


def fit_prefills(
    cases: Sequence[PrefillCase],
    profile: CalibrationProfile,
    prior: Engine | None,
    *,
    name: str,
    source: str,
    cluster: Cluster | None = None,
    interval_of: IntervalOf | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> PrefillFit:
    """Fit an engine's terms to the cases, and make a profile of that name with the fitted engine.

    prior: the engine whose values and spreads are the terms' priors; None: PRIOR_ENGINE.
    source: of the rows, in a few words. Rows that repeat a case are left out together.
    cluster: of the rows, for the profile if it names none.
    interval_of: for the share of rows left out that their prediction intervals hold; None: by their spread alone.
    """
    measured_s = np.array([case.row.ttft_s for case in cases])
    sizes = [case.scenario.request.new_tokens for case in cases]
    terms = EngineTerms.of(profile, prior, lengths=max(sizes) >= _SPANNED * min(sizes))

    def predict(values: Array) -> Array:
        chosen = dict(zip(terms.names, map(float, values), strict=True))
        return np.array([case.ttft_s(lambda scenario: terms.scenario_with(scenario, chosen)) for case in cases])

    labels = tuple(case.row.case for case in cases)
    found = solve(predict, measured_s, terms.priors, labels, on_progress)
    fitted = tuple(
        FittedTerm(prior=prior, value=_most(prior.name, float(f"{value:.4g}")), log_sd=float(log_sd))
        for prior, value, log_sd in zip(terms.priors, found.values, found.log_sd, strict=True)
    )
    values = {term.prior.name: term.value for term in fitted}
    engine = _engine(terms, fitted, found, measured_s, labels, name=name, source=source)
    whole = replace(
        with_clock(profile, values), name=name, engine=engine, residual=None, cluster=profile.cluster or cluster
    )
    fit = PrefillFit(
        profile=whole,
        engine=engine,
        terms=fitted,
        cases=labels,
        measured_s=measured_s,
        before_s=np.array([case.ttft_s() for case in cases]),
        solution=found,
    )
    return fit if interval_of is None else _with_coverage(fit, cases, interval_of)


def _with_coverage(fit: PrefillFit, cases: Sequence[PrefillCase], interval_of: IntervalOf) -> PrefillFit:
    """With the share of rows whose interval, around the prediction without the row, holds the measurement."""
    assert fit.engine.fit is not None, "fit_prefills sets it"
    inside = []
    for case, then_s in zip(map(fit.applied, cases), fit.solution.left_out_s, strict=True):
        ttft_s = case.ttft_s()
        span = interval_of(case.scenario, case.strategy, case.partition, ttft_s)
        inside.append(span.low_s <= case.row.ttft_s * ttft_s / then_s <= span.high_s)
    engine = replace(fit.engine, fit=replace(fit.engine.fit, coverage=float(np.mean(inside))))
    return replace(fit, engine=engine, profile=replace(fit.profile, engine=engine))


def _engine(
    terms: EngineTerms,
    fitted: Sequence[FittedTerm],
    found: Solution,
    measured_s: Array,
    labels: Sequence[str],
    *,
    name: str,
    source: str,
) -> Engine:
    """The engine as a record of its own."""
    base = terms.engine
    values = {term.prior.name: term.value for term in fitted}
    spread = {term.prior.name: float(f"{term.log_sd:.3g}") for term in fitted if term.prior.name in TERMS}
    after, left_out = (Errors.of(seconds, measured_s) for seconds in (found.after_s, found.left_out_s))
    log_sd = left_out_log_sd(found.left_out_s, measured_s)
    outside = np.abs(np.log(found.left_out_s / measured_s)) > DEVIATES_OF_80_PERCENT * log_sd
    rows = f"{len(labels)} prefill{'s' * (len(labels) > 1)}"
    return replace(
        terms.engine_with(values),
        name=name,
        title=f"fitted to {rows}",
        description=f"{rows} of one's own ({source}), with {base.name} as the prior.",
        not_covered="Models, lengths and numbers of GPUs far from those of the rows.",
        spread=dict(base.spread) | spread | {MODEL: float(f"{found.noise_log_sd:.3g}")},
        fit=EngineFit(
            source=source,
            num_rows=len(labels),
            mape=after.mape,
            median_ape=after.median_ape,
            left_out_mape=left_out.mape,
            left_out_median_ape=left_out.median_ape,
            left_out="row",
            log_sd=log_sd,
            coverage=float(np.mean(~outside)),
        ),
        provenance={
            "fitted": f"{date.today().isoformat()} by kvrsim {__version__}",
            "prior": base.name,
            "rows": source,
        },
    )


def _most(name: str, value: float) -> float:
    """A share is at most 1."""
    return min(1.0, value) if name == SUSTAINED_SHARE else value


def left_out_log_sd(left_out_s: Array, measured_s: Array) -> float:
    """Spread of log(predicted / measured) of rows left out, wider where few rows say it.

    As wide as makes 1.2816 of it the 80 % quantile of Student's t for so many rows.
    """
    from scipy.stats import t

    errors = np.log(left_out_s / measured_s)
    spread = float(np.sqrt(np.mean(errors**2)))
    return spread * float(t.ppf(0.9, max(1, len(errors)))) / DEVIATES_OF_80_PERCENT


def source_of(paths: Sequence[str | Path]) -> str:
    """Names of the files, without their folders."""
    return ", ".join(dict.fromkeys(Path(path).name for path in paths))
