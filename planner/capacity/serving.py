"""The queue of an engine: requests -> dispatcher -> groups that run steps of a token budget.

A request is dispatched on its arrival to the group with the fewest requests. A group fills each step as engines with
chunked prefill do: first one token of every sequence that decodes, then the rest of the prompt that it has begun, then
prompts of its queue, in order. A prompt that is longer than the rest of the budget is cut. A request begins if there is
memory for its whole sequence, output included, so that no sequence is ever evicted.

With turns of sessions, a turn arrives when the answer before it has ended and its user has thought. The caches of the
groups (prefixes.py) choose the group, and say how many tokens of the prompt need not be computed when it begins.

Groups that only prefill serve requests of one output token; groups that only decode, requests without new tokens.
Decode steps between two events are run as one block, so the time of a simulation depends on requests, not on tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array
from planner.capacity.prefixes import PrefixCaches, PrefixTraffic, Tier
from planner.capacity.steps import Piece, StepTimes

_NEVER = float("inf")
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequests:
    """Requests in the order of their arrival; arrays of shape (N,). Each fits in the memory of a group."""

    arrival_s: Array
    new_tokens: Numbers  # tokens that prefill computes; 0: the first token has been computed elsewhere
    cached_prefix: Numbers  # tokens before these
    decode_steps: Numbers  # tokens after the first one
    cache_bytes: Array  # bytes of a GPU for the cache of the whole sequence
    prefixes: PrefixTraffic | None = None  # turns of sessions: cached prefixes follow from them; None: no sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRun:
    """Results by request; arrays of shape (N,)."""

    begin_s: Array  # the first step of the request
    first_s: Array  # end of the prefill: the first token; the arrival where it was computed elsewhere
    last_s: Array  # the last token
    group: Numbers  # number of the group that served the request
    busy_s: float  # busy time of the groups, summed
    arrival_s: Array | None = None  # arrivals of turns, which depend on the ends of those before; None: no sessions
    hits: Mapping[Tier, Numbers] = field(default_factory=dict)  # tokens of each prompt in a cache, by memory

    def tpot_s(self, requests: StepRequests) -> Array:
        """Mean time per output token after the first; 0 for one token, nan for requests that are not served."""
        with np.errstate(invalid="ignore"):  # requests that are not served have no times
            mean_s = (self.last_s - self.first_s) / np.maximum(1, requests.decode_steps)
        return np.where(requests.decode_steps > 0, mean_s, 0.0)

    def most_at_once(self) -> int:
        """The largest number of requests that a group has begun and not ended."""
        most = 0
        for number in range(int(self.group.max(initial=-1)) + 1):
            here = self.group == number
            begin_s = np.sort(self.begin_s[here])
            ended = np.searchsorted(np.sort(self.last_s[here]), begin_s, side="right")
            most = max(most, int((np.arange(1, len(begin_s) + 1) - ended).max(initial=0)))
        return most


@dataclass(frozen=True, kw_only=True, slots=True)
class LateLimit:
    """The number of late requests at which a simulation may end, because the target is missed."""

    ttft_s: float
    tpot_s: float | None  # None: no TPOT is late
    allowed: int  # most requests that may have a longer TTFT, and most that may have a longer TPOT


def number_late(seconds: Array, most_s: float) -> int:
    """The number of values above `most_s`; requests that are not served, with inf or nan, are late, too."""
    return len(seconds) - int((seconds <= most_s).sum())


class _StepGroup:
    """A group between two ends of its steps."""

    __slots__ = (
        *("decoding", "end_s", "ending", "ends", "held_bytes", "keys", "now_s", "part"),
        *("load_s", "number", "queue", "running", "steps", "steps_done", "times", "version", "waiting"),
    )

    def __init__(self, queue: _StepQueue, number: int) -> None:
        self.queue = queue
        self.number = number
        self.times = queue.times
        self.waiting = deque[int]()
        self.part: tuple[int, int] | None = None  # request of which some pieces are computed, and its tokens so far
        self.running = 0  # requests that have begun and not ended
        self.held_bytes = 0.0  # memory of their caches
        self.decoding = 0  # sequences that decode
        self.keys = 0  # tokens of the caches of these in the next step
        self.ends: list[tuple[int, int]] = []  # heap: number of the step with its last token, and request
        self.ending: list[int] = []  # requests whose prefill ends in this step
        self.steps_done = 0
        self.steps = 0  # steps of the block that runs; 0: idle
        self.now_s = 0.0  # begin of the block
        self.end_s = _NEVER
        self.version = 0  # changes with `end_s`
        self.load_s = 0.0  # seconds in which the prefixes of this step are loaded

    def arrive(self, request: int, now_s: float) -> bool:
        """Queue a request; return whether `end_s` has changed."""
        if not self.steps:
            self.waiting.append(request)
            self.begin(now_s)
            return True
        is_cut = self.steps > 1 and not self.waiting and self._has_room(request)
        self.waiting.append(request)
        if is_cut:  # the block of decode steps ends after the step that runs
            steps = self.times.steps_in(now_s - self.now_s, self.decoding, self.keys)
            if steps < self.steps:
                self.steps = steps
                self.end_s = self.now_s + self.times.decoding_s(steps, self.decoding, self.keys)
                self.version += 1
                return True
        return False

    def begin(self, now_s: float) -> None:
        """Begin the next step, or the block of decode steps until the next sequence ends."""
        self.now_s = now_s
        self.version += 1
        pieces: list[Piece] = []
        if self.waiting or self.part is not None:
            pieces = self._pieces(now_s)
        if pieces:
            self.steps = 1
            step_s = self.times.mixed_s(pieces, len(self.ending), self.decoding, self.keys)
            self.end_s = now_s + max(step_s, self.load_s)
            self.load_s = 0.0
        elif self.decoding:
            self.steps = self.ends[0][0] - self.steps_done
            self.end_s = now_s + self.times.decoding_s(self.steps, self.decoding, self.keys)
        else:
            self.steps = 0
            self.end_s = _NEVER

    def _pieces(self, now_s: float) -> list[Piece]:
        """Pieces of the next step. Requests that were prefilled elsewhere decode from this step on."""
        queue = self.queue
        room = self.times.budget - self.decoding
        pieces: list[Piece] = []
        while room > 0:
            if self.part is None:
                if not self.waiting or not self._has_room(self.waiting[0]):
                    break
                request = self.waiting.popleft()
                done = 0
                self.running += 1
                self.held_bytes += queue.cache_bytes[request]
                queue.begin_s[request] = now_s
                if queue.caches is not None:
                    self._find_prefix(queue.caches, request)
            else:
                request, done = self.part
                self.part = None
            rest = queue.new_tokens[request] - done
            if not rest:
                self._decode(request)
                room -= 1
            elif rest <= room:
                pieces.append((rest, queue.cached_prefix[request] + done))
                self.ending.append(request)
                room -= rest
            else:
                pieces.append((room, queue.cached_prefix[request] + done))
                self.part = (request, done + room)
                room = 0
        return pieces

    def _has_room(self, request: int) -> bool:
        if not self.running:
            return True
        held_bytes = self.held_bytes + self.queue.cache_bytes[request]
        return self.running < self.times.most_sequences and held_bytes <= self.times.room_bytes

    def _find_prefix(self, caches: PrefixCaches, request: int) -> None:
        """Set the cached tokens of a request when it begins, from the prefix caches."""
        queue = self.queue
        cached, load_s = caches.begin(request, self.number, self.times.room_bytes - self.held_bytes)
        queue.cached_prefix[request] = cached
        queue.new_tokens[request] = queue.context_len[request] - cached
        self.load_s += load_s

    def _decode(self, request: int) -> None:
        """Let a request decode from the next step on."""
        self.decoding += 1
        self.keys += self.queue.context_len[request] + 1
        heappush(self.ends, (self.steps_done + self.queue.decode_steps[request], request))

    def end(self) -> list[int]:
        """End the block at `end_s`, and return the requests that have ended."""
        queue = self.queue
        now_s = self.end_s
        queue.busy_s += now_s - self.now_s
        self.steps_done += self.steps
        self.keys += self.decoding * self.steps
        ended: list[int] = []
        while self.ends and self.ends[0][0] <= self.steps_done:
            request = heappop(self.ends)[1]
            self.decoding -= 1
            self.keys -= queue.context_len[request] + 1 + queue.decode_steps[request]
            ended.append(request)
        if self.ending:
            for request in self.ending:
                queue.first_s[request] = now_s
                if now_s - queue.arrival_s[request] > queue.most_first_s:
                    queue.late_first += 1
                if queue.decode_steps[request]:
                    self._decode(request)
                else:
                    ended.append(request)
            self.ending = []
        for request in ended:
            queue.last_s[request] = now_s
            self.held_bytes -= queue.cache_bytes[request]
            if now_s - queue.first_s[request] > queue.most_decode_s[request]:
                queue.late_last += 1
            if queue.caches is not None:
                queue.caches.end(request, self.number, self.times.room_bytes - self.held_bytes)
        self.running -= len(ended)
        return ended


class _StepQueue:
    """The requests and results of a simulation, as lists by request."""

    def __init__(self, requests: StepRequests, times: StepTimes, replicas: int, limit: LateLimit | None) -> None:
        count = len(requests.arrival_s)
        elsewhere = requests.new_tokens == 0
        self.times = times
        self.new_tokens: list[int] = requests.new_tokens.tolist()
        self.cached_prefix: list[int] = requests.cached_prefix.tolist()
        self.context_len: list[int] = (requests.new_tokens + requests.cached_prefix).tolist()
        self.decode_steps: list[int] = requests.decode_steps.tolist()
        self.cache_bytes: list[float] = requests.cache_bytes.tolist()
        self.begin_s = [_NEVER] * count
        self.first_s: list[float] = np.where(elsewhere, requests.arrival_s, np.inf).tolist()
        self.last_s = [_NEVER] * count
        self.busy_s = 0.0
        self.caches: PrefixCaches | None = None
        if requests.prefixes is not None:
            self.caches = PrefixCaches(requests.prefixes, self.context_len, replicas)
        self.arrival_s: list[float] = requests.arrival_s.tolist()
        self.most_first_s = _NEVER if limit is None else limit.ttft_s
        self.most_decode_s = [_NEVER] * count  # time of all later tokens above which the request is late
        self.late_first = 0
        self.late_last = 0
        if limit is not None and limit.tpot_s is not None:
            most_s = requests.decode_steps * limit.tpot_s
            self.most_decode_s = np.where(requests.decode_steps > 0, most_s, np.inf).tolist()


def run_steps(
    requests: StepRequests, times: StepTimes, replicas: int, *, users: int | None = None, limit: LateLimit | None = None
) -> StepRun:
    """Serve all requests; the time is a few microseconds per request.

    users: only this number of requests arrive at their times; each other request arrives when an earlier one has ended,
    and its arrival time is not used. None: all arrive at their times. limit: if more requests are late, the simulation
    ends, and the times of the requests that it has not served are infinite.
    """
    queue = _StepQueue(requests, times, replicas, limit)
    caches = queue.caches
    allowed = _NEVER if limit is None else limit.allowed
    groups = [_StepGroup(queue, number) for number in range(replicas)]
    in_flight = [0] * replicas
    served_by = [0] * len(queue.new_tokens)
    ends: list[tuple[float, int, int]] = []  # heap: end of a group's block, number of the group, version of the end
    software_s = _software_s(requests, times).tolist()
    most = len(software_s)
    first: Sequence[int] = range(most)[:users]
    if caches is not None:
        first = caches.first_turns
    # Times from which requests can be in a step.
    ready = sorted((queue.arrival_s[request] + software_s[request], request) for request in first)
    arrived = 0
    while True:
        next_s = ready[arrived][0] if arrived < len(ready) else _NEVER
        if ends and ends[0][0] <= next_s:
            now_s, number, version = heappop(ends)
            group = groups[number]
            if version != group.version:
                continue
            ended = group.end()
            in_flight[number] -= len(ended)
            if users is not None:
                for request in range(len(ready), min(len(ready) + len(ended), most)):
                    insort(ready, (now_s + software_s[request], request), lo=arrived)
            elif caches is not None:
                for turn in filter(None, map(caches.next_turn.__getitem__, ended)):
                    queue.arrival_s[turn] = max(queue.arrival_s[turn], now_s + caches.think_s[turn])
                    insort(ready, (queue.arrival_s[turn] + software_s[turn], turn), lo=arrived)
            if max(queue.late_first, queue.late_last) > allowed:
                break
            group.begin(now_s)
            if group.steps:
                heappush(ends, (group.end_s, number, group.version))
        elif next_s < _NEVER:
            request = ready[arrived][1]
            if caches is None:
                number = in_flight.index(min(in_flight))
            else:
                number = caches.route(request, in_flight)
            in_flight[number] += 1
            served_by[request] = number
            group = groups[number]
            if group.arrive(request, next_s):
                heappush(ends, (group.end_s, number, group.version))
            arrived += 1
        else:
            break
    return StepRun(
        begin_s=np.array(queue.begin_s),
        first_s=np.array(queue.first_s),
        last_s=np.array(queue.last_s),
        group=np.array(served_by, dtype=np.int64),
        busy_s=queue.busy_s,
        arrival_s=None if caches is None else np.array(queue.arrival_s),
        hits={} if caches is None else {tier: np.array(tokens) for tier, tokens in caches.hits.items()},
    )


def _software_s(requests: StepRequests, times: StepTimes) -> Array:
    """Seconds from each arrival until the request can be in a step; none for requests that were prefilled elsewhere."""
    context = requests.new_tokens + requests.cached_prefix
    return np.where(requests.new_tokens > 0, times.request_s + times.token_s * context, 0.0)
