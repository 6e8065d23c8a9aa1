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
from kvrsim.executors.access import execution_of
from kvrsim.strategies import get_strategy
from planner.capacity.serving import StepRequests
from planner.capacity.steps import BUDGET, StepTimes, usual_cache
from planner.capacity.transfer import cache_bytes
from validate.statements.arithmetic import sizes_of
from validate.statements.claims import Claim, Options, arguments_of
from validate.statements.questions import choose
from validate.statements.simpy_steps import SimpySteps

_REQUESTS = 400  # requests of a trace
_MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "llama-3.1-70b", "qwen3-30b-a3b")
_CLUSTERS = ("8xh100", "8xa100-80gb", "8xb200", "8xh20")
_WHOLE = ("single", "tsp")  # strategies of groups whose GPUs have all weights
_SPLIT = ("tp",)  # strategies of groups that split the weights
_STRATEGIES = ",".join((*_WHOLE, *_SPLIT))  # a group prefills one prompt at a time
_LOADS = (0.5, 2.0, 5.0)  # arrivals per prefill time of the mean prompt on one GPU
_ROUNDING = 1e-6
_TIME_ERROR = 0.01  # relative error of an interpolated prefill time
_PERCENTILES = (50, 95, 99)
_ELEMENT_BYTES = 2  # of a cached value: no question asks for another type
Rows = np.ndarray[Any, Any]  # arrival seconds, context tokens and output tokens of requests


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
        """Arrival seconds, context tokens and output tokens, one row per request."""
        return np.loadtxt(self.options["requests"], delimiter=",", skiprows=1)

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


def _fleet_ttft_s(case: FleetCase, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """TTFT of each request, by the own queue of each kind of group; inf: it fits on no group.

    Times of whole prompts are multiplied by `scale`.
    """
    assert case.fleet is not None
    ttft_s = np.full(len(case.requests), np.inf)
    left = np.ones(len(case.requests), dtype=bool)
    for group in case.fleet["groups"]:
        low, high = group["context_range"]
        mine = left & (case.requests[:, 1] >= low) & (case.requests[:, 1] <= high)
        left &= ~mine
        if case.fleet["serving"] == "colocated":
            ttft_s[mine] = _shared_steps_ttft_s(case, group, case.requests[mine])
        else:
            ttft_s[mine] = _whole_prompts_ttft_s(case, group, case.requests[mine], scale)
    return ttft_s


def _whole_prompts_ttft_s(case: FleetCase, group: Mapping[str, Any], rows: Rows, scale: float) -> np.ndarray[Any, Any]:
    """TTFT of prompts that a group prefills one by one, until their caches have moved."""
    assert case.fleet is not None
    prefill_s = scale * np.array([case.prefill_s(group, int(tokens)) for tokens in rows[:, 1]])
    ttft_s = np.array(queue_ttft_s(rows[:, 0].tolist(), prefill_s.tolist(), group["replicas"]))
    if case.fleet.get("decode") is None:
        return ttft_s
    sizes = sizes_of(case.options["model"])
    assert sizes is not None
    layer_bytes = rows[:, 1] * sizes.kv_elements * _ELEMENT_BYTES
    layer_s = layer_bytes / (case.answer["kv_transfer"]["bytes_per_s_a_gpu"] * group["gpus_per_group"])
    after_first_layer_s = (sizes.num_layers - 1) * np.maximum(layer_s, prefill_s / sizes.num_layers)
    sent_s = prefill_s / sizes.num_layers + after_first_layer_s + layer_s
    return np.where(np.isfinite(prefill_s), ttft_s + sent_s - prefill_s, np.inf)


def _shared_steps_ttft_s(case: FleetCase, group: Mapping[str, Any], rows: Rows) -> np.ndarray[Any, Any]:
    """TTFT of requests on groups that also decode: steps of the product's durations, one by one in SimPy."""
    tokens = rows[:, 1].astype(np.int64)
    outputs = rows[:, 2].astype(np.int64)
    scenario = kvrsim.make_scenario(
        model=case.options["model"],
        cluster=case.options["cluster"],
        gpus=group["gpus_per_group"],
        ctx=int(case.requests[:, 1].max()),
    )[0]
    execution = execution_of(scenario, get_strategy(group["strategy"]))
    longest = int((case.requests[:, 1] + case.requests[:, 2]).max())
    cached = usual_cache(case.requests[:, 1], case.requests[:, 2])
    times = StepTimes.of(execution, BUDGET, 1 << (longest - 1).bit_length(), cached)  # as tabulated for the answer
    nbytes = cache_bytes(execution.placed.share, tokens + outputs, scenario.request.dtype_bytes)
    fits = nbytes <= times.room_bytes
    requests = StepRequests(
        arrival_s=rows[fits, 0],
        new_tokens=tokens[fits],
        cached_prefix=np.zeros(int(fits.sum()), dtype=np.int64),
        decode_steps=outputs[fits] - 1,
        cache_bytes=nbytes[fits],
    )
    run = SimpySteps(requests, times, group["replicas"]).run()
    ttft_s = np.full(len(rows), np.inf)
    ttft_s[fits] = run.first_s - requests.arrival_s
    return ttft_s


def _has_known_cache(case: FleetCase) -> bool:
    """Whether own arithmetic knows the bytes of the caches that a split fleet moves: not of models with windows."""
    assert case.fleet is not None
    return case.fleet.get("decode") is None or sizes_of(case.options["model"]) is not None


def check_percentile(case: FleetCase) -> Iterator[Claim]:
    """Percentiles of TTFT, by a queue of our own with simulated prefills, or step by step in SimPy.

    The product interpolates prefill times: a queue with all times shorter or longer by this error gives the range.
    """
    if case.fleet is None or not _has_known_cache(case):
        return
    shorter_s = np.sort(_fleet_ttft_s(case, 1 - _TIME_ERROR))
    longer_s = np.sort(_fleet_ttft_s(case, 1 + _TIME_ERROR))
    for percentile in _PERCENTILES:
        said_s = case.fleet[f"p{percentile}_ttft_s"]
        place = math.ceil(percentile / 100 * len(shorter_s)) - 1
        low_s = float(shorter_s[place])
        high_s = float(longer_s[place])
        if said_s is None:
            holds = math.isinf(low_s)
        else:
            holds = low_s * (1 - _ROUNDING) <= said_s <= high_s * (1 + _ROUNDING)
        yield Claim(
            kind="percentile",
            said=f"p{percentile} {_seconds(said_s)}",
            found=f"own queue: {_seconds(low_s)} to {_seconds(high_s)}",
            holds=holds,
        )


def _seconds(value: float | None) -> str:
    return "never" if value is None or math.isinf(value) else f"{value:.4g} s"


def check_served_share(case: FleetCase) -> Iterator[Claim]:
    """The share of the requests that fit on a group."""
    if case.fleet is None or "served_share" not in case.fleet or not _has_known_cache(case):
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
