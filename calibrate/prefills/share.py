"""Measured prefills as a user may give them away: without names, paths, hosts and dates.

A name stands in such a file only if it ships with kvrsim: of a model, a GPU, an engine, a profile. Every other name is
left out, or is "other".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calibrate.prefills.fit import PrefillCase, RowCheck
from calibrate.prefills.rows import SHARED
from kvrsim.engine import builtin_engines
from kvrsim.hardware import builtin_gpus
from kvrsim.kernels.profile import builtin_profiles
from kvrsim.model.load import builtin_models, known_shape
from kvrsim.strategies.load import is_file
from kvrsim.version import __version__, data_digest

_OTHER = "other"
_DIGITS = 4  # of times: more say nothing about a prediction


def shared_rows(cases: Sequence[PrefillCase], checks: Sequence[RowCheck]) -> dict[str, Any]:
    """The rows with their predictions, as plain JSON values."""
    rows = [_row(case, check) for case, check in zip(cases, checks, strict=True)]
    return {"format": SHARED, "schema_version": 1, "kvrsim": __version__, "data": data_digest(), "rows": rows}


def _row(case: PrefillCase, check: RowCheck) -> dict[str, Any]:
    scenario = case.execution.scenario
    engine, _, version = scenario.engine_name.partition("@")
    seconds = {
        "ttft_s": check.measured_s,
        "queued_s": case.row.queued_s,
        "predicted_s": check.predicted_s,
        "low_s": check.low_s,
        "high_s": check.high_s,
    }
    return {
        "gpu": _public(scenario.cluster.gpu.name, builtin_gpus()),
        "num_gpus": scenario.num_gpus,
        "profile": _public(scenario.profile_name, builtin_profiles()),
        "engine": _public(engine, builtin_engines()),
        "engine_version": version if engine in builtin_engines() else "",
        "model": _model(case.row.model or ""),
        "model_type": scenario.model.model_type,
        "strategy": _OTHER if is_file(case.row.strategy_name) else case.row.strategy_name,
        "context_len": scenario.request.context_len,
        "batch": scenario.request.batch,
        "cached_prefix": scenario.request.cached_prefix,
        "dtype": scenario.request.dtype,
        **{name: None if value is None else float(f"{value:.{_DIGITS}g}") for name, value in seconds.items()},
    }


def _public(name: str, shipped: Sequence[str]) -> str:
    if name in shipped:
        return name
    return _OTHER


def _model(name: str) -> str | None:
    """The shipped model with the row's shape; None for a model of the user's own."""
    if name in builtin_models():
        return name
    shape = known_shape(name)
    if shape is None:
        return None
    return shape.shape
