"""Operations of strategies' programs, and the bytes and seconds of a program.

A strategy is a list of these operations per rank and kind of layer, run once per layer. Every number in an operation
may be an array over a batch of partitions, shape (B,), so that one program describes thousands of candidates; the
event executor takes B = 1.

Two clocks run on a rank. The host issues operations one after another, `host_s` each, and never waits for the device.
The device (the compute stream) starts an operation when it is free and the host has begun to issue it, and ends it no
earlier than the host has issued all of it: `end = max(max(device, host_begin) + device_s, host_begin + host_s)`.

A new operation needs code in four places: here, with the bytes that it sends and holds; in the event executor; in the
batch executor; and in the bus executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
WorkKind = Literal["request", "embedding", "qkv", "append", "attention", "merge", "output+mlp", "head", "other"]
# Content of a message; heads: some heads of a chunk's Q, K, V or outputs; state: the state of a recurrence.
Payload = Literal["KV", "activations", "heads", "state", "tokens"]


class Compute(NamedTuple):
    """Work on the rank's own compute stream."""

    name: str  # name in a timeline
    device_s: Array  # seconds of device time, shape (B,)
    host_s: float = 0.0  # seconds that the host needs to issue it
    kernels: float = 0.0  # number of the decoder layer's kernels that it launches; see strategies.layers.launched
    kv_bytes: Array | None = None  # bytes of the layer's K and V that the rank then holds, shape (B,); None: as before
    score_elements: Array | None = None  # elements of an eager kernel's score matrix, shape (B,); None: no matrix
    query_blocks: Array | None = None  # number of attention calls for the chunk, shape (B,); None: one
    kind: WorkKind = "other"  # kind of work, which decides the colour in a picture


class Send(NamedTuple):
    """Hand a message to the link towards `dst`; messages on a link go first in, first out.

    The message overlaps computation. A rendezvous instead starts when the receiver has reached its Recv, and
    holds both compute streams until the last byte has left (as torch.distributed's send and recv do).
    """

    dst: int  # rank that receives
    nbytes: Array  # message size, shape (B,)
    host_s: float = 0.0
    rendezvous: bool = False
    in_turn: bool = False  # starts after the rank's earlier in-turn messages have left, on any link
    payload: Payload = "KV"


class Recv(NamedTuple):
    """Hold the compute stream until the next message from `src` has arrived."""

    src: int
    host_s: float = 0.0
    rendezvous: bool = False  # same value as in the matching Send
    payload: Payload = "KV"  # same value as in the matching Send


class AllGather(NamedTuple):
    """A ring of p - 1 steps that gathers K and V: in each step, a rank passes the piece received last to the next rank.

    There is no barrier: a piece moves when the sender holds it, both ranks have reached the collective
    and the link is free. A rank goes on when it has received all pieces. p: number of ranks that take part.
    """

    nbytes: Array  # this rank's own piece, shape (B,)
    host_s: float = 0.0
    among: int | None = None  # size of the groups of consecutive ranks that gather; None: all ranks

    def members(self, rank: int, num_ranks: int) -> range:
        """Return the ranks of a rank's group, including the rank itself."""
        size = self.among or num_ranks
        first = rank // size * size
        return range(first, first + size)


class RingPass(NamedTuple):
    """p rounds of work on a piece. In each round but the last, the piece is also sent to the next rank.

    There are two buffers: one is worked on and sent, the other receives. A piece moves when both ranks have reached
    the round. A rank reaches the next round when its work is done, its piece has left and the next piece has arrived.
    """

    name: str  # name of the work
    device_s: Array  # seconds of each round, shape (p, B)
    nbytes: Array  # bytes of the piece held in each round except the last, shape (p - 1, B)
    host_s: tuple[float, ...]  # seconds to issue each round
    kernels: tuple[float, ...] = ()  # number of kernels that each round launches; empty: none
    overlaps: bool = True  # whether the work overlaps the message; else the work comes first
    message_share: float = 0.0  # share of the work's rate that is lost while a piece is in flight
    score_elements: Array | None = None  # elements of the largest round's score matrix; see Compute
    kind: WorkKind = "attention"  # kind of the work
    payload: Payload = "KV"  # content of the pieces


