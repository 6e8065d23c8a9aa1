"""Random scenarios and partitions, and functions that change a scenario."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.choices import PREFIX_PLACEMENTS
from kvrsim.engine import OTHER_GPU, Engine, HostRates
from kvrsim.errors import InputError
from kvrsim.execution import Execution, execute, place
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.kernels.profile import SendStyle
from kvrsim.placement import PlacedScenario
from kvrsim.scenario import Partition, Request, Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.layers import supported_prefix_access
from kvrsim.units import scale
from tests.building.drawing import Draws, log, maybe, noted, strategy_of
from tests.building.machines import any_cluster
from tests.building.models import any_mixed_model, any_model, products_of
from tests.building.profiles import any_profile
from tests.building.rates import any_blocked, any_eager, any_sizes


def any_scenario(
    rng: Draws,
    *,
    num_gpus: tuple[int, int] = (2, 6),
    tokens: tuple[int, int] = (0, 4000),
    roofline: bool | None = None,
    sends: SendStyle | None = None,
    host: bool | None = None,
    layers: tuple[int, int] = (1, 4),
    topologies: tuple[str, ...] = ("switch", "chain", "nodes"),
    decades: tuple[float, float] = (7, 12),
    kind: str | None = None,  # a model_type, or "mixed" for layers of different kinds
    divisible: bool = False,  # whether groups of four GPUs divide the heads
) -> PlacedScenario:
    """A scenario with at least one new token per GPU and up to tokens[1] more; half have a cached prefix."""
    gpus = rng.randint(*num_gpus)
    cluster = any_cluster(rng, gpus, topologies=topologies, decades=decades)
    roofline = rng.random() < 0.15 if roofline is None else roofline
    cached = rng.choice([0, 0, 1, rng.randint(0, 5000)])
    spare = int(log(rng, 0, 3.6)) if tokens == (0, 4000) else rng.randint(*tokens)
    request = Request(
        context_len=cached + gpus + spare,
        cached_prefix=cached,
        batch=rng.choice([1, 1, 3]),
        dtype=rng.choice(["fp16", "bf16", "fp8"]),
    )
    if kind == "mixed":
        model = any_mixed_model(rng, layers=layers, divisible=divisible)
    else:
        model = any_model(rng, layers=layers, kind=kind, divisible=divisible)
    shapes = products_of(model)
    return noted(
        PlacedScenario(
            model=model,
            cluster=cluster,
            request=request,
            profile=None if roofline else any_profile(rng, cluster.gpu, sends=sends, host=host, shapes=shapes),
            kernel=rng.choice(["eager", "flash"]),
        )
    )


def as_measured(rng: Draws, scenario: PlacedScenario) -> PlacedScenario:
    """The scenario with rates that only `kvrsim calibrate` measures: sdpa, mask, copies in place, time of a step."""
    profile, gpu = scenario.profile, scenario.cluster.gpu
    if profile is None:
        return replace(scenario, kernel="sdpa")
    kernels = profile.kernels
    eager = any_eager(rng, gpu)
    share = eager.flops_per_s / gpu.peak_flops["fp16"]
    eager = replace(eager, measured=any_sizes(rng, share))
    kernels = replace(
        kernels,
        gemm=replace(kernels.gemm, head_bytes_per_s=gpu.hbm_bytes_per_s * log(rng, -3, 0)),
        attention={"flash": any_blocked(rng, gpu), "eager": eager, "sdpa": any_blocked(rng, gpu)},
        elementwise=replace(kernels.elementwise, mask_element_s=maybe(rng, 0.0, lambda: log(rng, -12, -8))),
        copies=replace(kernels.copies, own=maybe(rng, 0.0, lambda: 1.0)),
        whole_attention=rng.random() < 0.5,
    )
    host = replace(profile.host, step_s=maybe(rng, 0.0, lambda: log(rng, -5, -2)))
    return replace(
        scenario,
        profile=replace(profile, kernels=kernels, host=host, cluster=maybe(rng, None, lambda: scenario.cluster)),
        request=replace(scenario.request, dtype=rng.choice(["fp16", "fp32"])),
        kernel=rng.choice(["eager", "sdpa", "flash"]),
    )


def any_engine(rng: Draws) -> Engine:
    """An engine in which each term is absent with probability 1/2."""
    names = ("request_s", "token_s", "step_s", "layer_s", "gather_piece_s", "collective_s")
    ranges = {"token_s": (-8, -5)}
    host = {name: maybe(rng, 0.0, partial(log, rng, *ranges.get(name, (-5, -2)))) for name in names}
    return Engine(
        name="any",
        title="any",
        description="any",
        not_covered="any",
        host=HostRates(**host),
        kernel_scale={OTHER_GPU: log(rng, -0.3, 0.5)},
        decode_step=rng.random() < 0.3,
    )


def any_divisible(rng: Draws, **options: Any) -> PlacedScenario:
    """A scenario whose GPUs and heads can be divided into groups of two and of four."""
    options = {"num_gpus": (4, 4), "layers": (4, 6), "topologies": ("switch", "chain")} | options
    scenario = any_scenario(rng, divisible=True, **options)
    assert scenario.model.num_attention_heads % 4 == 0
    assert scenario.model.num_key_value_heads in (1, 2) or scenario.model.num_key_value_heads % 4 == 0
    return scenario


def executed(scenario: Scenario, strategy: Strategy) -> Execution:
    """The execution of a strategy on a placed scenario; on another one, with a rank per GPU."""
    placed = scenario if isinstance(scenario, PlacedScenario) else PlacedScenario.of(scenario)
    return execute(placed, strategy)


def any_placed(rng: Draws, strategy: Strategy, **machine: Any) -> tuple[PlacedScenario, tuple[int, ...]]:
    """A plain random scenario prepared for the strategy, and random chunks; machine: options of any_scenario."""
    placed = any_run(rng, strategy, plain=True, **machine)
    tokens, ranks = placed.request.new_tokens, placed.cluster.num_gpus
    if strategy.is_pipeline:
        return placed, any_pieces(rng, tokens, strategy.degrees.context or 1)
    return placed, any_partition(rng, tokens, ranks)


def any_run(rng: Draws, strategy: Strategy, *, plain: bool = False, **machine: Any) -> PlacedScenario:
    """A random scenario prepared for the strategy; machine: options of any_scenario.

    Unless plain, it may have slow GPUs and links, hosts that issue messages, expert parallelism and a prefix that must
    be loaded.
    """
    for attempt in range(20):
        kind = rng.choice([None, "mixed", "mixtral", "qwen3_moe"]) if attempt < 10 else None
        build = any_scenario if rng.random() < 0.5 and attempt < 5 else any_divisible
        scenario = build(rng, kind=kind, **machine)
        num_gpus, profile = scenario.cluster.num_gpus, scenario.profile
        if rng.random() < 0.3 and not plain:
            slow = [SlowGpu(rank=rank, factor=1 + rng.random()) for rank in range(num_gpus) if rng.random() < 0.5]
            own = not scenario.cluster.shares_bandwidth  # slow links are refused on a shared bus
            pairs = [(rank, rank + 1) for rank in range(num_gpus - 1) if own and rng.random() < 0.3]
            links = [SlowLink(first=first, second=second, factor=1 + 9 * rng.random()) for first, second in pairs]
            scenario = replace(scenario, cluster=UnevenCluster.of(scenario.cluster, slow, links))
        if rng.random() < 0.3:
            scenario = as_measured(rng, scenario)
        elif profile is not None and rng.random() < 0.5 and not plain:
            host = replace(profile.host, message_s=log(rng, -6, -3), collective_s=log(rng, -6, -3))
            scenario = replace(scenario, profile=replace(profile, host=host))
        if scenario.profile and scenario.request.new_tokens > 1 and rng.random() < 0.3:
            scenario = replace(scenario, engine=any_engine(rng))
        with suppress(InputError):
            if kind in ("mixtral", "qwen3_moe") and rng.random() < 0.5 and not plain:
                scenario = replace(scenario, expert_parallel=True)
            if scenario.request.cached_prefix and rng.random() < 0.5 and not plain:
                where = rng.choice(PREFIX_PLACEMENTS)
                rate = log(rng, 6, 13) if where in ("host", "remote") else None
                scenario = replace(scenario, prefix_placement=PrefixPlacement(place=where, bytes_per_s=rate))
            placed = place(scenario, strategy).placed
            placed = maybe(rng, placed, partial(_comparable, rng, placed))
            ways = supported_prefix_access(strategy, placed.prefix_placement, placed.cluster.num_gpus)
            return placed if placed.prefix_placement.place == "all" else replace(placed, prefix_access=rng.choice(ways))
    raise AssertionError(f"{strategy.name} refuses a scenario whose numbers divide")


def _comparable(rng: Draws, scenario: PlacedScenario) -> PlacedScenario:
    """The scenario with hosts, messages and latencies that take a tenth to three times as long as a layer's MLP."""
    costs, tokens = (
        scenario.layer_costs()[0],
        np.full(1, max(1.0, scenario.request.new_tokens / scenario.cluster.num_gpus)),
    )
    layer_s, cluster = float(costs.output_mlp_s(tokens)[0]), scenario.cluster

    def near_s() -> float:
        return layer_s * log(rng, -1, 0.5)

    host = replace(scenario.host, layer_s=near_s(), message_s=maybe(rng, 0.0, near_s))
    factor = near_s() * cluster.link.bandwidth_bytes_per_s / float(costs.activation_bytes(tokens)[0])
    link, network = (
        replace(scale(one, factor), latency_s=maybe(rng, 0.0, near_s)) if one else None
        for one in (cluster.link, cluster.network)
    )
    return replace(scenario.with_host(host), cluster=replace(cluster, link=link, network=network))


