"""Groups that run steps as SimPy processes, step by step: the reference for planner/capacity/serving.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from planner.capacity.serving import StepRequests, StepRun
from planner.capacity.steps import StepTimes


class SimpySteps:
    """A dispatcher and groups; every step of every sequence is an event."""

    def __init__(self, requests: StepRequests, times: StepTimes, replicas: int) -> None:
        self.requests, self.times, count = requests, times, len(requests.arrival_s)
        self.env = simpy.Environment()
        self.queues = [deque[int]() for _ in range(replicas)]
        self.in_flight = [0] * replicas
        self.woken = [self.env.event() for _ in range(replicas)]
        self.begin_s, self.last_s = np.full(count, np.inf), np.full(count, np.inf)
        self.first_s = np.where(requests.new_tokens > 0, np.inf, requests.arrival_s)
        self.group, self.busy_s = np.zeros(count, dtype=np.int64), 0.0

    def run(self) -> StepRun:
        """Serve all requests."""
        self.env.process(self._dispatch())
        for number in range(len(self.queues)):
            self.env.process(self._serve(number))
        self.env.run()
        return StepRun(
            begin_s=self.begin_s, first_s=self.first_s, last_s=self.last_s, group=self.group, busy_s=self.busy_s
        )

    def _dispatch(self) -> Generator[simpy.Event, Any, None]:
        for request, arrival_s in enumerate(self.requests.arrival_s.tolist()):
            yield self.env.timeout(arrival_s - self.env.now)
            number = min(range(len(self.queues)), key=lambda group: (self.in_flight[group], group))
            self.group[request] = number
            self.in_flight[number] += 1
            self.queues[number].append(request)
            if not self.woken[number].triggered:
                self.woken[number].succeed()

    def _serve(self, number: int) -> Generator[simpy.Event, Any, None]:
        requests, times, queue = self.requests, self.times, self.queues[number]
        done: dict[int, int] = {}  # prefilled tokens of requests that have begun
        decoded: dict[int, int] = {}  # decoded tokens of requests that decode
        while True:
            if not queue and not done:
                self.woken[number] = self.env.event()
                yield self.woken[number]
            room, pieces, begun = times.budget - len(decoded), [], [r for r in done if r not in decoded]
            while room > 0:
                if not begun:
                    held = sum(requests.cache_bytes[r] for r in done)
                    if not queue or (
                        done
                        and (
                            len(done) >= times.most_sequences
                            or held + requests.cache_bytes[queue[0]] > times.room_bytes
                        )
                    ):
                        break
                    begun = [queue.popleft()]
                    done[begun[0]] = 0
                    self.begin_s[begun[0]] = self.env.now
                request = begun.pop()
                if not requests.new_tokens[request]:
                    decoded[request] = 0
                    room -= 1
                    continue
                tokens = min(room, int(requests.new_tokens[request]) - done[request])
                pieces.append((request, tokens, int(requests.cached_prefix[request]) + done[request]))
                done[request] += tokens
                room -= tokens
            context = requests.new_tokens + requests.cached_prefix
            keys = sum(int(context[r]) + 1 + steps for r, steps in decoded.items())
            ending = [r for r, _, _ in pieces if done[r] == requests.new_tokens[r]]
            if pieces:
                taken_s = times.mixed_s([piece[1:] for piece in pieces], len(ending), len(decoded), keys)
            else:
                taken_s = times.decoding_s(1, len(decoded), keys)
            yield self.env.timeout(taken_s)
            self.busy_s += taken_s
            for request in decoded:
                decoded[request] += 1
            for request in ending:
                self.first_s[request] = self.env.now
                decoded[request] = 0
            for request in [r for r, steps in decoded.items() if steps == requests.decode_steps[r]]:
                self.last_s[request] = self.env.now
                self.in_flight[number] -= 1
                del decoded[request], done[request]
