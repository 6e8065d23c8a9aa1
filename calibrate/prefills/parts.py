"""Where measured TTFT goes: the parts that the model explains, the wait in the queue, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from calibrate.prefills.fit import PrefillCase, RowCheck
from kvrsim.engine import NO_HOST

PartName = Literal["queue", "front end", "host", "links", "kernels", "response"]
_FIRST_STEPS: dict[PartName, str] = {
    "queue": "requests wait for others: add replicas, or admit fewer at once (kvrsim capacity sizes the fleet)",
    "front end": "the time before the first layer: tokenise in more processes, and keep connections open",
    "host": "the CPU that launches kernels: CUDA graphs, fewer steps, a faster core",
    "links": "communication: another layout may need less of it (kvrsim plan compares them)",
    "kernels": "computation: cached prefixes, FP8, more GPUs or another layout (kvrsim plan says what each gains)",
    "response": "what the model does not explain, such as HTTP: fit the engine (-o mine.json), and ask again",
}
_NO_FRONT_END = {"request_s": 0.0, "token_s": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftPart:
    """A part of the measured TTFTs, added over all rows."""

    name: PartName
    seconds: float
    low_s: float  # ends of the 80 % interval; those of all predicted parts move together
    high_s: float
    share: float  # of the measured TTFT, waits included


def parts_of(cases: Sequence[PrefillCase], checks: Sequence[RowCheck]) -> tuple[TtftPart, ...]:
    """The parts in the order in which a request meets them; `queue` only where the files tell the waits.

    The front end is the engine's time per request and per token, the host what launching adds to the device, links what
    communication adds to TTFT, kernels what is left of the prediction. The response is what a measurement has beyond
    the prediction; it is negative where the prediction is too slow.
    """
    seconds: dict[PartName, float] = dict.fromkeys(("queue", "front end", "host", "links", "kernels"), 0.0)
    low_s = high_s = measured_s = 0.0
    for case, row in zip(cases, checks, strict=True):
        whole_s = row.predicted_s
        scenario = case.scenario
        no_front_end = scenario.with_host(replace(scenario.host, **_NO_FRONT_END))
        without_links_s = case.on(scenario.without_communication).ttft_s()
        without_host_s = case.on(scenario.with_host(NO_HOST)).ttft_s()
        without_front_end_s = case.on(no_front_end).ttft_s()
        front_end_s = max(0.0, whole_s - without_front_end_s)
        links_s = max(0.0, whole_s - without_links_s)
        host_s = max(0.0, without_front_end_s - without_host_s)
        seconds["queue"] += case.row.queued_s or 0.0
        seconds["front end"] += front_end_s
        seconds["host"] += host_s
        seconds["links"] += links_s
        seconds["kernels"] += whole_s - front_end_s - links_s - host_s
        low_s += row.low_s
        high_s += row.high_s
        measured_s += row.measured_s
    predicted_s = sum(row.predicted_s for row in checks)
    total_s = measured_s + seconds["queue"]
    parts = []
    for name, value in seconds.items():
        low, high = (value, value) if name == "queue" else (value * low_s / predicted_s, value * high_s / predicted_s)
        if value > 0:
            parts.append(TtftPart(name=name, seconds=value, low_s=low, high_s=high, share=value / total_s))
    rest_s = measured_s - predicted_s
    rest = TtftPart(
        name="response", seconds=rest_s, low_s=measured_s - high_s, high_s=measured_s - low_s, share=rest_s / total_s
    )
    return (*parts, rest)


def first_step(parts: Sequence[TtftPart]) -> str:
    """What to fix first: the largest part that can be told from nothing; the response only if it is certain."""
    certain = [part for part in parts if part.name != "response" or part.low_s > 0]
    largest = max(certain, key=lambda part: part.seconds)
    return f"{largest.name}, {largest.share:.0%} of TTFT: {_FIRST_STEPS[largest.name]}"
