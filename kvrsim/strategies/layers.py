"""Operations of one rank: before the layers, in each kind of layer, and after the layers; one GPU; tensor parallelism.

A strategy defines the work of several ranks in a layer with attention. A layer with only an MLP needs no other rank. In
a layer with a state, each rank waits for the state of the previous rank, and sends its own state on after its chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvrsim.choices import PrefixAccess
from kvrsim.engine import HostRates
from kvrsim.kernels.cost import CostModel
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.kernels.tensor_parallel import all_gather, all_reduce
from kvrsim.layout import Degrees
from kvrsim.model.mixers import Recurrence
from kvrsim.model.spec import ModelSpec
from kvrsim.placement import PlacedScenario
from kvrsim.program import AllToAll, Array, Collective, Compute, Load, Op, RingPass
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import RealRun, Step, Strategy, StrategyWords


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project, attend, compute the MLP; the cached prefix is on the GPU."""
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.starts[rank])
    yield step.attention(rank, prefix=step.starts[rank])
    yield step.output_mlp(rank)


SINGLE = Strategy(
    name="single",
    title="one GPU computes everything",
    source="KV-Runahead, Fig. 1",
    partition_rule="whole",
    layer=layer,
    degrees=Degrees(),
    words=StrategyWords(each_rank="all tokens, all layers", communication="none", holds="all K and V, all weights"),
    family="one GPU",
    colour=("#747678", "#6c727a"),
    baseline_rank=3,
    usual_in=frozenset({"fleets", "fleets on a bus", "maps", "paper"}),
    is_replayable=True,
    real_run=RealRun("single", "chain.Single", cache="one rank holds the K and V of all tokens"),
)
TENSOR_PARALLEL = Strategy(
    name="tp",
    title="tensor parallelism: every matrix split",
    source="Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053)",
    partition_rule="even",
    layer=SINGLE.layer,
    degrees=Degrees(tensor=None),
    words=StrategyWords(
        each_rank="all tokens, 1 / p of every matrix and of the heads",
        communication="two all-reduces of the activations in each layer",
        holds="K and V of 1 / p of the heads, 1 / p of the weights",
    ),
    family="tensor",
    colour=("#d21b42", "#e36650"),
    baseline_rank=1,
    usual_in=frozenset({"fleets", "fleets on a bus", "maps"}),
    real_run=RealRun(
        "tp",
        "tensor.TensorParallel",
        payload="collective",
        cache="each rank holds the K and V of all tokens for its own heads, so all ranks decode together",
    ),
)


def embedding(scenario: PlacedScenario, chunk: Array, cost: CostModel) -> tuple[Op, ...]:
    """Cost of reading and writing one row per token; in a group, each GPU has a share of the rows."""
    nbytes = 4.0 * scenario.model.hidden_size  # bytes read and written per row, with two-byte elements
    lookup = Compute(
        name="embedding", device_s=cost.traffic_s(chunk, (Traffic("embedding", nbytes, 1),)), kind="embedding"
    )
    if scenario.group is None:
        return (lookup,)
    summed = chunk * float(scenario.request.batch * scenario.model.hidden_size * scenario.request.dtype_bytes)
    return lookup, all_reduce(scenario.group, summed, scenario.host.collective_s)


def request(scenario: Scenario, chunk: Array, contexts: Sequence[int] | None = None) -> tuple[Op, ...]:
    """Wait of a request before its first layer, the same for every partition of the batch.

    contexts: tokens of each prompt, if several begin together; None: the scenario's request.
    """
    host = scenario.host
    if contexts is None:
        contexts = [scenario.request.batch * scenario.request.context_len]
    seconds = sum(host.request_s + host.token_s * tokens for tokens in contexts)
    if not seconds:
        return ()
    return (_hold("request", chunk, seconds),)


def before_step(scenario: Scenario, chunk: Array, keys: Array, cost: CostModel) -> tuple[Op, ...]:
    """Operations before each pass through the layers: the engine's step, and the mask if it was measured."""
    if scenario.profile is None:
        return ()
    host = scenario.host
    element_s = scenario.profile.kernels.elementwise.mask_element_s
    ops = []
    if host.step_s or host.prepare_s:
        ops.append(_hold("step", chunk, host.step_s, host.prepare_s))
    if element_s and scenario.kernel != "flash":  # flash kernels take no mask
        ops.append(Compute(name="mask", device_s=cost.mask_s(chunk * keys), kind="embedding"))
    return tuple(ops)


