"""LinkBench: times of messages and collectives between the ranks of this machine, and the topology that they show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, permutations, product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Literal

import numpy as np

from calibrate.data import RING, Measurement
from calibrate.fit.fit import sources_of, to_digits
from calibrate.measure.campaign import Campaign, Seconds
from calibrate.measure.device import device_name, origin
from calibrate.measure.ranks import HOLD_S, START_S, Flow, LinkRank, LinkSetup, counts_to
from kvrsim.choices import Topology
from kvrsim.errors import ABSENT, InputError
from kvrsim.hardware import LinkSpec
from kvrsim.interp import interquartile_range
from kvrsim.runtime.ranks import RankPool


def link_campaign(setup: LinkSetup, output: Path, command: str) -> Campaign:
    """Campaign that times messages and collectives between the ranks of this machine."""
    name = device_name(setup.device, setup.num_threads)

    def origin_of(rows: list[Measurement]) -> Mapping[str, Any]:
        topology, why = find_topology(rows)
        link = asdict(measured_link(rows, "measured"))
        for key in [key for key, value in link.items() if value is None]:
            del link[key]
        ranks = {"num_gpus": setup.num_ranks, "backend": setup.backend}
        return ranks | {"link": link, "topology": topology, "why": why}

    gpus: Sequence[int] = ()
    if setup.device == "cuda":
        gpus = range(setup.num_ranks)
    return Campaign(
        title="links",
        build=lambda: LinkBench(setup, name),
        about=origin(setup.device, setup.num_threads, command),
        origin=origin_of,
        output=output,
        gpus=gpus,
    )


Kind = Literal["send", "pairs", "gather", "reduce", "issue"]

SOURCE = "kvrsim calibrate links"
SMALLEST_BYTES = 2**10
STEP = 4  # factor from one size to the next
_COLLECTIVES = {"gather": "all_gather", "reduce": "all_reduce"}  # operation of the rows by kind of point
_LEAST_REDUCED = 2**16  # bytes of the smallest all-reduce, as for hidden states of a few tokens
_FP32_BYTES = 4  # bytes of an fp32 element
_LARGE_SIZES = 2  # number of the largest sizes at which several messages are sent at once
_LEAST_S = 2e-2  # minimum seconds of a sample: shorter ones depend on the CPU's state at their start
_LEAST_REPEATS = 3  # minimum number of repeats; with three, the median excludes one disturbed repeat
_MOST_REPEATS = 200
_LONG_S = 0.1  # a transfer that takes more seconds is not repeated
_GUESSES = {"gloo": (1.5e-4, 1.5e9), "nccl": (3e-5, 2e10)}  # seconds of a short message, and bytes/s of a long message


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPoint:
    """Messages along `flows` at the same time, or collectives of the first `num_ranks` ranks.

    The kind `issue` times the host's part of a send and of a receive.
    """

    kind: Kind
    nbytes: int  # bytes of a message, of all pieces of an all-gather, or of an all-reduce's fp32 tensor
    flows: tuple[Flow, ...] = ()  # flows of messages, for the kinds send, pairs and issue
    kernel: str = ""  # kernel of a collective
    num_ranks: int = 0  # number of ranks of a collective

    @property
    def collective(self) -> str | None:
        """Operation of the rows of a collective; None for messages."""
        return _COLLECTIVES.get(self.kind)

    def __str__(self) -> str:
        what = "+".join(map(flow_text, self.flows))
        if self.collective:
            what = f"{self.kernel}:{self.num_ranks}"
        return f"{self.kind}:{what}:{self.nbytes}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, in order."""
        if self.collective:
            return tuple(range(self.num_ranks))
        return tuple(sorted(set(chain.from_iterable(self.flows))))

    def guess_s(self, backend: str) -> float:
        """Estimated seconds of one transfer, without measurements."""
        latency_s, bytes_per_s = _GUESSES[backend]
        if self.collective:
            steps = self.num_ranks - 1
            if self.kind == "reduce":
                steps *= 2
            return steps * (latency_s + self.nbytes / self.num_ranks / bytes_per_s)
        return latency_s + len(self.flows) * self.nbytes / bytes_per_s

    def repeats(self, transfer_s: float) -> int:
        """Number of repeats that makes a sample long compared with its start and end."""
        least = _LEAST_REPEATS
        if transfer_s > _LONG_S:
            least = 1
        return max(least, min(_MOST_REPEATS, math.ceil(_LEAST_S / transfer_s)))

    def rows(self, samples: Sequence[Seconds], *, backend: str, device: str) -> list[Measurement]:
        """One row per message or collective: medians and interquartile ranges.

        The row of `issue` is the mean of a send and a receive, because a rank of a chain has one of each in a layer.
        """
        if self.kind == "issue":
            seconds = [(sample["send"] + sample["receive"]) / 2 for sample in samples]
            return [_row("host_message", backend, device, seconds)]
        common: dict[str, Any] = dict(bytes=self.nbytes, ranks=len(self.ranks), nodes=1)
        if self.collective:
            seconds = [sample[self.collective] for sample in samples]
            return [_row(self.collective, self.kernel, device, seconds, messages=1, **common)]
        rows = []
        for src, dst in self.flows:
            seconds = [sample[flow_text((src, dst))] for sample in samples]
            messages = len(self.flows)
            rows.append(_row("send_recv", backend, device, seconds, src=src, dst=dst, messages=messages, **common))
        return rows


