"""fit_experts: ExpertRates from tables of routed experts, type by type.

Six constants a type are fitted to the rows of one GPU, of all routings alike: what evenly spread and skewed tokens have
in common. Held out are the shapes of models. The same rows priced as one dense product an expert are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.fit.fit import Comparison, Fitted, Parameter, Some, cross_validated_s, rounded, solve
from calibrate.fit.gemm import burst_seconds, peak_of
from calibrate.importers.aiconfigurator import HALF, ExpertRows, read_experts
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.calibrated import CalibratedCost
from kvrsim.kernels.experts import ExpertRates, ExpertsCall, GroupedRates, counted_experts
from kvrsim.kernels.gemm import GEMM_TYPES, Width
from kvrsim.kernels.profile import CalibrationProfile, KernelRates
from kvrsim.program import Array

_NOISE = 0.15  # see calibrate.fit.gemm
_MOST_ROWS = 3000  # of a type
_STARTS = 6
_FEW_MODELS = 3  # below which shares of experts are held out instead of models
_LONG = 1024  # tokens from which engines are compared
_ENOUGH = 20  # common shapes
_TOKENS = (64, 256, 1024, 4096)
_SEEN = ("tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


def fit_experts_section(recipe: JsonObject, profile: CalibrationProfile) -> Fitted[ExpertRates]:
    """From a recipe's "sources", tables and the types taken from each, and "compare", tables of other engines."""
    recipe.only(("sources", "compare"))
    found = []
    for part in recipe.children("sources"):
        part.only(("source", "types"))
        found += read_experts(part.text("source"), [str(one) for one in part.sequence("types")], recipe.where)
    others = [rows for text in recipe.sequence("compare") for rows in read_experts(str(text), None, recipe.where)]
    return fit_experts(found, profile, others)


def fit_experts(
    found: Sequence[ExpertRows], profile: CalibrationProfile, others: Sequence[ExpertRows] = ()
) -> Fitted[ExpertRates]:
    """Rates of all the types, half precision among them; `others`: of other engines, for the systematic error.

    Raises InputError where rows of a type are missing or there twice.
    """
    names = [rows.kind for rows in found]
    if HALF not in names or len(set(names)) != len(names):
        raise InputError("types", ", ".join(names), f"each type once, {HALF} among them")
    gpu, kernels = load_gpu(profile.gpu), profile.kernels
    data = [one_gpu(rows, profile) for rows in found]
    fits = [fit_type(rows, gpu) for rows in data]
    dense = [dense_s(rows, kernels) for rows in data]
    checks: list[Comparison] = []
    for rows, (_, own_s, held_out_s), dense_of in zip(data, fits, dense, strict=True):
        held_out = Comparison(label=rows.kind, measured_s=rows.seconds, predicted_s=held_out_s)
        label = f"{rows.kind}, {rows.kernel}, {len(set(rows.shapes))} models, {left_out(rows)} left out"
        checks += [
            Comparison(label=f"{rows.kind}, as shipped", measured_s=rows.seconds, predicted_s=own_s),
            Comparison(label=label, measured_s=rows.seconds, predicted_s=held_out_s),
            *held_out.by(rows.tokens, _TOKENS, "tokens"),
            *(held_out.where(rows.exponent == one, f"{rows.kind}, {routing(one)}") for one in np.unique(rows.exponent)),
            Comparison(label=f"{rows.kind}, as dense products", measured_s=rows.seconds, predicted_s=dense_of),
        ]
    rates = {rows.kind: one for rows, (one, _, _) in zip(data, fits, strict=True)}
    return Fitted(
        rates=ExpertRates(half=rates.pop(HALF), types={kind: rates[kind] for kind in GEMM_TYPES if kind in rates}),
        source="; ".join(sorted({rows.source for rows in data})),
        own=_joined("as shipped", data, [own_s for _, own_s, _ in fits]),
        cross_validated=_joined("models left out", data, [held_out_s for _, _, held_out_s in fits]),
        systematic_log_sd=_systematic_log_sd(data, [one_gpu(rows, profile) for rows in others]),
        checks=tuple(checks),
        seen={name: _span([getattr(rows, name) for rows in data]) for name in _SEEN},
    )


def one_gpu(rows: ExpertRows, profile: CalibrationProfile) -> ExpertRows:
    """Rows whose experts are all on one GPU, at the burst clock; thinned evenly by time."""
    return at_burst(thinned(rows.take(rows.ep_size == 1)), profile)