def _hold(name: str, chunk: Array, seconds: float, host_s: float | None = None) -> Compute:
    """Operation in which the device waits `seconds` for the software; `host_s` is the host's time, None: `seconds`."""
    if host_s is None:
        host_s = seconds
    return Compute(name=name, device_s=np.full_like(chunk, seconds), host_s=host_s, kind="request")


def decode_step(scenario: PlacedScenario, context: Array, cost: CostModel) -> tuple[Op, ...]:
    """Operations of a decode step for the prompt's last token, if the engine's TTFT includes such a step.

    The rank with the last chunk runs the step, with the K and V of the whole context. Engines replay a graph of the
    step's kernels, so launches cost no extra time. context: tokens, shape (B,).
    """
    if scenario.engine is None or not scenario.engine.decode_step:
        return ()
    token = np.ones_like(context)
    summed = scenario.request.batch * scenario.share.hidden_size
    device_s = np.zeros_like(context)
    reduce_s = np.zeros_like(context)
    layers = scenario.layer_costs(cost)
    group = scenario.group
    for kind in scenario.share.layer_kind_index:
        costs = layers[kind]
        device_s = device_s + costs.decode_s(context)
        if group is not None:
            nbytes = token * float(summed * scenario.request.dtype_bytes)
            reduce_s = reduce_s + costs.num_sums * (scenario.host.collective_s + group.all_reduce_s(nbytes))
    host_s = scenario.host.layer_s * len(scenario.share.layer_kind_index)
    ops: list[Op] = [Compute(name="decode step", device_s=device_s, host_s=host_s, kind="head")]
    if group is not None:
        ops.append(Collective(name="all-reduce", seconds=reduce_s, nbytes=np.zeros_like(context)))
    return tuple(ops)


def has_prefill(scenario: Scenario) -> bool:
    """Whether any token passes through the layers before the token of the decode step."""
    request = scenario.request
    return scenario.engine is None or not scenario.engine.decode_step or request.context_len > request.cached_prefix + 1


def last_is_alike(scenario: Scenario, cost: CostModel) -> bool:
    """Whether the last rank's operations after its last layer are the same for all partitions."""
    return not cost.traits.head_on_all_tokens and (scenario.engine is None or not scenario.engine.decode_step)


def last(
    scenario: PlacedScenario, chunk: Array, context: Array, cost: CostModel, *, prompts: int = 1
) -> tuple[Op, ...]:
    """Operations of the last rank after its last layer; `prompts`: number of prompts that end in the chunk."""
    return (*decode_step(scenario, context, cost), *head(scenario, chunk, cost, prompts))


def head(scenario: PlacedScenario, chunk: Array, cost: CostModel, prompts: int = 1) -> tuple[Op, ...]:
    """Final norm and logits of each prompt's last token or, as in Hugging Face's code of 2023, of all tokens."""
    head = scenario.share.lm_head
    tokens = np.full_like(chunk, prompts)
    if cost.traits.head_on_all_tokens:
        tokens = chunk
    product = Product(head.in_features, head.out_features, compute=head.compute)
    logits = Compute(name="head", device_s=cost.head_s(tokens, product), kind="head")
    if scenario.group is None:
        return (logits,)
    nbytes = tokens * float(scenario.request.batch * scenario.model.lm_head.out_features * scenario.request.dtype_bytes)
    return logits, all_gather(scenario.group, nbytes)


def layer_ops(strategy: Strategy, step: Step, rank: int) -> Iterator[Op]:
    """Yield the operations of a rank in a layer, with the all-reduces of its GPUs if the rank is a group.

    Nothing overlaps with an all-reduce, so all of them are at the end of the layer. The operations include the launches
    of their kernels.
    """
    host = step.costs.setting.host
    ops = list(_layer_ops(strategy, step, rank))
    if not host.launch_s and not host.kernel_s:
        yield from ops
        return
    launch_s: float | Array = host.launch_s
    if host.launch_s and host.hidden_share:
        launch_s = _exposed_launch_s(ops, host)
    for op in ops:
        yield launched(op, host, launch_s)


