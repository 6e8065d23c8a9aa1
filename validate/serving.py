"""Prefills on serving engines of 2023 and 2024: fit their records, and compare: `python -m validate.serving [--fit]`.

The texts of a record, and whether its TTFT includes a decode step, are in kvrsim/data/engines/NAME.json; the command
rewrites its seconds, scales, spreads and errors. calibrate.prefills.solve fits an engine's terms to its rows, under
the same wide priors for all engines. Every row is one pass through the layers, so a constant time may belong to the
request or to the step; it is assigned to the step, but for TTFTs at the client, whose request passes a proxy. `serving`
has the mean of each term's logarithm over the engines, and its standard deviation.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.prefills.fit import PrefillCase, left_out_log_sd
from calibrate.prefills.rows import PrefillRow
from calibrate.prefills.solve import Prior, Solution, solve
from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.engine import DEVIATES_OF_80_PERCENT, NO_HOST, SHORT_TOKENS, Engine, EngineFit, load_engine
from kvrsim.io.files import write_atomically
from kvrsim.kernels.profile import CalibrationProfile, load_profile
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.uncertainty.intervals import interval
from validate.published.compare import DATA, read_table
from validate.report import fill, run_command, table

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
        """Tokens of all prompts together."""
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
        """Profile of the row's GPU."""
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
    """Fold of each row: rows of one setting are left out together; with one setting only, each row alone."""
    settings = [row.setting for row in rows]
    return settings if len(set(settings)) > 1 else [row.case for row in rows]


def _with_terms(base: Engine, priors: Sequence[Prior], values: Array) -> Engine:
    terms = {prior.name: _rounded(value) for prior, value in zip(priors, values, strict=True)}
    host = replace(base.host, **{term: value for term, value in terms.items() if term in _PRIORS})
    return replace(base, host=host, kernel_scale={key: value for key, value in terms.items() if key not in _PRIORS})


def _spread(priors: Sequence[Prior], solution: Solution) -> dict[str, float]:
    """Spread of each term after the rows, the widest of the scales, and that of the rows around the fit."""
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
    """A fit without widths: relative errors of all rows, and of rows predicted without `left_out`."""
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


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")


def fit_all() -> dict[str, FittedEngine]:
    """Every engine with rows, fitted to them."""
    rows = read_rows()
    return {name: fit_engine(name, [row for row in rows if row.engine == name]) for name in ENGINES}


def between_gpus(engines: Sequence[Engine]) -> dict[str, float]:
    """Spread of the kernels' scale between GPUs, from engines that were measured on several."""
    logs = [np.log(list(engine.kernel_scale.values())) for engine in engines if len(engine.kernel_scale) > 1]
    spreads = [one.std(ddof=1) * math.sqrt(2) for one in logs]  # spread of one more GPU around a measured GPU
    return {"other_gpu": _rounded(np.sqrt(np.mean(np.square(spreads))))} if spreads else {}


# Widths of intervals that rest on left-out prefills, beyond the spread of the terms. Errors are those of rows of 512
# tokens and more: below, the spread of the terms says more.
_MANY = 10  # rows from which a quantile is used instead of a standard deviation


def without_width(engine: Engine, fit: EngineFit) -> Engine:
    """The engine with that fit, and intervals that its terms alone make."""
    return replace(engine, fit=replace(fit, log_sd=0.0))


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
    """Log standard deviation within which four of five rows lie; a small-sample estimate for a few rows."""
    if len(off) >= _MANY:
        return float(np.quantile(np.abs(off), 0.8) / DEVIATES_OF_80_PERCENT)
    return left_out_log_sd(np.exp(off), np.ones_like(off))


_LENGTHS = ((0, 512), (512, 2048), (2048, 8192), (8192, 10**9))  # tokens of all prompts together
FIGURES = DATA / "serving_figures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every row under its engine's own record."""

    own: tuple[ServingError, ...]
    left_out: tuple[ServingError, ...]  # the rows that rules leave out
    fits: Mapping[str, EngineFit]  # by engine, with each setting left out

    def figures(self) -> dict[str, Any]:
        """The page's first table, as plain JSON values."""
        return {
            length: summary(error for error in self.own if error.is_short is is_short)
            for length, is_short in (("512 tokens and more", False), ("below 512 tokens", True))
        }


