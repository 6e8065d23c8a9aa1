"""fit_flash, fit_eager and fit_blocked: rates of attention from measured calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.attention_rows import AttentionRows, with_sizes
from calibrate.fit.flash_presets import PRESETS
from calibrate.fit.layers.narrow_heads import with_softmax
from calibrate.fit.solver import (
    Comparison,
    Fitted,
    Parameter,
    Some,
    cross_validated_s,
    dtypes_of,
    peak_flops,
    seen_of,
    solve,
    sources_of,
)
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.attention import AttentionRates, BlockedRates, EagerRates, FlashRates
from kvrsim.program import Array

HEAD_DIM = 128
PROMISED_CHUNK = 128  # from here on, a prefill's chunks: what the profile's error is about
LONG_KEYS = 4096  # a fit to shorter calls is tried on longer ones
KERNELS = (*PRESETS, "eager")

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
