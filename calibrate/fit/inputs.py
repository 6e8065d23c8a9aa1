"""The inputs of a fit: FitChoices, and FilteredRows (enough of them, steady, of one device, or else an InputError)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.data.measurement import ELEMENTWISE, Measurement
from calibrate.fit.attention import HEAD_DIM, PROMISED_CHUNK, HeldOut, usable_attention
from calibrate.fit.elementwise import usable_elementwise
from calibrate.fit.gemm import STEP, usable_gemm
from calibrate.fit.gemm_rows import Shape
from calibrate.fit.layers.narrow_heads import NARROW_HEAD_DIM
from calibrate.fit.links import usable_link_rows
from calibrate.fit.solver import dtypes_of
from kvrsim.errors import InputError
from kvrsim.io.schema import NonNegative, PositiveShare
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.kernels.profile import SendStyle

MAX_SPREAD = 0.10  # median of spread_s / median_s, of published tables
# Of own campaigns, which repeat until medians are precise: with ten repeats of this interquartile range the standard
# error of the median is 7 %.
MAX_OWN_SPREAD = 0.25
# Of own links and element-wise kernels, which are short: their spread is part of the fit's error and interval.
MAX_OWN_SHORT_SPREAD = 0.5
_SHORT = ("send_recv", "all_gather", "all_reduce", "elementwise")
LEAST_ROWS = {"gemm": 20, "attention": 12, "elementwise": 12, "send_recv": 6, "all_gather": 8, "all_reduce": 4}
LEAST_SIZES = {"gemm": 4, "attention": 4, "elementwise": 3, "send_recv": 4, "all_gather": 4, "all_reduce": 4}
_LEAST_TYPE_ROWS = 200
_SIZE = {
    **{"gemm": "tokens", "attention": "chunk", "elementwise": "bytes"},
    **dict.fromkeys(("send_recv", "all_gather", "all_reduce"), "bytes"),
}
_KINDS = {
    **dict.fromkeys((*ELEMENTWISE, "cache_append", "merge"), "elementwise"),
    **dict.fromkeys(("host_layer", "host_collective", "host_message", "host_prepare", "prepare"), "host"),
    **dict.fromkeys(("layer_alone", "layer_pending"), "send_recv"),
    **{"head": "gemm", "block": "attention"},
}
MAX_MEDIAN_ERROR = 0.35  # of a fit; beyond, its form is not that of what was measured


def kind_of(row: Measurement) -> str:
    """The kind of operation in a profile."""
    return _KINDS.get(row.operation, row.operation)


def check_rows(
    kind: str, usable: Sequence[Measurement], argument: str, what: str, max_spread: float = MAX_SPREAD
) -> None:
    """InputError where the rows of a kind are too few, vary too much or mix devices; `what`: rows needed."""
    sizes = {getattr(row, _SIZE[kind]) for row in usable}
    least = LEAST_ROWS[kind]
    if len(usable) < least or len(sizes) < LEAST_SIZES[kind]:
        got = f"{len(usable)} {kind} rows of {len(sizes)} sizes that can be used"
        raise InputError(argument, got, f"at least {least} of at least {LEAST_SIZES[kind]} sizes: {what}")
    _check_spread(kind, usable, argument, max_spread)
    if kind in ("gemm", "attention"):
        _check_one(kind, "device", usable, argument)
    if kind == "attention":
        _check_one(kind, "kernel", usable, argument)


def check_error(kind: str, median_ape: float, argument: str) -> None:
    """InputError where the fit is far from its own rows."""
    if median_ape > MAX_MEDIAN_ERROR:
        got = f"{kind} rows on which the best fit has an error of {median_ape:.0%} (median)"
        raise InputError(argument, got, f"measurements that a fit reproduces within {MAX_MEDIAN_ERROR:.0%}")


def _check_spread(kind: str, rows: Iterable[Measurement], argument: str, most: float) -> None:
    spreads = [row.spread_s / row.median_s for row in rows if row.spread_s is not None]
    if spreads and float(np.median(spreads)) > most:
        got = f"{kind} rows with a median spread of {float(np.median(spreads)):.0%}"
        raise InputError(argument, got, f"repeatable measurements: at most {most:.0%} of their medians")


def _check_one(kind: str, field: str, rows: Iterable[Measurement], argument: str) -> None:
    found = sorted({getattr(row, field) for row in rows})
    if len(found) > 1:
        key = "gpu" if field == "device" else "kernel"
        accepted = f"{kind} rows of one {field}; a source may end in a filter, ?{key}=TEXT"
        raise InputError(argument, "; ".join(found), accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumedElementwise:
    """Element-wise kernels that no table has: a share of the memory's bandwidth, the same for all."""

    hbm_share: PositiveShare  # of the datasheet's bytes per second
    start_s: NonNegative  # of each kernel
    source: str  # whose assumption it is


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoices:
    """Settings of a fit that the rows do not contain."""

    attention_kernel: str | None = (
        None  # a preset of calibrate.fit.flash_presets, or "eager"; None: by name, then the best fit
    )
    head_dim: int | None = None  # of attention; None: 128 where it was measured, else the most frequent
    fused: bool = True  # whether norm, rotary embedding and activation are one kernel each; never in measured layers
    sends: SendStyle = "overlap"  # whether messages hold the compute streams
    keep_shapes: Collection[Shape] | None = (
        None  # that get a table; None: all, or where they are many those of built-in models
    )
    held_out: HeldOut | None = None  # attention calls to compare with
    others: Sequence[Measurement] = ()  # other tables of the same GPU: for the clock and for the systematic error
    hidden_size: tuple[int, int] | None = None  # valid range of the profile; None: as measured
    elementwise: AssumedElementwise | None = None  # instead of measured element-wise kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class FilteredRows:
    """The rows that a fit uses, by kind of operation; a kind that was not measured is empty."""

    gemm: list[Measurement]
    heads: list[Measurement]  # logits of one token
    flash: list[Measurement]  # attention of a fused kernel that skips what is masked
    sdpa: list[Measurement]  # attention of a fused kernel with a mask
    eager: list[Measurement]  # attention of separate kernels
    head_dim: int  # of attention
    narrow: list[Measurement]  # calls of the flash kernel with narrower heads, beside those of the usual width
    elementwise: list[Measurement]  # with copies into the cache
    prepare: list[Measurement]
    blocks: list[Measurement]  # of a ring
    merges: list[Measurement]  # of their results
    send_recv: list[Measurement]
    all_gather: list[Measurement]
    all_reduce: list[Measurement]
    gemm_types: Mapping[str, list[Measurement]]  # products of quantised types with enough rows
    dtypes: tuple[str, ...]  # of the rows in the fit

    @classmethod
    def of(
        cls,
        rows: Sequence[Measurement],
        *,
        head_dim: int | None,
        kernel: str | None,
        argument: str,
        own: bool = False,
    ) -> FilteredRows:
        """All of them checked; InputError naming `argument`, also where gemm or attention is missing.

        `head_dim` None: 128 where it was measured often enough, else the most frequent. `kernel` "eager": all attention
        rows are eager; None: rows with eager in their kernel; otherwise rows of exactly the kernel eager. Rows of the
        kernel sdpa are sdpa, except with `kernel` "eager". Half precision if there is any, else fp32. `own`: rows of a
        model's layers on this machine: narrow products are used too, and larger spreads are accepted.
        """
        dtypes = dtypes_of(row for row in rows if row.operation in ("gemm", "attention"))
        of_dtype = [row for row in rows if row.dtype in dtypes]
        wanted = _head_dim(rows, dtypes) if head_dim is None else head_dim
        calls = usable_attention(rows, wanted, dtypes)
        eager = [row for row in calls if _is_eager(row, kernel)]
        sdpa = [row for row in calls if kernel != "eager" and row.kernel == "sdpa"]
        taken = set(map(id, (*eager, *sdpa)))
        reduces = usable_link_rows(rows, "all_reduce")
        filtered = cls(
            gemm=usable_gemm(rows, dtypes, narrow=own),
            heads=[row for row in of_dtype if row.operation == "head"],
            flash=[row for row in calls if id(row) not in taken],
            sdpa=sdpa,
            eager=eager,
            head_dim=wanted,
            narrow=_narrow(rows, dtypes, kernel) if wanted == HEAD_DIM else [],
            elementwise=usable_elementwise(rows, dtypes),
            prepare=[row for row in of_dtype if row.operation == "prepare"],
            blocks=[row for row in of_dtype if row.operation == "block"],
            merges=[row for row in of_dtype if row.operation == "merge"],
            send_recv=usable_link_rows(rows, "send_recv"),
            all_gather=usable_link_rows(rows, "all_gather"),
            all_reduce=[] if own and len(reduces) < LEAST_ROWS["all_reduce"] else reduces,
            gemm_types={kind: found for kind in GEMM_TYPES if _enough(found := usable_gemm(rows, (kind,)))},
            dtypes=dtypes,
        )
        filtered._check(argument, own=own)
        return filtered

    def _check(self, argument: str, *, own: bool) -> None:
        max_spread = MAX_OWN_SPREAD if own else MAX_SPREAD
        types = " or ".join(self.dtypes)
        check_rows("gemm", self.gemm, argument, f"products in {types} of at least {STEP} tokens", max_spread)
        calls = f"calls of one sequence in {types}, head_dim {self.head_dim}"
        check_rows("attention", self.flash or self.sdpa or self.eager, argument, calls, max_spread)
        for kind, rows, what in (
            ("attention", self.sdpa, calls),
            ("attention", self.eager, calls),
            ("elementwise", self.elementwise, f"kernels in {types}"),
            ("send_recv", self.send_recv, "inside one node"),
            ("all_gather", self.all_gather, "inside one node"),
            ("all_reduce", self.all_reduce, "inside one node"),
        ):
            if rows:
                check_rows(kind, rows, argument, what, MAX_OWN_SHORT_SPREAD if own and kind in _SHORT else max_spread)