def compare() -> Comparison:
    """Compare with the records that ship."""
    engines = {name: load_engine(name) for name in ENGINES}
    errors = {
        name: errors_of([row for row in read_rows(compared=False) if row.engine == name], engine)
        for name, engine in engines.items()
    }
    every = [error for own in errors.values() for error in own]
    return Comparison(
        own=tuple(error for error in every if not error.row.left_out),
        left_out=tuple(error for error in every if error.row.left_out),
        fits={name: engine.fit for name, engine in engines.items() if engine.fit is not None},
    )


def part(comparison: Comparison) -> list[str]:
    """Part of the accuracy page on serving engines, as Markdown lines."""
    settings = (
        (name, f"{fit.left_out}s", f"{fit.left_out_median_ape:.1%}", f"{fit.left_out_mape:.1%}", f"{fit.coverage:.0%}")
        for name, fit in comparison.fits.items()
    )
    own = comparison.own
    return fill(
        "accuracy_serving",
        predictions=_summaries("prediction", comparison.figures()),
        settings=table(("engine", "left out", "median error", "mean", "inside, 512 tokens and more"), settings),
        engines=_summaries("engine", _by(own, lambda error: error.row.engine, short=False)),
        lengths=_summaries("tokens of all prompts", _by(own, _length)),
        strategies=_summaries("strategy", _by(own, lambda error: error.row.strategy)),
        rules=_summaries("engine and rule", _by(comparison.left_out, lambda e: f"{e.row.engine}, `{e.row.left_out}`")),
    )


def _length(error: ServingError) -> str:
    low, high = next(span for span in _LENGTHS if span[0] <= error.row.tokens < span[1])
    if high == _LENGTHS[-1][1]:
        return f"{low} and more"
    return f"{low} to {high - 1}" if low else f"below {high}"


def _by(
    errors: Sequence[ServingError], key: Callable[[ServingError], str], short: bool | None = None
) -> dict[str, dict[str, Any]]:
    used = [error for error in errors if short is None or error.is_short is short]
    names = dict.fromkeys(key(error) for error in sorted(used, key=lambda error: error.row.tokens))
    return {name: summary(error for error in used if key(error) == name) for name in names}


def _summaries(title: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Table of summaries by name."""
    formats = {"median_ape": ".1%", "mape": ".1%", "median": "+.1%", "coverage": ".0%"}
    rows = (
        (name, group["n"], *(f"{group[key]:{spec}}" for key, spec in formats.items()))
        for name, group in groups.items()
        if group["n"]
    )
    return table((title, "rows", "median error", "mean", "with sign (median)", "inside"), rows)


def summary(errors: Iterable[ServingError]) -> dict[str, Any]:
    """Number of rows, median and mean absolute error, the median with its sign, and the share inside the intervals."""
    known = list(errors)
    if not known:
        return {"n": 0, "median_ape": None, "mape": None, "median": None, "coverage": None}
    signed = np.array([error.rel_error for error in known])
    return {
        "n": len(known),
        "median_ape": float(np.median(np.abs(signed))),
        "mape": float(np.abs(signed).mean()),
        "median": float(np.median(signed)),
        "coverage": float(np.mean([error.inside for error in known])),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every row; rewrite the figures, and with --fit the records."""
    parser = ArgumentParser(prog="python -m validate.serving", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--fit", action="store_true", help="fit the engines and rewrite their records")
    if parser.parse_args(arguments).fit:
        fitted = fit_all()
        between = between_gpus([one.engine for one in fitted.values()])
        for name, one in fitted.items():
            replace(one.engine, spread=dict(one.engine.spread) | between).write(FOLDER / f"{name}.json")
    comparison = compare()
    for error in comparison.own:
        row = error.row
        seconds = f"{row.ttft_s:.4g} s measured, {error.predicted_s:.4g} s predicted ({error.rel_error:+.1%})"
        print(f"{row.engine}: {row.case}: {seconds}")
    write_atomically(FIGURES, (json.dumps(comparison.figures(), indent=2) + "\n").encode(), argument="figures")


if __name__ == "__main__":
    sys.exit(run_command(main))
