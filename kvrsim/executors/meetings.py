"""Operations of the event executor for which all ranks, or all GPUs of one rank, come together."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from kvrsim.program import AllToAll, Collective, RingPass

if TYPE_CHECKING:
    from kvrsim.executors.event import RankProcess

Process = Generator[Any, Any, Any]


def ring_pass(process: RankProcess, layer: int | None, op: RingPass) -> Process:
    """Round by round: work on a piece while it goes on, and wait for the next."""
    last = len(op.host_s) - 1
    for index, host_s in enumerate(op.host_s):
        yield from process.until(max(process.clock_s, process.host_s))
        process.waited("host", layer)
        begin_s = process.env.now
        process.host_s += host_s
        work_s = op.device_s[index]
        if index < last:
            piece = process.env.process(_pass_on(process, layer, op.nbytes[index].item()))
            if not op.overlaps:
                yield piece
                process.waited("ring", layer, "KV")
                begin_s = process.env.now
        process.clock_s = max(process.computed_s(begin_s, work_s), process.host_s)
        process.replay.note(process.rank, "compute", op.name, op.kind, layer, begin_s, process.clock_s)
        if index < last and op.overlaps:
            yield piece
            process.waited("ring", layer, "KV")


def _pass_on(process: RankProcess, layer: int | None, nbytes: float) -> Process:
    """Hand the piece to the next rank once it has come to the round; ends when the next piece is there, too."""
    replay, rank = process.replay, process.rank
    dst, meeting = replay.after(rank), process.join()
    yield meeting.joined[dst]
    left = process.env.event()
    process.env.process(replay.carry(rank, dst, nbytes, layer, left, meeting.pieces[dst]))
    yield left
    yield meeting.pieces[rank].get()


def all_to_all(process: RankProcess, layer: int | None, op: AllToAll) -> Process:
    """One message after another, then wait for the others'."""
    replay, rank = process.replay, process.rank
    process.host_s += op.host_s
    yield from process.until(max(process.clock_s, process.host_s))
    meeting = process.join()
    for shift, nbytes in enumerate(op.nbytes, start=1):
        dst = (rank + shift) % replay.program.num_ranks
        yield meeting.joined[dst]
        left = process.env.event()
        carried = replay.carry(rank, dst, nbytes.item(), layer, left, meeting.pieces[dst], payload="heads")
        process.env.process(carried)
        yield left
    for _ in op.nbytes:
        yield meeting.pieces[rank].get()
    process.waited("all-to-all", layer, "heads")


def collective(process: RankProcess, layer: int | None, op: Collective) -> None:
    """Nobody outside of the rank's own group sees it: advance the clock alone."""
    start_s = max(process.clock_s, process.host_s)
    process.replay.note(process.rank, "wait", "host", "stall", layer, process.clock_s, start_s)
    process.host_s += op.host_s
    process.clock_s = max(start_s + op.seconds.item(), process.host_s)
    process.replay.note(process.rank, "wait", op.name, "collective", layer, start_s, process.clock_s)
