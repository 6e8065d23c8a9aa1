"""fit_flash, fit_eager and fit_blocked: rates of attention from measured calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import numpy as np

from calibrate.data import Measurement
from calibrate.fit.fit import (
    Comparison,
    Fitted,
    Parameter,
    Some,
    column,
    cross_validated_s,
    dtypes_of,
    element_bytes_of,
    peak_flops,
    rounded,
    seen_of,
    solve,
    sources_of,
    thinned,
)
from calibrate.importers.aiconfigurator import LatentForm, mean_head_dim, read_latent
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import (
    AttentionCall,
    AttentionRates,
    BlockedRates,
    EagerRates,
    FlashRates,
    LatentRates,
    MeasuredSizes,
)
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.program import Array

HEAD_DIM = 128
PROMISED_CHUNK = 128  # from here on, a prefill's chunks: what the profile's error is about
LONG_KEYS = 4096  # a fit to shorter calls is tried on longer ones

_CLASSES = (1, 128, 512, 2048, 4096, 8192)
_DECODING_CLASSES = (1, 1024, 8192, 65536)
_ENOUGH_HEADS = 4  # different counts of query heads, from which on they are held out too
_ENOUGH = 8  # rows
_WHOLE = 2**30  # keys of a block: one block for all keys, for a kernel that computes masked scores too
_KEY_BLOCKS = (1, 64, 128, 256, 512, 1024, _WHOLE)
_NOTHING_S = 1e-15  # below this a constant is 0
_TURNS = 2  # of constants and factors
_POOR_FORM = 0.05  # mean error on the fitted rows, above which factors by size are tried
Rates = TypeVar("Rates", bound=AttentionRates)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Held-out calls, predicted by the fitted constants with another kernel's tiles."""

    rows: Sequence[Measurement]
    kernel: str  # preset whose tiles they have


def fit_flash(
    rows: Sequence[Measurement],
    gpu: GpuSpec,
    *,
    kernel: str | None = None,
    head_dim: int = HEAD_DIM,
    held_out: HeldOut | None = None,
    narrow: Sequence[Measurement] = (),
) -> Fitted[FlashRates]:
    """Constants of one of PRESETS (None: of the best-fitting one) from calls of one sequence with this head_dim.

    narrow: calls with narrower heads, which tell how long softmax takes.
    No call is faster than its unmasked FLOPs at the datasheet's rate. Raises InputError for a kernel that is not
    among the presets.
    """
    if kernel is not None and kernel not in PRESETS:
        raise InputError("attention_kernel", kernel, ", ".join(KERNELS))
    found = usable_attention(rows, head_dim)
    data = [row for row in found if not is_decoding(row)]
    forms = [_flash_form(gpu, name) for name in ([kernel] if kernel else PRESETS)]
    best = min((_fit(form, data) for form in forms), key=lambda fitted: fitted.cross_validated.errors().mape)
    best = with_softmax(best, narrow)
    decoding = _check_decoding(best.rates, [row for row in found if is_decoding(row)])
    others = [] if held_out is None else _check_held_out(best.rates, held_out, head_dim)
    return replace(best, checks=(*best.checks, *decoding, *others))


def fit_eager(rows: Sequence[Measurement], gpu: GpuSpec, *, head_dim: int = HEAD_DIM) -> Fitted[EagerRates]:
    """FLOPs of QK^T and PV, 28 bytes an element of the score matrix through device memory, and a start.

    Where that form fits poorly and it improves held-out calls, also factors by size of the score matrix.
    """
    found = usable_attention(rows, head_dim)
    peak = peak_flops(gpu, dtypes_of(found))
    parameters = (
        Parameter(name="flops_per_s", start=0.7 * peak, low=1e-4 * peak, high=peak),
        Parameter(name="bytes_per_s", start=0.6 * gpu.hbm_bytes_per_s, low=1e8, high=gpu.hbm_bytes_per_s),
        Parameter(name="start_s", start=2e-5, low=0.0, high=1e-2),
    )
    form = _Form(name="eager", parameters=parameters, make=_eager)
    return _better(form, replace(form, sized=lambda rates, data: with_sizes(rates, data, peak)), found)


