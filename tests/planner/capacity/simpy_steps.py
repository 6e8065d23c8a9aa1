"""Groups that run steps as SimPy processes, step by step: the reference for planner/capacity/serving.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import simpy

from planner.capacity.prefixes import BLOCK_TOKENS
from planner.capacity.serving import StepRequests, StepRun
from planner.capacity.steps import StepTimes


class PlainCaches:
    """Caches of groups as lists of blocks, the block that leaves next first."""

    def __init__(self, requests: StepRequests, room_bytes: float, replicas: int) -> None:
        assert requests.prefixes is not None
        self.turns, self.tiers, self.token_bytes = (
            requests.prefixes.turns,
            requests.prefixes.tiers,
            requests.prefixes.token_bytes,
        )
        self.requests, self.room_bytes, self.count = requests, room_bytes, replicas
        self.context = (requests.new_tokens + requests.cached_prefix).tolist()
        self.running: list[list[int]] = [[] for _ in range(replicas)]
        self.waiting: list[dict[int, int]] = [{} for _ in range(replicas)]
        self.idle: list[list[int]] = [[] for _ in range(replicas)]
        self.host: list[list[int]] = [[] for _ in range(replicas)]
        self.store: list[int] = []
        self.hits: dict[int, list[int]] = {}
        self.order: list[int] = list(range(replicas))  # groups in the order of their last requests

    def found(self, request: int, group: int) -> list[int]:
        """Tokens of the prompt in the GPU, the host and the store."""
        used = [block for other in self.running[group] for block in self.turns.blocks[other]]
        places = (used + self.idle[group], self.host[group], self.store)
        tokens, total = [0, 0, 0], int(self.turns.reusable[request])
        for index, block in enumerate(self.turns.blocks[request]):
            place = next((number for number, blocks in enumerate(places) if block in blocks), None)
            if place is None:
                break
            tokens[place] += max(0, min(BLOCK_TOKENS, total - index * BLOCK_TOKENS))
        return tokens

    def route(self, request: int, in_flight: list[int]) -> int:
        """The group of a request that arrives."""
        costs = []
        for group in range(self.count):
            if in_flight[group] <= 2 * min(in_flight) + 4:
                gpu, host, _ = self.found(request, group)
                own = self.context[request] - gpu - host
                cost = sum(self.waiting[group].values()) + own
                costs.append((cost, in_flight[group], self.order.index(group), group, own))
        *_, group, own = min(costs)
        self.order.remove(group)
        self.order.append(group)
        self.waiting[group][request] = own
        return group

    def begin(self, request: int, group: int) -> float:
        """Seconds of the loads of a request that begins."""
        del self.waiting[group][request]
        gpu, host, store = self.hits[request] = self.found(request, group)
        self.running[group].append(request)
        blocks = self.turns.blocks[request]
        self.idle[group] = [block for block in self.idle[group] if block not in blocks]
        self.host[group] = [block for block in self.host[group] if block not in blocks]
        self.requests.cached_prefix[request] = gpu + host + store
        self.requests.new_tokens[request] = self.context[request] - gpu - host - store
        self._evict(group)
        load_s = host * self.token_bytes / self.tiers.host_bytes_per_s
        if self.tiers.remote_bytes_per_s:
            load_s += store * self.token_bytes / self.tiers.remote_bytes_per_s
        return load_s

    def end(self, request: int, group: int) -> None:
        """End a request."""
        self.running[group].remove(request)
        used = [block for other in self.running[group] for block in self.turns.blocks[other]]
        blocks = self.turns.blocks[request]
        self.idle[group] += [block for block in reversed(blocks) if block not in used]
        if self.tiers.remote_bytes_per_s:
            self.store += blocks
        self._evict(group)

    def _evict(self, group: int) -> None:
        block_bytes = BLOCK_TOKENS * self.token_bytes
        held = sum(self.requests.cache_bytes[other] for other in self.running[group])
        most = max(0, int((self.room_bytes - held) / block_bytes)) if self.tiers.gpu else 0
        while len(self.idle[group]) > most:
            self.host[group].append(self.idle[group].pop(0))
        while len(self.host[group]) > int(self.tiers.host_bytes / block_bytes):
            self.host[group].pop(0)


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
        self.arrival_s = requests.arrival_s.copy()
        self.caches = None if requests.prefixes is None else PlainCaches(requests, times.room_bytes, replicas)
        self.ended = [self.env.event() for _ in range(count)]

    def run(self) -> StepRun:
        """Serve all requests."""
        if self.caches is None:
            self.env.process(self._dispatch(range(len(self.ended))))
        else:
            session = self.caches.turns.session
            for number in np.unique(session):
                self.env.process(self._dispatch(np.flatnonzero(session == number).tolist()))
        for number in range(len(self.queues)):
            self.env.process(self._serve(number))
        self.env.run()
        return StepRun(
            begin_s=self.begin_s,
            first_s=self.first_s,
            last_s=self.last_s,
            group=self.group,
            busy_s=self.busy_s,
            arrival_s=self.arrival_s,
        )

    def _dispatch(self, requests: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        before = None
        for request in requests:
            arrival_s = float(self.requests.arrival_s[request])
            if self.caches is not None and before is not None:
                yield self.ended[before]
                arrival_s = max(arrival_s, self.env.now + float(self.caches.turns.think_s[request]))
            yield self.env.timeout(arrival_s - self.env.now)
            before = request
            self.arrival_s[request] = arrival_s
            if self.caches is None:
                number = min(range(len(self.queues)), key=lambda group: (self.in_flight[group], group))
            else:
                number = self.caches.route(request, self.in_flight)
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
            load_s = 0.0
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
                    if self.caches is not None:
                        load_s += self.caches.begin(begun[0], number)
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
                taken_s = max(taken_s, load_s)
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
                if self.caches is not None:
                    self.caches.end(request, number)
                self.ended[request].succeed()
