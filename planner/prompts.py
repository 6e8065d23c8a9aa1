"""Prompts for a simulation: contexts in a list, a trace, or drawn at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.results.stream import MAX_REQUESTS, REQUESTS, Arrivals, Prompts
from kvrsim.scenario import Scenario
from kvrsim.units import parse_count, parse_tokens
from planner.capacity.workloads.source import Source


def parse_prompts(requests: str, every: str | None, seed: int) -> Arrivals | Prompts:
    """From `requests` and `every`: a number, contexts with commas between, or what capacity reads.

    InputError says what is accepted.
    """
    if requests.strip().lstrip("+-").isdecimal():
        return Arrivals.parse(parse_count(requests, "requests", maximum=MAX_REQUESTS), every or "0s")
    parts = requests.split(",")
    if len(parts) > 1 and ":" not in requests:
        return _listed(requests, [parse_tokens(part, "requests") for part in parts], every or "0s", seed)
    if ":" not in requests and not Path(requests).exists():
        raise InputError("requests", requests, f"{REQUESTS}; there is no such file")
    if every is not None:
        raise InputError("every", every, "a number or a list of contexts as `requests`; a trace has its own times")
    workload = Source.of(requests).workload(seed)
    if len(workload) > MAX_REQUESTS:
        raise InputError("requests", requests, f"at most {MAX_REQUESTS} prompts, not {len(workload)}")
    return Prompts(
        arrivals=workload.name,
        arrivals_s=tuple(workload.arrival_s.tolist()),
        context_lens=tuple(workload.context_len.tolist()),
        cached_prefix=tuple(workload.cached_prefix.tolist()),
        notes=workload.notes,
    )


def _listed(requests: str, context_lens: list[int], every: str, seed: int) -> Prompts:
    if len(context_lens) > MAX_REQUESTS:
        raise InputError("requests", requests, REQUESTS)
    arrivals = Arrivals.parse(len(context_lens), every)
    return Prompts(
        arrivals=arrivals.describe(),
        arrivals_s=arrivals.times_s(seed),
        context_lens=tuple(context_lens),
        cached_prefix=(0,) * len(context_lens),
    )


def scenario_of(
    arrivals: Arrivals | Prompts | None, *, ctx: int | str | None, **scenario: Any
) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario and its notes, as make_scenario's: of `ctx`, or of the longest of prompts with lengths.

    Raises InputError where the context is missing, or given twice.
    """
    if not isinstance(arrivals, Prompts):
        if ctx is None:
            raise InputError("ctx", "nothing", "a context length in tokens, such as 16k")
        return make_scenario(ctx=ctx, **scenario)
    for name, value, usual in (
        ("ctx", ctx, None),
        ("cached_prefix", scenario.get("cached_prefix", 0), 0),
        ("batch", scenario.get("batch", 1), 1),
    ):
        if value is not None and str(value) != str(usual):
            raise InputError(name, value, "nothing where `requests` has the lengths of the prompts")
    longest = arrivals.largest
    lengths = {"ctx": arrivals.context_lens[longest], "cached_prefix": arrivals.cached_prefix[longest]}
    asked, notes = make_scenario(**scenario | lengths)
    return asked, (*notes, *arrivals.notes)
