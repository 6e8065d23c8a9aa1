"""The records of engines in kvrsim/data/engines, from a fit and from the errors of prefills that were left out.

Their intervals come from shares of TTFT (shares.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.fit import (
    ENGINES,
    NEW_BUILDS,
    PRIOR,
    TERMS,
    EngineConstants,
    fit,
    is_new_build,
    left_out,
    log_errors,
)
from calibrate.engines.settings import Settings
from kvrsim.engine import NO_HOST, OTHER_GPU, PRIOR_ENGINE, Engine, EngineFit, OlderBuilds, load_engine
from kvrsim.error_rule import ErrorRule, ErrorScores
from kvrsim.program import Array, Flags

FOLDER = Path(__file__).parents[2] / "kvrsim" / "data" / "engines"
_LEAST = (0.5, 0.5, 0.3, 0.12)  # minimum standard deviations of terms between engines, of which there are only three


def records(settings: Settings, training: Settings, rule: ErrorRule) -> list[Engine]:
    """Make the records of the engines and of `serving`.

    training: the settings, and the prefills of the newest builds. rule: gives the coverage of their intervals.
    """
    every = np.ones(len(settings), dtype=bool)
    constants = fit(training, np.ones(len(training), dtype=bool))
    after = log_errors(settings, constants.seconds(settings, every))
    without = log_errors(settings, left_out(settings, "model", training))
    kinds = dict(zip(training.rows.model_type, training.rows.kind, strict=True))
    made = []
    for name in ENGINES:
        own = settings.of("engine") == name
        frame = training.rows[training.of("engine") == name]
        logs = constants.by_engine[name]
        fit_of = _fit_of(after[own], without[own], "model", rule.scores[name], rule.scores["short"])
        factors = {model: constants.type_factor(name, model, kind) for model, kind in kinds.items()}
        record = _record(name, constants, logs, factors, (0.3, 0.3, 0.3, 0.12), fit_of)
        versions = {v: _round(np.exp(f)) for (e, v), f in sorted(constants.versions.items()) if e == name}
        models, gpus = (tuple(sorted(set(column))) for column in (frame.model_type, frame.gpu))
        layouts = _layouts(settings, own)
        record = replace(record, models=models, gpus=gpus, layouts=layouts, versions=versions)
        made.append(
            _newest(record, constants, frame.engine_version[is_new_build(training)[training.of("engine") == name]])
        )
    others = log_errors(settings, left_out(settings, "engine", training))
    spread = np.std([constants.by_engine[name] for name in ENGINES], axis=0, ddof=1)
    deviations = [_round(max(value, least)) for value, least in zip(spread, _LEAST, strict=True)]
    fit_of = _fit_of(after, others, "engine", rule.scores[PRIOR_ENGINE], rule.scores["short"])
    factors = {model: constants.type_factor(PRIOR_ENGINE, model, kind) for model, kind in kinds.items()}
    prior = _record(PRIOR_ENGINE, constants, constants.mean, factors, deviations, fit_of)
    return [*made, replace(prior, layouts=_layouts(settings, every))]


def _newest(record: Engine, constants: EngineConstants, versions: Iterable[str]) -> Engine:
    """The record of an engine's newest builds, with how older builds launch kernels; versions: newest ones measured."""
    if record.name not in NEW_BUILDS:
        return record
    older = OlderBuilds(before=NEW_BUILDS[record.name], hidden_share=constants.hidden_share)
    host = replace(record.host, hidden_share=constants.new_hidden_share)
    measured = dict.fromkeys(sorted(versions), 1.0)
    return replace(record, host=host, older=older, versions={**record.versions, **measured})


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
        host=replace(
            NO_HOST,
            request_s=request_s,
            token_s=token_s,
            launch_s=launch_s,
            collective_s=launch_s,
            hidden_share=constants.hidden_share,
        ),
        kernel_scale={OTHER_GPU: scale},
        transfer_s=_round(constants.transfer_s),
        model_types={model: _round(np.exp(factor)) for model, factor in sorted(factors.items())},
        mixtures=_round(np.exp(constants.mixtures)),
        systems={gpu: _round(np.exp(factor)) for gpu, factor in sorted(constants.systems.items())},
        older=None,
        spread=dict(zip((*TERMS, "collective_s"), (*spread, spread[TERMS.index("launch_s")]), strict=True)),
        fit=fit_of,
        provenance={
            "command": "python -m calibrate.engines SETTINGS.csv --configs FOLDER --prefills FILE.csv,FILE.csv",
            "launches": "launch times are added to the kernel times, unless host.hidden_share hides them, because the"
            " measured time minus the kernel times is nearly equal at 1k and at 8k tokens",
        },
    )


def _fit_of(after: Array, without: Array, split: str, scores: ErrorScores, short: ErrorScores) -> EngineFit:
    sizes = np.abs(np.expm1(after))
    right = np.abs(np.expm1(without))
    return EngineFit(
        source="NVIDIA AISimulate 0.13, silicon_sample.csv (InferenceX and NVIDIA's runs): 128 settings of 8 models",
        num_rows=len(after),
        mape=_round(sizes.mean()),
        median_ape=_round(np.median(sizes)),
        left_out_mape=_round(right.mean()),
        left_out_median_ape=_round(np.median(right)),
        left_out=split,
        log_sd=_round(np.std(without)),
        interval="shares",
        coverage=scores.coverage,
        short_coverage=short.coverage,
    )


def _round(value: Any) -> float:
    return float(f"{float(value):.4g}")


def shipped_seconds(settings: Settings) -> Array:
    """Predictions by the shipped records."""
    every = np.ones(len(settings), dtype=bool)
    engines = {name: load_engine(name) for name in ENGINES}
    logs = {}
    for name, engine in engines.items():
        host = engine.host
        if engine.older is not None:
            host = engine.older.host(host)
        logs[name] = np.log([host.request_s, host.token_s, host.launch_s, engine.kernel_scale[OTHER_GPU]])
    prior = load_engine(PRIOR_ENGINE)
    new_shares = [engine.host.hidden_share for engine in engines.values() if engine.older is not None]
    constants = EngineConstants(
        mean=PRIOR,
        by_engine=logs,
        transfer_s=prior.transfer_s,
        hidden_share=prior.host.hidden_share,
        new_hidden_share=max(new_shares, default=prior.host.hidden_share),
        model_types={(n, m): float(np.log(f)) for n, e in engines.items() for m, f in e.model_types.items()},
        systems={gpu: float(np.log(factor)) for gpu, factor in prior.systems.items()},
        versions={(n, v): float(np.log(f)) for n, e in engines.items() for v, f in e.versions.items()},
    )
    return constants.seconds(settings, every)


def write_records(engines: Sequence[Engine]) -> None:
    """Write the records."""
    for engine in engines:
        engine.write(FOLDER / f"{engine.name}.json")
