"""fit_prefills: an engine fitted to whole prefills that a user has timed; check_prefills: errors of a profile."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from calibrate.data import name_parts
from calibrate.fit.fit import to_digits
from calibrate.prefills.rows import PrefillRow
from calibrate.prefills.solve import Array, Prior, Solution, solve
from kvrsim.builder import make_scenario
from kvrsim.engine import DEVIATES_OF_80_PERCENT, PRIOR_ENGINE, TERMS, Engine, EngineFit, HostRates, load_engine
from kvrsim.errors import InputError
from kvrsim.execution import Execution, place
from kvrsim.executors.run import ttft_s
from kvrsim.hardware import Cluster, builtin_gpus, cluster_of, load_cluster
from kvrsim.io.schema import fields_to_json, to_frame, to_json
from kvrsim.kernels.profile import CalibrationProfile, ValidRange
from kvrsim.layout import LAYOUT_KINDS
from kvrsim.placement import PlacedScenario
from kvrsim.progress import OnProgress
from kvrsim.scenario import Partition
from kvrsim.strategies import get_strategy
from kvrsim.version import __version__

if TYPE_CHECKING:
    import pandas

KERNEL_SCALE = "kernel_scale"
MISS_FACTOR = 10.0  # of the interval score: 2 / (1 - 0.8)
SUSTAINED_SHARE = "sustained_share"  # rate under long load divided by the rate of bursts, in the profile's clock
MODEL = "model"  # spread that no term explains, estimated from the rows
TOKEN_PRIOR = Prior(name="token_s", median=1e-6, log_sd=1.5)  # seconds of a tokeniser per token
_CLOCK_LOG_SD = 0.03  # log sd of sustained_share over machines with other cooling or power limits
_HOST = {one.name for one in fields(HostRates)} & set(TERMS)
_LEAST_LENGTH_RATIO = 4  # token_s is fitted if the longest prompt is at least this multiple of the shortest
_IDENTIFIED = 0.5**0.5  # a term is identified if the rows narrow it below this share of the prior's width
_OF_A_ROW = ("model", "gpus", "ctx", "batch", "cached_prefix", "dtype", "strategy", "strategies", "attention")

# The partition that a strategy runs with. The planner supplies the function: this package does not import the planner.
PartitionOf = Callable[[Execution], Partition]


class HasInterval(Protocol):
    """The two ends of a prediction interval, seconds."""

    @property
    def low_s(self) -> float: ...

    @property
    def high_s(self) -> float: ...


# Function that returns the 80 % interval of a TTFT. The planner supplies the function, too.
IntervalOf = Callable[[Execution, Partition, float], HasInterval]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCase:
    """One measured prefill, ready to be predicted."""

    row: PrefillRow
    execution: Execution  # the scenario placed for the row's strategy
    partition: Partition

    def ttft_s(self) -> float:
        """Predicted seconds."""
        return float(ttft_s(self.execution, np.array([self.partition.chunk_lens], dtype=float))[0])

    def on(self, scenario: PlacedScenario) -> PrefillCase:
        """The case on a machine or with an engine that differ."""
        return replace(self, execution=self.execution.on(scenario))

    @property
    def scenario(self) -> PlacedScenario:
        """The scenario as one rank sees it."""
        return self.execution.placed


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCases:
    """All cases, with notes."""

    cases: tuple[PrefillCase, ...]
    notes: tuple[str, ...]
    cluster: Cluster | None  # cluster of all cases; None: the profile's own cluster, or a default


def make_cases(
    rows: Sequence[PrefillRow],
    profile: CalibrationProfile,
    partition_of: PartitionOf,
    setting: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> PrefillCases:
    """Convert the rows to cases of one profile.

    setting: further arguments of make_scenario, the same for all rows, such as cluster, engine or link_bandwidth.

    A row is left out if it names a built-in GPU and the profile is for a different GPU. A row with an unknown GPU
    counts as a row of the profile's GPU. Both cases give a note. Raises InputError if no row is left, or if a row
    cannot be simulated; the message names the file and the line.
    """
    fields = {key: value for key, value in (setting or {}).items() if value is not None}
    cluster = fields.pop("cluster", None)
    if cluster is None and profile.cluster is None:
        cluster = cluster_of(profile.gpu)
    elif cluster is not None and not isinstance(cluster, Cluster):
        cluster = load_cluster(str(cluster))
    if cluster is not None:
        fields["cluster"] = cluster
    cases = []
    notes = dict[str, str]()
    usable, gpu_notes = _of_gpu(rows, profile)
    for number, row in enumerate(usable, start=1):
        if on_progress is not None:
            on_progress(number, len(usable), "preparing rows")
        try:
            case, case_notes = _case(row, profile, partition_of, fields)
        except InputError as error:
            if error.parameter.split(":")[0] not in _OF_A_ROW:
                raise
            raise InputError(f"{row.where}: {error.parameter}", error.value, error.accepted) from None
        cases.append(case)
        for note in case_notes:
            # Keep one of the notes that differ only in numbers.
            notes.setdefault(getattr(note, "code", re.sub(r"[0-9]+", "", note)), note)
    return PrefillCases(cases=tuple(cases), notes=(*gpu_notes, *notes.values()), cluster=cluster)


def _case(
    row: PrefillRow, profile: CalibrationProfile, partition_of: PartitionOf, fields: Mapping[str, Any]
) -> tuple[PrefillCase, tuple[str, ...]]:
    scenario, notes = make_scenario(
        ctx=row.context_len or 0,
        gpus=row.num_gpus,
        model=row.model or "",
        profile=profile,
        batch=row.batch or 1,
        cached_prefix=row.cached_prefix or 0,
        dtype=row.dtype,
        **fields,
    )
    execution = place(scenario, get_strategy(row.strategy_name))
    return PrefillCase(row=row, execution=execution, partition=partition_of(execution)), notes


def _of_gpu(rows: Sequence[PrefillRow], profile: CalibrationProfile) -> tuple[list[PrefillRow], list[str]]:
    """The rows of the profile's GPU, and notes on the others."""
    usable = []
    others = Counter[str]()
    unknown = dict[str, None]()
    for row in rows:
        if row.gpu is None or _is_named(profile.gpu, row.gpu):
            usable.append(row)
            continue
        chips = chips_of(row.gpu)
        if profile.gpu in chips or not chips:
            unknown[row.gpu] = None
            usable.append(row)
        else:
            others[row.gpu] += 1
    if not usable:
        accepted = f"{profile.gpu}, the GPU of profile {profile.name}; other GPUs have profiles of their own"
        raise InputError(f"{rows[0].where}: gpu", rows[0].gpu, accepted)
    notes = [
        f"{count} row{'s' * (count > 1)} of {gpu} left out: profile {profile.name} is of {profile.gpu}"
        for gpu, count in others.items()
    ]
    notes += [f"GPU {gpu} is taken to be {profile.gpu}, the GPU of profile {profile.name}" for gpu in unknown]
    return usable, notes


