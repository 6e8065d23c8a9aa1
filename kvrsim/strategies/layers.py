"""The operations of one rank in one layer, for each kind of layer and every strategy.

A strategy says what ranks do in a layer of attention. A layer that is an MLP alone needs nobody else. In a layer with a
state each rank waits for the state of the rank before, and hands its own on when it has computed its chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.choices import PrefixAccess
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.kernels.tensor_parallel import all_reduce
from kvrsim.model.mixers import Attention, LatentAttention, Recurrence
from kvrsim.model.spec import ModelSpec
from kvrsim.program import AllToAll, Collective, Compute, Load, Op, RingPass
from kvrsim.strategies.base import Step, Strategy

_LSE_BYTES = 4  # of a log-sum-exp, which is in fp32


def layer_ops(strategy: Strategy, step: Step, rank: int) -> Iterator[Op]:
    """What a rank does in a layer; in a group of GPUs, with their all-reduces.

    Nothing runs beside an all-reduce, so all stand at the end of the layer.
    """
    if step.costs.mixing is None:
        yield step.output_mlp(rank)
    elif step.costs.has_state:
        ops = _with_state(step, rank, in_turn=strategy.sends_in_turn)
        load = prefix_load(strategy, step, rank) if strategy.pipeline is None else None
        yield from ops if load is None else _inserted(ops, (load,))
    elif step.costs.prefix.is_there or strategy.pipeline is not None:
        yield from strategy.layer(step, rank)
    else:
        yield from _with_prefix(strategy, step, rank)
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


def _with_prefix(strategy: Strategy, step: Step, rank: int) -> Iterator[Op]:
    """The strategy's layer where the cached prefix has to come to the queries, or they to it, after the projections."""
    costs, chunk = step.costs, step.chunks[rank]
    load = prefix_load(strategy, step, rank)
    if costs.new_alone is None or step.num_ranks == 1:  # of a part of the ranks, what it computes itself
        yield from _inserted(strategy.layer(step, rank), () if load is None else (load,))
        return
    ranks = range(step.num_ranks)
    starts = tuple(step.starts[one] - step.cached for one in ranks)
    chunks = tuple(step.chunks[one] for one in ranks)
    alone = Step(costs.new_alone, chunks, starts, query_blocks=step.query_blocks)
    held = costs.kv_bytes(step.cached) * costs.prefix.share
    ops = (
        replace(op, kv_bytes=op.kv_bytes + held) if isinstance(op, Compute) and op.kv_bytes is not None else op
        for op in strategy.layer(alone, rank)
    )
    merged_s = step.num_ranks * costs.merge_s(chunk) + 2.0 * costs.cast_s(chunk)
    merge = Compute(name="merge", device_s=merged_s, host_s=step.num_ranks * costs.host_merge_s, kind="merge")
    yield from _inserted(ops, (*(() if load is None else (load,)), *_pass_q(step, rank)), (merge,))


def prefix_load(strategy: Strategy, step: Step, rank: int) -> Load | None:
    """What a rank loads of the cached prefix for a layer; None: nothing. A state is the first rank's."""
    costs = step.costs
    if strategy.pipeline is not None and costs.prefix.source is None:  # a stage has its own layers'
        return None
    if costs.mixing is None or (costs.has_state and rank):
        return None
    if costs.has_state:
        return costs.prefix.load_state(costs.prefix_bytes)
    by_heads = strategy.splits_heads and costs.prefix.access == "whole" and step.num_ranks > 1
    needed = costs.on_heads(step.num_ranks) if by_heads else costs
    return costs.prefix.load(rank, needed.prefix_bytes, reads_peers=not strategy.carries_prefix)


def _inserted(ops: Iterable[Op], before: Sequence[Op], after: Sequence[Op] = ()) -> Iterator[Op]:
    """A layer with operations after its projections, and others before its output projection."""
    listed = list(ops)
    kinds = [op.kind if isinstance(op, Compute) else None for op in listed]
    first = kinds.index("qkv") + 1 if "qkv" in kinds else 0
    last = kinds.index("output+mlp") if "output+mlp" in kinds else len(listed)
    yield from (*listed[:first], *before, *listed[first:last], *after, *listed[last:])


def _pass_q(step: Step, rank: int) -> Iterator[Op]:
    """The queries of all chunks go round, each rank attends from them to its share of the prefix; results go back.

    Results are in the request's type, with a log-sum-exp a head in fp32.
    """
    costs, ranks = step.costs, step.num_ranks
    mixer = costs.layer.mixer
    assert isinstance(mixer, Attention | LatentAttention)
    lengths = np.stack([step.chunks[one] for one in range(ranks)])
    starts = np.stack([np.broadcast_to(step.starts[one], lengths[0].shape) for one in range(ranks)])
    held = (rank - np.arange(ranks)) % ranks  # whose queries are here, round by round
    work_s = [costs.share_s(lengths[one], starts[one], again=number > 0) for number, one in enumerate(held)]
    yield RingPass(
        name="attention to the prefix",
        device_s=np.stack(work_s),
        nbytes=costs.feature_bytes(lengths[held[:-1]], mixer.num_attention_heads * mixer.head_dim),
        host_s=(costs.host_attention_s,) * ranks,
        overlaps=costs.sends_overlap,
        message_share=costs.message_share,
        score_elements=costs.score_elements(lengths.max(axis=0), step.held_prefix),
        payload="heads",
    )
    back = lengths[(rank + np.arange(1, ranks)) % ranks]
    results = costs.feature_bytes(back, mixer.num_attention_heads * mixer.v_head_dim)
    yield AllToAll(nbytes=results + back * float(_LSE_BYTES * costs.batch * mixer.num_attention_heads))


def accesses(strategy: Strategy, placement: PrefixPlacement, model: ModelSpec, ranks: int) -> tuple[PrefixAccess, ...]:
    """The ways in which the strategy's ranks may attend to a prefix that lies there."""
    if ranks == 1 or placement.place in ("all", "layers") or strategy.pipeline is not None:
        return ("whole",)
    mixers = [layer.mixer for layer in model.layer_kinds if layer.mixer is not None]
    merge = all(isinstance(one, Attention | LatentAttention | Recurrence) and not one.is_sparse for one in mixers)
    shared: tuple[PrefixAccess, ...] = ("pass-kv", "pass-q") if merge else ("pass-kv",)
    return shared if placement.place == "sharded" else ("whole", *shared)


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


def placement_refusal(strategy: Strategy, placement: PrefixPlacement) -> str | None:
    """Where the cached prefix must lie for the strategy; None: it may lie there."""
    if placement.place == "sharded" and strategy.pipeline is not None:
        return "a prefix that lies on the stages of its layers, not sharded by tokens"
    if placement.place in ("sharded", "layers") and strategy.group_size is None:
        return f"a prefix of which each GPU has its own heads (all), not {placement.place}"
    return None


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
