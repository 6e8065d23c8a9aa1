"""NoiseDraw: the random part of a noise, drawn for one or many runs, as far as the runs go.

Each run (a sample) has generators of its own, by kind of noise and by place: so the same sample of the same
seed meets every partition and every strategy (common random numbers), alone or among others, and the draw
does not depend on how far it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvrsim.noise.model import Noise, SideTraffic
from kvrsim.program.operations import Array

_BLOCK = 512  # slots or factors drawn at a time
_TRAFFIC, _COMPUTE, _MESSAGES = range(3)  # the generators of a sample


class NoiseDraw:
    """Durations under noise; arrays end with an axis of one entry a sample."""

    def __init__(self, noise: Noise, num_ranks: int, *, seed: int, samples: Sequence[int] = (0,)) -> None:
        """`samples`: numbers of the runs; others of the same seed are independent of them."""
        self.noise, self.seed, self.samples = noise, seed, tuple(samples)
        self.num_samples, self.num_ranks = len(samples), num_ranks
        roots = [(seed, sample) for sample in samples]
        traffic = noise.side_traffic
        quiet = traffic is None or traffic.is_quiet or num_ranks < 2
        self.slots = None if quiet or traffic is None else _Slots(traffic, num_ranks, roots)
        self.compute_jitter = _Jitter(noise.compute_jitter, (_COMPUTE,), roots) if noise.compute_jitter else None
        self.message_jitter = _Jitter(noise.message_jitter, (_MESSAGES,), roots) if noise.message_jitter else None

    def only(self, index: int) -> NoiseDraw:
        """One of the samples alone."""
        return NoiseDraw(self.noise, self.num_ranks, seed=self.seed, samples=(self.samples[index],))

    @property
    def jitters_compute(self) -> bool:
        """Whether operations that follow one another are disturbed each on its own."""
        return self.compute_jitter is not None

    def compute_end_s(self, rank: int, index: int, start_s: Array, device_s: Array) -> Array:
        """When the index-th operation that a rank computes ends, if it begins then."""
        if self.compute_jitter is not None:
            device_s = device_s * self.compute_jitter.factor((rank,), index)
        if self.slots is None or (warp := self.slots.of_rank(rank)) is None:
            return start_s + device_s
        return warp.end_s(start_s, device_s)

    def message_end_s(self, src: int, dst: int, index: int, start_s: Array, busy_s: Array) -> Array:
        """When the index-th message from src to dst has left, if it begins then."""
        if self.message_jitter is not None:
            busy_s = busy_s * self.message_jitter.factor((src, dst), index)
        if self.slots is None or (warp := self.slots.of_link(src, dst)) is None:
            return start_s + busy_s
        return warp.end_s(start_s, busy_s)


@dataclass(slots=True)
class _Jitter:
    """Lognormal factors of mean 1, by place and number."""

    log_sd: float
    kind: tuple[int, ...]
    roots: list[tuple[int, int]]
    drawn: dict[tuple[int, ...], list[Array]] = field(default_factory=dict)  # place -> blocks of (_BLOCK, samples)
    generators: dict[tuple[int, ...], list[np.random.Generator]] = field(default_factory=dict)

    def factor(self, place: tuple[int, ...], index: int) -> Array:
        """Of the index-th operation there, shape (samples,)."""
        blocks = self.drawn.setdefault(place, [])
        while len(blocks) <= index // _BLOCK:
            if place not in self.generators:
                self.generators[place] = [np.random.default_rng([*root, *self.kind, *place]) for root in self.roots]
            normal = np.stack([rng.standard_normal(_BLOCK) for rng in self.generators[place]], axis=1)
            blocks.append(np.exp(self.log_sd * normal - self.log_sd**2 / 2))
        return np.asarray(blocks[index // _BLOCK][index % _BLOCK])


class _Slots:
    """Which pair of neighbours carries side traffic in which slot of time."""

    def __init__(self, traffic: SideTraffic, num_ranks: int, roots: list[tuple[int, int]]) -> None:
        self.traffic, self.num_pairs = traffic, num_ranks - 1
        self.generators = [np.random.default_rng([*root, _TRAFFIC]) for root in roots]
        self.phase_s = np.array([rng.random() for rng in self.generators]) * traffic.dwell_s
        self.pairs: npt.NDArray[np.int64] = np.zeros((len(roots), 0), dtype=np.int64)  # -1: nobody
        self.ranks: dict[int, Warp | None] = {}
        self.links: dict[int, Warp | None] = {}

    def of_rank(self, rank: int) -> Warp | None:
        """The rank's speed of computing; None where it never changes."""
        if rank not in self.ranks:
            pairs = [pair for pair in (rank - 1, rank) if 0 <= pair < self.num_pairs]
            slowdown = self.traffic.slowdown
            self.ranks[rank] = Warp(self, pairs, 1.0 / (1.0 + slowdown)) if slowdown else None
        return self.ranks[rank]

    def of_link(self, src: int, dst: int) -> Warp | None:
        """The speed of the link between two ranks, the same both ways; None where it never changes."""
        if abs(src - dst) != 1 or not self.traffic.share:
            return None
        pair = min(src, dst)
        if pair not in self.links:
            self.links[pair] = Warp(self, [pair], 1.0 - self.traffic.share)
        return self.links[pair]

    def draw_to(self, num_slots: int) -> None:
        """Have at least so many slots of every sample."""
        while self.pairs.shape[1] < num_slots:
            # The pair and whether there is traffic are drawn apart: more duty only adds to it.
            block = [
                np.where(rng.random(_BLOCK) < self.traffic.duty, rng.integers(0, self.num_pairs, _BLOCK), -1)
                for rng in self.generators
            ]
            self.pairs = np.concatenate([self.pairs, np.stack(block)], axis=1)