def _exposed_launch_s(ops: Sequence[Op], host: HostRates) -> float | Array:
    """Seconds that a launch adds to the kernels of a layer.

    The host launches kernels while earlier ones compute: a share of the shorter of launches and kernels is hidden.
    """
    kernels_s: float | Array = 0.0
    launches = 0.0
    for op in ops:
        if isinstance(op, Compute) and op.kernels:
            kernels_s = kernels_s + op.device_s
            launches += op.kernels
        elif isinstance(op, RingPass) and op.kernels:
            kernels_s = kernels_s + op.device_s.sum(axis=0)
            launches += sum(op.kernels)
    if not launches:
        return host.launch_s
    hidden = np.minimum(1.0, kernels_s / (launches * host.launch_s))
    return host.launch_s * (1.0 - host.hidden_share * hidden)


def launched(op: Op, host: HostRates, launch_s: float | Array) -> Op:
    """The operation with the launches of its kernels: the device's additional time, and the host's time to issue them.

    This is the only place that prices launches, so that device and host count the same kernels. launch_s: device
    seconds that a launch adds to its kernel, of shape () or (B,).
    """
    if isinstance(op, Compute) and op.kernels:
        device_s = op.device_s + launch_s * op.kernels
        return op._replace(device_s=device_s, host_s=op.host_s + host.kernel_s * op.kernels)
    if isinstance(op, RingPass) and op.kernels:
        kernels = np.array(op.kernels)
        issue_s = np.array(op.host_s) + host.kernel_s * kernels
        by_round = kernels.reshape(-1, *[1] * (op.device_s.ndim - 1))
        return op._replace(device_s=op.device_s + launch_s * by_round, host_s=tuple(issue_s.tolist()))
    return op


def _layer_ops(strategy: Strategy, step: Step, rank: int) -> Iterator[Op]:
    """Operations of a rank in a layer. A pipeline loads the cached prefix before its first piece, not here."""
    if step.costs.has_mixer:
        ops = _mixer_ops(strategy, step, rank)
        load = None
        if not strategy.is_pipeline and (step.costs.has_state or not step.costs.setting.prefix.is_local):
            load = prefix_load(strategy, step, rank)
        if load is not None:
            ops = _insert(ops, load)
        yield from ops
    else:
        yield step.output_mlp(rank)
    yield from _experts(step, rank)
    yield from _all_reduces(step, rank)


def _mixer_ops(strategy: Strategy, step: Step, rank: int) -> Iterator[Op]:
    """Operations from the projections to the MLP: with a state, of the scan; else of the strategy's attention."""
    if step.costs.has_state:
        return _with_state(step, rank, in_turn=strategy.sends_in_turn)
    if step.num_ranks == 1:
        return SINGLE.layer(step, rank)
    return strategy.layer(step, rank)


def _with_state(step: Step, rank: int, *, in_turn: bool) -> Iterator[Op]:
    """Project the chunk, wait for the state before it, compute, send the state after it on, compute the MLP.

    The scan's kernels are launched with those of the projections, before the device waits for the state.
    """
    projections = step.qkv(rank)
    scan = step.scan(rank)
    yield projections._replace(kernels=projections.kernels + scan.kernels)
    if rank > 0:
        yield step.recv_kv(rank)._replace(payload="state")
    yield scan._replace(kernels=0.0)
    if rank < step.num_ranks - 1:
        yield step.send_kv(rank, in_turn=in_turn)._replace(payload="state")
    yield step.output_mlp(rank)


def prefix_load(strategy: Strategy, step: Step, rank: int) -> Load | None:
    """Load of a layer's cached prefix on a rank; None if the rank loads nothing. Only the first rank loads a state."""
    costs = step.costs
    if strategy.is_pipeline and costs.setting.prefix.source is None:  # a stage holds the prefix of its layers
        return None
    if not costs.has_mixer or (costs.has_state and rank):
        return None
    if costs.has_state:
        return costs.setting.prefix.load_own(costs.prefix_bytes)
    by_heads = strategy.splits_heads and costs.setting.prefix.access == "whole" and step.num_ranks > 1
    prefix_bytes = costs.prefix_bytes
    if by_heads:
        prefix_bytes = costs.on_heads(step.num_ranks).prefix_bytes
    return costs.setting.prefix.load(prefix_bytes, reads_peers=not strategy.carries_prefix)


def _insert(ops: Iterable[Op], load: Load) -> Iterator[Op]:
    """Insert a load after the projections of a layer; at its start if it has none."""
    program = list(ops)
    first = 0
    for number, op in enumerate(program, start=1):
        if isinstance(op, Compute) and op.kind == "qkv":
            first = number
            break
    yield from (*program[:first], load, *program[first:])