class AllToAll(NamedTuple):
    """Messages from a rank's chunk to every other rank, one after another, the next rank first.

    Every message waits until its receiver reaches the collective. A rank goes on when all its messages have left
    and all messages for it have arrived.
    """

    nbytes: Array  # bytes for the next rank, the one after it, ..., shape (p - 1, B)
    host_s: float = 0.0
    payload: Payload = "heads"


class Collective(NamedTuple):
    """A collective among the GPUs of a rank. They do the same work, so they reach it together."""

    name: str  # name in a timeline
    seconds: Array  # time on the compute stream, shape (B,)
    nbytes: Array  # bytes that each GPU sends
    host_s: float = 0.0


class Load(NamedTuple):
    """Hold the compute stream until a part of the cached prefix has been loaded.

    A rank's loads go first in, first out, over a link of their own, and overlap all other work. With `ahead`, the
    first load begins with the request, and each later load when the previous one has left the link. Without `ahead`,
    a load begins when the rank goes on after the previous load.
    """

    name: str  # name of the source in a timeline
    nbytes: Array  # bytes, shape (1,): the same in all partitions
    seconds: Array  # time on the rank's link, shape (1,)
    latency_s: float = 0.0  # seconds from leaving the link to the arrival
    ahead: bool = True
    host_s: float = 0.0


Op = Compute | Send | Recv | AllGather | RingPass | AllToAll | Collective | Load
Collectives = AllGather | RingPass | AllToAll  # collectives of several ranks, which meet


def work_s(op: Op) -> Array:
    """Device seconds of the rank's own work in an operation, shape (B,)."""
    if isinstance(op, Compute):
        return op.device_s
    if isinstance(op, RingPass):
        return np.asarray(op.device_s.sum(axis=0))
    return np.zeros(1)


def stream_s(op: Op) -> Array:
    """Seconds for which an operation that needs no other ranks holds its rank's stream."""
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def host_s_of(op: Any) -> float:
    """Seconds that the host needs to issue an operation, all its rounds together."""
    return sum(op.host_s) if isinstance(op, RingPass) else op.host_s


def beside_message_s(work_s: Array, flight_s: Array, share: float) -> Array:
    """Seconds of work that loses `share` of its rate for the first `flight_s` seconds, while messages are in flight.

    flight_s: has the shape of the result.
    """
    if not share:
        return work_s
    beside_s = share * flight_s
    np.minimum(beside_s, share / (1.0 - share) * work_s, out=beside_s)
    beside_s += work_s
    return beside_s


def with_arrays(op: Op, change: Callable[[Array], Array]) -> Op:
    """Return the operation with `change` applied to each of its arrays."""
    arrays: dict[str, Any] = {
        name: change(value) for name, value in op._asdict().items() if isinstance(value, np.ndarray)
    }
    return op._replace(**arrays)


def slowed_by_pending_recv(ops: tuple[Op, ...], share: float | Array) -> tuple[Op, ...]:
    """Slow the computation in a rank's layer, which loses `share` of its rate while a receive waits.

    A rank posts the receive of the next layer as soon as it has the message of this layer, so that a receive waits
    nearly all the time. If the previous rank is far ahead, messages arrive sooner, and the slowed times are too long.
    A rendezvous is not posted ahead.
    """
    if not np.any(share) or not any(isinstance(op, Recv) and not op.rendezvous for op in ops):
        return ops
    factor = 1.0 / (1.0 - share)
    return tuple(op._replace(device_s=factor * op.device_s) if isinstance(op, Compute) else op for op in ops)


SEND_COPIES = "copies for the send"  # name of the computation that a message takes from its sender


def with_senders(ops: tuple[Op, ...], sends: Array) -> tuple[Op, ...]:
    """Remove what messages take from ranks that send none; `sends`: 1 for ranks that send, else 0, shape (ranks, 1)."""
    changed: list[Op] = []
    for op in ops:
        if isinstance(op, Compute) and op.name == SEND_COPIES:
            changed.append(op._replace(device_s=sends * op.device_s))
        else:
            changed.append(op)
    return tuple(changed)


