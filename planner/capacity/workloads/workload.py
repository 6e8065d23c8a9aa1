"""Workload: arrival time, context length and output length of each request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrsim.errors import InputError
from kvrsim.interp import percentile_of
from kvrsim.program import Array, Flags
from kvrsim.units import MAX_TOKENS, format_tokens

Lengths = npt.NDArray[np.int64]
MAX_REQUESTS = 5_000_000  # about 1 GiB with all derived arrays
_SHARES = (50, 90, 99, 100)  # percentiles of a summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in the order of their arrival; all arrays of shape (N,)."""

    name: str  # file or specification
    kind: str  # format that was read, or "synthetic"
    arrival_s: Array  # since the first
    context_len: Lengths  # tokens, cached prefix included; each at least 1
    cached_prefix: Lengths  # leading tokens whose KV a prefix cache holds; each less than the context
    output_tokens: Lengths
    notes: tuple[str, ...] = ()  # repairs and omissions, as text

    def __post_init__(self) -> None:
        assert len(self.arrival_s)
        assert (np.diff(self.arrival_s) >= 0).all()
        assert (self.context_len >= 1).all()
        assert (self.context_len <= MAX_TOKENS).all()
        assert ((self.cached_prefix >= 0) & (self.cached_prefix < self.context_len)).all()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def new_tokens(self) -> Lengths:
        """Tokens that the prefill of each request computes."""
        return self.context_len - self.cached_prefix

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    def only(self, chosen: Flags) -> Workload:
        """The chosen requests, at their times."""
        return replace(
            self,
            arrival_s=self.arrival_s[chosen],
            context_len=self.context_len[chosen],
            cached_prefix=self.cached_prefix[chosen],
            output_tokens=self.output_tokens[chosen],
        )

    def busiest(self, count: int) -> Workload:
        """So many requests in a row, where most new tokens arrive in the shortest time."""
        work = np.concatenate([[0.0], np.cumsum(self.new_tokens, dtype=float)])
        spans_s = self.arrival_s[count - 1 :] - self.arrival_s[: len(self) - count + 1]
        rate = (work[count:] - work[:-count]) / np.maximum(spans_s, 1e-9)
        begin = int(rate.argmax())
        chosen = np.zeros(len(self), dtype=bool)
        chosen[begin : begin + count] = True
        return self.only(chosen)

    def compressed(self, factor: float) -> Workload:
        """The same requests in 1/`factor` of the time."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def scaled(self, factor: float, rng: np.random.Generator) -> Workload:
        """`factor` times as many requests in the same time.

        Whole copies are shifted cyclically in time by a random offset, so that bursts keep their shape but do not
        coincide; the fractional part of the factor is a random sample of one more copy.
        """
        if factor == 1:
            return self
        if len(self) * factor > MAX_REQUESTS:
            raise InputError("rate_scale", f"{factor:g}", f"at most {MAX_REQUESTS} requests in all")
        copies, rest = int(factor), factor - int(factor)
        period_s = self.duration_s * (1 + 1 / max(1, len(self) - 1))  # a mean gap between the last and the first
        times, picks = [], []
        for copy in range(copies + (rest > 0)):
            kept = np.arange(len(self))
            if copy == copies:
                kept = kept[rng.random(len(self)) < rest]
            offset_s = rng.uniform(0, period_s) if copy and period_s else 0.0
            times.append((self.arrival_s[kept] + offset_s) % period_s if offset_s else self.arrival_s[kept])
            picks.append(kept)
        arrival_s, pick = np.concatenate(times), np.concatenate(picks)
        if not len(pick):
            raise InputError("rate_scale", f"{factor:g}", "a factor that leaves at least one request")
        order = np.argsort(arrival_s, kind="stable")
        arrival_s, pick = arrival_s[order], pick[order]
        how = "copies shifted in time by random offsets" if copies > 1 or (copies and rest) else "a random sample"
        return Workload(
            name=self.name,
            kind=self.kind,
            arrival_s=arrival_s - arrival_s[0],
            context_len=self.context_len[pick],
            cached_prefix=self.cached_prefix[pick],
            output_tokens=self.output_tokens[pick],
            notes=(*self.notes, f"{factor:g} times the requests in the same time: {how}"),
        )

    def summary(self) -> dict[str, Any]:
        """Summary statistics as plain JSON values."""
        gaps = np.diff(self.arrival_s)
        mean_gap = float(gaps.mean()) if len(gaps) else 0.0
        return {
            "name": self.name,
            "kind": self.kind,
            "requests": len(self),
            "duration_s": self.duration_s,
            "rate_per_s": (len(self) - 1) / self.duration_s if self.duration_s else None,
            "gap_variation": float(gaps.std() / mean_gap) if mean_gap else None,  # 1 for a Poisson process
            "context_tokens": _percentiles(self.context_len),
            "new_tokens": _percentiles(self.new_tokens),
            "output_tokens": _percentiles(self.output_tokens),
            "cached_share": float(self.cached_prefix.sum() / self.context_len.sum()),
            "histogram": self.histogram(),
            "notes": list(self.notes),
        }

    def histogram(self) -> list[dict[str, Any]]:
        """Requests by context, in powers of two: from (inclusive), to (exclusive), how many, share of new tokens."""
        octave = np.frexp(self.context_len.astype(float))[1] - 1  # exact, where a logarithm would round
        new = self.new_tokens
        rows = []
        for power in range(int(octave.min()), int(octave.max()) + 1):
            here = octave == power
            rows.append(
                {
                    "from_tokens": 2**power,
                    "to_tokens": 2 ** (power + 1),
                    "requests": int(here.sum()),
                    "share_of_new_tokens": float(new[here].sum() / new.sum()),
                }
            )
        return rows

    def describe(self) -> str:
        """Summary in one line."""
        rate = f", {(len(self) - 1) / self.duration_s:.3g} a second" if self.duration_s else ""
        low, high = (format_tokens(int(length)) for length in (self.context_len.min(), self.context_len.max()))
        cached = self.cached_prefix.sum() / self.context_len.sum()
        held = f", {cached:.0%} of them cached" if cached else ""
        return f"{len(self)} requests in {self.duration_s:.4g} s{rate}, contexts of {low} to {high} tokens{held}"


def _percentiles(lengths: Lengths) -> dict[str, float]:
    named = {f"p{share}" if share < 100 else "max": int(percentile_of(lengths, share)) for share in _SHARES}
    return {"mean": float(lengths.mean()), **named}
