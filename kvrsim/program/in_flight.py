"""Bytes of messages, read from a program: what a rank sends, and what it holds at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache

from kvrsim.program.operations import AllGather, AllToAll, Collective, Compute, Load, Op, Program, Recv, RingPass, Send


def sent_bytes(program: Program, rank: int) -> float:
    """Bytes that a rank puts on its links; of a ring, its own piece and those it passes on."""
    once = (*program.prologue[rank], *program.epilogue[rank])
    sent = sum(op.nbytes.item() for op in once if isinstance(op, Collective))
    for count, kind in zip(program.layer_counts, program.layers, strict=True):
        own = [op for op in kind[rank] if isinstance(op, Send | Collective | RingPass | AllToAll)]
        sent += count * sum(float(op.nbytes.sum()) for op in own)
        sent += count * _gathered_bytes(kind, rank)
    return float(sent)


def _gathered_bytes(layer: Sequence[Sequence[Op]], rank: int) -> float:
    """What a rank sends in a layer's all-gathers: all pieces but that of the rank that it sends to."""
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
    loads = [op for _, op in program.ops(rank) if isinstance(op, Load)]
    return float(sum(op.nbytes.item() for number, op in enumerate(loads) if number not in op.held))


def bytes_in_flight(layer: Sequence[Sequence[Op]]) -> list[float]:
    """Peak bytes of each rank in one layer, for the first of a batch of partitions.

    A message and gathered pieces stay until the next operation that says what the rank holds: it has copied them. A
    ring holds the piece that it works on and the one that comes; an all-to-all what leaves and what comes; a load of
    what does not stay, itself and the next.

    layer: the operations of each rank.
    """
    sent: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    for src, ops in enumerate(layer):
        for op in ops:
            if isinstance(op, Send):
                sent[src, op.dst].append(float(op.nbytes[0]))
    gathers = [_gathers(ops) for ops in layer]
    exchanges = [[op for op in ops if isinstance(op, AllToAll)] for ops in layer]

    @cache
    def gathered(ranks: range, number: int) -> float:
        return sum(float(gathers[rank][number].nbytes[0]) for rank in ranks)

    return [_peak_of(rank, ops, sent, gathered, exchanges) for rank, ops in enumerate(layer)]


def _peak_of(
    rank: int,
    ops: Sequence[Op],
    sent: dict[tuple[int, int], deque[float]],
    gathered: Callable[[range, int], float],
    exchanges: Sequence[Sequence[AllToAll]],
) -> float:
    """`gathered`: bytes of all pieces of some ranks' gather."""
    peak = waiting = 0.0
    num_gathers = num_exchanges = 0
    for op in ops:
        now = 0.0
        if isinstance(op, Recv) and sent[op.src, rank]:
            waiting += sent[op.src, rank].popleft()
        elif isinstance(op, AllGather):
            waiting += gathered(op.members(rank, len(exchanges)), num_gathers)
            num_gathers += 1
        elif isinstance(op, AllToAll):
            comes = (others[num_exchanges] for src, others in enumerate(exchanges) if src != rank)
            sources = (src for src in range(len(exchanges)) if src != rank)
            now = float(op.nbytes[:, 0].sum()) + sum(
                float(one.nbytes[(rank - src - 1) % len(exchanges), 0]) for src, one in zip(sources, comes, strict=True)
            )
            num_exchanges += 1
        elif isinstance(op, Load) and not op.ahead:
            now = 2.0 * op.nbytes.item()
        elif isinstance(op, RingPass):
            now = 2.0 * float(op.nbytes[:, 0].max(initial=0.0))
        peak = max(peak, waiting + now)
        if isinstance(op, Compute) and op.kv_bytes is not None:
            waiting = 0.0
    return peak