def thinned(rows: ExpertRows, most: int = _MOST_ROWS) -> ExpertRows:
    """At most so many, evenly by time."""
    order = np.argsort(rows.seconds, kind="stable")
    return rows.take(order[:: max(1, -(-len(order) // most))])


def at_burst(rows: ExpertRows, profile: CalibrationProfile) -> ExpertRows:
    """The same at the burst clock of the profile."""
    seconds = burst_seconds(rows.seconds, rows.warmups, rows.repeats, profile.kernels.clock)
    return rows.with_seconds(seconds)


def routing(exponent: float) -> str:
    """How tokens are spread, in words."""
    return f"power law of exponent {exponent:g}" if exponent else "balanced"


def left_out(rows: ExpertRows) -> str:
    """What is held out of a fit at a time."""
    return "models" if len(set(rows.shapes)) >= _FEW_MODELS else "shares of experts"


def fit_type(rows: ExpertRows, gpu: GpuSpec) -> tuple[GroupedRates, Array, Array]:
    """Rates, and seconds of the rows by these and by fits without each model."""
    width = width_of(rows.kind)
    constants = _fit_form(rows, gpu, width)
    rates = _rates(constants, gpu, rows.kind)
    shares = list(zip(rows.shapes, rows.tp_size.tolist(), strict=True))
    labels = rows.shapes if left_out(rows) == "models" else shares

    def predict(train: Some, test: Some) -> Array:
        return form_s(_rates(_fit_form(rows.take(train), gpu, width, constants), gpu, rows.kind), rows.take(test))

    return rates, form_s(rates, rows), cross_validated_s(labels, predict)


def form_s(rates: GroupedRates, rows: ExpertRows, imbalance: Array | float = 1.0) -> Array:
    """Seconds of all rows by the form."""
    return rates.seconds(rows.call(imbalance), 1, width_of(rows.kind))


def width_of(kind: str) -> Width:
    """Bytes of an element of each operand."""
    return 2 if kind == HALF else GEMM_TYPES[kind]


def _parameters(gpu: GpuSpec, near: Mapping[str, float]) -> list[Parameter]:
    hbm = gpu.hbm_bytes_per_s
    listed = (
        Parameter(name="share", start=0.5, low=0.02, high=1.0),  # of the datasheet's FLOP/s
        Parameter(name="weight_bytes_per_s", start=0.6 * hbm, low=0.05 * hbm, high=hbm),
        Parameter(name="row_bytes_per_s", start=0.5 * hbm, low=0.02 * hbm, high=hbm),
        Parameter(name="tile_rows", start=64.0, low=1.0, high=512.0),
        Parameter(name="tile_features", start=200.0, low=1.0, high=4096.0),
        Parameter(name="start_s", start=3e-5, low=1e-6, high=3e-4),
    )
    return [Parameter(name=one.name, start=near.get(one.name, one.start), low=one.low, high=one.high) for one in listed]


def _rates(values: Mapping[str, float], gpu: GpuSpec, kind: str) -> GroupedRates:
    constants = {name: value for name, value in values.items() if name != "share"}
    return GroupedRates(
        flops_per_s=rounded(values["share"] * peak_of(gpu, None if kind == HALF else kind)), **constants
    )


def _fit_form(
    rows: ExpertRows, gpu: GpuSpec, width: Width, near: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Rows weigh by the square root of their time: long calls make a prefill. `near`: where to start."""
    return solve(
        _parameters(gpu, near or {}),
        lambda values, some: form_s(_rates(values, gpu, rows.kind), rows.take(some)),
        rows.seconds,
        weights=np.sqrt(rows.seconds),
        starts=_STARTS if near is None else 1,
        noise=_NOISE,
    )


def dense_s(rows: ExpertRows, kernels: KernelRates) -> Array:
    """Seconds of the rows as one dense product an expert, by the profile's rates of such products."""
    cost = CalibratedCost(rates=kernels, kernel=next(iter(kernels.attention)), batch=1, element_bytes=2)
    seconds = np.empty(len(rows.tokens))
    keys = np.stack(
        [rows.hidden_size, rows.intermediate_size, rows.tp_size, rows.num_experts, rows.num_experts_per_tok]
    )
    for key in np.unique(keys, axis=1).T:
        some = (keys == key[:, None]).all(axis=0)
        hidden, inner, tp_size, num_experts, per_tok = key
        call = ExpertsCall(
            tokens=rows.tokens[some],
            hidden_size=int(hidden),
            intermediate_size=max(1, int(inner / tp_size)),
            gated=bool(rows.gated[some][0]),
            num_experts=int(num_experts),
            num_experts_per_tok=float(per_tok),
            compute=None if rows.kind == HALF else rows.kind,
        )
        seconds[some] = cost.row_cost(*counted_experts(call, fused=cost.fused))(call.tokens)
    return seconds


def _joined(label: str, data: Sequence[ExpertRows], predicted: Sequence[Array]) -> Comparison:
    measured_s = np.concatenate([rows.seconds for rows in data])
    return Comparison(label=label, measured_s=measured_s, predicted_s=np.concatenate(predicted))


def _span(values: Sequence[Array]) -> tuple[float, float]:
    return float(min(one.min() for one in values)), float(max(one.max() for one in values))


def _systematic_log_sd(data: Sequence[ExpertRows], others: Sequence[ExpertRows]) -> float | None:
    """How far other engines are: of a type the root mean square of their medians of log(their seconds / these).

    Of at least _LONG tokens; the median over types, as one engine may have one type badly. None without others.
    """
    of_types = []
    for rows in data:
        own, medians = by_call(rows), []
        for other in others:
            if other.kind == rows.kind and other.source != rows.source:
                theirs = by_call(other)
                common = own.keys() & theirs.keys()
                if len(common) >= _ENOUGH:
                    medians.append(float(np.median([np.log(theirs[call] / own[call]) for call in common])))
        if medians:
            of_types.append(float(np.sqrt(np.mean(np.square(medians)))))
    return rounded(float(np.median(of_types))) if of_types else None


def by_call(rows: ExpertRows, least_tokens: int = _LONG) -> dict[tuple[object, ...], float]:
    """Seconds by shape, share, tokens and routing, of at least so many tokens."""
    long = rows.take(rows.tokens >= least_tokens)
    calls = zip(long.shapes, long.tp_size.tolist(), long.tokens.tolist(), long.exponent.tolist(), strict=True)
    return dict(zip(calls, long.seconds.tolist(), strict=True))
