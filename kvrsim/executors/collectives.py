"""Collectives of the batch evaluator, all ranks at once: arrays of shape (num_ranks, B) or (num_ranks, B, samples).

Each is prepared once for a kind of layer. What moves and what is computed ends when `Timing` says, which noise may
delay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrsim.hardware import Cluster, Path
from kvrsim.program import AllGather, AllToAll, Array, RingPass, beside_message_s


class Timing(Protocol):
    """When work of every rank ends that begins then and takes so long on a noise-free machine."""

    def sent_s(self, edges: Sequence[tuple[int, int]], start_s: Array, busy_s: Array) -> Array:
        """A message of each rank over its edge, (sender, receiver), has left."""
        ...

    def computed_s(self, start_s: Array, device_s: Array) -> Array:
        """A compute of each rank is done."""
        ...


@dataclass(frozen=True, slots=True)
class Edges:
    """From every rank that takes part to the one `shift` further on: few kinds of path, and the kind of each rank's."""

    pairs: tuple[tuple[int, int], ...]  # each rank and the one that it sends to
    paths: tuple[Path, ...]
    kind: npt.NDArray[np.intp]  # of each rank's, shape (num_ranks,)

    @classmethod
    def of(cls, cluster: Cluster, ranks: range, shift: int) -> Edges:
        """Every rank's path there."""
        pairs = tuple((rank, ranks[(number + shift) % len(ranks)]) for number, rank in enumerate(ranks))
        kinds: dict[Path, int] = {}
        index = [kinds.setdefault(cluster.path(*pair), len(kinds)) for pair in pairs]
        return cls(pairs, tuple(kinds), np.array(index))

    def seconds(self, time_of: Callable[[Path, Array], Array], nbytes: Array) -> Array:
        """Each rank's message, shape (num_ranks, B), on its own path."""
        if len(self.paths) == 1:
            return time_of(self.paths[0], nbytes)
        found = np.empty(nbytes.shape)
        for index, path in enumerate(self.paths):
            mine = self.kind == index
            found[mine] = time_of(path, nbytes[mine])
        return found

    def values(self, name: str, like: Array) -> Array:
        """An attribute of each rank's path, shape (num_ranks, 1), or with as many axes as `like`."""
        found = np.array([getattr(path, name) for path in self.paths])[self.kind]
        return found.reshape(-1, *[1] * (like.ndim - 1))


@dataclass(slots=True)
class AllGatherEvaluator:
    """The ring all-gather of one kind of layer: step k moves the piece that came k hops to the next rank."""

    edges: Edges
    pieces: Array  # each rank's own, shape (num_ranks, B)
    same: bool  # whether all have as much
    first_s: Array  # the first step, shape (num_ranks, B)
    launch_s: Array  # shape (num_ranks, 1)
    latency_s: Array  # shape (num_ranks, 1)

    @classmethod
    def of(cls, ops: Sequence[AllGather], edges: Edges, wide: Callable[[Array], Array]) -> AllGatherEvaluator:
        """Of the ranks that take part."""
        pieces = np.stack(np.broadcast_arrays(*[wide(op.nbytes) for op in ops]))
        return cls(
            edges=edges,
            pieces=pieces,
            same=bool((pieces == pieces[0]).all()),
            first_s=_gather_step_s(edges, pieces),
            launch_s=edges.values("gather_launch_s", pieces),
            latency_s=edges.values("gather_latency_s", pieces),
        )

    def run(self, start: Array, link: Array, timing: Timing) -> tuple[Array, Array]:
        """When each rank has all pieces, and when its link is free, from when each comes and its link is free."""
        num_ranks = len(start)
        edges, pieces, latency = self.edges, self.pieces, self.latency_s
        before = np.arange(-1, num_ranks - 1)
        start = start + self.launch_s
        both_there = start.copy()
        both_there[before] = np.maximum(start[before], start)
        held, clock = start, start.copy()
        steps_s = self.first_s
        for _ in range(num_ranks - 1):
            link = timing.sent_s(edges.pairs, np.maximum(np.maximum(held, both_there), link), steps_s)
            held = (link + latency)[before]
            if not self.same:
                pieces = pieces[before]
                steps_s = steps_s[before] if len(edges.paths) == 1 else _gather_step_s(edges, pieces)
            np.maximum(clock, held, out=clock)
        return clock, link


