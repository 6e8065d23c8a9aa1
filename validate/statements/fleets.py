"""Statements of a fleet: its percentiles, the share that it serves, its price, and what more traffic needs."""

from __future__ import annotations

import heapq
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

import kvrsim
from kvrsim.errors import InputError
from validate.statements.claims import Claim, Options, arguments_of
from validate.statements.questions import choose

_REQUESTS = 400  # requests of a trace
_MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "llama-3.1-70b", "qwen3-30b-a3b")
_CLUSTERS = ("8xh100", "8xa100-80gb", "8xb200", "8xh20")
_WHOLE = ("single", "tsp")  # strategies of groups whose GPUs have all weights
_SPLIT = ("tp",)  # strategies of groups that split the weights
_STRATEGIES = ",".join((*_WHOLE, *_SPLIT))  # a group prefills one prompt at a time
_LOADS = (0.5, 2.0, 5.0)  # arrivals per prefill time of the mean prompt on one GPU
_PERCENTILE_ERROR = 0.02  # relative difference of a percentile
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True)
class FleetCase:
    """A question about a fleet, and its answer."""

    options: Options
    answer: Mapping[str, Any]  # as `kvrsim capacity --json` prints it

    @classmethod
    def ask(cls, options: Options, rng: Generator) -> FleetCase:
        """Size the fleet; raises KvrsimError where the question is refused."""
        return cls(options=options, answer=kvrsim.capacity(**arguments_of(options)).to_dict())

    @property
    def fleet(self) -> Mapping[str, Any] | None:
        """The fleet of the answer; None where no fleet meets the target."""
        fleet: Mapping[str, Any] | None = self.answer["answer"]
        return fleet

    @cached_property
    def requests(self) -> np.ndarray[Any, Any]:
        """Arrival seconds and context tokens, one row per request."""
        return np.loadtxt(self.options["requests"], delimiter=",", skiprows=1, usecols=(0, 1))

    def prefill_s(self, group: Mapping[str, Any], tokens: int) -> float:
        """Seconds of a prefill on a group: of the fastest strategy that fits and has the same placement of weights."""
        names = _WHOLE if group["weights"] == "whole" else _SPLIT
        size = group["gpus_per_group"]
        return min(self._simulated_s(name, size, tokens) for name in names)

    def _simulated_s(self, strategy: str, size: int, tokens: int) -> float:
        """Simulated seconds of a strategy; infinite where it does not run or does not fit."""
        key = strategy, size, tokens
        if key not in self._times_s:
            self._times_s[key] = self._simulate_s(*key)
        return self._times_s[key]

    @cached_property
    def _times_s(self) -> dict[tuple[str, int, int], float]:
        return {}

    def _simulate_s(self, strategy: str, size: int, tokens: int) -> float:
        options = self.options
        with suppress(InputError):
            result = kvrsim.simulate(
                strategy=strategy,
                gpus=size,
                ctx=tokens,
                model=options["model"],
                cluster=options["cluster"],
                engine=options.get("engine"),
                dtype=options.get("dtype"),
            )
            if result.fits:
                return result.ttft_s
        return math.inf


def draw_fleet(rng: Generator) -> dict[str, str]:
    """Draw the options of a fleet, and write its trace."""
    model, cluster = choose(rng, _MODELS), choose(rng, _CLUSTERS)
    lengths = rng.choice((512, 1000, 1500, 2048, 3000, 5000, 8192, 12000, 16384), size=3, replace=False)
    if rng.random() < 0.3:
        lengths[0] = choose(rng, (100_000, 131_072))  # may fit on no group
    weights = np.array([0.02, 0.4, 0.58]) if lengths[0] > 20_000 else np.array([0.2, 0.4, 0.4])
    contexts = rng.choice(lengths, size=_REQUESTS, p=weights)
    mean = int(contexts.mean())
    alone = kvrsim.simulate(model=model, cluster=cluster, strategy="tp", gpus=8, ctx=mean).ttft_s
    rate = choose(rng, _LOADS) / (4 * alone)
    arrivals = np.cumsum(rng.exponential(1 / rate, size=_REQUESTS))
    outputs = rng.integers(50, 400, size=_REQUESTS)
    path = Path(tempfile.gettempdir()) / f"statements-{rng.integers(2**32):08x}.csv"
    rows = zip(arrivals, contexts, outputs, strict=True)
    lines = [f"{seconds:.6f},{tokens},{output}" for seconds, tokens, output in rows]
    path.write_text("\n".join(["timestamp,context,output", *lines, ""]), "utf-8")
    options = {
        "model": model,
        "cluster": cluster,
        "requests": str(path),
        "slo_ttft": f"{alone * choose(rng, (4, 12, 30)):.4g}s",
        "percentile": choose(rng, ("90", "95", "99")),
        "strategies": _STRATEGIES,
        "group_sizes": choose(rng, ("1", "1,2", "2,4")),
        "max_gpus": "32",
        "price_per_gpu_hour": choose(rng, ("2", "2.5", "3.1")),
    }
    if rng.random() < 0.5:
        options["tpot"] = choose(rng, ("30ms", "50ms", "100ms"))
    return options


