"""kvrsim simulates and plans the prefill of large language models over several GPUs.

>>> import kvrsim
>>> plan = kvrsim.plan(ctx="16k", gpus=8)
>>> plan.best.strategy, plan.best.partition, plan.best.ttft_s  # doctest: +SKIP

Everything in `__all__` is loaded when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from kvrsim.arguments import checked, named, wholes
from kvrsim.version import __version__

if TYPE_CHECKING:
    from os import PathLike

    from kvrsim.errors import InputError, KvrsimError
    from kvrsim.hardware.cluster import Cluster, GpuSpec, LinkSpec, load_cluster
    from kvrsim.model.load import load_model
    from kvrsim.model.spec import ModelSpec
    from kvrsim.noise.model import Noise
    from kvrsim.partition import Partition
    from kvrsim.profile.profile import CalibrationProfile, load_profile
    from kvrsim.request import Request
    from kvrsim.results import Plan, SimResult
    from kvrsim.scenario import Scenario
    from kvrsim.setup import make_scenario
    from kvrsim.timeline import Span, Timeline
    from planner.capacity.answer import CapacityPlan
    from planner.confirm.facade import confirm
    from planner.map.map import StrategyMap
    from planner.map.strategies import map_strategies
    from planner.table.table import PartitionTable, load_table

__all__ = [
    "CalibrationProfile",
    "Cluster",
    "GpuSpec",
    "InputError",
    "KvrsimError",
    "LinkSpec",
    "ModelSpec",
    "Partition",
    "PartitionTable",
    "Plan",
    "Request",
    "Scenario",
    "SimResult",
    "Span",
    "StrategyMap",
    "Timeline",
    "__version__",
    "build_table",
    "capacity",
    "confirm",
    "load_cluster",
    "load_model",
    "load_profile",
    "load_table",
    "make_scenario",
    "map_strategies",
    "plan",
    "simulate",
]

_HOMES = {
    "kvrsim.errors": ("InputError", "KvrsimError"),
    "kvrsim.hardware.cluster": ("Cluster", "GpuSpec", "LinkSpec", "load_cluster"),
    "kvrsim.model.load": ("load_model",),
    "kvrsim.model.spec": ("ModelSpec",),
    "kvrsim.partition": ("Partition",),
    "kvrsim.profile.profile": ("CalibrationProfile", "load_profile"),
    "kvrsim.request": ("Request",),
    "kvrsim.results": ("Plan", "SimResult"),
    "kvrsim.scenario": ("Scenario",),
    "kvrsim.setup": ("make_scenario",),
    "kvrsim.timeline": ("Span", "Timeline"),
    "planner.confirm.facade": ("confirm",),
    "planner.map.map": ("StrategyMap",),
    "planner.map.strategies": ("map_strategies",),
    "planner.table.table": ("PartitionTable", "load_table"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker reads the imports above, and flags names that are not there

    def __getattr__(name: str) -> Any:
        """Load a name of the facade when it is first used (PEP 562)."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'kvrsim' has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@checked()