def any_rows(rng: Draws, scenario: Scenario, strategy: Strategy, number: int) -> list[tuple[int, ...]]:
    """Random partitions of a scenario that is prepared for the strategy; even chunks first, except for pipelines."""
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    if not strategy.is_pipeline:
        even = Partition.even(tokens, ranks).chunk_lens
        return [even, *(any_partition(rng, tokens, ranks) for _ in range(number - 1))]
    context = strategy.degrees.context or 1
    first = any_pieces(rng, tokens, context)
    least = len(first) * (context - 1)
    more = [any_partition(rng, tokens - least, len(first)) for _ in range(number - 1)]
    return [first, *(tuple(piece + context - 1 for piece in pieces) for pieces in more)]


def any_pieces(rng: Draws, num_tokens: int, context: int) -> tuple[int, ...]:
    """Random pieces of a pipeline; each has at least one token per context rank."""
    number = min(num_tokens // context, rng.randint(1, 6))
    more = any_partition(rng, num_tokens - number * (context - 1), number)
    return tuple(piece + context - 1 for piece in more)


def any_partition(rng: Draws, num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Uneven random chunks, many of one token."""
    weights = [rng.random() ** rng.choice([0.2, 1, 20]) for _ in range(num_ranks)]
    left, chunks = num_tokens - num_ranks, []
    for rank in range(num_ranks - 1):
        share = int(left * weights[rank] / max(1e-300, sum(weights[rank:])))
        chunks.append(1 + share)
        left -= share
    return noted((*chunks, 1 + left))


scenarios = strategy_of(any_scenario)
partitions = strategy_of(any_partition)


@strategy_of
def measured_scenarios(rng: Draws, **options: Any) -> Scenario:
    """A random scenario; half have rates that only `kvrsim calibrate` measures."""
    scenario = any_scenario(rng, **options)
    return as_measured(rng, scenario) if rng.random() < 0.5 else scenario


def faster(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with all rates of the device and links multiplied by `factor`, and latencies divided by it."""
    cluster, profile = scenario.cluster, scenario.profile
    gpu = replace(
        cluster.gpu,
        hbm_bytes_per_s=cluster.gpu.hbm_bytes_per_s * factor,
        peak_flops={dtype: flops * factor for dtype, flops in cluster.gpu.peak_flops.items()},
    )
    cluster = replace(
        cluster, gpu=gpu, link=scale(cluster.link, 1 / factor), network=scale(cluster.network, 1 / factor)
    )
    if profile is not None:
        profile = replace(profile, kernels=scale(profile.kernels, 1 / factor))
    return replace(scenario, cluster=cluster, profile=profile)


def scenario_in(folder: Path) -> Scenario:
    """A scenario that once made a test fail, read from the files of a folder."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    profile = folder / "profile.json"
    about = {"model": folder / "model.json", "cluster": folder / "cluster.json"}
    return make_scenario(**request, **about, profile=profile if profile.exists() else "roofline")[0]