def _gather_step_s(edges: Edges, pieces: Array) -> Array:
    """A step of each rank's piece, on the path to the next."""

    def step_s(path: Path, nbytes: Array) -> Array:
        return path.gather_step_s(nbytes, len(pieces))

    return edges.seconds(step_s, pieces)


@dataclass(slots=True)
class RingPassEvaluator:
    """The rounds of a ring pass; see RingPass."""

    edges: Edges
    work_s: Array  # shape (p, num_ranks, B)
    busy_s: Array  # shape (p - 1, num_ranks, B)
    latency_s: Array  # shape (num_ranks, 1)
    host_s: Array  # shape (p, num_ranks, 1)
    overlaps: bool
    message_share: float

    @classmethod
    def of(cls, ops: Sequence[RingPass], edges: Edges, wide: Callable[[Array], Array]) -> RingPassEvaluator:
        """Of all ranks of a program."""
        work_s = np.stack([wide(op.device_s) for op in ops], axis=1)
        nbytes = np.stack([wide(op.nbytes) for op in ops], axis=1)
        rounds = [edges.seconds(Path.busy_s, one) for one in nbytes]
        host_s = np.array([op.host_s for op in ops]).T
        return cls(
            edges=edges,
            work_s=work_s,
            busy_s=np.array(rounds),
            latency_s=edges.values("latency_s", work_s[0]),
            host_s=host_s.reshape(*host_s.shape, *[1] * (work_s.ndim - 2)),
            overlaps=ops[0].overlaps,
            message_share=ops[0].message_share,
        )

    def run(self, clock: Array, host: Array, link: Array, timing: Timing) -> Array:
        """When each rank has done its last round; host: when its host is there, shape (num_ranks, 1)."""
        before = np.arange(-1, clock.shape[0] - 1)
        after = np.append(np.arange(1, clock.shape[0]), 0)
        for index, work_s in enumerate(self.work_s):
            clock = np.maximum(clock, host)
            host = host + self.host_s[index]
            if index == len(self.work_s) - 1:
                return np.maximum(timing.computed_s(clock, work_s), host)
            start = np.maximum(np.maximum(clock, clock[after]), link)
            left = timing.sent_s(self.edges.pairs, start, self.busy_s[index])
            there = np.maximum(left, (left + self.latency_s)[before])
            if self.overlaps:
                beside_s = beside_message_s(work_s, there - clock, self.message_share)
                clock = np.maximum(np.maximum(timing.computed_s(clock, beside_s), host), there)
            else:
                clock = np.maximum(timing.computed_s(there, work_s), host)
            link = left
        raise AssertionError("a ring pass without rounds")


@dataclass(slots=True)
class AllToAllEvaluator:
    """The messages of one all-to-all, by how many ranks further on they go; see AllToAll."""

    edges: Sequence[Edges]  # to the ranks 1, 2, ... further on
    busy_s: Array  # shape (p - 1, num_ranks, B)
    latency_s: Array  # shape (p - 1, num_ranks, 1)
    senders: npt.NDArray[np.intp]  # whose message each rank gets, shape (p - 1, num_ranks)

    @classmethod
    def of(
        cls, ops: Sequence[AllToAll], edges_to: Callable[[int], Edges], wide: Callable[[Array], Array]
    ) -> AllToAllEvaluator:
        """Of all ranks of a program."""
        ranks = np.arange(len(ops))
        nbytes = np.stack([wide(op.nbytes) for op in ops], axis=1)
        edges = [edges_to(shift) for shift in range(1, len(ops))]
        return cls(
            edges=edges,
            busy_s=np.array([one.seconds(Path.busy_s, size) for one, size in zip(edges, nbytes, strict=True)]),
            latency_s=np.array([one.values("latency_s", nbytes[0]) for one in edges]),
            senders=(ranks - np.arange(1, len(ops))[:, None]) % len(ops),
        )

    def run(self, start: Array, timing: Timing) -> Array:
        """When each rank has sent and received all, from when each comes to the collective."""
        num_ranks = len(start)
        left, done = start, start
        for edges, busy_s, latency_s, sender in zip(self.edges, self.busy_s, self.latency_s, self.senders, strict=True):
            receiver = num_ranks - 1 - sender[::-1]  # the reverse of the shift
            left = timing.sent_s(edges.pairs, np.maximum(left, start[receiver]), busy_s)
            done = np.maximum(done, (left + latency_s)[sender])
        return np.maximum(done, left)
