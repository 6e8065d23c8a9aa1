"""What measurements a fit accepts: enough of them, steady, of one device; refused in a sentence otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.fit_attention import HEAD_DIM, usable_attention
from calibrate.fit_elementwise import usable_elementwise
from calibrate.fit_gemm import STEP, usable_gemm
from calibrate.fit_links import usable_link_rows
from calibrate.fitted import HALF
from calibrate.measurement import ELEMENTWISE, Measurement
from kvrsim.errors import InputError

MAX_SPREAD = 0.10  # median of spread_s / median_s
LEAST_ROWS = {"gemm": 20, "attention": 12, "elementwise": 12, "send_recv": 6, "all_gather": 8}
LEAST_SIZES = {"gemm": 4, "attention": 4, "elementwise": 3, "send_recv": 4, "all_gather": 4}
_SIZE = {"gemm": "tokens", "attention": "chunk", "elementwise": "bytes", "send_recv": "bytes", "all_gather": "bytes"}
MAX_MEDIAN_ERROR = 0.35  # of a fit; beyond, its form is not that of what was measured


def kind_of(row: Measurement) -> str:
    """The kind of operation in a profile."""
    if row.operation in ELEMENTWISE:
        return "elementwise"
    return "host" if row.operation.startswith("host_") else row.operation


def check_rows(kind: str, usable: Sequence[Measurement], argument: str, what: str) -> None:
    """InputError where the rows of a kind are too few, too unsteady or of several devices; `what` they have to be."""
    sizes = {getattr(row, _SIZE[kind]) for row in usable}
    least = LEAST_ROWS[kind]
    if len(usable) < least or len(sizes) < LEAST_SIZES[kind]:
        got = f"{len(usable)} {kind} rows of {len(sizes)} sizes that can be used"
        raise InputError(argument, got, f"at least {least} of at least {LEAST_SIZES[kind]} sizes: {what}")
    _check_spread(kind, usable, argument)
    if kind in ("gemm", "attention"):
        _check_one(kind, "device", usable, argument)
    if kind == "attention":
        _check_one(kind, "kernel", usable, argument)


def check_error(kind: str, median_ape: float, argument: str) -> None:
    """InputError where the fit is far from its own rows."""
    if median_ape > MAX_MEDIAN_ERROR:
        got = f"{kind} rows that the best fit misses by {median_ape:.0%} (median)"
        raise InputError(argument, got, f"measurements that a fit can follow within {MAX_MEDIAN_ERROR:.0%}")


def _check_spread(kind: str, rows: Iterable[Measurement], argument: str) -> None:
    spreads = [row.spread_s / row.median_s for row in rows if row.spread_s is not None]
    if spreads and float(np.median(spreads)) > MAX_SPREAD:
        got = f"{kind} rows with a median spread of {float(np.median(spreads)):.0%}"
        raise InputError(argument, got, f"steady measurements: at most {MAX_SPREAD:.0%} of their medians")


def _check_one(kind: str, field: str, rows: Iterable[Measurement], argument: str) -> None:
    found = sorted({getattr(row, field) for row in rows})
    if len(found) > 1:
        key = "gpu" if field == "device" else "kernel"
        accepted = f"{kind} rows of one {field}; a source may end in a filter, ?{key}=TEXT"
        raise InputError(argument, "; ".join(found), accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Screened:
    """The rows that a fit uses, by kind of operation; the kinds that no one measured are empty."""

    gemm: list[Measurement]
    flash: list[Measurement]  # attention of a fused kernel
    eager: list[Measurement]  # attention of separate kernels
    head_dim: int  # of attention
    elementwise: list[Measurement]
    send_recv: list[Measurement]
    all_gather: list[Measurement]

    @classmethod
    def of(cls, rows: Sequence[Measurement], *, head_dim: int | None, kernel: str | None, argument: str) -> Screened:
        """All of them checked; InputError naming `argument`, also where gemm or attention is missing.

        `head_dim` None: 128 where it was measured often enough, else what was measured most. `kernel` "eager": all
        attention is eager; None: what is called eager; another: nothing.
        """
        wanted = _head_dim(rows) if head_dim is None else head_dim
        calls = usable_attention(rows, wanted)
        eager = [row for row in calls if kernel == "eager" or (kernel is None and "eager" in row.kernel)]
        taken = set(map(id, eager))
        screened = cls(
            gemm=usable_gemm(rows),
            flash=[row for row in calls if id(row) not in taken],
            eager=eager,
            head_dim=wanted,
            elementwise=usable_elementwise(rows),
            send_recv=usable_link_rows(rows, "send_recv"),
            all_gather=usable_link_rows(rows, "all_gather"),
        )
        screened._check(argument)
        return screened

    def _check(self, argument: str) -> None:
        halves = " or ".join(HALF)
        check_rows("gemm", self.gemm, argument, f"products in {halves} of at least {STEP} tokens")
        calls = f"calls of one sequence in {halves}, head_dim {self.head_dim}"
        check_rows("attention", self.flash or self.eager, argument, calls)
        for kind, rows, what in (
            ("attention", self.eager, calls),
            ("elementwise", self.elementwise, f"kernels in {halves}"),
            ("send_recv", self.send_recv, "inside one node"),
            ("all_gather", self.all_gather, "inside one node"),
        ):
            if rows:
                check_rows(kind, rows, argument, what)


def _head_dim(rows: Sequence[Measurement]) -> int:
    """128 if there are enough, else what was measured most."""
    if len(usable_attention(rows, HEAD_DIM)) >= LEAST_ROWS["attention"]:
        return HEAD_DIM
    found = [row.head_dim for row in rows if row.operation == "attention" and row.head_dim is not None]
    return max(sorted(set(found)), key=found.count, default=HEAD_DIM)


def notes_on(rows: Sequence[Measurement], used: Iterable[Measurement]) -> tuple[str, ...]:
    """What was left away, and why it may have been."""
    taken = set(map(id, used))
    left: dict[str, int] = {}
    for row in rows:
        if id(row) not in taken:
            left[kind_of(row)] = left.get(kind_of(row), 0) + 1
    halves = " or ".join(HALF)
    reasons = {
        "gemm": f"not {halves}, fewer than {STEP} tokens, or of a narrow matrix",
        "attention": f"not {halves}, another head_dim, or more than one sequence",
        "elementwise": f"not {halves}",
        "send_recv": "between nodes, or far from the form",
        "all_gather": "between nodes, or far from the form",
    }
    return tuple(
        f"{count} {kind} rows were not fitted: {reasons[kind]}"
        for kind, count in sorted(left.items())
        if kind in reasons
    )
