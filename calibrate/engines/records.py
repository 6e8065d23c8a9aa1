"""The records of engines in kvrsim/data/engines, from a fit and from the errors of prefills that were left out.

Widths come from errors of prefills that were left out: those of the engine or those of all engines, whichever are
wider.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.fit import ENGINES, PRIOR, SPLITS, TERMS, EngineConstants, fit, left_out, log_errors
from calibrate.engines.prefills import EnginePrefill
from calibrate.engines.settings import Settings
from kvrsim.engine import NO_HOST, OTHER_GPU, PRIOR_ENGINE, SHORT_TOKENS, Engine, EngineFit, load_engine
from kvrsim.program import Array, Flags

FOLDER = Path(__file__).parents[2] / "kvrsim" / "data" / "engines"
LEAST_SHORT = (0.3, 0.7)  # minimum widths below SHORT_TOKENS
_LEAST = (0.5, 0.5, 0.3, 0.12)  # minimum standard deviations of terms between engines, of which there are only three
_LEAST_ROWS = 5  # minimum number of errors from which widths are computed


def widths_of(logs: Array, own: Flags | None = None) -> tuple[float, float]:
    """Widths of errors: the 90 % quantiles of log(predicted / measured) and of log(measured / predicted).

    own: mask of one engine's errors; its widths are used if they are wider and come from at least 5 errors.
    """
    below, above = np.quantile(logs, [0.1, 0.9])
    widths = _round(max(0.0, float(above))), _round(max(0.0, float(-below)))
    if own is None or own.sum() < _LEAST_ROWS:
        return widths
    shorter, longer = widths_of(logs[own])
    return max(widths[0], shorter), max(widths[1], longer)


def records(settings: Settings) -> list[Engine]:
    """Make the records of the engines and of `serving`."""
    every = np.ones(len(settings), dtype=bool)
    constants = fit(settings, every)
    after = log_errors(settings, constants.seconds(settings, every))
    splits = {split: log_errors(settings, left_out(settings, split)) for split in SPLITS}
    made = []
    for name in ENGINES:
        own = settings.of("engine") == name
        frame = settings.rows[own]
        logs = constants.by_engine[name]
        widths = {split: widths_of(errors, own) for split, errors in splits.items()}
        fit_of = _fit_of(after[own], splits["model"][own], "model", widths)
        factors = {model: constants.type_factor(name, model) for model in constants.shared_types}
        record = _record(name, constants, logs, factors, (0.3, 0.3, 0.3, 0.12), fit_of)
        versions = {v: _round(np.exp(f)) for (e, v), f in sorted(constants.versions.items()) if e == name}
        models, gpus = (tuple(sorted(set(column))) for column in (frame.model_type, frame.gpu))
        layouts = _layouts(settings, own)
        made.append(replace(record, models=models, gpus=gpus, layouts=layouts, versions=versions))
    others = log_errors(settings, left_out(settings, "engine"))
    spread = np.std([constants.by_engine[name] for name in ENGINES], axis=0, ddof=1)
    deviations = [_round(max(value, least)) for value, least in zip(spread, _LEAST, strict=True)]
    fit_of = _fit_of(after, others, "engine", {"setting": widths_of(others)})
    prior = _record(PRIOR_ENGINE, constants, constants.mean, constants.shared_types, deviations, fit_of)
    return [*made, replace(prior, layouts=_layouts(settings, every))]


def _layouts(settings: Settings, rows: Flags) -> tuple[str, ...]:
    """The ways, of LAYOUT_KINDS, in which some of these settings divide a prefill over GPUs."""
    columns = {"tensor": settings.of("tp"), "experts": settings.of("moe_ep")}
    return tuple(kind for kind, sizes in columns.items() if (sizes[rows] > 1).any())


def _record(
    name: str,
    constants: EngineConstants,
    logs: Array,
    factors: Mapping[str, float],
    spread: Sequence[float],
    fit_of: EngineFit,
) -> Engine:
    """The record of an engine with these terms, factors of model types and standard deviations of terms."""
    request_s, token_s, launch_s, scale = (_round(value) for value in np.exp(logs))
    return replace(
        load_engine(name),
        host=replace(NO_HOST, request_s=request_s, token_s=token_s, launch_s=launch_s, collective_s=launch_s),
        kernel_scale={OTHER_GPU: scale},
        transfer_s=_round(constants.transfer_s),
        model_types={model: _round(np.exp(factor)) for model, factor in sorted(factors.items())},
        spread=dict(zip((*TERMS, "collective_s"), (*spread, spread[TERMS.index("launch_s")]), strict=True)),
        fit=fit_of,
        provenance={
            "command": "python -m calibrate.engines SETTINGS.csv --configs FOLDER --prefills FILE.csv",
            "launches": "launch times are added to the kernel times, because the measured time minus the kernel times"
            " is nearly equal at 1k and at 8k tokens",
        },
    )


def _fit_of(after: Array, without: Array, split: str, widths: Mapping[str, tuple[float, float]]) -> EngineFit:
    sizes = np.abs(np.expm1(after))
    right = np.abs(np.expm1(without))
    low, high = widths_of(without)
    return EngineFit(
        source="NVIDIA AISimulate 0.13, silicon_sample.csv (InferenceX and NVIDIA's runs): 128 settings of 8 models",
        num_rows=len(after),
        mape=_round(sizes.mean()),
        median_ape=_round(np.median(sizes)),
        left_out_mape=_round(right.mean()),
        left_out_median_ape=_round(np.median(right)),
        left_out=split,
        log_sd=_round(np.std(without)),
        coverage=_round(np.mean((without <= low) & (-without <= high))),
        widths=widths,
    )


def _round(value: Any) -> float:
    return float(f"{float(value):.4g}")


def shipped_seconds(settings: Settings) -> Array:
    """Predictions by the shipped records."""
    every = np.ones(len(settings), dtype=bool)
    engines = {name: load_engine(name) for name in ENGINES}
    logs = {
        name: np.log([e.host.request_s, e.host.token_s, e.host.launch_s, e.kernel_scale[OTHER_GPU]])
        for name, e in engines.items()
    }
    constants = EngineConstants(
        mean=PRIOR,
        by_engine=logs,
        transfer_s=engines[ENGINES[0]].transfer_s,
        model_types={(n, m): float(np.log(f)) for n, e in engines.items() for m, f in e.model_types.items()},
        versions={(n, v): float(np.log(f)) for n, e in engines.items() for v, f in e.versions.items()},
    )
    return constants.seconds(settings, every)


def short_widths(prefills: Sequence[EnginePrefill]) -> tuple[float, float]:
    """Widths for prompts below SHORT_TOKENS. No setting is that short, so prefills of other sources determine them."""
    short = [prefill for prefill in prefills if prefill.tokens < SHORT_TOKENS]
    if not short:
        return LEAST_SHORT
    logs = np.array([math.log(prefill.predicted_s / prefill.measured_s) for prefill in short])
    shorter, longer = widths_of(logs)
    return max(shorter, LEAST_SHORT[0]), max(longer, LEAST_SHORT[1])


def write_records(engines: Sequence[Engine], short: tuple[float, float]) -> None:
    """Write the records, with these widths for prompts below SHORT_TOKENS."""
    for engine in engines:
        assert engine.fit is not None
        fit_of = replace(engine.fit, widths={**engine.fit.widths, "short": short})
        replace(engine, fit=fit_of).write(FOLDER / f"{engine.name}.json")
