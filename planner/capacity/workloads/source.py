"""Source of requests: a trace, or synthetic requests as specified below.

    synthetic:poisson,rate=4,requests=20000,context=lognormal:2k:1.1,output=200

First the arrivals: poisson, bursty or diurnal. Then:

rate      requests a second, on average
requests  how many; or duration=3600s
cv        bursty: standard deviation of the gaps between arrivals over their mean (gamma-distributed gaps)
period    diurnal: seconds from peak to peak;  peak  the highest rate over the lowest (a sine between)
context   LEN, lognormal:MEDIAN:SIGMA, or file:TRACE (drawn from the contexts of a trace)
output    LEN, lognormal:MEDIAN:SIGMA, or file:TRACE
cached    share of every context that is in a prefix cache;  max  the longest context
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.errors import InputError
from kvrsim.program import Array
from kvrsim.units import MAX_TOKENS, parse_count, parse_number, parse_seconds, parse_share, parse_tokens
from planner.capacity.workloads.files import AZURE, MOONCAKE, read_trace
from planner.capacity.workloads.workload import MAX_REQUESTS, Lengths, Workload

ARRIVALS = ("poisson", "bursty", "diurnal")
_KEYS = ("rate", "requests", "duration", "cv", "period", "peak", "context", "output", "cached", "max")
_DEFAULT_MAX = "128k"
_Draw = Callable[[int, "np.random.Generator"], Lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """A checked specification of synthetic requests."""

    text: str
    arrivals: str  # one of ARRIVALS
    rate_per_s: float
    requests: int
    cv: float
    period_s: float
    peak: float  # highest rate over lowest
    context: _Draw
    output: _Draw
    cached_share: float  # of every context
    max_context: int  # tokens

    @classmethod
    def parse(cls, text: str, argument: str = "requests") -> Synthetic:
        """Read a specification such as "poisson,rate=4,requests=20000,context=lognormal:2k:1.1"."""
        arrivals, *pairs = [part.strip() for part in text.split(",")]
        if arrivals not in ARRIVALS:
            raise InputError(argument, arrivals, f"synthetic: and one of {', '.join(ARRIVALS)}, then key=value")
        values: dict[str, str] = {}
        for pair in pairs:
            key, mark, value = pair.partition("=")
            if not mark or key not in _KEYS or key in values:
                raise InputError(argument, pair, f"key=value with commas between, once each: {', '.join(_KEYS)}")
            values[key] = value
        rate = parse_number(values.get("rate", ""), f"{argument}: rate", above=0, most=1e6)
        requests = cls._requests(values, rate, argument)
        return cls(
            text=text,
            arrivals=arrivals,
            rate_per_s=rate,
            requests=requests,
            cv=parse_number(values.get("cv", "3"), f"{argument}: cv", above=0, most=100),
            period_s=parse_seconds(values.get("period", "86400s"), f"{argument}: period"),
            peak=parse_number(values.get("peak", "3"), f"{argument}: peak", least=1, most=1e6),
            context=_lengths(values.get("context", "lognormal:1k:1"), f"{argument}: context"),
            output=_lengths(values.get("output", "200"), f"{argument}: output"),
            cached_share=parse_share(values.get("cached", "0"), f"{argument}: cached", below=1),
            max_context=parse_tokens(values.get("max", _DEFAULT_MAX), f"{argument}: max"),
        )

    @staticmethod
    def _requests(values: dict[str, str], rate: float, argument: str) -> int:
        if "duration" in values and "requests" in values:
            raise InputError(f"{argument}: duration", values["duration"], "requests or duration, not both")
        if "duration" in values:
            expected = rate * parse_seconds(values["duration"], f"{argument}: duration")
            if not 1 <= expected <= MAX_REQUESTS:
                raise InputError(f"{argument}: duration", values["duration"], f"1 to {MAX_REQUESTS} requests in all")
            return round(expected)
        return parse_count(values.get("requests", "20000"), f"{argument}: requests", maximum=MAX_REQUESTS)

    def scaled(self, factor: float, argument: str = "rate_scale") -> Synthetic:
        """`factor` times as many requests in the same time."""
        requests = round(self.requests * factor)
        if not 1 <= requests <= MAX_REQUESTS:
            raise InputError(argument, f"{factor:g}", f"a factor that makes it 1 to {MAX_REQUESTS} requests")
        return replace(self, rate_per_s=self.rate_per_s * factor, requests=requests)

    def draw(self, rng: np.random.Generator) -> Workload:
        """Draw one realisation."""
        context = np.minimum(self.context(self.requests, rng), self.max_context)
        cached = np.floor(self.cached_share * context).astype(np.int64)
        return Workload(
            name=f"synthetic:{self.text}",
            kind="synthetic",
            arrival_s=self._arrivals_s(rng),
            context_len=context,
            cached_prefix=np.minimum(cached, context - 1),
            output_tokens=self.output(self.requests, rng),
        )

    def _arrivals_s(self, rng: np.random.Generator) -> Array:
        """Unit-rate arrivals, stretched; diurnal ones by the inverse of the integrated rate."""
        shape = 1.0 / self.cv**2 if self.arrivals == "bursty" else 1.0
        events = np.cumsum(rng.gamma(shape, 1.0 / shape, size=self.requests))
        times = events / self.rate_per_s
        if self.arrivals == "diurnal":
            times = self._diurnal_s(times)
        return np.asarray(times - times[0])

    def _diurnal_s(self, expected_s: Array) -> Array:
        """When the integral of 1 - a cos(2 pi t / period) reaches each number; a from peak = (1 + a) / (1 - a)."""
        swing = (self.peak - 1) / (self.peak + 1)
        grid = np.linspace(0.0, 1.0, 4097)
        integral = grid - swing * np.sin(2 * math.pi * grid) / (2 * math.pi)
        cycles, phase = np.divmod(expected_s / self.period_s, 1.0)
        return np.asarray(self.period_s * (cycles + np.interp(phase, integral, grid)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A trace or a specification, and how its arrivals are scaled."""

    trace: Workload | None  # None: synthetic
    synthetic: Synthetic | None
    rate_scale: float = 1.0  # factor on the requests in the same time

    @classmethod
    def of(cls, text: str, *, rate_scale: float = 1.0) -> Source:
        """Read FILE, azure:FILE, mooncake:FILE or synthetic:SPEC."""
        kind, mark, rest = text.partition(":")
        if mark and kind == "synthetic":
            return cls(trace=None, synthetic=Synthetic.parse(rest), rate_scale=rate_scale)
        if mark and kind in (AZURE, MOONCAKE):
            return cls(trace=read_trace(rest, kind), synthetic=None, rate_scale=rate_scale)
        return cls(trace=read_trace(text), synthetic=None, rate_scale=rate_scale)

    @property
    def is_random(self) -> bool:
        """Whether requests depend on the seed."""
        return self.synthetic is not None

    def workload(self, seed: int, replication: int = 0) -> Workload:
        """The requests; synthetic ones are independent between replications."""
        rng = np.random.default_rng([seed, replication])
        if self.synthetic is not None:
            return self.synthetic.scaled(self.rate_scale).draw(rng)
        assert self.trace is not None
        return self.trace.scaled(self.rate_scale, rng)


def _lengths(text: str, argument: str) -> _Draw:
    """A function that draws lengths."""
    kind, _, rest = text.partition(":")
    if kind == "lognormal":
        parts = rest.split(":")
        if len(parts) != 2:
            raise InputError(argument, text, "lognormal:MEDIAN:SIGMA, such as lognormal:2k:1.1")
        median, sigma = parse_tokens(parts[0], argument), parse_number(parts[1], argument, above=0, most=10)

        def lognormal(count: int, rng: np.random.Generator) -> Lengths:
            drawn = np.exp(math.log(median) + sigma * rng.standard_normal(count))
            return np.clip(np.rint(np.minimum(drawn, MAX_TOKENS)), 1, MAX_TOKENS).astype(np.int64)

        return lognormal
    if kind == "file":
        trace = read_trace(rest, argument=argument)
        values = trace.output_tokens if argument.endswith("output") else trace.context_len

        def empirical(count: int, rng: np.random.Generator) -> Lengths:
            return np.asarray(rng.choice(values, size=count))

        return empirical
    length = parse_tokens(text, argument)
    return lambda count, rng: np.full(count, length, dtype=np.int64)
