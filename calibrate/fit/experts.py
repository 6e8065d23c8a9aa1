"""fit_experts: ExpertRates from tables of routed experts, fitted separately for each type of products.

Six constants per type are fitted to the rows of one GPU, with even and with skewed routing together. Cross-validation
holds out the shapes of models.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from calibrate.fit.fit import (
    Constants,
    Fit,
    FitComparison,
    FitResult,
    Parameter,
    log_ratio,
    root_mean_square,
    span_of,
    to_digits,
)
from calibrate.fit.gemm import HALF_BYTES, burst_seconds, peak_of
from calibrate.importers.aiconfigurator import HALF, ExpertRows, read_experts
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.experts import ExpertRates, GroupedRates
from kvrsim.kernels.gemm import GEMM_TYPES, Width
from kvrsim.kernels.profile import CalibrationProfile

_NOISE = 0.15  # see _NOISE in calibrate.fit.gemm
_MOST_ROWS = 3000  # maximum number of rows per type
_STARTS = 6
_FEW_MODELS = 3  # minimum number of models to hold out models; with fewer, shares of experts are held out
_LONG = 1024  # minimum number of tokens of a row in the comparison of engines
_SEEN = ("tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


def fit_experts_section(recipe: JsonObject, profile: CalibrationProfile) -> FitResult[ExpertRates]:
    """Fit the tables and types listed in a recipe's "sources"; compare with the tables listed in "compare"."""
    recipe.only(("sources", "compare"))
    tables: list[ExpertRows] = []
    for part in recipe.children("sources"):
        part.only(("source", "types"))
        tables += read_experts(part.text("source"), list(map(str, part.sequence("types"))), recipe.where)
    others: list[ExpertRows] = []
    for source in recipe.sequence("compare"):
        others += read_experts(str(source), None, recipe.where)
    return fit_experts(tables, profile, others)


def fit_experts(
    tables: Sequence[ExpertRows], profile: CalibrationProfile, others: Sequence[ExpertRows] = ()
) -> FitResult[ExpertRates]:
    """Fit the rates of all types, half precision included. `others`: rows of other engines, for the systematic error.

    Raises InputError where a type is missing or appears twice.
    """
    names = [rows.kind for rows in tables]
    if HALF not in names or len(set(names)) != len(names):
        raise InputError("types", ", ".join(names), f"each type once, {HALF} among them")
    gpu = load_gpu(profile.gpu)
    data = [_of_one_gpu(rows, profile) for rows in tables]
    rates: dict[str, GroupedRates] = {}
    fitted = []
    held_out = []
    for rows in data:
        fit = _fit(rows, gpu)
        rates[rows.kind] = fit.rates
        fitted.append(fit.own)
        if len(set(rows.shapes)) >= _FEW_MODELS:
            held_out.append(fit.left_out("models", rows.shapes))
        else:
            held_out.append(fit.left_out("shares of experts", zip(rows.shapes, rows.tp_size.tolist(), strict=True)))
    return FitResult(
        rates=ExpertRates(half=rates[HALF], types={kind: rates[kind] for kind in GEMM_TYPES if kind in rates}),
        source="; ".join(sorted({rows.source for rows in data})),
        own=FitComparison.join("as shipped", fitted),
        cross_validated=FitComparison.join("models left out", held_out),
        systematic_log_sd=_systematic_log_sd(data, [_of_one_gpu(rows, profile) for rows in others]),
        seen={name: span_of([getattr(rows, name) for rows in data]) for name in _SEEN},
    )


def _of_one_gpu(rows: ExpertRows, profile: CalibrationProfile) -> ExpertRows:
    """Rows without expert parallelism, with seconds at the profile's burst clock; thinned evenly by time."""
    alone = rows.take(rows.ep_size == 1)
    order = np.argsort(alone.seconds, kind="stable")
    thinned = alone.take(order[:: max(1, -(-len(order) // _MOST_ROWS))])
    burst_s = burst_seconds(thinned.seconds, thinned.warmups, thinned.repeats, profile.kernels.clock)
    return replace(thinned, seconds=burst_s)


def _fit(rows: ExpertRows, gpu: GpuSpec) -> Fit[GroupedRates]:
    hbm = gpu.hbm_bytes_per_s
    if rows.kind == HALF:
        peak = peak_of(gpu, None)
        width: Width = HALF_BYTES
    else:
        peak = peak_of(gpu, rows.kind)
        width = GEMM_TYPES[rows.kind]

    def rates(values: Constants) -> GroupedRates:
        constants = dict(values)
        share = constants.pop("share")
        return GroupedRates(flops_per_s=to_digits(share * peak), **constants)

    return Fit(
        label=rows.kind,
        measured_s=rows.seconds,
        parameters=(
            Parameter(name="share", start=0.5, low=0.02, high=1.0),  # share of the datasheet's FLOP/s
            Parameter(name="weight_bytes_per_s", start=0.6 * hbm, low=0.05 * hbm, high=hbm),
            Parameter(name="row_bytes_per_s", start=0.5 * hbm, low=0.02 * hbm, high=hbm),
            Parameter(name="tile_rows", start=64.0, low=1.0, high=512.0),
            Parameter(name="tile_features", start=200.0, low=1.0, high=4096.0),
            Parameter(name="start_s", start=3e-5, low=1e-6, high=3e-4),
        ),
        make=rates,
        seconds=lambda rates, indices: rates.seconds(rows.take(indices).call(), 1, width),
        weighted=True,
        starts=_STARTS,
        noise=_NOISE,
        warm=True,
    )


def _systematic_log_sd(data: Sequence[ExpertRows], others: Sequence[ExpertRows]) -> float | None:
    """Spread over engines. Per type: root mean square, over other engines, of the median of log(other / own seconds).

    Only rows of at least _LONG tokens count. The result is the median over types, because an engine may be slow at one
    of the types.
    """
    log_sds = []
    for rows in data:
        medians: list[float] = []
        for other in others:
            if other.kind == rows.kind and other.source != rows.source:
                medians += log_ratio(_by_call(rows), _by_call(other))
        log_sd = root_mean_square(medians)
        if log_sd is not None:
            log_sds.append(log_sd)
    if not log_sds:
        return None
    return to_digits(float(np.median(log_sds)))


def _by_call(rows: ExpertRows) -> dict[Hashable, float]:
    """Seconds by shape, share, tokens and routing, for rows of at least _LONG tokens."""
    long = rows.take(rows.tokens >= _LONG)
    calls = zip(long.shapes, long.tp_size.tolist(), long.tokens.tolist(), long.exponent.tolist(), strict=True)
    return dict(zip(calls, long.seconds.tolist(), strict=True))
