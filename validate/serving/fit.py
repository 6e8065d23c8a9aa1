"""Fit the shipped engines to published prefills: `python -m validate.serving.fit`.

The texts of a record, and whether its TTFT includes a decode step, are in kvrsim/data/engines/NAME.json; the command
rewrites its seconds, scales, spreads and errors. calibrate.prefills.solve fits an engine's terms to its rows, under
the same wide priors for all engines. Every row is one pass through the layers, so a constant time may belong to the
request or to the step; it is assigned to the step, but for TTFTs at the client, whose request passes a proxy. `serving`
has the mean of each term's logarithm over the engines, and its standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from calibrate.prefills.fit import PrefillCase, left_out_log_sd
from calibrate.prefills.rows import PrefillRow
from calibrate.prefills.solve import Prior, Solution, solve
from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.engine import NO_HOST, OTHER_GPU, SHORT_TOKENS, Engine, EngineFit, load_engine
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT, CalibrationProfile, load_profile
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.uncertainty.intervals import interval
from validate.published.compare import DATA, read_table

PATH = DATA / "serving_prefills.csv"
_PROFILES = {"a100": "a100-flash", "a800": "a100-flash", "h100": "h100-flash", "h800": "h100-flash"}
_OPERATORS = ("ring-flash-attention",)  # attention alone, not whole prefills


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRow:
    """One published prefill."""

    engine: str  # name of the engine's record
    model: str
    cluster: str
    num_gpus: int
    strategy: str
    context_len: int  # tokens of each prompt
    batch: int  # prompts
    dtype: str
    ttft_s: float
    left_out: str  # the rule by which it is not compared; empty: it is
    source: str

    @property
    def tokens(self) -> int:
        """Of all prompts together."""
        return self.context_len * self.batch

    @property
    def setting(self) -> str:
        """What the row shares with others of its engine but for the prompts."""
        return f"{self.model} {self.strategy} on {self.num_gpus} of {self.cluster}"

    @property
    def case(self) -> str:
        """The row in words."""
        gpus = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)} of {self.cluster}"
        batch = f" x {self.batch}" if self.batch > 1 else ""
        return f"{self.model} {self.context_len}{batch} {self.strategy} on {gpus}"

    @property
    def profile(self) -> CalibrationProfile:
        """Of the row's GPU."""
        return _profile(_PROFILES[self.cluster.partition("-")[0]])


def read_rows(*, compared: bool = True) -> tuple[ServingRow, ...]:
    """All rows of whole prefills, or those that no rule leaves out."""
    texts = ("model", "cluster", "strategy", "dtype", "left_out", "source")
    rows = [
        ServingRow(
            **{name: fields[name] for name in texts},
            engine=fields["engine_name"],
            num_gpus=int(fields["num_gpus"]),
            context_len=int(fields["context_len"]),
            batch=int(fields["batch"]),
            ttft_s=float(fields["seconds"]),
        )
        for fields in read_table(PATH.name)
        if fields["engine_name"] not in _OPERATORS
    ]
    return tuple(row for row in rows if not (compared and row.left_out))


def case_of(row: ServingRow, engine: Engine) -> PrefillCase:
    """The row with its scenario under an engine."""
    scenario, _ = make_scenario(
        ctx=row.context_len,
        gpus=row.num_gpus,
        model=row.model,
        profile=row.profile,
        cluster=row.cluster,
        batch=row.batch,
        dtype=row.dtype,
        engine=engine,
    )
    strategy = get_strategy(row.strategy)
    scenario = for_strategy(scenario, strategy)
    prefill = PrefillRow(
        ttft_s=row.ttft_s,
        where=str(PATH),
        model=row.model,
        num_gpus=row.num_gpus,
        strategy=row.strategy,
        context_len=row.context_len,
        batch=row.batch,
    )
    return PrefillCase(row=prefill, scenario=scenario, strategy=strategy, partition=partition_of(scenario, strategy))