def _row(operation: str, kernel: str, device: str, seconds: Sequence[float], **fields: Any) -> Measurement:
    spread_s = None
    if len(seconds) > 1:
        spread_s = interquartile_range(seconds)
    return Measurement(
        operation=operation,
        kernel=kernel,
        device=device,
        median_s=float(np.median(seconds)),
        spread_s=spread_s,
        source=SOURCE,
        **fields,
    )


def flow_text(flow: Flow) -> str:
    """Format a flow: 0>1, for example."""
    return f"{flow[0]}>{flow[1]}"


def link_points(num_ranks: int, backend: str, max_bytes: int) -> list[LinkPoint]:
    """All points for `num_ranks` ranks, most informative first; equally informative points in order of cost.

    The first points are one pair of ranks at all sizes and the collectives of all ranks. Points that show the topology
    follow: long messages of each pair, and several messages at once. All-gathers of fewer ranks, and each pair at all
    sizes, come last.
    """
    sizes = sizes_to(max_bytes)
    large = sizes[-_LARGE_SIZES:]
    kernels = (backend, backend + RING)
    points = []
    for size, pair in product(sizes, permutations(range(num_ranks), 2)):
        points.append(LinkPoint(kind="send", flows=(pair,), nbytes=size))
    for size, flows in product(large, patterns(num_ranks)):
        points.append(LinkPoint(kind="pairs", flows=flows, nbytes=size))
    for count, kernel in product(counts_to(num_ranks), kernels):
        for whole in sorted({size // count * count for size in sizes}):
            points.append(LinkPoint(kind="gather", kernel=kernel, num_ranks=count, nbytes=whole))
    for kernel, size in product(kernels, sizes):
        if size >= _LEAST_REDUCED:
            nbytes = size // _FP32_BYTES * _FP32_BYTES
            points.append(LinkPoint(kind="reduce", kernel=kernel, num_ranks=num_ranks, nbytes=nbytes))
    points.append(LinkPoint(kind="issue", flows=((0, 1),), nbytes=SMALLEST_BYTES))
    return sorted(points, key=lambda point: (_turn(point, num_ranks, large), point.guess_s(backend)))


def _turn(point: LinkPoint, num_ranks: int, large: Sequence[int]) -> int:
    """Position of a point: 0: first; 1: points that show the topology; 2: the rest."""
    if point.kind == "issue":
        return 0
    if point.collective:
        if point.num_ranks == num_ranks:
            return 0
        return 2
    if point.kind == "send" and set(point.flows[0]) == {0, 1}:
        return 0
    if point.nbytes in large:
        return 1
    return 2


def sizes_to(max_bytes: int) -> list[int]:
    """Sizes from 1 KiB in steps of four, and the largest size."""
    steps = 0
    if max_bytes > SMALLEST_BYTES:
        steps = math.ceil(math.log(max_bytes / SMALLEST_BYTES, STEP))
    return [SMALLEST_BYTES * STEP**step for step in range(steps)] + [max_bytes]


def patterns(num_ranks: int) -> list[tuple[Flow, ...]]:
    """Groups of simultaneous messages that distinguish a bus from a switch; no rank sends or receives twice in a group.

    The groups are both directions between neighbours, and pairs without a common rank.
    """
    groups: list[tuple[Flow, ...]] = [((rank, rank + 1), (rank + 1, rank)) for rank in range(num_ranks - 1)]
    separate = tuple((rank, rank + 1) for rank in range(0, num_ranks - 1, 2))
    if len(separate) > 1:
        groups.append(separate)
    return groups


# -- the bench


class LinkBench:
    """Bench of links: one process per rank, started on first use.

    Raises KvrsimError, naming the rank, if a process ends or does not answer within `timeout_s`.
    """

    def __init__(self, setup: LinkSetup, device_name: str) -> None:
        self.setup = setup
        self.device_name = device_name
        self.backend = setup.backend
        self.num_ranks = setup.num_ranks
        self.timeout_s = setup.timeout_s
        self.hold_s = HOLD_S if setup.device == "cuda" else 0.0  # seconds for which a GPU waits before each transfer
        self._last_s: dict[LinkPoint, float] = {}  # seconds of one transfer in the last sample
        self._pool: RankPool | None = None
        self._make = partial(LinkRank, setup=setup)

    @property
    def pool(self) -> RankPool:
        """The processes of the ranks; the first use starts them."""
        if self._pool is None:
            self._pool = RankPool(self.num_ranks, self._make, start_s=START_S + self.timeout_s)
        return self._pool

    def points(self) -> Sequence[LinkPoint]:
        """The points in the order of link_points."""
        return link_points(self.num_ranks, self.backend, self.setup.max_bytes)

    def expected_s(self, point: LinkPoint) -> float:
        """Expected seconds of one sample: of its transfers and of a synchronisation before each."""
        transfer_s = point.guess_s(self.backend)
        short_s = LinkPoint(kind="send", flows=((0, 1),), nbytes=1).guess_s(self.backend)
        return point.repeats(transfer_s + self.hold_s) * (transfer_s + self.hold_s + 2 * short_s)

    def sample(self, point: LinkPoint) -> Seconds:
        """Seconds of each message ("0>1") or of the collective: the median of the repeats."""
        repeats = point.repeats(self._last_s.get(point, point.guess_s(self.backend)) + self.hold_s)
        if point.kind == "issue":
            return self._issue(point, repeats)
        if point.collective:
            seconds = self._collective(point, repeats)
        else:
            seconds = self._exchange(point, repeats)
        self._last_s[point] = max(seconds.values())
        return seconds

    def rows(self, samples: Mapping[LinkPoint, Sequence[Seconds]]) -> list[Measurement]:
        """Medians and interquartile ranges, in the order of the points."""
        rows: list[Measurement] = []
        for point in self.points():
            seconds = samples.get(point)
            if seconds:
                rows += point.rows(seconds, backend=self.backend, device=self.device_name)
        return rows

    def close(self) -> None:
        """End the processes of the ranks; the next use starts them again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _exchange(self, point: LinkPoint, repeats: int) -> dict[str, float]:
        """Seconds of each message, from the start of the first one after a synchronisation."""
        arguments = {"flows": point.flows, "nbytes": point.nbytes, "repeats": repeats}
        answers = self.pool.ask(point.ranks, ("exchange", arguments), self.timeout_s)
        # By rank: when each repeat began and arrived, shape (repeats, 2).
        times_s = {rank: np.array(pairs, dtype=float) for rank, pairs in answers.items()}
        began_s = np.min([times_s[src][:, 0] for src, _ in point.flows], axis=0)
        seconds = {}
        for src, dst in point.flows:
            seconds[flow_text((src, dst))] = float(np.median(times_s[dst][:, 1] - began_s))
        return seconds

    def _issue(self, point: LinkPoint, repeats: int) -> dict[str, float]:
        """Measure the host's seconds per send and per receive."""
        [flow] = point.flows
        arguments = {"flow": flow, "nbytes": point.nbytes, "repeats": repeats}
        took_s = self.pool.ask(point.ranks, ("issue", arguments), self.timeout_s)
        return {"send": float(np.median(took_s[flow[0]])), "receive": float(np.median(took_s[flow[1]]))}

    def _collective(self, point: LinkPoint, repeats: int) -> dict[str, float]:
        """Seconds from the moment at which the last rank begins a collective until the last rank has ended it."""
        assert point.collective is not None
        sizes = {"num_ranks": point.num_ranks, "nbytes": point.nbytes}
        arguments = {"kernel": point.kernel, "repeats": repeats, **sizes}
        spans_s = self.pool.ask(point.ranks, (point.kind, arguments), self.timeout_s)
        began_s, ended_s = np.max(list(spans_s.values()), axis=0).T
        return {point.collective: float(np.median(ended_s - began_s))}


# -- whether a switch or a bus connects the ranks, derived from message times

Slowdowns = Mapping[tuple[str, int], float]  # slowdown by shape (separate, both) and number of messages

_SHARED = 0.5  # threshold between 0 (simultaneous messages keep their rates) and 1 (they share one rate)
_SHAPES = {"separate": "of separate pairs", "both": "in both directions of a pair"}  # the first one measured decides


def find_topology(rows: Sequence[Measurement], argument: str = "measurements") -> tuple[Topology, str]:
    """Return the topology that send_recv rows with src and dst show, and a sentence with the measured ratios.

    Ranks share a bus if simultaneous messages slow each other down: with four ranks or more, messages of separate
    pairs; with fewer ranks, the two directions of a pair. Raises InputError naming `argument` without such rows.
    """
    sent = [row for row in rows if row.operation == "send_recv" and None not in (row.src, row.dst)]
    if not any(row.messages == 1 for row in sent):
        raise InputError(argument, f"{len(sent)} such rows", "send_recv rows with src, dst and one message at a time")
    slowdowns = _slowdowns(sent)
    if not slowdowns:
        return "switch", "No simultaneous messages were measured: assumed to be a switch."
    shares: dict[str, list[float]] = defaultdict(list)  # share of the bandwidth that is common, by shape
    texts = []
    for (shape, messages), factor in sorted(slowdowns.items(), reverse=True):
        shares[shape].append(math.log(factor) / math.log(messages))
        took = f"{messages} messages {_SHAPES[shape]} take {factor:.2f} times as long as alone"
        texts.append(f"{took} (on a bus {messages}, a switch 1)")
    decisive = next(shape for shape in _SHAPES if shape in shares)
    topology: Topology = "switch"
    if median(shares[decisive]) >= _SHARED:
        topology = "bus"
    verdict = f"a {topology}"
    if decisive != "separate":
        verdict += " (fewer than four ranks cannot show more)"
    return topology, f"{'; '.join(texts)}: {verdict}."


def _slowdowns(sent: Iterable[Measurement]) -> Slowdowns:
    """Return slowdowns: seconds until the last of simultaneous messages arrives, divided by those of one message."""
    alone = {(row.src, row.dst, row.bytes): row.median_s for row in sent if row.messages == 1}
    together: dict[tuple[Any, ...], list[Measurement]] = {}
    for row in sent:
        is_pair = row.ranks in (2, 2 * row.messages) and (row.src, row.dst, row.bytes) in alone
        if row.messages == 1 or not is_pair:
            continue
        group: tuple[Any, ...] = ("separate", row.messages, row.bytes)
        if row.ranks != 2 * row.messages:  # the directions of each pair form a group
            group = ("both", row.messages, row.bytes, frozenset((row.src, row.dst)))
        together.setdefault(group, []).append(row)
    factors: dict[tuple[str, int], list[float]] = {}
    for (shape, messages, *_), rows in together.items():
        alone_s = geometric_mean(alone[row.src, row.dst, row.bytes] for row in rows)
        factors.setdefault((shape, messages), []).append(max(row.median_s for row in rows) / alone_s)
    return {key: median(values) for key, values in factors.items()}


def measured_link(rows: Sequence[Measurement], name: str, argument: str = "measurements") -> LinkSpec:
    """Make a link without a datasheet, from the highest bandwidth of a message and the time of the smallest message.

    Each size has the median over the pairs. Raises InputError naming `argument` if no row is a single message.
    """
    sizes: dict[int, list[float]] = {}
    for row in rows:
        if row.operation == "send_recv" and row.messages == 1 and row.bytes is not None:
            sizes.setdefault(row.bytes, []).append(row.median_s)
    if not sizes:
        raise InputError(argument, ABSENT, "send_recv rows, one message at a time")
    seconds = {nbytes: median(times_s) for nbytes, times_s in sizes.items()}
    return LinkSpec(
        name=name,
        bandwidth_bytes_per_s=to_digits(max(nbytes / message_s for nbytes, message_s in seconds.items())),
        latency_s=to_digits(seconds[min(seconds)]),
        source=sources_of(rows),
    )
