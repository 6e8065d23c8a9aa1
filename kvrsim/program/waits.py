"""How long ranks compute, and how long they wait, in a program that has run."""

from __future__ import annotations

from collections.abc import Sequence

from kvrsim.program.operations import Op, Program, work_s


def compute_s(program: Program, rank: int) -> float:
    """Device time of a rank's own operations."""
    return computes_s(program, (rank,))[0]


def computes_s(program: Program, ranks: Sequence[int] | None = None) -> list[float]:
    """Device time of each rank's own operations; of these ranks, or of all."""
    known: dict[int, float] = {}  # by block: ranks may share them

    def block_s(ops: tuple[Op, ...]) -> float:
        if id(ops) not in known:
            known[id(ops)] = float(sum(work_s(op).item() for op in ops))
        return known[id(ops)]

    return [
        block_s(program.prologue[rank])
        + sum(
            float(count) * block_s(kind[rank]) for count, kind in zip(program.layer_counts, program.layers, strict=True)
        )
        + block_s(program.epilogue[rank])
        for rank in (range(program.num_ranks) if ranks is None else ranks)
    ]


def waited_s(busy_s: float, finish_s: float) -> float:
    """Time that a rank was not computing until it finished; rounding alone counts as none."""
    wait_s = finish_s - busy_s
    return wait_s if wait_s > 1e-12 * finish_s else 0.0