def _enough(rows: Sequence[Measurement]) -> bool:
    return len(rows) >= _LEAST_TYPE_ROWS and len({row.tokens for row in rows}) >= LEAST_SIZES["gemm"]


def _is_eager(row: Measurement, kernel: str | None) -> bool:
    if kernel is None:
        return "eager" in row.kernel
    return kernel == "eager" or row.kernel == "eager"


def _narrow(rows: Sequence[Measurement], dtypes: Sequence[str], kernel: str | None) -> list[Measurement]:
    """Of a prefill's chunks, where enough were measured."""
    calls = usable_attention(rows, NARROW_HEAD_DIM, dtypes)
    flash = [row for row in calls if not _is_eager(row, kernel) and row.kernel != "sdpa"]
    found = [row for row in flash if row.chunk is not None and row.chunk >= PROMISED_CHUNK]
    return found if len(found) >= LEAST_ROWS["attention"] else []


def _head_dim(rows: Sequence[Measurement], dtypes: Sequence[str]) -> int:
    """128 if there are enough, else what was measured most."""
    if len(usable_attention(rows, HEAD_DIM, dtypes)) >= LEAST_ROWS["attention"]:
        return HEAD_DIM
    found = [row.head_dim for row in rows if row.operation == "attention" and row.head_dim is not None]
    return max(sorted(set(found)), key=found.count, default=HEAD_DIM)


def notes_on(rows: Sequence[Measurement], used: Iterable[Measurement], dtypes: Sequence[str]) -> tuple[str, ...]:
    """How many rows of each kind were not used, and possible reasons."""
    taken = set(map(id, used))
    left: dict[str, int] = {}
    for row in rows:
        if id(row) not in taken:
            left[kind_of(row)] = left.get(kind_of(row), 0) + 1
    types = " or ".join(dtypes)
    reasons = {
        "gemm": f"not {types}, fewer than {STEP} tokens, or of a narrow matrix",
        "attention": f"not {types}, another head_dim, more than one sequence, or decoding",
        "elementwise": f"not {types}",
        "send_recv": "between nodes, or far from the form",
        "all_gather": "between nodes, or far from the form",
        "all_reduce": "between nodes, or slower than another kernel at that size",
    }
    return tuple(
        f"{count} {kind} rows were not fitted: {reasons[kind]}"
        for kind, count in sorted(left.items())
        if kind in reasons
    )
