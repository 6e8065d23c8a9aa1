"""Fit the shipped engines to published prefills: `python -m validate.serving.fit`.

What a record says in words, and whether its TTFT holds a decode step, stands in kvrsim/data/engines/NAME.json; the
command rewrites its seconds, scales, spreads and errors. The terms of an engine are fitted to its rows by
calibrate.prefills.solve, under the same wide priors for all engines. Every row is one pass through the layers, so what
is added whatever its length may belong to the request or to the step; it is taken to be the step's, but for TTFTs at
the client, whose request passes a proxy. `serving` is what the engines have in common: of
each term the mean of the logarithm over the engines, and its standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from calibrate.prefills.fit import left_out_log_sd
from calibrate.prefills.solve import Prior, Solution, solve
from kvrsim.engine import NO_HOST, OTHER_GPU, SHORT_TOKENS, Engine, EngineFit, load_engine
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from validate.serving.rows import ServingError, ServingRow, case_of, errors_of, read_rows

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

        def changed(scenario: Scenario) -> Scenario:
            return replace(scenario, engine=engine)

        return np.array([case.ttft_s(changed) for case in cases])

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
    measured = np.array([row.ttft_s for row in rows])
    own, left_out = solution.after_s / measured - 1, solution.left_out_s / measured - 1
    fit = EngineFit(
        source=", ".join(dict.fromkeys(row.source for row in rows)),
        num_rows=len(rows),
        mape=_rounded(np.abs(own).mean()),
        median_ape=_rounded(np.median(np.abs(own))),
        left_out_mape=_rounded(np.abs(left_out).mean()),
        left_out_median_ape=_rounded(np.median(np.abs(left_out))),
        left_out="setting" if len({row.setting for row in rows}) > 1 else "row",
        log_sd=0.0,
        coverage=0.0,
    )
    predicted_s = list(map(float, solution.left_out_s))
    bare = errors_of(rows, without_width(engine, fit))
    fit = replace(fit, log_sd=_rounded(both_sides(unexplained(bare, predicted_s, least=_LEAST_LONG))))
    held = np.array(inside(rows, replace(engine, fit=fit), predicted_s))
    short = np.array([row.tokens < SHORT_TOKENS for row in rows])
    return replace(fit, coverage=_rounded(held[~short].mean()), short_coverage=_rounded(held[short].mean()))


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
    fit = EngineFit(
        source=f"prefills of {len(rows)} engines, each predicted from the others",
        num_rows=sum(map(len, rows.values())),
        mape=0.0,
        median_ape=0.0,
        left_out_mape=0.0,
        left_out_median_ape=0.0,
        left_out="engine",
        log_sd=0.0,
        coverage=0.0,
    )
    priors = left_out_engines(engines)
    bare = [error for name, mine in rows.items() for error in errors_of(mine, without_width(priors[name], fit))]
    size = np.abs([error.rel_error for error in bare])
    long = np.abs([error.rel_error for error in bare if not error.is_short])
    shorter, longer = each_side(unexplained(bare))
    fit = replace(
        fit,
        mape=_rounded(size.mean()),
        median_ape=_rounded(np.median(size)),
        left_out_mape=_rounded(long.mean()),
        left_out_median_ape=_rounded(np.median(long)),
        log_sd=_rounded(np.std([math.log1p(error.rel_error) for error in bare if not error.is_short])),
        shorter_log=_rounded(shorter),
        longer_log=_rounded(longer),
    )
    wide = {name: replace(prior, fit=fit) for name, prior in priors.items()}  # widths of all, terms of the others
    found = [error for name, mine in rows.items() for error in errors_of(mine, wide[name])]
    coverage, short = (
        _rounded(np.mean([error.inside for error in found if error.is_short is is_short])) for is_short in (False, True)
    )
    return replace(engine, fit=replace(fit, coverage=coverage, short_coverage=short))


def between_gpus(engines: Sequence[Engine]) -> dict[str, float]:
    """How much the kernels' scale of one engine differs between GPUs, where it was measured on several."""
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


# -- how wide an interval has to be that rests on left-out prefills, beyond what the engine's terms explain
#
# Errors are those of rows of 512 tokens and more: below, the spread of the terms says more.

_MANY = 10  # rows, from which on a quantile says more than a standard deviation


def without_width(engine: Engine, fit: EngineFit) -> Engine:
    """The engine with that fit, and intervals that its terms alone make."""
    side = 0.0 if fit.left_out == "engine" else None
    return replace(engine, fit=replace(fit, log_sd=0.0, shorter_log=side, longer_log=side))


def unexplained(bare: Sequence[ServingError], predicted_s: Sequence[float] | None = None, least: int = 1) -> Array:
    """log(measured / predicted) of each row beyond the end of an interval, by squares; 0 inside.

    bare: with the intervals of the terms alone. predicted_s: of each, instead of the errors' own. least: with fewer
    rows of 512 tokens and more, all rows count.
    """
    found, only_long = [], sum(not error.is_short for error in bare) >= least
    for index, error in enumerate(bare):
        if error.is_short and only_long:
            continue
        then_s = error.predicted_s if predicted_s is None else predicted_s[index]
        off = float(np.log(error.row.ttft_s / then_s))
        end = float(np.log((error.high_s if off > 0 else error.low_s) / error.predicted_s))
        found.append(np.sign(off) * np.sqrt(max(off**2 - end**2, 0.0)))
    return np.array(found)


def both_sides(off: Array) -> float:
    """Log standard deviation by which four of five rows lie inside; of a few rows, as far as so few can tell."""
    if len(off) >= _MANY:
        return float(np.quantile(np.abs(off), 0.8) / DEVIATES_OF_80_PERCENT)
    return left_out_log_sd(np.exp(off), np.ones_like(off))


def each_side(off: Array) -> tuple[float, float]:
    """What a tenth of the rows exceeds: log(predicted / measured), and log(measured / predicted)."""
    low, high = np.quantile(off, (0.1, 0.9))
    return max(0.0, -float(low)), max(0.0, float(high))


def inside(rows: Sequence[ServingRow], engine: Engine, predicted_s: Sequence[float]) -> list[bool]:
    """Whether each measurement lies in an interval as wide as the engine's around `predicted_s`."""
    found = []
    for error, then_s in zip(errors_of(rows, engine), predicted_s, strict=True):
        low, high = error.low_s / error.predicted_s, error.high_s / error.predicted_s
        found.append(low * then_s <= error.row.ttft_s <= high * then_s)
    return found


if __name__ == "__main__":
    main()
