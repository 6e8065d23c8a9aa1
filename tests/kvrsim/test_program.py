"""Programs: the operations of every rank in order, and matching messages."""

from __future__ import annotations

import numpy as np

from kvrsim.program import Compute, Program


def compute(name: str, device_s: float = 1.0) -> Compute:
    return Compute(name=name, device_s=np.array([device_s]))


def test_ops_run_from_the_prologue_through_all_layers() -> None:
    program = Program(
        strategy="test",
        prologue=((compute("embedding"),),),
        layers=(((compute("wide"),),), ((compute("narrow", 2.0), compute("more")),)),
        layer_kind_index=(0, 1, 0),
        epilogue=((compute("head"),),),
    )
    names = [(layer, op.name) for layer, op in program.ops(0) if isinstance(op, Compute)]
    layers = [(0, "wide"), (1, "narrow"), (1, "more"), (2, "wide")]
    assert names == [(None, "embedding"), *layers, (None, "head")]
    assert program.num_ranks == 1
    assert sum(op.device_s.item() for _, op in program.ops(0) if isinstance(op, Compute)) == 6.0 + 1.0
