"""kvrsim's side: seconds of a prefill's kernels by operation, without the host and what an engine adds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.cost.layer import LayerCosts
from kvrsim.cost.mixing.base import products_of
from kvrsim.cost.traffic import after_mixer, before_mixer
from kvrsim.ends import embedding, head
from kvrsim.engine.engine import NO_ENGINE
from kvrsim.engine.host import NO_HOST
from kvrsim.executors.run import run_partition
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import LatentAttention, Recurrence
from kvrsim.partition import Partition
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.program import Array, Collective, Compute
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from validate.estimates.cases import NUM_GPUS, OPERATIONS, Case


def predict(case: Case) -> dict[str, float]:
    """Seconds by key of OPERATIONS; all of them sum to TTFT.

    Operations are at the burst clock, as NVIDIA's tables of short kernels are; "clock" is what its fall adds.
    """
    whole = scenario_of(case)
    assert whole.profile is not None
    burst = replace(whole, profile=replace(whole.profile, kernels=replace(whole.profile.kernels, clock=None)))
    found: dict[str, float] = defaultdict(float)
    for name, seconds in _operations(for_strategy(burst, get_strategy("tp")), float(case.tokens)):
        found[name] += seconds
    return {name: found[name] for name in OPERATIONS if found[name]} | {"clock": ttft_s(whole) - ttft_s(burst)}


def ttft_s(scenario: Scenario) -> float:
    """As kvrsim simulates tensor parallelism over all GPUs."""
    strategy = get_strategy("tp")
    return run_partition(
        for_strategy(scenario, strategy), strategy, Partition.even(scenario.request.context_len, 1)
    ).ttft_s


def scenario_of(case: Case) -> Scenario:
    """Eight GPUs, no engine, a host that takes no time."""
    scenario, _ = make_scenario(
        ctx=case.tokens,
        gpus=NUM_GPUS,
        model=case.model.spec(),
        profile=case.gpu.profile,
        cluster=case.gpu.cluster,
        dtype="bf16",
        engine=NO_ENGINE,
        expert_parallel=case.experts == "expert",
    )
    return scenario.with_host(NO_HOST)


def _operations(scenario: Scenario, tokens: float) -> Iterator[tuple[str, float]]:
    """Key and seconds of every operation of all layers and of both ends."""
    cost, chunk = scenario.cost, np.array([tokens])
    for kind, costs in enumerate(scenario.layer_costs(cost)):
        count = scenario.share.layer_kind_index.count(kind)
        for part in (_before, _mixed, _after):
            for name, seconds in part(costs, chunk).items():
                yield name, count * seconds
    for op in (*embedding(scenario, chunk, cost), *head(scenario, chunk, cost)):
        if isinstance(op, Collective):
            yield "all_reduce", op.seconds.item()
        elif isinstance(op, Compute):
            yield "ends", op.device_s.item()


def _before(costs: LayerCosts, chunk: Array) -> dict[str, float]:
    """Norms, projections, rotary embedding; what a mixer does to the chunk by itself is part of _mixed."""
    layer = costs.layer
    own_s = 0.0 if costs.mixing is None else costs.mixing.own_s(chunk).item()
    parts = {
        "projections": 0.0 if layer.mixer is None else _products_s(costs, layer.mixer.projections, chunk),
        "norms": _norms_s(costs, before_mixer(costs.model, layer, fused=costs.cost.fused), chunk),
    }
    return _with_rest(parts, costs.qkv_s(chunk).item() - own_s)


def _mixed(costs: LayerCosts, chunk: Array) -> dict[str, float]:
    """The mixer itself; of latent attention, keys and values are expanded from the latents first."""
    mixer = costs.layer.mixer
    if costs.mixing is None or mixer is None:
        return {}
    alone = 0.0 * chunk
    own_s, mixed_s = costs.mixing.own_s(chunk).item(), costs.mixing.mix_s(chunk, alone).item()
    if isinstance(mixer, Recurrence):
        return {"scan": own_s + mixed_s}
    expanded = (mixer.expand,) if isinstance(mixer, LatentAttention) else ()
    own = _with_rest({"projections": _products_s(costs, expanded, chunk)}, own_s)
    name = "attention" if mixer.reach is None else "window"
    return own | {name: mixed_s, "steps": own["steps"] + costs.append_s(chunk, alone).item()}


def _after(costs: LayerCosts, chunk: Array) -> dict[str, float]:
    """Output projection, MLP, norms, residuals and the group's sums."""
    layer = costs.layer
    router = () if layer.router is None else (layer.router,)
    steps = after_mixer(costs.model, layer, fused=costs.cost.fused, intermediate=0)
    parts = {
        "output": sum(_products_s(costs, (gemm,), chunk) for gemm in (layer.mixer.output if layer.mixer else ())),
        "router": _products_s(costs, router, chunk),
        "shared": _products_s(costs, layer.shared_mlp, chunk),
        "dense": 0.0 if layer.num_experts else _products_s(costs, layer.mlp, chunk),
        "experts": 0.0 if costs.experts is None else costs.experts.seconds(chunk).item(),
        "norms": _norms_s(costs, steps, chunk),
    }
    found = _with_rest(parts, costs.output_mlp_s(chunk).item())
    if costs.group is not None:
        found["all_reduce"] = costs.num_sums * costs.group.all_reduce_s(costs.activation_bytes(chunk)).item()
    return found


def _with_rest(parts: dict[str, float], whole_s: float) -> dict[str, float]:
    """What the parts leave of the whole is the other element-wise kernels' time."""
    return parts | {"steps": whole_s - sum(parts.values())}


def _products_s(costs: LayerCosts, gemms: Sequence[Gemm], chunk: Array) -> float:
    return float(costs.cost.row_cost(products_of(costs.cost, gemms), ())(chunk)[0]) if gemms else 0.0


def _norms_s(costs: LayerCosts, steps: Sequence[Traffic], chunk: Array) -> float:
    norms = tuple(step for step in steps if step.op in ("norm", "residual"))
    return float(costs.cost.traffic_s(chunk, norms)[0])