def slower(ops: Sequence[Op], factor: float | Array) -> tuple[Op, ...]:
    """Return the operations on GPUs that are slower by `factor`; hosts and links are unchanged."""
    if isinstance(factor, float) and factor == 1.0:
        return tuple(ops)
    return tuple(
        op._replace(device_s=factor * op.device_s)
        if isinstance(op, Compute | RingPass) and op.kind != "request"
        else op
        for op in ops
    )


def run_order(ranks: Sequence[Sequence[Any]]) -> tuple[list[Sequence[int]], list[int]]:
    """An order in which ranks can run their operations, and the number of operations that each rank can run.

    Each entry of the order is the ranks whose next operations run together: one rank, the sender and the receiver of a
    rendezvous, or the ranks of a collective. The order does not depend on times. A rank that cannot run all of its
    operations waits for ever.
    ranks: the operations of each rank; a message is a Send, or another object with `dst` and `rendezvous`.
    """
    order = list[Sequence[int]]()
    at = [0] * len(ranks)
    sent = Counter[tuple[int, int]]()

    def now(rank: int) -> Any:
        return ranks[rank][at[rank]] if at[rank] < len(ranks[rank]) else None

    def together(rank: int, op: Any) -> Sequence[int]:
        """Ranks whose next operations run together with this rank's next one, `op`; empty if it has to wait."""
        if isinstance(op, Recv):
            return (rank,) if sent[op.src, rank] else ()
        if isinstance(op, Collectives):
            group = _members(op, rank, len(ranks))
            # The last member is asked first: while the earlier ranks arrive one by one, it is not there yet.
            alike = all(
                type(now(member)) is type(op) and _members(now(member), member, len(ranks)) == group
                for member in reversed(group)
            )
            return group if alike else ()
        if getattr(op, "rendezvous", False):
            other = now(op.dst)
            return (rank, op.dst) if isinstance(other, Recv) and other.src == rank else ()
        return (rank,)

    while True:
        before = len(order)
        for rank in range(len(ranks)):
            while (op := now(rank)) is not None and (group := together(rank, op)):
                if isinstance(op, Recv):
                    sent[op.src, rank] -= 1
                elif len(group) == 1 and hasattr(op, "dst"):
                    sent[rank, op.dst] += 1
                order.append(group)
                for member in group:
                    at[member] += 1
        if len(order) == before:
            return order, at