@cache
def _profile(name: str) -> CalibrationProfile:
    return load_profile(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingError:
    """One prefill and its prediction."""

    row: ServingRow
    predicted_s: float
    low_s: float  # of the 80 % prediction interval
    high_s: float

    @property
    def rel_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.row.ttft_s - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low_s <= self.row.ttft_s <= self.high_s

    @property
    def is_short(self) -> bool:
        """Whether most of the time may be what the engine adds."""
        return self.row.tokens < SHORT_TOKENS

    def around(self, predicted_s: float) -> ServingError:
        """Another prediction, with an interval of the same relative width."""
        scale = predicted_s / self.predicted_s
        return replace(self, predicted_s=predicted_s, low_s=scale * self.low_s, high_s=scale * self.high_s)


def errors_of(rows: Sequence[ServingRow], engine: Engine) -> list[ServingError]:
    """Every row predicted under one engine."""
    errors = []
    for row in rows:
        case = case_of(row, engine)
        predicted_s = case.ttft_s()
        sure = interval(case.scenario, case.strategy, case.partition, predicted_s)
        errors.append(ServingError(row=row, predicted_s=predicted_s, low_s=sure.low_s, high_s=sure.high_s))
    return errors


FOLDER = Path(__file__).parents[2] / "kvrsim" / "data" / "engines"
SERVING = "serving"
ENGINES = ("vllm-2023", "tensorrt-llm-0.5", "lmdeploy-0.1", "loongserve-2024", "mooncake-vllm-0.11")
_AT_THE_CLIENT = ("mooncake-vllm-0.11",)  # whose TTFT holds what comes before and after the engine

# Wide enough for every engine: three standard deviations of a host's layer are 3 us to 10 ms.
_PRIORS = {
    "step_s": Prior(name="step_s", median=3e-3, log_sd=1.5),
    "request_s": Prior(name="request_s", median=3e-2, log_sd=1.5),
    "token_s": Prior(name="token_s", median=5e-6, log_sd=1.5),
    "layer_s": Prior(name="layer_s", median=1.5e-4, log_sd=1.3),
    "collective_s": Prior(name="collective_s", median=1.5e-5, log_sd=1.3),
}
_TERMS = ("step_s", "layer_s", "collective_s")
_CLIENT_TERMS = ("request_s", "token_s", "layer_s", "collective_s")
_SCALE = Prior(name="kernel_scale", median=1.05, log_sd=0.15)
_LEAST_LONG = 4  # rows of 512 tokens and more, for a width from these alone
_LEAST_SCALE_LOG_SD = 0.03  # of the mean of so few engines


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedEngine:
    """One engine's record, and its fit."""

    engine: Engine
    rows: tuple[ServingRow, ...]
    priors: tuple[Prior, ...]
    solution: Solution


def fit_engine(name: str, rows: Sequence[ServingRow]) -> FittedEngine:
    """The record of an engine with terms fitted to its rows."""
    base = load_engine(name)
    base = replace(base, host=NO_HOST, kernel_scale={}, spread={}, fit=None)
    cases = [case_of(row, base) for row in rows]
    gpus = tuple(dict.fromkeys(row.profile.gpu for row in rows))
    priors = (
        *(_PRIORS[term] for term in (_CLIENT_TERMS if name in _AT_THE_CLIENT else _TERMS)),
        *(replace(_SCALE, name=gpu) for gpu in gpus),
    )

    def predict(values: Array) -> Array:
        engine = _with_terms(base, priors, values)

        def with_engine(scenario: Scenario) -> Scenario:
            return replace(scenario, engine=engine)

        return np.array([case.ttft_s(with_engine) for case in cases])

    solution = solve(predict, np.array([row.ttft_s for row in rows]), priors, left_out_together(rows))
    engine = _with_terms(base, priors, solution.values)
    engine = replace(engine, spread=_spread(priors, solution))
    return FittedEngine(
        engine=replace(engine, fit=_fit(engine, rows, solution)), rows=tuple(rows), priors=priors, solution=solution
    )


def left_out_together(rows: Sequence[ServingRow]) -> list[str]:
    """Of each row its setting: rows of one are left out together; where there is only one setting, each row alone."""
    settings = [row.setting for row in rows]
    return settings if len(set(settings)) > 1 else [row.case for row in rows]


def _with_terms(base: Engine, priors: Sequence[Prior], values: Array) -> Engine:
    terms = {prior.name: _rounded(value) for prior, value in zip(priors, values, strict=True)}
    host = replace(base.host, **{term: value for term, value in terms.items() if term in _PRIORS})
    return replace(base, host=host, kernel_scale={key: value for key, value in terms.items() if key not in _PRIORS})


def _spread(priors: Sequence[Prior], solution: Solution) -> dict[str, float]:
    """Of each term after the rows; of the scales the widest; of the rows around the fit."""
    spread: dict[str, float] = {}
    for prior, log_sd in zip(priors, solution.log_sd, strict=True):
        term = prior.name if prior.name in _PRIORS else "kernel_scale"
        spread[term] = max(spread.get(term, 0.0), _rounded(log_sd))
    return spread | {"model": _rounded(solution.noise_log_sd)}


def _fit(engine: Engine, rows: Sequence[ServingRow], solution: Solution) -> EngineFit:
    measured_s = np.array([row.ttft_s for row in rows])
    fit = _errors_only(
        ", ".join(dict.fromkeys(row.source for row in rows)),
        "setting" if len({row.setting for row in rows}) > 1 else "row",
        solution.after_s / measured_s - 1,
        solution.left_out_s / measured_s - 1,
    )

    def left_out(engine: Engine) -> list[ServingError]:
        errors = zip(errors_of(rows, engine), solution.left_out_s, strict=True)
        return [error.around(float(predicted_s)) for error, predicted_s in errors]

    off = unexplained(left_out(without_width(engine, fit)), least=_LEAST_LONG)
    fit = replace(fit, log_sd=_rounded(both_sides(off)))
    return _with_coverage(fit, left_out(replace(engine, fit=fit)))


def _with_coverage(fit: EngineFit, errors: Sequence[ServingError]) -> EngineFit:
    """The fit with the shares of short and longer rows inside their intervals."""
    coverage, short = (
        _rounded(np.mean([error.inside for error in errors if error.is_short is is_short]))
        for is_short in (False, True)
    )
    return replace(fit, coverage=coverage, short_coverage=short)


def _errors_only(source: str, left_out: str, own: Array, without: Array) -> EngineFit:
    """A fit without widths; relative errors of all rows, and of rows predicted without `left_out`."""
    return EngineFit(
        source=source,
        num_rows=len(own),
        mape=_rounded(np.abs(own).mean()),
        median_ape=_rounded(np.median(np.abs(own))),
        left_out_mape=_rounded(np.abs(without).mean()),
        left_out_median_ape=_rounded(np.median(np.abs(without))),
        left_out=left_out,
        log_sd=0.0,
        coverage=0.0,
    )


def prior_of(engines: Sequence[Engine]) -> Engine:
    """`serving` as these engines have it: of each term the mean over the engines, and how they differ."""
    base = load_engine(SERVING)
    spread, seconds = {}, {}
    for term in _TERMS:
        values = [getattr(engine.host, term) for engine in engines]
        seconds[term], spread[term] = _pooled([value for value in values if value])
    scales = [scale for engine in engines for scale in engine.kernel_scale.values()]
    scale, scale_log_sd = _pooled(scales)
    spread["kernel_scale"] = max(scale_log_sd, _LEAST_SCALE_LOG_SD)
    spread["model"] = _rounded(float(np.median([engine.spread["model"] for engine in engines])))
    return replace(base, host=replace(NO_HOST, **seconds), kernel_scale={OTHER_GPU: scale}, spread=spread, fit=None)


def _pooled(values: Sequence[float]) -> tuple[float, float]:
    """The geometric mean of a term of several engines, and how far a further engine's logarithm may be from it.

    As wide as makes 1.2816 of it the 80 % quantile of Student's t for so few engines.
    """
    logs = np.log(values)
    few = float(t.ppf(0.9, len(logs) - 1)) / DEVIATES_OF_80_PERCENT
    return _rounded(math.exp(logs.mean())), _rounded(few * logs.std(ddof=1) * math.sqrt(1 + 1 / len(logs)))


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")


def fit_all() -> dict[str, FittedEngine]:
    """Every engine with rows, fitted to them."""
    rows = read_rows()
    return {name: fit_engine(name, [row for row in rows if row.engine == name]) for name in ENGINES}


def left_out_engines(engines: Mapping[str, Engine]) -> dict[str, Engine]:
    """For each engine, `serving` as the other engines have it."""
    return {name: prior_of([one for other, one in engines.items() if other != name]) for name in engines}


def serving_of(engines: Mapping[str, Engine], rows: Mapping[str, Sequence[ServingRow]]) -> Engine:
    """`serving` with the errors of each engine's rows predicted from the other engines."""
    engine = prior_of(list(engines.values()))
    priors = left_out_engines(engines)
    source = f"prefills of {len(rows)} engines, each predicted from the others"
    unknown = _errors_only(source, "engine", np.zeros(1), np.zeros(1))
    bare = [error for name, own in rows.items() for error in errors_of(own, without_width(priors[name], unknown))]
    long = np.array([error.rel_error for error in bare if not error.is_short])
    shorter, longer = each_side(unexplained(bare))
    fit = replace(
        _errors_only(source, "engine", np.array([error.rel_error for error in bare]), long),
        log_sd=_rounded(np.std(np.log1p(long))),
        shorter_log=_rounded(shorter),
        longer_log=_rounded(longer),
    )
    wide = {name: replace(prior, fit=fit) for name, prior in priors.items()}  # widths of all, terms of the others
    errors = [error for name, own in rows.items() for error in errors_of(own, wide[name])]
    return replace(engine, fit=_with_coverage(fit, errors))


def between_gpus(engines: Sequence[Engine]) -> dict[str, float]:
    """Spread of the kernels' scale between GPUs, from engines that were measured on several."""
    logs = [np.log(list(engine.kernel_scale.values())) for engine in engines if len(engine.kernel_scale) > 1]
    spreads = [one.std(ddof=1) * math.sqrt(2) for one in logs]  # of a further GPU from one that was measured
    return {"other_gpu": _rounded(np.sqrt(np.mean(np.square(spreads))))} if spreads else {}


def main() -> None:
    """Rewrite the engines' records."""
    fitted = fit_all()
    between = between_gpus([one.engine for one in fitted.values()])
    engines = {name: replace(one.engine, spread=dict(one.engine.spread) | between) for name, one in fitted.items()}
    for engine in (*engines.values(), serving_of(engines, {name: one.rows for name, one in fitted.items()})):
        engine.write(FOLDER / f"{engine.name}.json")
        fit = engine.fit
        assert fit is not None
        print(
            f"{engine.name}: {fit.num_rows} rows, median {fit.median_ape:.1%}; left out by {fit.left_out}: median"
            f" {fit.left_out_median_ape:.1%}, inside {fit.coverage:.0%}"
        )


# Widths of intervals that rest on left-out prefills, beyond the spread of the terms. Errors are those of rows of 512
# tokens and more: below, the spread of the terms says more.
_MANY = 10  # rows from which a quantile is used instead of a standard deviation


def without_width(engine: Engine, fit: EngineFit) -> Engine:
    """The engine with that fit, and intervals that its terms alone make."""
    side = 0.0 if fit.left_out == "engine" else None
    return replace(engine, fit=replace(fit, log_sd=0.0, shorter_log=side, longer_log=side))


def unexplained(bare: Sequence[ServingError], least: int = 1) -> Array:
    """log(measured / predicted) of each row beyond the end of an interval, by squares; 0 inside.

    bare: with the intervals of the terms alone. least: with fewer rows of 512 tokens and more, all rows count.
    """
    long = [error for error in bare if not error.is_short]
    excess = []
    for error in long if len(long) >= least else bare:
        off = float(np.log(error.row.ttft_s / error.predicted_s))
        end = float(np.log((error.high_s if off > 0 else error.low_s) / error.predicted_s))
        excess.append(np.sign(off) * np.sqrt(max(off**2 - end**2, 0.0)))
    return np.array(excess)


def both_sides(off: Array) -> float:
    """Log standard deviation by which four of five rows lie inside; of a few rows, by a small-sample estimate."""
    if len(off) >= _MANY:
        return float(np.quantile(np.abs(off), 0.8) / DEVIATES_OF_80_PERCENT)
    return left_out_log_sd(np.exp(off), np.ones_like(off))


def each_side(off: Array) -> tuple[float, float]:
    """What a tenth of the rows exceeds: log(predicted / measured), and log(measured / predicted)."""
    low, high = np.quantile(off, (0.1, 0.9))
    return max(0.0, -float(low)), max(0.0, float(high))


if __name__ == "__main__":
    main()
