"""What a prefill does before its first layer and after its last, as operations of one rank."""

from __future__ import annotations

import numpy as np

from kvrsim.cost.kernels import CostModel
from kvrsim.cost.tensor_parallel import all_gather, all_reduce
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.profile.rates.gemm import Product
from kvrsim.program.operations import Array, Compute, Op
from kvrsim.scenario import Scenario


def embedding(scenario: Scenario, chunk: Array, cost: CostModel) -> tuple[Op, ...]:
    """One row read and written a token; in a group, each GPU has some rows."""
    nbytes = 4.0 * scenario.model.hidden_size  # of two-byte elements
    read = Compute(
        name="embedding", device_s=cost.traffic_s(chunk, (Traffic("embedding", nbytes, 1),)), kind="embedding"
    )
    if scenario.group is None:
        return (read,)
    summed = chunk * float(scenario.request.batch * scenario.model.hidden_size * scenario.request.dtype_bytes)
    return read, all_reduce(scenario.group, summed)


def prepare(scenario: Scenario, chunk: Array, keys: Array, cost: CostModel) -> tuple[Op, ...]:
    """Mask and rotary tables, where they were measured; the host and the device wait for each other there."""
    if scenario.profile is None:
        return ()
    request_s, element_s = scenario.profile.host.request_s, scenario.profile.kernels.elementwise.mask_element_s
    if not request_s and not element_s and not scenario.profile.host.prepare_s:
        return ()
    device_s, host_s = cost.prepare_s(request_s, chunk * keys), scenario.profile.host.prepare_s
    host_s = request_s if host_s is None else host_s
    return (Compute(name="prepare", device_s=device_s, host_s=host_s, kind="embedding"),)


def head(scenario: Scenario, chunk: Array, cost: CostModel) -> tuple[Op, ...]:
    """Final norm and logits, of the last token alone or, as the 2023 Hugging Face code did, of all."""
    head = scenario.share.lm_head
    tokens = chunk if cost.head_on_all_tokens else np.ones_like(chunk)
    product = Product(head.in_features, head.out_features, compute=head.compute)
    logits = Compute(name="head", device_s=cost.head_s(tokens, product), kind="head")
    if scenario.group is None:
        return (logits,)
    nbytes = tokens * float(scenario.request.batch * scenario.model.lm_head.out_features * scenario.request.dtype_bytes)
    return logits, all_gather(scenario.group, nbytes)