def fit_blocked(
    rows: Sequence[Measurement], gpu: GpuSpec, *, name: str, skips_masked: bool, head_dim: int = HEAD_DIM
) -> Fitted[BlockedRates]:
    """FLOPs of the causal half and of the rectangle, a start of calls and of queries, and the nearest size of blocks.

    Where that form fits poorly and it improves held-out calls, also factors by number of queries.
    """
    found = usable_attention(rows, head_dim)
    peak = peak_flops(gpu, dtypes_of(found))
    parameters = [
        *(
            Parameter(name=name, start=0.4 * peak, low=1e-4 * peak, high=peak)
            for name in ("causal_flops_per_s", "rectangle_flops_per_s")
        ),
        Parameter(name="start_s", start=2e-5, low=0.0, high=1e-2),
        Parameter(name="query_s", start=64 * 4 * head_dim / peak, low=0.0, high=1e-4),
    ]
    if skips_masked:
        parameters.append(Parameter(name="join_s", start=16 * 4 * head_dim / peak, low=0.0, high=1e-4))
    forms = [
        _Form(
            name=name,
            parameters=tuple(parameters),
            make=lambda values, block=block: _blocked(values, block, skips_masked),  # type: ignore[misc]
            starts=4,
        )
        for block in _KEY_BLOCKS
    ]
    data = AttentionRows.of(found)
    form = min(forms, key=lambda one: one.error(data))
    return _better(form, replace(form, sized=lambda rates, rows: with_sizes(rates, rows, peak)), found)


def _eager(values: Mapping[str, Any]) -> EagerRates:
    return EagerRates(**values)


def _blocked(values: Mapping[str, Any], key_block: int, skips_masked: bool) -> BlockedRates:
    told: dict[str, Any] = {name: value if value >= _NOTHING_S else 0.0 for name, value in values.items()}
    if not skips_masked:  # what the rates mean by it
        told["rectangle_flops_per_s"] = min(told["rectangle_flops_per_s"], told["causal_flops_per_s"])
    return BlockedRates(**told, key_block=key_block, skips_masked=skips_masked)


def _better(plain: _Form[Rates], sized: _Form[Rates], found: Sequence[Measurement]) -> Fitted[Rates]:
    """The plain form, unless it fits poorly and the other is better on held-out calls."""
    simple = _fit(plain, found)
    if simple.own.errors().mape <= _POOR_FORM:
        return simple
    richer = _fit(sized, found)
    return min(simple, richer, key=lambda fitted: fitted.cross_validated.errors().mape)