def chips_of(text: str) -> list[str]:
    """The built-in GPUs that a name may mean; A800 and H800 are A100 and H100 with slower links."""
    plain = re.sub("[ah]800", lambda match: f"{match[0][0]}100", text.lower())
    return [gpu for gpu in builtin_gpus() if _is_named(gpu, plain)]


def _is_named(gpu: str, text: str) -> bool:
    """Whether one of the names has all parts of the other, such as "A100-SXM-80GB" and "A100"."""
    ours = name_parts(gpu)
    theirs = name_parts(text)
    return bool(ours) and bool(theirs) and (ours <= theirs or theirs <= ours)


# -- a check of a profile, without a fit


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillErrors:
    """Absolute relative errors of predicted prefills, as fractions."""

    median_ape: float
    mape: float

    @classmethod
    def of(cls, predicted_s: Array, measured_s: Array) -> PrefillErrors:
        """Errors from predicted / measured - 1."""
        size = np.abs(predicted_s / measured_s - 1)
        return cls(median_ape=float(np.median(size)), mape=float(np.mean(size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCheck:
    """One measured prefill and its prediction."""

    case: str  # description of the case
    measured_s: float
    predicted_s: float
    low_s: float  # lower end of the 80 % prediction interval
    high_s: float

    @property
    def rel_error(self) -> float:
        """Relative error: predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        """Whether the measurement lies inside the interval."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def interval_score(self) -> float:
        """Winkler's score of the 80 % interval of log TTFT: its width and 10 times the miss of the measurement."""
        miss = max(self.low_s / self.measured_s, self.measured_s / self.high_s, 1.0)
        return math.log(self.high_s / self.low_s) + MISS_FACTOR * math.log(miss)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCheck:
    """All checked rows, with their errors."""

    rows: tuple[RowCheck, ...]

    @property
    def errors(self) -> PrefillErrors:
        predicted_s, measured_s = np.array([(row.predicted_s, row.measured_s) for row in self.rows]).T
        return PrefillErrors.of(predicted_s, measured_s)

    @property
    def coverage(self) -> float:
        """Share of the measurements inside their intervals."""
        return float(np.mean([row.inside for row in self.rows]))

    @property
    def interval_score(self) -> float:
        """Mean interval score of the rows."""
        return float(np.mean([row.interval_score for row in self.rows]))

    def to_dict(self) -> dict[str, Any]:
        """The check as plain JSON values."""
        rows = [fields_to_json(row) | {"rel_error": row.rel_error} for row in self.rows]
        return {"rows": rows, "n": len(rows), **to_json(self.errors), "coverage": self.coverage}


def check_prefills(
    cases: Sequence[PrefillCase], interval_of: IntervalOf, on_progress: OnProgress | None = None
) -> PrefillCheck:
    """Predict each case, with its 80 % interval."""
    rows = []
    for number, case in enumerate(cases, start=1):
        if on_progress is not None:
            on_progress(number, len(cases), "predicting rows")
        predicted_s = case.ttft_s()
        span = interval_of(case.execution, case.partition, predicted_s)
        seconds = {"predicted_s": predicted_s, "low_s": span.low_s, "high_s": span.high_s}
        rows.append(RowCheck(case=case.row.case, measured_s=case.row.ttft_s, **seconds))
    return PrefillCheck(rows=tuple(rows))


# -- fit of an engine to the cases


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTerms:
    """The terms of an engine that a fit may change. The engine's values are medians of priors, its spreads widths."""

    engine: Engine
    gpu: str  # GPU of the profile; the engine has a kernel_scale for it
    priors: tuple[Prior, ...]

    @classmethod
    def of(cls, profile: CalibrationProfile, engine: Engine | None, *, lengths: bool = False) -> EngineTerms:
        """The terms that have both a value and a spread. Raises InputError if there are none.

        engine: the prior; None: PRIOR_ENGINE. lengths: whether the rows' lengths differ enough to determine seconds per
        token, a term that the prior may lack.
        """
        base = engine
        if base is None:
            base = load_engine(PRIOR_ENGINE)
        priors = []
        for name in TERMS:
            log_sd = base.spread.get(name, 0.0)
            if name == KERNEL_SCALE:
                median = base.scale_on(profile.gpu)
            else:
                median = getattr(base.host, name, 0.0)
            if name != MODEL and log_sd > 0 and median > 0:
                priors.append(Prior(name=name, median=median, log_sd=log_sd))
        if not priors:
            raise InputError("engine", base.name, f"an engine with terms that have a spread, such as {PRIOR_ENGINE}")
        if profile.kernels.clock is not None:
            share = profile.kernels.clock.sustained_share
            priors.append(Prior(name=SUSTAINED_SHARE, median=share, log_sd=_CLOCK_LOG_SD))
        if lengths and base.host.token_s == 0:
            priors.append(TOKEN_PRIOR)
        priors.sort(key=lambda prior: (*TERMS, SUSTAINED_SHARE).index(prior.name))
        return cls(engine=base, gpu=profile.gpu, priors=tuple(priors))

    def named(self, values: Array) -> dict[str, float]:
        """Values by name of the term."""
        return {prior.name: float(value) for prior, value in zip(self.priors, values, strict=True)}

    def engine_with(self, values: Mapping[str, float]) -> Engine:
        """The engine with these values of its terms."""
        host = {name: value for name, value in values.items() if name in _HOST}
        scale = self.engine.kernel_scale
        if KERNEL_SCALE in values:
            scale = {self.gpu: values[KERNEL_SCALE]}
        return replace(self.engine, host=replace(self.engine.host, **host), kernel_scale=scale)

    def scenario_with(self, scenario: PlacedScenario, values: Mapping[str, float]) -> PlacedScenario:
        """The scenario with these values in its engine and in the clock of its profile."""
        profile = scenario.profile and with_clock(scenario.profile, values)
        return replace(scenario, engine=self.engine_with(values), profile=profile)


class CasePredictor:
    """Seconds of cases by values of an engine's terms. Values that differ only in host terms share costs of kernels."""

    def __init__(self, terms: EngineTerms, cases: Sequence[PrefillCase]) -> None:
        self.terms = terms
        self.cases = cases
        self._kernels: dict[str, float] | None = None  # terms of kernels in the latest call; None: not called
        self._scenarios: list[PlacedScenario] = []  # scenarios of the cases with these terms

    def __call__(self, values: Array) -> Array:
        """Seconds of each case, shape (cases,); values: of all terms, shape (terms,)."""
        factors = self.terms.named(values)
        kernels = {name: factors[name] for name in (KERNEL_SCALE, SUSTAINED_SHARE) if name in factors}
        if kernels != self._kernels:
            self._scenarios = [self.terms.scenario_with(case.scenario, factors) for case in self.cases]
            self._kernels = kernels
        engine = self.terms.engine_with(factors)
        cases = zip(self.cases, self._scenarios, strict=True)
        return np.array([case.on(scenario.with_engine(engine)).ttft_s() for case, scenario in cases])


def with_clock(profile: CalibrationProfile, values: Mapping[str, float]) -> CalibrationProfile:
    """The profile with the sustained share of its clock from these values, at most 1."""
    kernels = profile.kernels
    if kernels.clock is None or SUSTAINED_SHARE not in values:
        return profile
    clock = replace(kernels.clock, sustained_share=min(1.0, values[SUSTAINED_SHARE]))
    return replace(profile, kernels=replace(kernels, clock=clock))


@dataclass(frozen=True, kw_only=True, slots=True)
class TermFit:
    """A term of the engine, before and after the fit to the rows."""

    prior: Prior
    value: float
    log_sd: float  # standard deviation of the term's logarithm, given the rows

    @property
    def identified(self) -> bool:
        """Whether the rows determine the term better than the prior does."""
        return self.log_sd < _IDENTIFIED * self.prior.log_sd

    @property
    def span(self) -> tuple[float, float]:
        """Ends of the 80 % interval of the term's value."""
        factor = float(np.exp(DEVIATES_OF_80_PERCENT * self.log_sd))
        return self.value / factor, self.value * factor

    def to_dict(self) -> dict[str, Any]:
        """The term as plain JSON values."""
        low, high = self.span
        prior = {"name": self.prior.name, "prior": self.prior.median, "prior_log_sd": self.prior.log_sd}
        return {**prior, "value": self.value, "low": low, "high": high, "identified": self.identified}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFit:
    """Fitted terms, errors before and after the fit, and errors of rows that were left out of fits."""

    profile: CalibrationProfile  # profile with the fitted engine
    engine: Engine
    terms: tuple[TermFit, ...]
    cases: tuple[str, ...]  # description of each row's case
    measured_s: Array
    before_s: Array  # seconds of each row by the prior engine
    solution: Solution

    @property
    def before(self) -> PrefillErrors:
        """Errors with the prior engine."""
        return PrefillErrors.of(self.before_s, self.measured_s)

    @property
    def after(self) -> PrefillErrors:
        """Errors of the rows that the terms were fitted to."""
        return PrefillErrors.of(self.solution.after_s, self.measured_s)

    @property
    def left_out(self) -> PrefillErrors:
        """Errors of rows, each predicted with terms fitted without its case."""
        return PrefillErrors.of(self.solution.left_out_s, self.measured_s)

    def apply(self, case: PrefillCase) -> PrefillCase:
        """The case with the fitted engine and clock."""
        profile = case.scenario.profile
        assert profile is not None, "a roofline has no engine"
        fitted = replace(profile, kernels=self.profile.kernels)
        return case.on(replace(case.scenario, engine=self.engine, profile=fitted))

    def to_frame(self) -> pandas.DataFrame:
        """A frame with one row per prefill: seconds measured, and predicted before, after and without the case."""
        return to_frame(self.to_dict()["rows"])

    def to_dict(self) -> dict[str, Any]:
        """The fit as plain JSON values."""
        assert self.engine.fit is not None, "fit_prefills sets it"
        columns = {
            "case": self.cases,
            "measured_s": self.measured_s.tolist(),
            "before_s": self.before_s.tolist(),
            "after_s": self.solution.after_s.tolist(),
            "left_out_s": self.solution.left_out_s.tolist(),
        }
        return {
            "profile": self.profile.name,
            "n": len(self.cases),
            "terms": [term.to_dict() for term in self.terms],
            "before": to_json(self.before),
            "after": to_json(self.after),
            "left_out": to_json(self.left_out),
            "left_out_log_sd": self.engine.fit.log_sd,
            "left_out_coverage": self.engine.fit.coverage,
            "rows": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        }


def fit_prefills(
    cases: Sequence[PrefillCase],
    profile: CalibrationProfile,
    prior: Engine | None,
    *,
    name: str,
    source: str,
    cluster: Cluster | None = None,
    interval_of: IntervalOf,
    on_progress: OnProgress | None = None,
) -> PrefillFit:
    """Fit an engine's terms to the cases, and make a profile called `name` with the fitted engine.

    prior: an engine; its values and spreads are the priors of the terms. None: PRIOR_ENGINE.
    source: origin of the rows, in a few words. Rows that repeat a case are left out together.
    cluster: cluster of the rows, which the profile takes if it names none.
    interval_of: prediction intervals for the coverage, the share of left-out rows inside them.
    """
    measured_s = np.array([case.row.ttft_s for case in cases])
    sizes = [case.scenario.request.new_tokens for case in cases]
    terms = EngineTerms.of(profile, prior, lengths=max(sizes) >= _LEAST_LENGTH_RATIO * min(sizes))
    labels = tuple(case.row.case for case in cases)
    solution = solve(CasePredictor(terms, cases), measured_s, terms.priors, labels, on_progress)
    found = np.concatenate([solution.values, solution.log_sd, solution.after_s, solution.left_out_s])
    if not np.isfinite(found).all():
        worst = int(np.argmax(np.abs(np.log(measured_s / solution.after_s))))
        row = cases[worst].row
        accepted = "times near each other for like prefills: no engine explains these rows together"
        raise InputError(f"{row.where}: TTFT", f"{row.ttft_s:.4g} s", accepted)
    values = {term: to_digits(value) for term, value in terms.named(solution.values).items()}
    if SUSTAINED_SHARE in values:
        values[SUSTAINED_SHARE] = min(1.0, values[SUSTAINED_SHARE])
    engine = replace(
        _fitted_engine(terms, values, solution, cases, source), name=name, fit=_engine_fit(solution, measured_s, source)
    )
    fitted_profile = replace(
        with_clock(profile, values),
        name=name,
        engine=engine,
        residual=None,
        cluster=profile.cluster or cluster,
        valid=_range_with(profile.valid, cases),
    )
    fitted_terms = []
    for prior_of_term, log_sd in zip(terms.priors, solution.log_sd, strict=True):
        term = TermFit(prior=prior_of_term, value=values[prior_of_term.name], log_sd=float(log_sd))
        fitted_terms.append(term)
    fit = PrefillFit(
        profile=fitted_profile,
        engine=engine,
        terms=tuple(fitted_terms),
        cases=labels,
        measured_s=measured_s,
        before_s=np.array([case.ttft_s() for case in cases]),
        solution=solution,
    )
    return _with_coverage(fit, cases, interval_of)


def _fitted_engine(
    terms: EngineTerms, values: Mapping[str, float], solution: Solution, cases: Sequence[PrefillCase], source: str
) -> Engine:
    """The engine with the fitted terms, their spreads, and what a reader must know of the rows."""
    rows = f"{len(cases)} prefill"
    if len(cases) > 1:
        rows += "s"
    spread = dict(terms.engine.spread)
    for prior, log_sd in zip(terms.priors, solution.log_sd, strict=True):
        if prior.name in TERMS:
            spread[prior.name] = to_digits(float(log_sd), 3)
    spread[MODEL] = to_digits(solution.noise_log_sd, 3)
    return replace(
        terms.engine_with(values),
        title=f"fitted to {rows}",
        description=f"{rows} of one's own ({source}), with {terms.engine.name} as the prior.",
        not_covered="Models, lengths and numbers of GPUs far from those of the rows.",
        spread=spread,
        layouts=_layouts(cases),
        provenance={
            "fitted": f"{date.today().isoformat()} by kvrsim {__version__}",
            "prior": terms.engine.name,
            "rows": source,
        },
    )


def _layouts(cases: Sequence[PrefillCase]) -> tuple[str, ...]:
    """The ways in which some of the rows divide a prefill over GPUs."""
    kinds = set(chain.from_iterable(case.scenario.layout_kinds for case in cases))
    return tuple(kind for kind in LAYOUT_KINDS if kind in kinds)


def _range_with(valid: ValidRange, cases: Sequence[PrefillCase]) -> ValidRange:
    """The measured range of a profile and of the rows together."""
    contexts = [case.scenario.request.context_len for case in cases]
    gpus = [case.row.num_gpus or 1 for case in cases]
    shortest, longest = valid.context_len
    fewest, most = valid.num_gpus
    return replace(
        valid,
        context_len=(min(shortest, *contexts), max(longest, *contexts)),
        num_gpus=(min(fewest, *gpus), max(most, *gpus)),
    )


def _engine_fit(solution: Solution, measured_s: Array, source: str) -> EngineFit:
    """Errors of the fit; `_with_coverage` sets the coverage, which needs the fitted engine."""
    after, left_out = (PrefillErrors.of(seconds, measured_s) for seconds in (solution.after_s, solution.left_out_s))
    return EngineFit(
        source=source,
        num_rows=len(measured_s),
        mape=after.mape,
        median_ape=after.median_ape,
        left_out_mape=left_out.mape,
        left_out_median_ape=left_out.median_ape,
        left_out="row",
        log_sd=left_out_log_sd(solution.left_out_s, measured_s),
        coverage=0.0,
    )


def _with_coverage(fit: PrefillFit, cases: Sequence[PrefillCase], interval_of: IntervalOf) -> PrefillFit:
    """Return the fit with its coverage: the share of rows inside the intervals of predictions made without them."""
    assert fit.engine.fit is not None, "fit_prefills sets it"
    inside = []
    for case, then_s in zip(map(fit.apply, cases), fit.solution.left_out_s, strict=True):
        ttft_s = case.ttft_s()
        span = interval_of(case.execution, case.partition, ttft_s)
        inside.append(span.low_s <= case.row.ttft_s * ttft_s / then_s <= span.high_s)
    engine = replace(fit.engine, fit=replace(fit.engine.fit, coverage=float(np.mean(inside))))
    return replace(fit, engine=engine, profile=replace(fit.profile, engine=engine))


def left_out_log_sd(left_out_s: Array, measured_s: Array) -> float:
    """Spread of log(predicted / measured) of left-out rows; wider for fewer rows.

    The spread is scaled so that 1.2816 spreads are the 90 % quantile of Student's t for this number of rows.
    """
    from scipy.special import stdtrit  # imported only for fits

    errors = np.log(left_out_s / measured_s)
    spread = float(np.sqrt(np.mean(errors**2)))
    return spread * float(stdtrit(max(1, len(errors)), 0.9)) / DEVIATES_OF_80_PERCENT
