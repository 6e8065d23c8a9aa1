"""The operations of one rank in one layer, for each kind of layer and every strategy.

A strategy says what ranks do in a layer of attention. A layer that is an MLP alone needs nobody else. In a layer with a
state each rank waits for the state of the rank before, and hands its own on when it has computed its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.cost.tensor_parallel import all_reduce
from kvrsim.model.mixers import Recurrence
from kvrsim.model.spec import ModelSpec
from kvrsim.program.operations import AllToAll, Collective, Compute, Op
from kvrsim.strategies.base import Step, Strategy


def layer_ops(strategy: Strategy, step: Step, rank: int) -> Iterator[Op]:
    """What a rank does in a layer; in a group of GPUs, with their all-reduces.

    Nothing runs beside an all-reduce, so all stand at the end of the layer.
    """
    if step.costs.mixing is None:
        yield step.output_mlp(rank)
    elif step.costs.has_state:
        yield from _with_state(step, rank, in_turn=strategy.sends_in_turn)
    else:
        yield from strategy.layer(step, rank)
    yield from _experts(step, rank)
    yield from _all_reduces(step, rank)


def _with_state(step: Step, rank: int, *, in_turn: bool) -> Iterator[Op]:
    """Project the chunk, wait for the state before it, compute, hand the state after it on, MLP."""
    yield step.qkv(rank)
    if rank > 0:
        yield step.recv_state(rank)
    yield step.scan(rank)
    if rank < step.num_ranks - 1:
        yield step.send_state(rank, in_turn=in_turn)
    yield step.output_mlp(rank)


def _experts(step: Step, rank: int) -> Iterator[Op]:
    """Where experts lie on other ranks: tokens to their experts, the experts, their results back."""
    routed, ranks = step.costs.experts, step.num_ranks
    if routed is None or not routed.meets:
        return
    shares = [step.costs.batch * routed.reach * step.chunks[(rank + shift) % ranks] for shift in range(ranks)]
    there, back = routed.dispatched_bytes(step.costs.element_bytes), routed.combined_bytes(step.costs.element_bytes)
    experts = Compute(name="experts", device_s=routed.seconds(step.chunks[rank]), kind="output+mlp")
    if ranks == 1:  # a part of the ranks, which is asked for what it computes
        yield experts
        return
    yield AllToAll(nbytes=np.repeat(shares[0][None] * there, ranks - 1, axis=0), payload="tokens")
    yield experts
    yield AllToAll(nbytes=np.stack(shares[1:]) * back, payload="tokens")


def _all_reduces(step: Step, rank: int) -> Iterator[Collective]:
    """Sum what the GPUs of the rank's group have of the mixer's output and the MLP's; at once if parallel."""
    group = step.costs.group
    if group is not None:
        for _ in range(step.costs.num_sums):
            nbytes = step.costs.activation_bytes(step.chunks[rank])
            yield all_reduce(group, nbytes, step.costs.host.collective_s)


def refusal(strategy: Strategy, model: ModelSpec, ranks: int) -> str | None:
    """What the model must be for the strategy on so many ranks; None: it is."""
    stages, context = 1, ranks
    if strategy.pipeline is not None:
        context = strategy.context_size or 1
        stages = ranks // context
    if strategy.refuses is not None and (why := strategy.refuses(model, stages if strategy.pipeline else ranks)):
        return why
    if context == 1:
        return None
    mixers = [layer.mixer for layer in model.layer_kinds if layer.mixer is not None]
    states = [mixer for mixer in mixers if isinstance(mixer, Recurrence)]
    if states and not strategy.passes_state:
        return f"layers without a state to hand on in order; {model.name} has {states[0].title}"
    whole = [mixer for mixer in mixers if mixer.is_sparse]
    if whole and strategy.merges_blocks:
        return f"attention that can be merged from blocks of keys; {model.name} has {whole[0].title}"
    return None