def usable_attention(
    rows: Sequence[Measurement], head_dim: int = HEAD_DIM, dtypes: Sequence[str] | None = None
) -> list[Measurement]:
    """Calls of one sequence in these dtypes (None: dtypes_of(rows)), with heads of that size."""
    wanted = dtypes_of(rows) if dtypes is None else dtypes
    return [
        row
        for row in rows
        if row.operation == "attention" and row.dtype in wanted and row.head_dim == head_dim and row.batch == 1
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Form(Generic[Rates]):
    """Rates as a function of their constants."""

    name: str
    parameters: tuple[Parameter, ...]
    make: Callable[[Mapping[str, float]], Rates]
    sized: Callable[[Rates, AttentionRows], Rates] | None = None  # with what the rows say by size
    starts: int = 1

    def fit(self, rows: AttentionRows) -> Rates:
        """Robust least squares of the logarithms; in turn with factors by size."""
        rates = self._solved(rows, rows.expected_s)
        for _ in range(_TURNS if self.sized is not None else 0):
            assert self.sized is not None
            with_factors = self.sized(rates, rows)
            factors = rows.predicted_s(with_factors) / rows.predicted_s(rates)
            rates = self._solved(rows, rows.expected_s / factors)
        return rates if self.sized is None else self.sized(rates, rows)

    def error(self, rows: AttentionRows) -> float:
        """Of the rows that it is fitted to, in the mean of their logarithms."""
        return float(np.mean(np.abs(np.log(rows.predicted_s(self.fit(rows)) / rows.expected_s))))

    def _solved(self, rows: AttentionRows, seconds: Array) -> Rates:
        def predict(found: Mapping[str, float], some: Some) -> Array:
            return rows.take(some).predicted_s(self.make(found))

        return self.make(solve(self.parameters, predict, seconds, starts=self.starts))


def _flash_form(gpu: GpuSpec, name: str) -> _Form[FlashRates]:
    preset = PRESETS[name]
    return _Form(name=name, parameters=preset.parameters(gpu), make=lambda found: preset.rates(gpu, found))


def _fit(form: _Form[Rates], found: Sequence[Measurement]) -> Fitted[Rates]:
    """The fit, cross-validated by holding out whole chunk sizes."""
    data = AttentionRows.of(found)
    rates = form.fit(data)
    seconds = data.predicted_s(rates)
    own = Comparison(label=f"{form.name}, fitted", measured_s=data.expected_s, predicted_s=seconds)
    held_out = _cross_validated(form, data, "chunk sizes", data.chunk)
    promised = data.chunk >= PROMISED_CHUNK
    checks = [*own.by(data.chunk, _CLASSES, "chunk"), *_check_prefix(own, data)]
    if len(set(data.num_attention_heads.tolist())) >= _ENOUGH_HEADS:
        heads = _cross_validated(form, data, "counts of heads", data.num_attention_heads)
        checks.append(_promised(heads, promised))
    return Fitted(
        rates=rates,
        source=sources_of(found),
        own=own,
        cross_validated=_promised(held_out, promised),
        checks=(*checks, *_check_longer(form, data)),
        seen=seen_of(found, ("chunk", "prefix", "num_attention_heads", "num_key_value_heads", "head_dim")),
    )


def _cross_validated(form: _Form[Rates], data: AttentionRows, what: str, labels: Array) -> Comparison:
    """Every call predicted by a fit without the calls of its label."""
    predicted = cross_validated_s(
        labels.tolist(), lambda train, test: data.take(test).predicted_s(form.fit(data.take(train)))
    )
    return Comparison(label=f"{form.name}, {what} left out", measured_s=data.expected_s, predicted_s=predicted)


def _promised(comparison: Comparison, promised: Some) -> Comparison:
    """The chunks of a prefill, if there are any."""
    if not promised.any():
        return comparison
    return comparison.where(promised, f"{comparison.label}, chunk >= {PROMISED_CHUNK}")


def _check_prefix(own: Comparison, data: AttentionRows) -> list[Comparison]:
    """Calls with a prefix and without, where there are both."""
    behind = data.prefix > 0
    if behind.all() or not behind.any():
        return []
    big = data.chunk >= PROMISED_CHUNK
    named = ((behind & big, "with"), (~behind & big, "without"))
    return [own.where(mask, f"{own.label}, {how} a prefix") for mask, how in named if mask.any()]


def _check_longer(form: _Form[Rates], data: AttentionRows) -> list[Comparison]:
    """A fit to short calls against the longer ones."""
    cut = LONG_KEYS if data.keys.max() > LONG_KEYS else data.keys.max() // 2
    short = data.keys <= cut
    longer = ~short & (data.chunk >= PROMISED_CHUNK)
    if short.sum() < _ENOUGH or not longer.any():
        return []
    test = data.take(longer)
    predicted = test.predicted_s(form.fit(data.take(short)))
    label = f"{form.name}, fitted up to {cut:g} keys, longer calls"
    return [Comparison(label=label, measured_s=test.expected_s, predicted_s=predicted)]


def is_decoding(row: Measurement) -> bool:
    """One query behind a prefix, for which engines have kernels of their own."""
    return row.chunk == 1 and (row.prefix or 0) > 0


def _check_decoding(rates: FlashRates, rows: Sequence[Measurement]) -> list[Comparison]:
    """Such calls, which are not fitted, by their keys: a piece of a prefill costs no less than one query does."""
    if not rows:
        return []
    data = AttentionRows.of(rows)
    label = "not fitted, one query behind a prefix"
    whole = Comparison(label=label, measured_s=data.expected_s, predicted_s=data.predicted_s(rates))
    return whole.by(data.keys, _DECODING_CLASSES, "keys")


def _check_held_out(rates: FlashRates, held_out: HeldOut, head_dim: int) -> list[Comparison]:
    """Another lab's calls by these constants and their kernel's tiles."""
    found = usable_attention(held_out.rows, head_dim)
    preset = PRESETS[held_out.kernel]
    other = replace(
        rates,
        tile_rows=preset.tile_rows,
        key_block=preset.key_block,
        packs_heads=preset.packs_heads,
        causal=preset.causal,
    )
    data = AttentionRows.of(found)
    label = f"not fitted, {held_out.kernel} of another source"
    whole = Comparison(label=label, measured_s=data.expected_s, predicted_s=data.predicted_s(other))
    return _check_prefix(whole, data) or [whole]


# -- FlashPreset: the structure of a kind of flash kernel, and which of its constants are fitted.

# Bounds of what may be fitted, in seconds or as shares; append_bytes_per_s ends at the datasheet's HBM rate.
_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "launch_s": (5e-7, 3e-5),
        "tile_s": (1e-8, 3e-5),
        "block_s": (2e-7, 5e-5),
        "query_s": (1e-12, 1e-7),
        "split_s": (1e-8, 3e-5),
        "append_bytes_per_s": (2e10, 1e30),
        "alone_share": (0.3, 1.0),
        "barrier_share": (0.0, 1.0),
        "split_share": (0.2, 1.0),
        "diagonal_cost": (1.0, 4.0),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashPreset:
    """Structure of the kernel (from its source) and start values; the constants in `fitted` are fitted."""

    tile_rows: int
    key_block: int
    tiles_per_sm: int  # that a multiprocessor runs at once
    causal: bool
    packs_heads: bool
    splits_keys: bool
    start: Mapping[str, float]
    fitted: tuple[str, ...]

    def rates(self, gpu: GpuSpec, constants: Mapping[str, float]) -> FlashRates:
        """Rates with these constants instead of the start values."""
        values = {**self.start, **constants}
        return FlashRates(
            tile_rows=self.tile_rows,
            key_block=self.key_block,
            concurrent_tiles=gpu.num_sms * self.tiles_per_sm,
            num_sms=gpu.num_sms,
            causal=self.causal,
            packs_heads=self.packs_heads,
            splits_keys=self.splits_keys,
            flops_per_s=peak_flops(gpu),
            **values,
        )

    def parameters(self, gpu: GpuSpec) -> tuple[Parameter, ...]:
        """The parameters of a fit."""
        listed = []
        for name in self.fitted:
            low, high = _BOUNDS[name]
            high = min(high, gpu.hbm_bytes_per_s) if name == "append_bytes_per_s" else high
            listed.append(Parameter(name=name, start=self.start[name], low=low, high=high))
        return tuple(listed)


_FA2 = FlashPreset(
    tile_rows=64,
    key_block=128,
    tiles_per_sm=2,
    causal=True,
    packs_heads=False,
    splits_keys=False,
    start=MappingProxyType(
        dict(
            launch_s=5e-6,
            tile_s=4e-6,
            block_s=4.8e-6,
            alone_share=0.75,
            barrier_share=1.0,
            append_bytes_per_s=8e11,
        )
    ),
    fitted=("launch_s", "tile_s", "block_s", "alone_share", "append_bytes_per_s"),
)

PRESETS: Mapping[str, FlashPreset] = MappingProxyType(
    {
        # FlashAttention-2 on Ampere; FlashInfer's prefill, which packs the query heads of a KV head.
        "fa2": _FA2,
        "flashinfer": replace(_FA2, tile_rows=128, key_block=64, packs_heads=True),
        # FlashAttention over a paged cache as sarathi called it: all blocks of the rectangle, keys split.
        "paged": FlashPreset(
            tile_rows=64,
            key_block=128,
            tiles_per_sm=2,
            causal=False,
            packs_heads=False,
            splits_keys=True,
            start=MappingProxyType(
                dict(
                    launch_s=5e-6,
                    tile_s=0.0,
                    block_s=5e-6,
                    alone_share=1.0,
                    barrier_share=0.3,
                    append_bytes_per_s=2.5e11,
                    query_s=2e-9,
                    split_s=1e-5,
                    split_share=0.85,
                    diagonal_cost=1.25,
                )
            ),
            fitted=(
                *("launch_s", "block_s", "barrier_share", "split_s"),
                *("query_s", "diagonal_cost", "append_bytes_per_s"),
            ),
        ),
        # FlashAttention-3 on Hopper: one tile a multiprocessor, keys split.
        "fa3": FlashPreset(
            tile_rows=128,
            key_block=64,
            tiles_per_sm=1,
            causal=True,
            packs_heads=False,
            splits_keys=True,
            start=MappingProxyType(
                dict(
                    launch_s=7e-6,
                    tile_s=4e-6,
                    block_s=8e-7,
                    alone_share=1.0,
                    barrier_share=0.3,
                    append_bytes_per_s=1e12,
                    split_s=5e-6,
                    split_share=0.55,
                )
            ),
            fitted=(
                *("launch_s", "tile_s", "block_s", "barrier_share"),
                *("append_bytes_per_s", "split_s", "split_share"),
            ),
        ),
    }
)
KERNELS = (*PRESETS, "eager")


# -- AttentionRows: measured attention calls as arrays, for the formulas of the rates.
#
# with_sizes: adds correction factors by size of the call to rates.

LLAMA_SCORE_BYTES = 28.0  # see kvrsim/kernels/elementwise.py
_ARRAYS = ("chunk", "prefix", "num_attention_heads", "num_key_value_heads", "head_dim", "batch", "expected_s")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionRows:
    """As many attention calls as the arrays are long."""

    chunk: Array
    prefix: Array
    num_attention_heads: Array
    num_key_value_heads: Array
    head_dim: Array
    batch: Array
    expected_s: Array  # measured
    element_bytes: int = 2

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> AttentionRows:
        """The attention measurements."""
        return cls(**{name: column(rows, name) for name in _ARRAYS}, element_bytes=element_bytes_of(rows))

    def take(self, indices: Some) -> AttentionRows:
        """Some of them, by index or mask."""
        return replace(self, **{name: getattr(self, name)[indices] for name in _ARRAYS})

    @property
    def keys(self) -> Array:
        """Of the last query."""
        return self.prefix + self.chunk

    @property
    def call(self) -> AttentionCall:
        """As the rates' formulas take it, which take arrays of shapes as well."""
        return AttentionCall(
            chunk=self.chunk,
            prefix=self.prefix,
            causal=self.chunk * (self.prefix + 0.5 * self.chunk),
            num_attention_heads=cast(Any, self.num_attention_heads),
            num_key_value_heads=cast(Any, self.num_key_value_heads),
            head_dim=cast(Any, self.head_dim),
            score_bytes=LLAMA_SCORE_BYTES,
        )

    def predicted_s(self, rates: AttentionRates) -> Array:
        """As the simulator takes them."""
        return rates.seconds(self.call, cast(Any, self.batch), self.element_bytes)

    def sizes(self, rates: EagerRates | BlockedRates) -> Array:
        """What MeasuredSizes of such rates go by."""
        if isinstance(rates, BlockedRates):
            return self.chunk
        return rates.elements(self.call, cast(Any, self.batch))


MAX_KNOTS = 20
_A_DOUBLING = 2  # classes of size
_KNOT_ERROR = 0.01
_LEAST_SHARE = 0.3  # of a call's time that depends on its elements; calls with less are not used

Sized = TypeVar("Sized", EagerRates, BlockedRates)


def with_sizes(rates: Sized, rows: AttentionRows, peak_flops: float) -> Sized:
    """The rates with factors at some of the rows' sizes; no call beats its unmasked FLOPs at `peak_flops`."""
    plain = replace(rates, measured=None)
    whole_s = rows.predicted_s(plain)
    elements_s = whole_s - rows.predicted_s(_without_elements(plain))
    says = elements_s >= _LEAST_SHARE * whole_s
    if not says.any():
        return plain
    taken_s = np.maximum(rows.expected_s - (whole_s - elements_s), 0.1 * rows.expected_s)
    flops = 4.0 * rows.batch * rows.num_attention_heads * rows.head_dim * rows.call.causal
    taken_s = np.maximum(taken_s, flops / peak_flops)
    return replace(plain, measured=_sizes(rows.sizes(plain)[says], taken_s[says] / elements_s[says]))


def _without_elements(rates: Sized) -> Sized:
    """The rates with only the constant time of a call."""
    none = dict.fromkeys(("flops_per_s", "bytes_per_s", "causal_flops_per_s", "rectangle_flops_per_s"), 1e60)
    values: dict[str, Any] = {name: value for name, value in none.items() if name in rates.__slots__}
    return replace(rates, **values)


def _sizes(sizes: Array, factors: Array) -> MeasuredSizes:
    """Medians of classes of size, with few knots, such that longer calls never take less time."""
    classes = np.round(_A_DOUBLING * np.log2(sizes))
    knots = sorted(set(classes.tolist()))
    places = np.array([np.mean(np.log(sizes[classes == knot])) for knot in knots])
    spent = places + np.array([np.median(np.log(factors[classes == knot])) for knot in knots])
    spent = 0.5 * (np.maximum.accumulate(spent) + np.minimum.accumulate(spent[::-1])[::-1])
    kept = thinned(places, spent - places, most=MAX_KNOTS, error=_KNOT_ERROR)
    rounded_sizes = np.array([rounded(float(size), 6) for size in np.exp(places[kept])])
    return MeasuredSizes(
        sizes=tuple(rounded_sizes.tolist()),
        factors=tuple((np.maximum.accumulate(np.exp(spent[kept])) / rounded_sizes).tolist()),
    )


def with_blocks(rates: BlockedRates, rows: Sequence[Measurement]) -> BlockedRates:
    """With the rate of attention to blocks that are not masked, in the geometric mean of the rows; none without rows.

    Start and queries take what they do in other calls, but no more than half of a row's seconds.
    """
    if not rows:
        return rates
    heads, chunk, keys, head_dim, seconds = (
        column(rows, name) for name in ("num_attention_heads", "chunk", "prefix", "head_dim", "expected_s")
    )
    left_s = np.maximum(seconds - rates.start_s - heads * chunk * rates.query_s, 0.5 * seconds)
    flops_per_s = 4.0 * heads * head_dim * chunk * keys / left_s
    return replace(rates, block_flops_per_s=rounded(float(np.exp(np.log(flops_per_s).mean()))))


# -- with_softmax: what a flash kernel's steps take however narrow the heads are, from calls with heads of 64.

NARROW_HEAD_DIM = 64


def with_softmax(fitted: Fitted[FlashRates], rows: Sequence[Measurement]) -> Fitted[FlashRates]:
    """The same rates with softmax_s, which only heads narrower than those of the fit see; no rows: as they are.

    One more check: the narrow calls, whole chunk sizes left out.
    """
    if not rows:
        return fitted
    data, rates = AttentionRows.of(rows), fitted.rates
    held_out = cross_validated_s(
        data.chunk.tolist(), lambda train, test: data.take(test).predicted_s(_solved(rates, data.take(train)))
    )
    label = f"heads of {NARROW_HEAD_DIM}, chunk sizes left out"
    check = Comparison(label=label, measured_s=data.expected_s, predicted_s=held_out)
    _, widest = fitted.seen["head_dim"]
    seen = dict(fitted.seen) | {"head_dim": (NARROW_HEAD_DIM, widest)}
    return replace(fitted, rates=_solved(rates, data), checks=(*fitted.checks, check), seen=seen)


def _solved(rates: FlashRates, data: AttentionRows) -> FlashRates:
    """Softmax takes no longer than the products of the fit's heads, and matters from half of that on."""

    def predict(found: Mapping[str, float], some: Some) -> Array:
        return data.take(some).predicted_s(replace(rates, softmax_s=found["softmax_s"]))

    block_s = rates.block_s
    bounds = Parameter(name="softmax_s", start=0.7 * block_s, low=0.4 * block_s, high=block_s)
    return replace(rates, softmax_s=solve((bounds,), predict, data.expected_s)["softmax_s"])


# -- fit_latent: flash kernels of latent attention from calls of DeepSeek-V3's widths.

FORMS: tuple[LatentForm, ...] = ("expanded", "absorbed")
# Kernels that skip what is masked: calls without a prefix do not tell the cost of masked blocks.
_CAUSAL = tuple(name for name, preset in PRESETS.items() if preset.causal)


def fit_latent_section(part: JsonObject, profile: CalibrationProfile) -> Fitted[LatentRates]:
    """From a recipe that names the source of either form; InputError for what cannot be read."""
    part.only(FORMS)
    return fit_latent({form: part.text(form) for form in FORMS if part.has(form)}, load_gpu(profile.gpu))


def fit_latent(sources: Mapping[LatentForm, str], gpu: GpuSpec) -> Fitted[LatentRates]:
    """Each form as a flash kernel of its own; stated errors are those of the expanded form, as of a prefill.

    Single queries are not fitted: they are decoded by kernels of their own.
    """
    found: dict[LatentForm, Fitted[FlashRates]] = {}
    for form, source in sources.items():
        rows = [row for row in read_latent(source, form, "recipes") if (row.chunk or 0) > 1]
        fits = [fit_flash(rows, gpu, kernel=kernel, head_dim=mean_head_dim(form)) for kernel in _CAUSAL]
        best = min(fits, key=lambda fitted: fitted.cross_validated.errors().mape)
        found[form] = _named(best, form)
    expanded, absorbed = found["expanded"], found.get("absorbed")
    more = () if absorbed is None else (absorbed.own, absorbed.cross_validated, *absorbed.checks)
    return Fitted(
        rates=LatentRates(expanded=expanded.rates, absorbed=None if absorbed is None else absorbed.rates),
        source="; ".join(f"{one.source} ({form})" for form, one in found.items()),
        own=expanded.own,
        cross_validated=expanded.cross_validated,
        checks=(*expanded.checks, *more),
        seen={name: span for name, span in expanded.seen.items() if name in ("chunk", "num_attention_heads")},
    )


def _named(fitted: Fitted[FlashRates], form: LatentForm) -> Fitted[FlashRates]:
    """Its lines say which form they are about."""
    own, held_out = (replace(one, label=f"{form}, {one.label}") for one in (fitted.own, fitted.cross_validated))
    checks = tuple(replace(one, label=f"{form}, {one.label}") for one in fitted.checks)
    return replace(fitted, own=own, cross_validated=held_out, checks=checks)