class Warp:
    """A speed that is `slow` while one of some pairs carries side traffic, else 1; one row of slots a sample."""

    def __init__(self, slots: _Slots, pairs: list[int], slow: float) -> None:
        self.slots, self.pairs, self.slow = slots, pairs, slow
        self.dwell_s = slots.traffic.dwell_s
        self._extend(_BLOCK)

    def _extend(self, num_slots: int) -> None:
        """What is done by the start of each slot, in seconds at full speed."""
        self.slots.draw_to(num_slots)
        busy = np.isin(self.slots.pairs, self.pairs)
        speed = np.where(busy, self.slow, 1.0)
        done = np.cumsum(speed, axis=1) * self.dwell_s
        done = np.concatenate([np.zeros((len(done), 1)), done], axis=1)
        self.width = speed.shape[1]
        self.least_done_s = float(done[:, -1].min())
        # Rows laid end to end, each beyond the last, so that one search finds a place in all of them.
        rows = np.arange(len(done))
        self.apart_s = float(done[:, -1].max()) + self.dwell_s
        self.edges = (done[:, 1:] + rows[:, None] * self.apart_s).ravel()
        self.speed, self.done = speed.ravel(), done[:, :-1].ravel()
        self.first, self.shift_s = rows * self.width, rows * self.apart_s

    def end_s(self, start_s: Array, work_s: Array) -> Array:
        """When work that takes so long at full speed ends; shapes (..., samples)."""
        since = np.asarray(start_s + self.slots.phase_s)
        latest = float(since.max()) if since.size else 0.0
        while latest + self.dwell_s > self.width * self.dwell_s:
            self._extend(2 * self.width)
        slot = (since / self.dwell_s).astype(np.int64)
        here = slot + self.first
        target = self.done[here] + (since - slot * self.dwell_s) * self.speed[here] + work_s
        while float(target.max()) >= self.least_done_s:
            self._extend(2 * self.width)
            return self.end_s(start_s, work_s)
        there = np.searchsorted(self.edges, target + self.shift_s, side="left")
        ended = (there - self.first) * self.dwell_s + (target - self.done[there]) / self.speed[there]
        # Rounding never ends work before it would have on a quiet machine.
        return np.asarray(np.maximum(ended - self.slots.phase_s, start_s + work_s))
