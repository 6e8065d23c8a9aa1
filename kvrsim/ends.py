"""Operations of one rank before the first layer and after the last: request, step, embedding, head, decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrsim.kernels.cost import CostModel
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.tensor_parallel import all_gather, all_reduce
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Scenario


def embedding(scenario: Scenario, chunk: Array, cost: CostModel) -> tuple[Op, ...]:
    """Cost of reading and writing one row per token; in a group, each GPU has a share of the rows."""
    nbytes = 4.0 * scenario.model.hidden_size  # bytes read and written per row, with two-byte elements
    read = Compute(
        name="embedding", device_s=cost.traffic_s(chunk, (Traffic("embedding", nbytes, 1),)), kind="embedding"
    )
    if scenario.group is None:
        return (read,)
    summed = chunk * float(scenario.request.batch * scenario.model.hidden_size * scenario.request.dtype_bytes)
    return read, all_reduce(scenario.group, summed, scenario.host.collective_s)


def request(scenario: Scenario, chunk: Array, contexts: Sequence[int] | None = None) -> tuple[Op, ...]:
    """Wait of a request before its first layer, the same for every partition of the batch.

    contexts: tokens of each prompt, if several begin together; None: the scenario's request.
    """
    host, asked = scenario.host, scenario.request
    each = [asked.batch * asked.context_len] if contexts is None else contexts
    seconds = sum(host.request_s + host.token_s * tokens for tokens in each)
    return (_held("request", chunk, seconds),) if seconds else ()


def step(scenario: Scenario, chunk: Array, keys: Array, cost: CostModel) -> tuple[Op, ...]:
    """Operations before each pass through the layers: the engine's step, and the mask if it was measured."""
    if scenario.profile is None:
        return ()
    host, element_s = scenario.host, scenario.profile.kernels.elementwise.mask_element_s
    ops = [_held("step", chunk, host.step_s, host.prepare_s)] if host.step_s or host.prepare_s else []
    if element_s and scenario.kernel != "flash":  # flash kernels take no mask
        ops.append(Compute(name="mask", device_s=cost.mask_s(chunk * keys), kind="embedding"))
    return tuple(ops)


def _held(name: str, chunk: Array, seconds: float, host_s: float | None = None) -> Compute:
    """Operation in which the device waits `seconds` for the software; `host_s` is the host's time, None: `seconds`."""
    host_s = seconds if host_s is None else host_s
    return Compute(name=name, device_s=np.full_like(chunk, seconds), host_s=host_s, kind="request")


def decode_step(scenario: Scenario, context: Array, cost: CostModel) -> tuple[Op, ...]:
    """Operations of a decode step for the prompt's last token, if the engine's TTFT includes such a step.

    The rank with the last chunk runs the step, with the K and V of the whole context. context: tokens, shape (B,).
    """
    if scenario.engine is None or not scenario.engine.decode_step:
        return ()
    one, summed = np.ones_like(context), scenario.request.batch * scenario.share.hidden_size
    device_s, reduce_s = np.zeros_like(context), np.zeros_like(context)
    layers, group = scenario.layer_costs(cost), scenario.group
    for kind in scenario.share.layer_kind_index:
        costs = layers[kind]
        device_s = device_s + costs.qkv_s(one) + costs.decode_attention_s(context) + costs.output_mlp_s(one)
        if group is not None:
            nbytes = one * float(summed * scenario.request.dtype_bytes)
            reduce_s = reduce_s + costs.num_sums * (scenario.host.collective_s + group.all_reduce_s(nbytes))
    host_s = scenario.host.layer_s * len(scenario.share.layer_kind_index)
    ops: list[Op] = [Compute(name="decode step", device_s=device_s, host_s=host_s, kind="head")]
    if group is not None:
        ops.append(Collective(name="all-reduce", seconds=reduce_s, nbytes=np.zeros_like(context)))
    return tuple(ops)


def has_prefill(scenario: Scenario) -> bool:
    """Whether any token passes through the layers before the token of the decode step."""
    asked = scenario.request
    return scenario.engine is None or not scenario.engine.decode_step or asked.context_len > asked.cached_prefix + 1


def last_is_alike(scenario: Scenario, cost: CostModel) -> bool:
    """Whether the last rank's operations after its last layer are the same for all partitions."""
    return not cost.traits.head_on_all_tokens and (scenario.engine is None or not scenario.engine.decode_step)


def last(scenario: Scenario, chunk: Array, context: Array, cost: CostModel, *, prompts: int = 1) -> tuple[Op, ...]:
    """Operations of the last rank after its last layer; `prompts`: number of prompts that end in the chunk."""
    return (*decode_step(scenario, context, cost), *head(scenario, chunk, cost, prompts))


def head(scenario: Scenario, chunk: Array, cost: CostModel, prompts: int = 1) -> tuple[Op, ...]:
    """Final norm and logits of each prompt's last token or, as in Hugging Face's code of 2023, of all tokens."""
    head = scenario.share.lm_head
    tokens = chunk if cost.traits.head_on_all_tokens else np.full_like(chunk, prompts)
    product = Product(head.in_features, head.out_features, compute=head.compute)
    logits = Compute(name="head", device_s=cost.head_s(tokens, product), kind="head")
    if scenario.group is None:
        return (logits,)
    nbytes = tokens * float(scenario.request.batch * scenario.model.lm_head.out_features * scenario.request.dtype_bytes)
    return logits, all_gather(scenario.group, nbytes)
