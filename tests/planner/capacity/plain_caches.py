"""Caches of prefixes as plain lists of blocks: the reference for planner/capacity/prefixes.py."""

from __future__ import annotations

from planner.capacity.prefixes import BLOCK_TOKENS
from planner.capacity.serving import StepRequests


class PlainCaches:
    """Caches of groups as lists of blocks, the block that leaves next first."""

    def __init__(self, requests: StepRequests, room_bytes: float, replicas: int) -> None:
        assert requests.prefixes is not None
        self.turns = requests.prefixes.turns
        self.tiers = requests.prefixes.tiers
        self.token_bytes = requests.prefixes.token_bytes
        self.requests = requests
        self.room_bytes = room_bytes
        self.count = replicas
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
        tokens = [0, 0, 0]
        total = int(self.turns.reusable[request])
        for index, block in enumerate(self.turns.blocks[request]):
            place = next((number for number, blocks in enumerate(places) if block in blocks), None)
            if place is None:
                break
            tokens[place] += max(0, min(BLOCK_TOKENS, total - index * BLOCK_TOKENS))
        return tokens

    def route(self, request: int, in_flight: list[int]) -> int:
        """Choose the group of a new request."""
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
        """Begin a request; return the seconds of its loads."""
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
