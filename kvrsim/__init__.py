"""kvrsim simulates and plans the prefill of large language models over several GPUs.

>>> import kvrsim
>>> plan = kvrsim.plan(ctx="16k", gpus=8)
>>> plan.best.strategy, plan.best.partition, plan.best.ttft_s  # doctest: +SKIP

Everything in `__all__` is loaded when it is first used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from os import PathLike

    from kvrsim.errors import InfeasibleError, InputError, KvrsimError
    from kvrsim.hardware import Cluster, GpuSpec, LinkSpec, load_cluster
    from kvrsim.model import ModelSpec, load_model
    from kvrsim.partition import Partition
    from kvrsim.profile import CalibrationProfile, load_profile
    from kvrsim.request import Request
    from kvrsim.results import Plan, SimResult
    from kvrsim.scenario import Scenario
    from kvrsim.timeline import Span, Timeline

__version__ = "0.1.0"

__all__ = [
    "CalibrationProfile",
    "Cluster",
    "GpuSpec",
    "InfeasibleError",
    "InputError",
    "KvrsimError",
    "LinkSpec",
    "ModelSpec",
    "Partition",
    "Plan",
    "Request",
    "Scenario",
    "SimResult",
    "Span",
    "Timeline",
    "__version__",
    "load_cluster",
    "load_model",
    "load_profile",
    "make_scenario",
    "plan",
    "simulate",
]

_HOMES = {
    "kvrsim.errors": ("InfeasibleError", "InputError", "KvrsimError"),
    "kvrsim.hardware": ("Cluster", "GpuSpec", "LinkSpec", "load_cluster"),
    "kvrsim.model": ("ModelSpec", "load_model"),
    "kvrsim.partition": ("Partition",),
    "kvrsim.profile": ("CalibrationProfile", "load_profile"),
    "kvrsim.request": ("Request",),
    "kvrsim.results": ("Plan", "SimResult"),
    "kvrsim.scenario": ("Scenario",),
    "kvrsim.timeline": ("Span", "Timeline"),
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


def plan(
    *,
    ctx: int | str,
    gpus: int | str = 8,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    attention: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    dtype: str = "fp16",
    strategies: Sequence[str] = ("single", "tsp", "kvr-e", "kvr-s"),
    method: str = "auto",
    stride: int | str | None = None,
    on_progress: Callable[[int, int, float], None] | None = None,
    timeline: bool = False,
) -> Plan:
    """Compare strategies for one prefill, each with its best partition, and bound what is possible at all.

    The arguments up to `dtype` are those of make_scenario.

    strategies: names out of "single", "tsp", "kvr-e", "kvr-s".
    method: how KVR-S's partition is searched: "grid" (the paper's), "analytical", or "auto".
    stride: tokens that every searched chunk boundary is a multiple of; None: chosen for the context.
    on_progress: called during the search with partitions simulated, partitions expected, best TTFT so far
        in seconds.

    timeline: whether the plan carries every span of time of the best strategy.

    Raises InputError naming the command line's argument. Where nothing fits in memory, the plan's `feasible`
    is False.
    """
    from planner.plan import make_plan

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
    )
    return make_plan(
        scenario,
        strategies=strategies,
        method=method,
        stride=None if stride is None else _tokens(stride, "--stride"),
        warnings=warnings,
        on_progress=on_progress,
        timeline=timeline,
    )


def simulate(
    *,
    strategy: str,
    ctx: int | str,
    gpus: int | str = 8,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    attention: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    dtype: str = "fp16",
    partition: Sequence[int] | None = None,
    executor: str | None = None,
    timeline: bool = False,
    breakdown: bool = False,
) -> SimResult:
    """Simulate one strategy's prefill.

    All arguments but these are those of make_scenario.

    strategy: "single", "tsp", "kvr-e" or "kvr-s".
    partition: new tokens a rank, summing to the context less the cached prefix; None: the strategy's own
        ("kvr-s" searches it first).
    executor: "batch", "event" (simulates queues on links one by one), or None for the one that is needed.
    timeline: whether the result carries every span of time; asks for the event executor.
    breakdown: whether it carries the seconds of every operation on every rank, the share of the roofline that
        they are, and how they are known (result.breakdown.to_frame()); asks for the event executor.

    Raises InputError naming the command line's argument.
    """
    from planner.simulate import run_simulation

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
    )
    return run_simulation(
        scenario,
        strategy=strategy,
        partition=partition,
        executor=executor,
        timeline=timeline,
        with_breakdown=breakdown,
        warnings=warnings,
    )


def make_scenario(
    *,
    ctx: int | str,
    gpus: int | str = 8,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    attention: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    dtype: str = "fp16",
) -> tuple[Scenario, tuple[str, ...]]:
    """What a prediction is about, and notes on it; numbers may be text, as on the command line.

    ctx: tokens of the whole context, such as 16384 or "16k".
    gpus: GPUs that take part.
    model: a built-in name, a path to a Hugging Face config.json or its folder, or a ModelSpec.
    profile: a built-in name, a path, "roofline" (the datasheet's limits), or a CalibrationProfile; None: the
        one measured on the cluster's GPU.
    cluster: a built-in name, a path, or a Cluster; None: A100s of 80 GB on NVLink.
    link_bandwidth: bytes per second one way, or text such as "10GB/s", in the place of the cluster's.
    link_latency: seconds, or text such as "5us", in the place of the cluster's.
    topology: "switch", "bus" or "chain", in the place of the cluster's.
    attention: kernel, "eager" or "flash"; None: the profile's first.
    batch: sequences prefilled together.
    cached_prefix: leading tokens of the context whose KV every rank already holds.
    dtype: "fp16", "bf16" or "fp8", of weights, activations and KV cache.

    Raises InputError naming the command line's argument.
    """
    from typing import cast

    from kvrsim.hardware import Topology
    from planner import scenarios

    return scenarios.make_scenario(
        ctx=_tokens(ctx, "--ctx"),
        gpus=_count(gpus, "--gpus"),
        model=_named(model),
        profile=_named(profile),
        cluster=_named(cluster),
        link_bandwidth_bytes_per_s=_bandwidth(link_bandwidth),
        link_latency_s=_seconds(link_latency),
        topology=cast("Topology | None", topology),  # checked by Cluster
        attention=attention,
        batch=_count(batch, "--batch"),
        cached_prefix=0 if cached_prefix == "0" else _tokens(cached_prefix, "--cached-prefix"),
        dtype=dtype,
    )


_Thing = TypeVar("_Thing")


def _named(value: _Thing | PathLike[str]) -> _Thing | str:
    """A path as text; the rest as it is."""
    return str(value) if hasattr(value, "__fspath__") else value


def _tokens(value: int | str, argument: str) -> int:
    from kvrsim.units import parse_tokens

    return parse_tokens(value, argument) if isinstance(value, str) else _whole(value)


def _count(value: int | str, argument: str) -> int:
    from kvrsim.units import parse_count

    return parse_count(value, argument) if isinstance(value, str) else _whole(value)


def _whole(value: int) -> int:
    """NumPy's whole numbers as Python's; what is not one is left for the type that checks it."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _bandwidth(value: float | str | None) -> float | None:
    from kvrsim.units import parse_bandwidth

    return parse_bandwidth(value, "--link-bandwidth") if isinstance(value, str) else value


def _seconds(value: float | str | None) -> float | None:
    from kvrsim.units import parse_seconds

    return parse_seconds(value, "--link-latency", allow_zero=True) if isinstance(value, str) else value