def queue_ttft_s(arrivals: Sequence[float], prefill_s: Sequence[float], servers: int) -> list[float]:
    """Seconds from arrival to the end of the prefill, in order of arrival, of servers with one queue.

    The first server that is free takes the next prompt. Prompts that no server fits, of infinite prefill_s, wait for
    ever and hold nothing.
    """
    free = [0.0] * servers
    ttft = []
    for arrival, seconds in zip(arrivals, prefill_s, strict=True):
        if math.isinf(seconds):
            ttft.append(math.inf)
            continue
        end = max(arrival, heapq.heappop(free)) + seconds
        heapq.heappush(free, end)
        ttft.append(end - arrival)
    return ttft


def _fleet_ttft_s(case: FleetCase) -> np.ndarray[Any, Any]:
    """TTFT of each request, by the own queue of each kind of group."""
    assert case.fleet is not None
    found: list[float] = []
    left = np.ones(len(case.requests), dtype=bool)
    for group in case.fleet["groups"]:
        low, high = group["context_range"]
        mine = left & (case.requests[:, 1] >= low) & (case.requests[:, 1] <= high)
        left &= ~mine
        rows = case.requests[mine]
        seconds = [case.prefill_s(group, int(tokens)) for tokens in rows[:, 1]]
        found += queue_ttft_s(rows[:, 0].tolist(), seconds, group["replicas"])
    found += [math.inf] * int(left.sum())
    return np.array(found)


def check_percentile(case: FleetCase) -> Iterator[Claim]:
    """Percentiles of TTFT, by a queue of our own with simulated prefills."""
    if case.fleet is None:
        return
    ttft_s = np.sort(_fleet_ttft_s(case))
    for percentile in _PERCENTILES:
        said_s = case.fleet[f"p{percentile}_ttft_s"]
        found_s = float(ttft_s[math.ceil(percentile / 100 * len(ttft_s)) - 1])
        if said_s is None or math.isinf(found_s):
            holds = said_s is None and math.isinf(found_s)
        else:
            holds = math.isclose(said_s, found_s, rel_tol=_PERCENTILE_ERROR)
        yield Claim(
            kind="percentile",
            said=f"p{percentile} {_seconds(said_s)}",
            found=f"own queue: {_seconds(found_s)}",
            holds=holds,
        )


def _seconds(value: float | None) -> str:
    return "never" if value is None or math.isinf(value) else f"{value:.4g} s"


def check_served_share(case: FleetCase) -> Iterator[Claim]:
    """The share of the requests that fit on a group."""
    if case.fleet is None or "served_share" not in case.fleet:
        return
    found = float(np.isfinite(_fleet_ttft_s(case)).mean())
    said = case.fleet["served_share"]
    yield Claim(
        kind="served share",
        said=f"serves {said:.4f} of the requests",
        found=f"{found:.4f} fit; the target asks for {case.options['percentile']} %",
        holds=math.isclose(said, found, abs_tol=1e-9) and said >= float(case.options["percentile"]) / 100 - 1e-9,
    )


def check_price(case: FleetCase) -> Iterator[Claim]:
    """GPUs times the price of a GPU; the GPUs are those of the groups and of decoding."""
    if case.fleet is None:
        return
    price = float(case.options["price_per_gpu_hour"])
    fleet = case.fleet
    prefill = sum(group["replicas"] * group["gpus_per_group"] for group in fleet["groups"])
    yield Claim(
        kind="price",
        said=f"{fleet['num_gpus']} GPUs for {fleet['cost_per_hour']} $/h",
        found=f"{prefill} GPUs, {prefill * price:g} $/h",
        holds=fleet["num_gpus"] == prefill and math.isclose(fleet["cost_per_hour"], prefill * price),
    )
    if fleet.get("decode") is None:
        return
    total = prefill + fleet["decode"]["num_gpus"]
    yield Claim(
        kind="price",
        said=f"{fleet['total_gpus']} GPUs together for {fleet['total_cost_per_hour']} $/h",
        found=f"{total} GPUs, {total * price:g} $/h",
        holds=fleet["total_gpus"] == total and math.isclose(fleet["total_cost_per_hour"], total * price),
    )


def check_growth(case: FleetCase) -> Iterator[Claim]:
    """The GPUs for more traffic, by the same question with --rate-scale."""
    growth = None if case.fleet is None else case.fleet.get("growth", case.answer.get("growth"))
    if not isinstance(growth, list):
        return
    for step in growth:
        options = {**case.options, "rate_scale": f"{step['times']:.17g}"}
        again = kvrsim.capacity(**arguments_of(options))
        found = again.answer.total_gpus if again.feasible and again.answer is not None else None
        yield Claim(
            kind="growth",
            said=f"{step['times']:g} times the traffic needs {step['num_gpus']} GPUs",
            found=f"--rate-scale {step['times']:g}: {found} GPUs",
            holds=step["num_gpus"] == found,
        )
