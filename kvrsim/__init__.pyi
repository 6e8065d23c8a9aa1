"""The names of `import kvrsim` and where each is defined: type checkers read this file, and so does __init__.py."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import pandas

from calibrate.prefills.fit import PrefillFit as PrefillFit
from kvrsim.engine import Engine as Engine
from kvrsim.engine import builtin_engines as engines
from kvrsim.engine import load_engine as load_engine
from kvrsim.errors import InputError as InputError
from kvrsim.errors import KvrsimError as KvrsimError
from kvrsim.errors import NothingFits as NothingFits
from kvrsim.hardware import Cluster as Cluster
from kvrsim.hardware import GpuSpec as GpuSpec
from kvrsim.hardware import LinkSpec as LinkSpec
from kvrsim.hardware import builtin_clusters as clusters
from kvrsim.hardware import load_cluster as load_cluster
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.kernels.profile import CalibrationProfile as CalibrationProfile
from kvrsim.kernels.profile import builtin_profiles as profiles
from kvrsim.kernels.profile import load_profile as load_profile
from kvrsim.model.load import builtin_models as models
from kvrsim.model.load import load_model as load_model
from kvrsim.model.spec import ModelSpec as ModelSpec
from kvrsim.noise import Noise
from kvrsim.progress import OnProgress
from kvrsim.results.results import Plan as Plan
from kvrsim.results.results import SimResult as SimResult
from kvrsim.results.timeline import Span as Span
from kvrsim.results.timeline import Timeline as Timeline
from kvrsim.scenario import Partition as Partition
from kvrsim.scenario import Request as Request
from kvrsim.scenario import Scenario as Scenario
from kvrsim.strategies.base import Strategy as Strategy
from kvrsim.version import __version__ as __version__
from kvrsim.views import View
from planner.capacity.result import CapacityPlan as CapacityPlan
from planner.confirm.result import Confirmation as Confirmation
from planner.map.map import StrategyMap as StrategyMap
from planner.predictor.predictor import TtftPredictor as TtftPredictor
from planner.predictor.predictor import load_predictor as load_predictor
from planner.table.table import PartitionTable as PartitionTable
from planner.table.table import load_table as load_table

def view_of(result: object) -> View: ...

__all__ = ["clusters", "engines", "models", "profiles"]  # the others are exported by `as` with their own name

# Functions, written by `python -m tests.building.stubs`. The comment says which module defines a function.
def make_scenario(  # kvrsim.builder
    *,
    ctx: int | str,
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
) -> tuple[Scenario, tuple[str, ...]]: ...
def calibrate(  # kvrsim.prefills
    *,
    ctx: int | str | None = None,
    gpus: int | str | None = None,
    model: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    strategy: str | None = None,
    columns: str | None = None,
    prefills: str | PathLike[str] | pandas.DataFrame | Sequence[str | PathLike[str] | pandas.DataFrame],
    name: str = "mine",
    on_progress: OnProgress | None = None,
) -> PrefillFit: ...
def build_predictor(  # planner.api
    *,
    ctx: int | str = "128k",
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec,
    batch: int | str = 1,
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    strategy: str | Strategy = "best",
    jobs: int | str = 1,
    on_progress: OnProgress | None = None,
) -> TtftPredictor: ...
def build_table(  # planner.api
    *,
    ctx: int | str | Iterable[int | str],
    gpus: int | str | Iterable[int | str] | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    strategy: str | Strategy = "kvr-s",
    jobs: int | str = 1,
    on_progress: OnProgress | None = None,
) -> PartitionTable: ...
def capacity(  # planner.api
    *,
    model: str | PathLike[str] | ModelSpec,
    dtype: str | None = None,
    cluster: str | PathLike[str] | Cluster,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    requests: str | PathLike[str] | pandas.DataFrame,
    columns: str | None = None,
    rate_scale: float | str = 1,
    think_time: str | None = None,
    session_rate: float | str | None = None,
    prefix_cache: Literal["simulated", "unlimited", "none"] = "simulated",
    kv_cache_host: int | str | None = None,
    kv_cache_remote: float | str | None = None,
    replications: int | str = 5,
    max_num_batched_tokens: int | str | None = None,
    slo_ttft: float | str,
    percentile: float | str = 99,
    sure: bool = False,
    max_gpus: int | str | None = None,
    group_sizes: int | str | Iterable[int | str] | None = None,
    uniform_only: bool = False,
    price_per_gpu_hour: float | str | Mapping[int, float | str] | None = None,
    node_granularity: int | str = 1,
    spare: int | str = 0,
    objective: Literal["gpus", "cost"] = "gpus",
    tpot: float | str | None = None,
    colocated: bool = False,
    kv_transfer_bandwidth: float | str | None = None,
    seed: int | str = 0,
    strategies: str | Strategy | Iterable[str | Strategy] | None = None,
    on_progress: OnProgress | None = None,
) -> CapacityPlan: ...
def confirm(  # planner.api
    *,
    ctx: int | str,
    gpus: int | str = 2,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    strategies: str | Strategy | Iterable[str | Strategy] | None = None,
    top: int | str | None = None,
    plan: str | PathLike[str] | None = None,
    virtual: bool | None = None,
    hardware: dict[str, Any] | None = None,
) -> Confirmation: ...
def map_strategies(  # planner.api
    *,
    ctx: int | str | Iterable[int | str],
    gpus: int | str | Iterable[int | str] | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    link_bandwidths: str | Iterable[float | str] | None = None,
    strategies: str | Strategy | Iterable[str | Strategy] | None = None,
    on_progress: OnProgress | None = None,
) -> StrategyMap: ...
def plan(  # planner.api
    *,
    ctx: int | str,
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    slo: float | str | None = None,
    rate: float | str | None = None,
    percentile: float | str = 90,
    table: str | PathLike[str] | PartitionTable | None = None,
    method: Literal["auto", "analytical", "grid"] = "auto",
    stride: int | str | None = None,
    search_budget: float | str = "1.5s",
    strategies: str | Strategy | Iterable[str | Strategy] | None = None,
    confirmed: str | None = None,
    noise: str | PathLike[str] | Noise | None = None,
    samples: int | str | None = None,
    seed: int | str = 0,
    users: int | str | None = None,
    output_tokens: int | str | None = None,
    timeline: bool = False,
    on_progress: OnProgress | None = None,
) -> Plan: ...
def simulate(  # planner.api
    *,
    ctx: int | str,
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec = "llama-7b",
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    prefix_placement: str | PrefixPlacement = "all",
    dtype: str | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    engine: str | PathLike[str] | Engine | None = None,
    attention: str | None = None,
    memory_fraction: float | str = 0.9,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    strategy: str | Strategy,
    partition: str | Iterable[int | str] | None = None,
    table: str | PathLike[str] | PartitionTable | None = None,
    executor: Literal["batch", "event"] | None = None,
    breakdown: bool = False,
    explain: bool = False,
    noise: str | PathLike[str] | Noise | None = None,
    samples: int | str | None = None,
    seed: int | str = 0,
    users: int | str | None = None,
    output_tokens: int | str | None = None,
    timeline: bool = False,
) -> SimResult: ...
