"""Prompts, one behind the other or packed on the same GPUs: when they come, and how they fare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.units import format_seconds, parse_seconds

MAX_REQUESTS = 10_000
_POISSON = "poisson:"
REQUESTS = "a number of equal prompts, contexts such as 2k,8k,2k, a trace, or synthetic:SPEC"
EVERY = "a time between requests with its unit, such as 500ms, 0s (all at once), or poisson:500ms (a mean)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """When requests come; the first at 0."""

    count: int  # requests, at least 1
    every_s: float = 0.0  # seconds between one and the next, or their mean
    poisson: bool = False  # gaps drawn from an exponential distribution, else all the same

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not 1 <= self.count <= MAX_REQUESTS:
            raise InputError("requests", self.count, f"a whole number from 1 to {MAX_REQUESTS}")

    @classmethod
    def parse(cls, count: int, every: str) -> Arrivals:
        """From `requests` and `every`; InputError says what is accepted."""
        poisson = every.startswith(_POISSON)
        try:
            every_s = parse_seconds(every.removeprefix(_POISSON), "every", allow_zero=True)
        except InputError:
            raise InputError("every", every, EVERY) from None
        return cls(count=count, every_s=every_s, poisson=poisson)

    def times_s(self, seed: int) -> tuple[float, ...]:
        """Ascending, one a request; the same seed gives the same."""
        if self.poisson:
            gaps = np.random.default_rng(seed).exponential(self.every_s, self.count - 1)
        else:
            gaps = np.full(self.count - 1, self.every_s)
        return (0.0, *map(float, np.cumsum(gaps)))

    def describe(self) -> str:
        """A few words for people."""
        if not self.every_s:
            return "all at once"
        return f"one every {format_seconds(self.every_s)}" + (" on average (Poisson)" if self.poisson else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Prompts that differ in length, in the order of their arrival."""

    arrivals: str  # in words
    arrivals_s: tuple[float, ...]
    context_lens: tuple[int, ...]  # tokens, the cached prefix included
    cached_prefix: tuple[int, ...]  # leading tokens whose K, V every rank holds
    notes: tuple[str, ...] = ()  # on what was read

    def __post_init__(self) -> None:
        if not 1 <= len(self.arrivals_s) <= MAX_REQUESTS:
            raise InputError("requests", len(self.arrivals_s), f"1 to {MAX_REQUESTS} prompts")

    @classmethod
    def alike(cls, arrivals: Arrivals, seed: int, context_len: int, cached_prefix: int) -> Prompts:
        """Equal prompts that arrive so."""
        count = arrivals.count
        return cls(
            arrivals=arrivals.describe(),
            arrivals_s=arrivals.times_s(seed),
            context_lens=(context_len,) * count,
            cached_prefix=(cached_prefix,) * count,
        )

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens that each prefill computes."""
        return tuple(context - cached for context, cached in zip(self.context_lens, self.cached_prefix, strict=True))

    @property
    def largest(self) -> int:
        """Index of the prompt with the longest context."""
        return max(range(len(self.context_lens)), key=lambda prompt: self.context_lens[prompt])

    def first(self, count: int) -> Prompts:
        """The first ones."""
        return replace(
            self,
            arrivals_s=self.arrivals_s[:count],
            context_lens=self.context_lens[:count],
            cached_prefix=self.cached_prefix[:count],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Steps into which prompts were packed."""

    pack_tokens: int  # most new tokens of a step
    steps: int
    mean_tokens: float  # new tokens of a step
    mean_prompts: float  # prompts with tokens in a step


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamResult:
    """Prompts that each rank runs one after another, or in packed steps."""

    arrivals: str  # in words
    arrivals_s: tuple[float, ...]
    context_lens: tuple[int, ...]  # tokens of each prompt, the cached prefix included
    queue_s: tuple[float, ...]  # of each request, from its arrival until rank 0 begins it
    ttft_s: tuple[float, ...]  # of each request, from its arrival
    throughput_per_s: float  # requests over the time from the first arrival until all ranks are done
    steady_per_s: float | None  # of requests without end, all there from the start; None: not worked out
    busy_s: tuple[float, ...]  # a rank: device time of its own operations, of one request; their mean
    utilisation: tuple[float, ...]  # a rank: its busy time over the time until all ranks are done
    packed: Packed | None = None  # None: prompts run one behind the other

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        p50_s, p95_s, p99_s = (float(value) for value in np.quantile(self.ttft_s, (0.5, 0.95, 0.99)))
        return {
            "count": len(self.ttft_s),
            **fields_to_json(self, "arrivals", "arrivals_s", "context_lens", "queue_s", "ttft_s"),
            "mean_ttft_s": float(np.mean(self.ttft_s)),
            "p50_ttft_s": p50_s,
            "p95_ttft_s": p95_s,
            "p99_ttft_s": p99_s,
            **fields_to_json(self, "throughput_per_s", "steady_per_s", "busy_s", "utilisation", "packed"),
        }
