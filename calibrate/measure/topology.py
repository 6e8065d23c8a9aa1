"""LinkLayout: whether a switch, a bus or a network between nodes connects the ranks, derived from message times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import geometric_mean, median

from calibrate.data.measurement import Measurement
from calibrate.fit.solver import rounded, sources_of
from kvrsim.choices import Topology
from kvrsim.errors import InputError
from kvrsim.hardware import LinkSpec
from kvrsim.units import format_bandwidth

Flow = tuple[int, int]  # from a rank to another
Alone = Mapping[tuple[Flow, int], float]  # seconds of a message by flow and bytes, nothing else in flight

_LARGE = 16  # sizes from the largest down to this part of it count as large
_NODES_GAP = 1.4  # between the slowest pair inside a node and the fastest between nodes
_SHARED = 0.5  # between 0, where messages at once keep their rates, and 1, where they share one


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLayout:
    """The links as a cluster file describes them."""

    topology: Topology  # switch, bus or nodes
    link: LinkSpec  # between ranks; under nodes, inside a node
    gpus_per_node: int | None = None  # under nodes, else None
    network: LinkSpec | None = None  # under nodes one rank's share of what joins them, else None
    full_duplex: bool | None = None  # whether both directions of a pair keep their rates; None: not measured
    why: str  # sentences, with ratios


def find_layout(rows: Sequence[Measurement], name: str = "measured", argument: str = "measurements") -> LinkLayout:
    """The layout that the send_recv rows with src and dst show; InputError naming `argument` where there are none.

    Ranks form nodes where their pairs fall into a fast and a slow group, and the fast pairs connect consecutive groups
    of equal size. Otherwise they share a bus where simultaneous messages slow each other down: messages of separate
    pairs from four ranks on, else the two directions of a pair and the links of a chain.
    """
    found = [row for row in rows if row.operation == "send_recv" and None not in (row.src, row.dst)]
    singles = [row for row in found if row.messages == 1]
    if not singles:
        raise InputError(argument, f"{len(found)} such rows", "send_recv rows with src, dst and one message at a time")
    alone = {(_flow(row), row.bytes or 0): row.median_s for row in singles}
    nodes = _Nodes.of(alone)
    slow = _Slowdowns.of([row for row in found if row.messages > 1 and not nodes.apart(row)], alone)
    link = measured_link([row for row in found if not nodes.apart(row)], name)
    if nodes.size is None:
        text = " ".join(part for part in (nodes.text, slow.text) if part)
        topology: Topology = "bus" if slow.is_bus else "switch"
        return LinkLayout(topology=topology, link=link, full_duplex=slow.full_duplex, why=text)
    network, shared = _network([row for row in found if nodes.apart(row)], alone, f"{name}-network")
    return LinkLayout(
        topology="nodes",
        link=link,
        gpus_per_node=nodes.size,
        network=network,
        full_duplex=slow.full_duplex,
        why=f"{nodes.text} {shared}",
    )


def measured_link(rows: Sequence[Measurement], name: str, argument: str = "measurements") -> LinkSpec:
    """A link without a datasheet: the highest bandwidth of a message, and the time of the smallest one.

    Of the median over the pairs, for each size. InputError naming `argument` where no row is a message by itself.
    """
    sizes: dict[int, list[float]] = {}
    for row in rows:
        if row.operation == "send_recv" and row.messages == 1 and row.bytes is not None:
            sizes.setdefault(row.bytes, []).append(row.median_s)
    if not sizes:
        raise InputError(argument, "nothing", "send_recv rows, one message at a time")
    seconds = {nbytes: median(found) for nbytes, found in sizes.items()}
    return LinkSpec(
        name=name,
        bandwidth_bytes_per_s=rounded(max(nbytes / one_s for nbytes, one_s in seconds.items())),
        latency_s=rounded(seconds[min(seconds)]),
        source=sources_of(rows),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slowdowns:
    """Slowdown of simultaneous messages: time until the last one arrives, over the time of one alone."""

    separate: Mapping[int, float]  # by count of messages, no two of which have a rank in common
    both_ways: float | None  # the two directions of a pair
    chain: Mapping[int, float]  # by count of messages along a chain or a ring

    @classmethod
    def of(cls, rows: Iterable[Measurement], alone: Alone) -> _Slowdowns:
        patterns: dict[tuple[int, int, int, bool], list[Measurement]] = {}
        for row in rows:
            if (_flow(row), row.bytes or 0) in alone:
                near = _near(row) or row.ranks != 2 * row.messages
                patterns.setdefault((row.messages, row.ranks or 0, row.bytes or 0, near), []).append(row)
        factors: dict[tuple[int, str], list[float]] = {}
        for (messages, ranks, nbytes, _), members in patterns.items():
            shape = "separate" if ranks == 2 * messages else "both" if ranks == 2 else "chain"
            factor = _slowdown(members, alone, nbytes, joined=shape == "both")
            factors.setdefault((messages, shape), []).append(factor)
        medians = {key: median(values) for key, values in factors.items()}
        return cls(
            separate={messages: one for (messages, shape), one in medians.items() if shape == "separate"},
            both_ways=medians.get((2, "both")),
            chain={messages: one for (messages, shape), one in medians.items() if shape == "chain"},
        )

    @property
    def telling(self) -> Mapping[int, float]:
        """By count of messages, what decides between bus and switch."""
        both = {} if self.both_ways is None else {2: self.both_ways}
        return self.separate or {**both, **self.chain}

    @property
    def is_bus(self) -> bool:
        """Whether simultaneous messages rather share one rate than keep their own."""
        shares = [_share(factor, messages) for messages, factor in self.telling.items()]
        return bool(shares) and median(shares) >= _SHARED

    @property
    def full_duplex(self) -> bool | None:
        """Of a pair."""
        return None if self.both_ways is None else _share(self.both_ways, 2) < _SHARED

    @property
    def text(self) -> str:
        """Why."""
        if not self.telling:
            return "No simultaneous messages were measured: assumed to be a switch."
        said = [_text(messages, "of separate pairs", one) for messages, one in sorted(self.separate.items())]
        said += [_text(messages, "along a chain", one) for messages, one in sorted(self.chain.items())]
        both = [] if self.both_ways is None else [_text(2, "in both directions of a pair", self.both_ways)]
        verdict = "a bus" if self.is_bus else "a switch"
        if not self.separate:
            verdict += " (fewer than four ranks cannot show more)"
        elif self.full_duplex is False and not self.is_bus:
            verdict += ", though the directions of a pair share its rate, which kvrsim does not model"
        return f"{'; '.join([*said, *both])}: {verdict}."


def _text(messages: int, which: str, factor: float) -> str:
    return f"{messages} messages {which} take {factor:.2f} times as long as alone (on a bus {messages}, a switch 1)"


def _share(factor: float, messages: int) -> float:
    """0 where messages keep their rates, 1 where all share one."""
    return math.log(factor) / math.log(messages)


def _slowdown(members: Sequence[Measurement], alone: Alone, nbytes: int, joined: bool) -> float:
    """Until the last of them has come, against the mean of each alone; `joined`: several pairs, each on its own."""
    if not joined:
        return max(row.median_s for row in members) / geometric_mean(alone[_flow(row), nbytes] for row in members)
    pairs: dict[tuple[int, ...], list[Measurement]] = {}
    for row in members:
        pairs.setdefault(tuple(sorted(_flow(row))), []).append(row)
    return median(_slowdown(pair, alone, nbytes, joined=False) for pair in pairs.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Nodes:
    """How pairs differ, and what follows."""

    size: int | None = None  # ranks a node; None: no nodes
    text: str = ""  # a sentence; empty: pairs are alike

    @classmethod
    def of(cls, alone: Alone) -> _Nodes:
        rates = _pair_rates(alone)
        ranks = sorted({rank for pair in rates for rank in pair})
        ordered = sorted(rates.values())
        gap, fast = max(((high / low, high) for low, high in pairwise(ordered)), default=(1.0, 0.0))
        if gap < _NODES_GAP:
            return cls()
        near = {pair for pair, rate in rates.items() if rate >= fast}
        groups = {frozenset({one, *(rank for pair in near if one in pair for rank in pair)}) for one in ranks}
        slow, quick = (
            format_bandwidth(geometric_mean(rate for rate in ordered if (rate >= fast) is wanted))
            for wanted in (False, True)
        )
        text = f"Some pairs reach {quick}, others {slow}"
        size = len(next(iter(groups)))
        if sum(map(len, groups)) != len(ranks) or any(len(group) != size for group in groups):
            return cls(text=f"{text}, but the fast ones do not join equal nodes.")
        if any(max(group) - min(group) >= size for group in groups):
            named = ", ".join("+".join(map(str, sorted(group))) for group in sorted(groups, key=min))
            return cls(text=f"{text}: nodes of ranks {named}; number ranks node by node for kvrsim.")
        return cls(size=size, text=f"{text}: nodes of {size} ranks.")

    def apart(self, row: Measurement) -> bool:
        """Whether a message goes from one node to another."""
        src, dst = _flow(row)
        return self.size is not None and src // self.size != dst // self.size


def _pair_rates(alone: Alone) -> dict[Flow, float]:
    """Bytes/s of each pair, of both directions and all large sizes together."""
    flows = {flow for flow, _ in alone}
    common = [nbytes for nbytes in {nbytes for _, nbytes in alone} if all((flow, nbytes) in alone for flow in flows)]
    sizes = [nbytes for nbytes in common if nbytes * _LARGE >= max(common)]
    rates: dict[Flow, list[float]] = {}
    for flow in flows if sizes else ():
        low, high = sorted(flow)
        rates.setdefault((low, high), []).extend(nbytes / alone[flow, nbytes] for nbytes in sizes)
    return {pair: geometric_mean(found) for pair, found in rates.items()}


def _network(rows: Sequence[Measurement], alone: Alone, name: str) -> tuple[LinkSpec, str]:
    """One rank's share of the network while all ranks of its node use it, where that was measured."""
    link = measured_link(rows, name)
    crowded = _Slowdowns.of([row for row in rows if row.messages > 1 and not _near(row)], alone).separate
    if not crowded:
        return (
            link,
            "Between nodes no simultaneous messages were measured: each rank is assumed to have that by itself.",
        )
    messages = max(crowded)
    factor = max(1.0, crowded[messages])
    said = f"Between nodes {messages} simultaneous messages take {factor:.2f} times as long as one: a rank's share."
    return replace(link, bandwidth_bytes_per_s=rounded(link.bandwidth_bytes_per_s / factor)), said


def _near(row: Measurement) -> bool:
    """Whether it is a message between neighbours."""
    src, dst = _flow(row)
    return abs(dst - src) == 1


def _flow(row: Measurement) -> Flow:
    assert row.src is not None
    assert row.dst is not None
    return row.src, row.dst
