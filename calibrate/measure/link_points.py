"""LinkPoint: one thing that can be timed about the links between ranks, and the rows that its samples make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibrate.data.measurement import RING, Measurement
from kvrsim.errors import InputError
from kvrsim.results.quartiles import interquartile_range

Flow = tuple[int, int]  # from a rank to another
Kind = Literal["send", "pairs", "gather", "reduce", "issue"]

SOURCE = "kvrsim calibrate links"
SMALLEST_BYTES = 2**10
STEP = 4  # from one size to the next
_COLLECTIVES = {"gather": "all_gather", "reduce": "all_reduce"}  # what their rows are
_LEAST_REDUCED = 2**16  # bytes of an all-reduce: hidden states of a few tokens
_FP32_BYTES = 4  # of an element that is added up
_LARGE_SIZES = 2  # of the largest, at which several messages are sent at once
_LEAST_S = 2e-2  # of a sample: shorter ones depend on the state of the processor when they begin
_LEAST_REPEATS = 3  # the median of which excludes one that another process disturbed
_MOST_REPEATS = 200
_LONG_S = 0.1  # of a transfer: longer ones are not repeated
_GUESSES = {"gloo": (1.5e-4, 1.5e9), "nccl": (3e-5, 2e10)}  # seconds of a short message, bytes/s of a long one


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPoint:
    """Messages along `flows` at the same time, or collectives of the first `num_ranks` ranks.

    Of `issue`, what a message takes of its sender's and its receiver's host. Keys are send:0>1:1024, issue:0>1:1024,
    pairs:0>1+1>0:1048576, gather:gloo:4:1024 and reduce:gloo:4:65536.
    """

    kind: Kind
    nbytes: int  # of each message; of all pieces of an all-gather together; of an all-reduce's tensor, in fp32
    flows: tuple[Flow, ...] = ()  # of send and pairs
    kernel: str = ""  # of a collective
    num_ranks: int = 0  # of a collective

    @property
    def collective(self) -> str | None:
        """What a collective's rows are; None: the point is of messages."""
        return _COLLECTIVES.get(self.kind)

    @property
    def key(self) -> str:
        """As journals have it."""
        what = f"{self.kernel}:{self.num_ranks}" if self.collective else "+".join(map(flow_text, self.flows))
        return f"{self.kind}:{what}:{self.nbytes}"

    @classmethod
    def parse(cls, key: str) -> LinkPoint:
        """The point of a key; InputError for what is none."""
        try:
            kind, *what, nbytes = key.split(":")
            if kind in _COLLECTIVES:
                kernel, ranks = what
                which: Kind = "gather" if kind == "gather" else "reduce"
                return cls(kind=which, kernel=kernel, num_ranks=int(ranks), nbytes=int(nbytes))
            flows = tuple(_read_flow(text) for text in what[0].split("+"))
            if kind == "send" and len(flows) == 1:
                return cls(kind="send", flows=flows, nbytes=int(nbytes))
            if kind == "issue" and len(flows) == 1:
                return cls(kind="issue", flows=flows, nbytes=int(nbytes))
            if kind == "pairs" and len(flows) > 1:
                return cls(kind="pairs", flows=flows, nbytes=int(nbytes))
        except (ValueError, IndexError):
            pass
        raise InputError(
            "point",
            key,
            "send:0>1:BYTES, issue:0>1:BYTES, pairs:0>1+1>0:BYTES, gather:KERNEL:RANKS:BYTES or"
            " reduce:KERNEL:RANKS:BYTES",
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that take part, the first one first."""
        if self.collective:
            return tuple(range(self.num_ranks))
        return tuple(sorted({rank for flow in self.flows for rank in flow}))

    def guess_s(self, backend: str) -> float:
        """Seconds of one transfer, before anything is known."""
        latency_s, bytes_per_s = _GUESSES[backend]
        if self.collective:
            steps = (self.num_ranks - 1) * (2 if self.kind == "reduce" else 1)
            return steps * (latency_s + self.nbytes / self.num_ranks / bytes_per_s)
        return latency_s + len(self.flows) * self.nbytes / bytes_per_s

    def repeats(self, one_s: float) -> int:
        """Repeats in one sample, so that it is long compared with its start and end."""
        least = 1 if one_s > _LONG_S else _LEAST_REPEATS
        return max(least, min(_MOST_REPEATS, math.ceil(_LEAST_S / one_s)))

    def rows(
        self, samples: Sequence[Mapping[str, float]], *, backend: str, device: str, hosts: Sequence[str]
    ) -> list[Measurement]:
        """One row a message, one a collective: medians and interquartile ranges; `hosts` by rank."""
        if self.kind == "issue":
            return [_issue_row(samples, backend, device)]
        transfers: tuple[tuple[Flow | None, str], ...] = tuple((flow, flow_text(flow)) for flow in self.flows)
        if self.collective:
            transfers = ((None, self.collective),)
        timed = [(flow, [sample[name] for sample in samples]) for flow, name in transfers]
        return [
            Measurement(
                operation=self.collective or "send_recv",
                kernel=self.kernel or backend,
                device=device,
                bytes=self.nbytes,
                ranks=len(self.ranks),
                nodes=min(2, len({hosts[rank] for rank in (flow or self.ranks)})),
                src=flow[0] if flow else None,
                dst=flow[1] if flow else None,
                messages=len(self.flows) or 1,
                median_s=float(np.median(seconds)),
                spread_s=interquartile_range(seconds) if len(seconds) > 1 else None,
                source=SOURCE,
            )
            for flow, seconds in timed
        ]


def _issue_row(samples: Sequence[Mapping[str, float]], backend: str, device: str) -> Measurement:
    """A send and a receive are counted alike: a rank of a chain has one of each in a layer."""
    seconds = [(sample["send"] + sample["receive"]) / 2 for sample in samples]
    return Measurement(
        operation="host_message",
        kernel=backend,
        device=device,
        median_s=float(np.median(seconds)),
        spread_s=interquartile_range(seconds) if len(seconds) > 1 else None,
        source=SOURCE,
    )


def flow_text(flow: Flow) -> str:
    """0>1"""
    return f"{flow[0]}>{flow[1]}"


def _read_flow(text: str) -> Flow:
    src, dst = map(int, text.split(">"))
    if src == dst or min(src, dst) < 0:
        raise ValueError(text)
    return src, dst


def link_points(num_ranks: int, backend: str, max_bytes: int) -> list[LinkPoint]:
    """All points of so many ranks, most informative first, and among equals the cheapest.

    First one pair at all sizes and the collectives of all ranks; then the points that show the topology: long messages
    of each pair, and several at once; then all-gathers of fewer ranks, and each pair at all sizes.
    """
    sizes = sizes_to(max_bytes)
    pairs = [(src, dst) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]
    points = [LinkPoint(kind="send", flows=(pair,), nbytes=size) for size in sizes for pair in pairs]
    points += [
        LinkPoint(kind="pairs", flows=flows, nbytes=size)
        for size in sizes[-_LARGE_SIZES:]
        for flows in patterns(num_ranks)
    ]
    points += [
        LinkPoint(kind="gather", kernel=kernel, num_ranks=count, nbytes=whole)
        for count in counts_to(num_ranks)
        for kernel in (backend, backend + RING)
        for whole in sorted({size // count * count for size in sizes})
    ]
    points += [
        LinkPoint(kind="reduce", kernel=kernel, num_ranks=num_ranks, nbytes=size // _FP32_BYTES * _FP32_BYTES)
        for kernel in (backend, backend + RING)
        for size in sizes
        if size >= _LEAST_REDUCED
    ]
    large = sizes[-_LARGE_SIZES:]
    points.append(LinkPoint(kind="issue", flows=((0, 1),), nbytes=SMALLEST_BYTES))
    return sorted(points, key=lambda point: (_turn(point, num_ranks, large), point.guess_s(backend)))


def _turn(point: LinkPoint, num_ranks: int, large: Sequence[int]) -> int:
    """0: first; 1: shows the topology; 2: the rest."""
    if point.kind == "issue":
        return 0
    if point.collective:
        return 0 if point.num_ranks == num_ranks else 2
    if point.kind == "send" and set(point.flows[0]) == {0, 1}:
        return 0
    return 1 if point.nbytes in large else 2


def sizes_to(max_bytes: int) -> list[int]:
    """From 1 KiB in steps of four, and the largest itself."""
    steps = math.ceil(math.log(max_bytes / SMALLEST_BYTES, STEP)) if max_bytes > SMALLEST_BYTES else 0
    return [SMALLEST_BYTES * STEP**step for step in range(steps)] + [max_bytes]


def counts_to(num_ranks: int) -> list[int]:
    """Two, four, eight and so on, and all of them."""
    powers = [2**power for power in range(1, num_ranks.bit_length()) if 2**power < num_ranks]
    return [*powers, num_ranks]


def patterns(num_ranks: int) -> list[tuple[Flow, ...]]:
    """Simultaneous messages that distinguish a bus from a switch; no rank sends or receives two of them.

    Both ways between neighbours; pairs that share no rank, of neighbours and of ranks half of all apart, which between
    two nodes is every GPU's share of the network; the chain that a prefix takes; the ring of an all-gather.
    """
    half = num_ranks // 2
    chain = tuple((rank, rank + 1) for rank in range(num_ranks - 1))
    found: Iterable[tuple[Flow, ...]] = (
        *(((rank, rank + 1), (rank + 1, rank)) for rank in range(num_ranks - 1)),
        tuple((rank, rank + 1) for rank in range(0, num_ranks - 1, 2)),
        tuple((rank, rank + half) for rank in range(half)),
        chain,
        (*chain, (num_ranks - 1, 0)),
    )
    return list(dict.fromkeys(flows for flows in found if len(flows) > 1))