def plan(
    *,
    ctx: int | str,
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    attention: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    dtype: str | None = None,
    memory_fraction: float | str = 0.9,
    strategies: Sequence[str] | None = None,
    method: str = "auto",
    stride: int | str | None = None,
    table: str | PathLike[str] | PartitionTable | None = None,
    on_progress: Callable[[int, int | None, float], None] | None = None,
    timeline: bool = False,
    noise: str | Noise | None = None,
    objective: str = "mean",
    samples: int = 200,
    seed: int = 0,
    on_stage: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Compare strategies for one prefill, each with its best partition, and bound what is possible at all.

    The arguments up to `memory_fraction` are those of make_scenario.
    strategies: names, such as "tp8+kvr-s"; or "all"; None: KVR-S and all that need no search.
    method: how KVR-S's partition is searched: "grid" (the paper's), "analytical", or "auto".
    stride: tokens that every searched chunk boundary is a multiple of; None: chosen for the context.
    table: where "kvr-p" looks its partition up: a file of build_table, or a PartitionTable.
    on_progress: called with partitions simulated, the most there will be (None: unknown), best TTFT so far in seconds.
    on_stage: called before each strategy with its name, its number from 1 and how many there are.
    timeline: whether the plan carries every span of time of the best strategy.
    noise: what disturbs it, as after --noise, or a Noise; KVR-S's partition is then searched for the `objective`
        ("mean", "p50", "p95" or "p99" of TTFT), and judged by so many other `samples` of that `seed`.
    Raises InputError naming the parameter. Where nothing fits in memory, the plan's `feasible` is False.
    """
    from kvrsim.setup import make_scenario, parsed
    from kvrsim.units import parse_tokens
    from planner.plan import make_plan
    from planner.uncertainty.disturbed import as_asked

    scenario, warnings = make_scenario(
        ctx=ctx,
        gpus=gpus,
        model=model,
        profile=profile,
        cluster=cluster,
        link_bandwidth=link_bandwidth,
        link_latency=link_latency,
        topology=topology,
        attention=attention,
        batch=batch,
        cached_prefix=cached_prefix,
        dtype=dtype,
        memory_fraction=memory_fraction,
    )
    return make_plan(
        scenario,
        strategies=strategies,
        method=method,
        stride=parsed(stride, parse_tokens, "stride"),
        table=_table(table),
        warnings=warnings,
        on_progress=on_progress,
        on_stage=on_stage,
        timeline=timeline,
        disturbance=as_asked(noise, samples, seed),
        objective=objective,
        seed=seed,
    )


@checked()
def simulate(
    *,
    strategy: str,
    ctx: int | str,
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    attention: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    dtype: str | None = None,
    memory_fraction: float | str = 0.9,
    partition: Sequence[int] | None = None,
    table: str | PathLike[str] | PartitionTable | None = None,
    executor: str | None = None,
    timeline: bool = False,
    breakdown: bool = False,
    noise: str | Noise | None = None,
    samples: int = 200,
    requests: int | None = None,
    every: str = "0s",
    seed: int = 0,
) -> SimResult:
    """Simulate one strategy's prefill.

    All arguments but these are those of make_scenario.
    strategy: a name, such as "tsp", "kvr-s", "zigzag" or "tp8+kvr-s" (see docs/explanation/strategies.md).
    partition: new tokens a rank, summing to the context less the cached prefix; None: the strategy's own
        ("kvr-s" searches it first, "kvr-p" looks it up).
    table: where "kvr-p" looks it up: a file of build_table, or a PartitionTable.
    executor: "batch", "event" (simulates queues on links one by one), or None for the one that is needed.
    timeline: whether the result carries every span of time; asks for the event executor.
    breakdown: whether it carries the seconds of every operation on every rank, the share of the roofline that
        they are, and how they are known (result.breakdown.to_frame()); asks for the event executor.
    noise: what disturbs it, as after --noise, or a Noise; result.noisy is the distribution over so many `samples`.
    requests: so many prompts alike behind each other (result.stream), `every` "500ms", "poisson:500ms", or all at once.
    seed: of the noise and of Poisson gaps.

    Raises InputError naming the parameter.
    """
    from kvrsim.setup import make_scenario
    from kvrsim.stream import Arrivals
    from planner.simulate import run_simulation
    from planner.uncertainty.disturbed import as_asked

    scenario, warnings = make_scenario(
        ctx=ctx,
        gpus=gpus,
        model=model,
        profile=profile,
        cluster=cluster,
        link_bandwidth=link_bandwidth,
        link_latency=link_latency,
        topology=topology,
        attention=attention,
        batch=batch,
        cached_prefix=cached_prefix,
        dtype=dtype,
        memory_fraction=memory_fraction,
    )
    return run_simulation(
        scenario,
        strategy=strategy,
        partition=partition,
        table=_table(table),
        executor=executor,
        timeline=timeline,
        with_breakdown=breakdown,
        disturbance=as_asked(noise, samples, seed),
        arrivals=None if requests is None else Arrivals.parse(requests, every),
        seed=seed,
        warnings=warnings,
    )


@checked(ctx=wholes, gpus=wholes)
def build_table(
    *,
    ctx: Sequence[int] | str,
    gpus: Sequence[int] | str | None = None,
    jobs: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
    **scenario: Any,
) -> PartitionTable:
    """Search the best partition for many contexts and numbers of GPUs: a lookup table for "kvr-p".

    ctx: contexts in tokens, or text such as "1k:32k:1k" (both ends included) or "4k,8k".
    gpus: numbers of GPUs, or text such as "2,4,8"; None: 2, 4, 8, ... up to those of the cluster.
    jobs: processes that work on it; more than one needs a script with `if __name__ == "__main__"` on some systems.
    on_progress: called with entries searched and entries in all.
    scenario: the other arguments of make_scenario.

    Raises InputError naming the parameter.
    """
    from kvrsim.ranges import counts_of, counts_up_to, lengths_of
    from kvrsim.setup import make_scenario
    from planner.table.backends import Pool
    from planner.table.build import make_table

    lengths = lengths_of(ctx, "ctx")
    if gpus is None:
        gpus = counts_up_to(make_scenario(ctx=1, **scenario)[0].num_gpus)
    counts = counts_of(gpus, "gpus")
    base, _ = make_scenario(ctx=lengths[-1], gpus=counts[-1], **scenario)
    with Pool(jobs=jobs) as pool:
        return make_table(base, counts, lengths, pool=pool, on_progress=on_progress)


@checked(requests=named())
def capacity(
    *, requests: str | PathLike[str], slo_ttft: float | str, percentile: float | str = 99, **options: Any
) -> CapacityPlan:
    """Find the smallest or cheapest fleet whose TTFT is within the target for so many percent of the requests.

    requests: a trace, or "synthetic:...". options: the other options of `kvrsim capacity`, with _ for -, and
    on_progress, called with what is being worked on. Raises InputError naming the parameter; where nothing meets the
    target, the plan's `feasible` is False.
    """
    from planner.capacity.facade import ask

    return ask(requests=requests, slo_ttft=slo_ttft, percentile=percentile, **options)


def _table(value: str | PathLike[str] | PartitionTable | None) -> PartitionTable | None:
    """A table, read where it is named by its file."""
    from planner.table.table import load_table

    return load_table(value) if isinstance(value, str) else cast("PartitionTable | None", value)
