"""Groups that run the steps of an engine as SimPy processes, step by step: the reference for the queue of fleets."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import numpy as np
import simpy

from planner.capacity.serving import StepRequests, StepRun
from planner.capacity.steps import StepTimes


class Caches(Protocol):
    """Prefixes of sessions that groups keep."""

    def route(self, request: int, in_flight: list[int]) -> int:
        """Choose the group of a new request."""

    def begin(self, request: int, group: int) -> float:
        """Begin a request: set its cached and new tokens, and return the seconds of its loads."""

    def end(self, request: int, group: int) -> None:
        """Keep what a request that ends has cached."""


class SimpySteps:
    """A dispatcher and groups; every step is an event, in which every sequence that decodes gets a token.

    caches: the prefixes that groups keep, for requests of sessions.
    """

    def __init__(self, requests: StepRequests, times: StepTimes, replicas: int, caches: Caches | None = None) -> None:
        count = len(requests.arrival_s)
        self.caches = caches
        self.requests = requests
        self.times = times
        self.env = simpy.Environment()
        self.groups = [_Group(self, number) for number in range(replicas)]
        self.begin_s = np.full(count, np.inf)
        self.first_s = np.where(requests.new_tokens > 0, np.inf, requests.arrival_s)
        self.last_s = np.full(count, np.inf)
        self.group = np.zeros(count, dtype=np.int64)
        self.busy_s = 0.0
        self.arrival_s = requests.arrival_s.copy()
        self.ended = [self.env.event() for _ in range(count)]

    def run(self) -> StepRun:
        """Serve all requests."""
        for turns in self._sessions():
            self.env.process(self._arrive(turns))
        for group in self.groups:
            self.env.process(group.serve())
        self.env.run()
        return StepRun(
            begin_s=self.begin_s,
            first_s=self.first_s,
            last_s=self.last_s,
            group=self.group,
            busy_s=self.busy_s,
            arrival_s=self.arrival_s,
        )

    def _sessions(self) -> list[list[int]]:
        """The requests of each session, in order; each request is a session where none are given."""
        prefixes = self.requests.prefixes
        if prefixes is None:
            return [[request] for request in range(len(self.arrival_s))]
        session = prefixes.turns.session
        return [np.flatnonzero(session == number).tolist() for number in np.unique(session)]

    def _arrive(self, turns: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """Let the turns of a session arrive: each at its time, but not before the answer and the user's thinking."""
        before = None
        for request in turns:
            arrival_s = float(self.requests.arrival_s[request])
            if before is not None:
                assert self.requests.prefixes is not None
                yield self.ended[before]
                arrival_s = max(arrival_s, self.env.now + float(self.requests.prefixes.turns.think_s[request]))
            self.arrival_s[request] = arrival_s
            yield self.env.timeout(arrival_s + self._software_s(request) - self.env.now)
            before = request
            in_flight = [group.in_flight for group in self.groups]
            if self.caches is None:
                number = in_flight.index(min(in_flight))
            else:
                number = self.caches.route(request, in_flight)
            self.group[request] = number
            self.groups[number].add(request)

    def _software_s(self, request: int) -> float:
        """Seconds of the engine's front end before a request can be in a step."""
        new = int(self.requests.new_tokens[request])
        context = new + int(self.requests.cached_prefix[request])
        return self.times.request_s + self.times.token_s * context if new else 0.0


class _Group:
    """A group: its queue, the prompts that it has begun, and the sequences that decode."""

    def __init__(self, fleet: SimpySteps, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.load_s = 0.0  # seconds of the loads of the requests that begin in the next step
        self.in_flight = 0
        self.queue = deque[int]()
        self.computed: dict[int, int] = {}  # tokens of a prompt that are computed, by request that has begun
        self.decoded: dict[int, int] = {}  # tokens after the first one, by request that decodes
        self.woken = fleet.env.event()

    def add(self, request: int) -> None:
        """Queue a request, and wake the group if it is idle."""
        self.in_flight += 1
        self.queue.append(request)
        if not self.woken.triggered:
            self.woken.succeed()

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """Run steps for ever; wait while there is nothing to run."""
        fleet = self.fleet
        while True:
            if not self.queue and not self.computed:
                self.woken = fleet.env.event()
                yield self.woken
            pieces = self._pieces()
            ending = [request for request, _, _ in pieces if self._is_computed(request)]
            taken_s = self._step_s(pieces, len(ending))
            yield fleet.env.timeout(taken_s)
            fleet.busy_s += taken_s
            for request in self.decoded:
                self.decoded[request] += 1
            for request in ending:
                fleet.first_s[request] = fleet.env.now
                self.decoded[request] = 0
            self._end()

    def _pieces(self) -> list[tuple[int, int, int]]:
        """The pieces of the next step: request, tokens, and tokens before them."""
        requests = self.fleet.requests
        room = self.fleet.times.budget - len(self.decoded)
        self.load_s = 0.0
        pieces = []
        begun = [request for request in self.computed if request not in self.decoded]
        while room > 0:
            if begun:
                request = begun.pop()
            elif self.queue and self._has_room(self.queue[0]):
                request = self.queue.popleft()
                self.computed[request] = 0
                self.fleet.begin_s[request] = self.fleet.env.now
                if self.fleet.caches is not None:
                    self.load_s += self.fleet.caches.begin(request, self.number)
            else:
                break
            if not requests.new_tokens[request]:
                self.decoded[request] = 0
                room -= 1
                continue
            done = self.computed[request]
            tokens = min(room, int(requests.new_tokens[request]) - done)
            pieces.append((request, tokens, int(requests.cached_prefix[request]) + done))
            self.computed[request] = done + tokens
            room -= tokens
        return pieces

    def _has_room(self, request: int) -> bool:
        """Whether a request can begin beside those that have begun."""
        if not self.computed:
            return True
        if len(self.computed) >= self.fleet.times.most_sequences:
            return False
        held_bytes = sum(self.fleet.requests.cache_bytes[begun] for begun in self.computed)
        return bool(held_bytes + self.fleet.requests.cache_bytes[request] <= self.fleet.times.room_bytes)

    def _is_computed(self, request: int) -> bool:
        return bool(self.computed[request] == self.fleet.requests.new_tokens[request])

    def _step_s(self, pieces: Sequence[tuple[int, int, int]], ending: int) -> float:
        """Seconds of a step with these pieces, in which `ending` prompts end."""
        times = self.fleet.times
        requests = self.fleet.requests
        keys = 0
        for request, steps in self.decoded.items():
            keys += int(requests.new_tokens[request] + requests.cached_prefix[request]) + 1 + steps
        if not pieces:
            return times.decoding_s(1, len(self.decoded), keys)
        computed_s = times.mixed_s([(tokens, before) for _, tokens, before in pieces], ending, len(self.decoded), keys)
        return max(computed_s, self.load_s)

    def _end(self) -> None:
        """Let go of the requests whose last token is computed."""
        for request, steps in list(self.decoded.items()):
            if steps == self.fleet.requests.decode_steps[request]:
                self.fleet.last_s[request] = self.fleet.env.now
                self.in_flight -= 1
                del self.decoded[request]
                del self.computed[request]
                if self.fleet.caches is not None:
                    self.fleet.caches.end(request, self.number)
                self.fleet.ended[request].succeed()
