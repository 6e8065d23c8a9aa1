"""Names that the command line, the Python API and the packages below share; this module imports nothing heavy."""

from __future__ import annotations

from typing import Literal, get_args

Topology = Literal["switch", "bus", "chain", "nodes"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

Attention = Literal["eager", "sdpa", "flash"]  # kernels that the runtime measures
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

DTYPE_BYTES = {"fp16": 2, "bf16": 2, "fp8": 1, "fp32": 4}  # bytes of one element
# Element types; fp8: matrix products of layers are in FP8, other operations in half precision.
DTYPES = tuple(DTYPE_BYTES)

PrefixPlace = Literal["all", "sharded", "host", "remote"]  # where the K and V of a cached prefix are stored
PREFIX_PLACEMENTS: tuple[PrefixPlace, ...] = get_args(PrefixPlace)
PrefixAccess = Literal["whole", "pass-kv", "pass-q"]  # how ranks attend to a cached prefix (kvrsim/kernels/prefix.py)

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = get_args(Device)

RankBackend = Literal["gloo", "nccl"]  # backends of torch.distributed

Method = Literal["auto", "analytical", "grid"]  # search methods of a partition
METHODS: tuple[Method, ...] = get_args(Method)

DeployEngine = Literal["vllm", "sglang", "trtllm"]  # engines that `--emit` supports
DEPLOY_ENGINES: tuple[DeployEngine, ...] = get_args(DeployEngine)
Launch = Literal["vllm", "sglang", "trtllm", "vllm-runahead"]  # what `plan --emit` prints

Executor = Literal["batch", "event"]
EXECUTORS: tuple[Executor, ...] = get_args(Executor)

PoolBackend = Literal["loky", "dask", "ray"]  # of joblib; "loky" starts processes on this machine
POOL_BACKENDS: tuple[PoolBackend, ...] = get_args(PoolBackend)

PrefixCache = Literal["simulated", "unlimited", "none"]  # what a fleet keeps of the prefixes of sessions
FleetObjective = Literal["gpus", "cost"]  # quantities that a capacity plan can minimise

# Sections of the help, in this order.
SECTIONS = (
    "Question",
    "Workload",
    "Sessions",
    "Target",
    "Fleet",
    "Machine",
    "Search",
    "Randomness",
    "Measurement",
    "Processes",
    "Output",
)
ALL_OPTIONS = "kvrsim.all_options"  # key in a command's context; if set, the help shows every option
FEW_OPTIONS = 14  # number of options in a short help: required ones, then FIRST_OPTIONS
# Options that a short help shows after the required ones, in the order of their importance.
FIRST_OPTIONS = (
    "max_median_error",
    "min_coverage",
    "max_interval_score",
    "requests",
    "slo_ttft",
    "percentile",
    "max_gpus",
    "price_per_gpu_hour",
    "tpot",
    "emit",
    "plot",
    "ctx",
    "gpus",
    "strategy",
    "strategies",
    "partition",
    "slo",
    "rate",
    "engine",
    "only_deployable",
    "dtype",
    "cached_prefix",
    "explain",
    "breakdown",
    "check",
    "output_tokens",
    "measurements",
    "top",
    "profile",
    "output",
    "minutes",
    "ranks",
    "even_if_busy",
    "repeats",
    "noise",
    "model",
    "name",
    "link_bandwidths",
    "gpu",
    "link",
    "report",
    "device",
    "json",
)