def supported_prefix_access(strategy: Strategy, placement: PrefixPlacement, ranks: int) -> tuple[PrefixAccess, ...]:
    """The ways in which the strategy's ranks may attend to a prefix with this placement."""
    if ranks == 1 or placement.place == "all" or strategy.is_pipeline:
        return ("whole",)
    if placement.place != "sharded":
        return ("whole", "pass-kv")
    if strategy.passes_queries:
        return ("pass-kv", "pass-q")
    return ("pass-kv",)


def _experts(step: Step, rank: int) -> Iterator[Op]:
    """Operations of experts on other ranks: send tokens, compute the experts, return the results."""
    routed = step.costs.experts
    ranks = step.num_ranks
    if routed is None or routed.exchange == "none":
        return
    placement = routed.placement
    chunk = step.chunks[rank]
    if placement.gather is not None:  # ranks with equal shares, which arrive together
        together = step.lengths.sum(axis=0)
        if ranks < placement.layout.context:
            together = chunk * placement.layout.context
        more_s = step.costs.setting.host.collective_s
        if routed.is_dispatched:
            sent = chunk * step.costs.setting.batch
            yield routed.dispatch(sent, more_s)
            yield Compute(name="experts", device_s=routed.seconds(chunk, together), kind="output+mlp")
            yield routed.combine(sent, more_s)
            return
        tokens = together * (step.costs.setting.batch * placement.load)
        yield all_gather(placement.gather, tokens * routed.combined_bytes, more_s)
        yield Compute(name="experts", device_s=routed.seconds(chunk, together), kind="output+mlp")
        yield all_gather(placement.gather, tokens * routed.combined_bytes, more_s)._replace(name="reduce-scatter")
        return
    sent_tokens = step.costs.setting.batch * routed.reach  # per token of a chunk, to each other rank
    experts = Compute(name="experts", device_s=routed.seconds(chunk), kind="output+mlp")
    if ranks == 1:  # a part of the ranks: only their computation counts
        yield experts
        return
    there = chunk * (sent_tokens * routed.dispatched_bytes)
    yield AllToAll(nbytes=np.broadcast_to(there, (ranks - 1, *there.shape)), payload="tokens")
    yield experts
    back = step.lengths_twice[rank + 1 : rank + ranks] * (sent_tokens * routed.combined_bytes)
    yield AllToAll(nbytes=back, payload="tokens")


def _all_reduces(step: Step, rank: int) -> Iterator[Collective]:
    """Sum the mixer's and the MLP's outputs over the group's GPUs; with one all-reduce if they run in parallel."""
    group = step.costs.setting.group
    if group is not None:
        nbytes = step.costs.activation_bytes(step.chunks[rank])
        yield from [all_reduce(group, nbytes, step.costs.setting.host.collective_s)] * step.costs.num_sums


def placement_refusal(strategy: Strategy, placement: PrefixPlacement) -> str | None:
    """The placement of the cached prefix that the strategy requires; None if it accepts this placement."""
    if placement.place == "sharded" and strategy.is_pipeline:
        return "a prefix that lies on the stages of its layers, not sharded by tokens"
    if placement.place == "sharded" and strategy.group_size is None:
        return "a prefix of which each GPU has its own heads (all), not sharded"
    return None


def refusal(strategy: Strategy, model: ModelSpec, ranks: int) -> str | None:
    """The requirement that a model and number of ranks do not meet; None if they meet all."""
    divisions = ranks  # ranks, or stages of a pipeline
    context = ranks
    if strategy.is_pipeline:
        context = strategy.degrees.context or 1
        divisions = ranks // context
    if strategy.refuses is not None:
        reason = strategy.refuses(model, divisions)
        if reason:
            return reason
    if context == 1:
        return None
    mixers = [layer.mixer for layer in model.layer_kinds if layer.mixer is not None]
    if not strategy.passes_state:
        for mixer in mixers:
            if isinstance(mixer, Recurrence):
                return f"layers without a state to hand on in order; {model.name} has {mixer.title}"
    if strategy.merges_blocks:
        for mixer in mixers:
            if mixer.is_sparse:
                return f"attention that can be merged from blocks of keys; {model.name} has {mixer.title}"
    return None
