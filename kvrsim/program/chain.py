"""The program of a chain of ranks that differ in nothing but their neighbours: all ranks in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.program.operations import Op, slower


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainProgram:
    """What the ranks do; the arrays of operations have the shape (ranks, B), those of the epilogue (B,)."""

    prologue: tuple[Op, ...]
    layer: tuple[Op, ...]  # of a rank with neighbours on both sides: computes, a Recv, computes, a Send, computes
    num_layers: int  # all alike, at least 1
    epilogue: tuple[Op, ...]  # of the last rank

    def slowed(self, factors: Sequence[float]) -> ChainProgram:
        """As Program.slowed."""
        if all(factor == 1.0 for factor in factors):
            return self
        each = np.array(factors)[:, None]
        return replace(
            self,
            prologue=slower(self.prologue, each),
            layer=slower(self.layer, each),
            epilogue=slower(self.epilogue, factors[-1]),
        )