def _members(op: AllGather | RingPass | AllToAll, rank: int, num_ranks: int) -> range:
    """Ranks that run a rank's collective together."""
    return op.members(rank, num_ranks) if isinstance(op, AllGather) else range(num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """All operations of every rank from the prompt to the first token.

    Most strategies have a block per kind of layer. In a pipeline, a block is a piece of the context on all stages.
    """

    strategy: str
    prologue: tuple[tuple[Op, ...], ...]  # operations per rank: embedding
    layers: tuple[tuple[tuple[Op, ...], ...], ...]  # operations per kind of layer, per rank
    layer_kind_index: tuple[int, ...]  # kind of each layer, in order
    epilogue: tuple[tuple[Op, ...], ...]  # operations per rank: final norm and head, on the last rank
    layer_numbers: tuple[tuple[int, ...], ...] | None = None  # layer of each block, per rank; None: in order

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return len(self.prologue)

    def ops(self, rank: int) -> Sequence[tuple[int | None, Op]]:
        """The whole sequence of one rank as (layer or None, operation)."""
        sequence: list[tuple[int | None, Op]] = [(None, op) for op in self.prologue[rank]]
        numbers = range(len(self.layer_kind_index)) if self.layer_numbers is None else self.layer_numbers[rank]
        for layer, kind in zip(numbers, self.layer_kind_index, strict=True):
            sequence.extend((layer, op) for op in self.layers[kind][rank])
        sequence.extend((None, op) for op in self.epilogue[rank])
        return sequence

    @property
    def layer_counts(self) -> npt.NDArray[np.intp]:
        """Number of layers of each kind."""
        return np.bincount(np.array(self.layer_kind_index, dtype=int), minlength=len(self.layers))

    @property
    def query_blocks(self) -> tuple[tuple[int, ...], ...] | None:
        """Attention calls per rank and layer, for one partition; None where no attention is issued in blocks."""
        calls = [
            [[op.query_blocks for op in ops if isinstance(op, Compute) and op.query_blocks is not None] for ops in kind]
            for kind in self.layers
        ]
        if not any(any(kind) for kind in calls):
            return None
        most = [[int(max((one[0] for one in own), default=1)) for own in kind] for kind in calls]
        return tuple(tuple(most[kind][rank] for kind in self.layer_kind_index) for rank in range(self.num_ranks))

    @property
    def most_query_blocks(self) -> tuple[int, ...] | None:
        """Attention calls per rank, in the layer with the most calls."""
        return None if self.query_blocks is None else tuple(map(max, self.query_blocks))

    @property
    def num_rows(self) -> int:
        """Number of partitions in the batch that the program was built for."""
        blocks = {id(ops): ops for block in self._blocks for ops in block}  # ranks may share blocks
        computes = (op for ops in blocks.values() for op in ops if isinstance(op, Compute))
        return max((op.device_s.size for op in computes), default=1)

    def row(self, index: int) -> Program:
        """Return the program of one partition of the batch."""
        return self.rows(slice(index, index + 1))

    def rows(self, which: slice) -> Program:
        """Return the program of some partitions of the batch."""

        def some(values: Array) -> Array:
            if values.shape[-1] == 1:
                return values
            return values[..., which]

        return self._map(lambda _, ops: tuple(with_arrays(op, some) for op in ops))

    def on_slower_gpus(self, factors: Sequence[float]) -> Program:
        """Return the program on GPUs that are slower by one factor per rank; hosts and links are unchanged."""
        if all(factor == 1.0 for factor in factors):
            return self
        return self._map(lambda rank, ops: slower(ops, factors[rank]))

    def _map(self, change: Callable[[int, tuple[Op, ...]], tuple[Op, ...]]) -> Program:
        """Return the program with `change` applied to each rank's operations in each block."""

        def change_block(block: tuple[tuple[Op, ...], ...]) -> tuple[tuple[Op, ...], ...]:
            return tuple(change(rank, ops) for rank, ops in enumerate(block))

        layers = tuple(map(change_block, self.layers))
        return replace(self, prologue=change_block(self.prologue), layers=layers, epilogue=change_block(self.epilogue))

    @property
    def _blocks(self) -> tuple[tuple[tuple[Op, ...], ...], ...]:
        return (self.prologue, *self.layers, self.epilogue)


def sent_bytes(program: Program, rank: int) -> float:
    """Bytes that a rank puts on its links; in a ring, its own piece and the pieces that it forwards."""
    once = (*program.prologue[rank], *program.epilogue[rank])
    sent = sum(op.nbytes.item() for op in once if isinstance(op, Collective))
    for count, kind in zip(program.layer_counts, program.layers, strict=True):
        own = [op for op in kind[rank] if isinstance(op, Send | Collective | RingPass | AllToAll)]
        sent += count * sum(float(op.nbytes.sum()) for op in own)
        sent += count * _gathered_bytes(kind, rank)
    return float(sent)


def _gathered_bytes(layer: Sequence[Sequence[Op]], rank: int) -> float:
    """Bytes that a rank sends in a layer's all-gathers: all pieces except the next rank's own."""
    total = 0.0
    for number, op in enumerate(_gathers(layer[rank])):
        ranks = op.members(rank, len(layer))
        after = ranks[(rank - ranks[0] + 1) % len(ranks)]
        total += sum(_gathers(layer[other])[number].nbytes.item() for other in ranks if other != after)
    return total


def _gathers(ops: Sequence[Op]) -> list[AllGather]:
    return [op for op in ops if isinstance(op, AllGather)]


def loaded_bytes(program: Program, rank: int) -> float:
    """Bytes of the cached prefix that a rank loads."""
    return float(sum(op.nbytes.item() for _, op in program.ops(rank) if isinstance(op, Load)))


def bytes_in_flight(
    layer: Sequence[Sequence[Op]], ranks: Sequence[int], alike: Sequence[int] | None = None
) -> list[float]:
    """Peak bytes of these ranks in one layer, for the first of a batch of partitions.

    Messages and gathered pieces count until the next operation with `kv_bytes`, which has copied them. A ring holds the
    piece that it works on and the piece that arrives; an all-to-all holds the messages that it sends and receives; a
    load that is not `ahead` holds its own bytes and as many for the next load.

    layer: the operations of each rank. alike: for each rank, a rank that gathers pieces of equal size; None: itself.
    """
    if alike is None:
        alike = range(len(layer))

    @cache
    def gathered(members: range, number: int) -> float:
        counts = Counter(alike[member] for member in members)
        return sum(count * float(_gathers(layer[rank])[number].nbytes[0]) for rank, count in counts.items())

    received = _received_bytes(layer)

    def peak_of(rank: int) -> float:
        sent: dict[int, Iterator[float]] = {}  # by sender: bytes of its messages to the rank, in order
        peak = waiting = 0.0
        num_gathers = num_exchanges = 0
        for op in layer[rank]:
            now = 0.0
            if isinstance(op, Recv):
                if op.src not in sent:
                    sent[op.src] = _sent_to(rank, layer[op.src])
                waiting += next(sent[op.src], 0.0)
            elif isinstance(op, AllGather):
                waiting += gathered(op.members(rank, len(layer)), num_gathers)
                num_gathers += 1
            elif isinstance(op, AllToAll):
                now = float(op.nbytes[:, 0].sum()) + received(rank, num_exchanges)
                num_exchanges += 1
            elif isinstance(op, Load) and not op.ahead:
                now = 2.0 * op.nbytes.item()
            elif isinstance(op, RingPass):
                now = 2.0 * float(op.nbytes[:, 0].max(initial=0.0))
            peak = max(peak, waiting + now)
            if isinstance(op, Compute) and op.kv_bytes is not None:
                waiting = 0.0
        return peak

    return [peak_of(rank) for rank in ranks]


def _sent_to(rank: int, ops: Sequence[Op]) -> Iterator[float]:
    """Bytes of the messages to a rank, in order, for the first of a batch of partitions."""
    return (float(op.nbytes[0]) for op in ops if isinstance(op, Send) and op.dst == rank)


def _received_bytes(layer: Sequence[Sequence[Op]]) -> Callable[[int, int], float]:
    """Return a function of a rank and a number: bytes that the rank receives in its all-to-all of this number."""

    @cache
    def sent(number: int) -> Array:
        """Bytes of each rank's messages to the ranks after it in turn, shape (p, p - 1)."""
        exchanges = [[op for op in ops if isinstance(op, AllToAll)] for ops in layer]
        return np.stack([ops[number].nbytes[:, 0] for ops in exchanges])

    def received(rank: int, number: int) -> float:
        sources = np.delete(np.arange(len(layer)), rank)
        return float(sent(number)[sources, (rank - sources - 1) % len(layer)].sum())

    return received


def computes_s(program: Program) -> list[float]:
    """Device time of each rank's own operations."""
    by_block: dict[int, float] = {}  # seconds by block, because ranks may share blocks

    def block_s(ops: tuple[Op, ...]) -> float:
        if id(ops) not in by_block:
            by_block[id(ops)] = float(sum(work_s(op).item() for op in ops))
        return by_block[id(ops)]

    layers = list(zip(program.layer_counts.tolist(), program.layers, strict=True))
    return [
        block_s(program.prologue[rank])
        + sum(count * block_s(kind[rank]) for count, kind in layers)
        + block_s(program.epilogue[rank])
        for rank in range(program.num_ranks)
    ]


def waited_s(busy_s: float, finish_s: float) -> float:
    """Seconds in which a rank did not compute before it finished; a rounding error counts as 0."""
    wait_s = finish_s - busy_s
    return wait_s if wait_s > 1e-12 * finish_s else 0.0
