"""How ranks start, what they run in one prefill, and its measurements. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType

from kvrsim.choices import Attention, RankBackend
from kvrsim.errors import InputError
from kvrsim.hardware import LinkSpec
from kvrsim.interp import interquartile_range
from kvrsim.kernels.profile import Gather
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES
from kvrsim.strategies.base import RealRun
from kvrsim.units import format_bytes

RUN_DTYPES = ("fp16", "bf16", "fp32")
OnProgress = Callable[[int, int, str], object]  # numbers of finished steps and of all steps, and a text
Parts = Mapping[tuple[int | None, str], float]  # seconds by layer (None: outside the layers) and the simulator's name

# Registered strategies that ranks can run, with the name of each one's run.
RUN_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {name: strategy.real_run.name for name, strategy in STRATEGIES.items() if strategy.real_run is not None}
)
# How ranks run, by the name of the run.
REAL_RUNS: Mapping[str, RealRun] = MappingProxyType(
    {strategy.real_run.name: strategy.real_run for strategy in STRATEGIES.values() if strategy.real_run is not None}
)


def run_strategy(name: str) -> str:
    """Return the name of a registered strategy's run; raise InputError if the runtime cannot run the strategy."""
    if name not in RUN_STRATEGIES:
        accepted = f"what the runtime runs: {', '.join(RUN_STRATEGIES)}"
        if name not in STRATEGIES:
            accepted += "; hybrids and strategies from elsewhere are planned and simulated only"
        raise InputError("strategy", name, accepted)
    return RUN_STRATEGIES[name]


def check_decoding(run: str, output_tokens: int) -> None:
    """Raise InputError if ranks are to generate several tokens, but no rank can decode after this run's prefill."""
    if output_tokens > 1 and not REAL_RUNS[run].decodes:
        decoding = ", ".join(name for name, other in RUN_STRATEGIES.items() if REAL_RUNS[other].decodes)
        accepted = f"1 for {run.replace('_', '-')}, where {REAL_RUNS[run].cache}; others decode: {decoding}"
        raise InputError("output_tokens", output_tokens, accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlot:
    """Rank of a worker, and its connections to the other processes."""

    rank: int
    store: str  # address where ranks find each other, in the form of torch.distributed
    note: Callable[[int], object] = lambda layer: None  # called with the layer that the rank has reached
    report: OnProgress = lambda done, total, what: None  # called with progress; only that of rank 0 is reported


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """Settings for starting ranks."""

    num_ranks: int
    device: str = "cpu"  # "cpu", or "cuda": rank r uses GPU r modulo the number of GPUs
    backend: RankBackend | None = None  # None: NCCL where each rank has its own GPU, else gloo
    timeout_s: float = 60.0  # seconds for a message: longer than any rank computes between two messages
    deadline_s: float = 600.0  # seconds for the start, and again for the work
    threads: int = 1  # number of CPU threads of each rank
    link: LinkSpec | None = None  # speed of messages; None: that of the real links
    peer_to_peer: bool = True  # whether NCCL may use direct access between GPUs; otherwise it sends through host memory


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A run of a strategy with its partition."""

    strategy: str  # a name of REAL_RUNS
    partition: Partition
    batch: int = 1  # number of prompts of equal length
    gather: Gather = "ring"  # kind of all-gather: between neighbours, or the backend's own
    stage_layers: tuple[int, ...] | None = None  # layers of each pipeline stage; None: no pipeline
    query_blocks: tuple[tuple[int, ...], ...] = ()  # attention calls of KVR by chunk, by layer; empty: one call each
    output_tokens: int = 1  # tokens to generate; those after the first are decoded from the KV cache of the prefill

    @property
    def context_len(self) -> int:
        """Number of tokens of a prompt."""
        return self.partition.num_tokens

    @property
    def chunks(self) -> str:
        """The partition as text, such as "28,42,26"."""
        return ",".join(map(str, self.partition.chunk_lens))

    @property
    def name(self) -> str:
        """The exchange as text, such as "zigzag-ring"."""
        return self.strategy.replace("_", "-")

    @property
    def label(self) -> str:
        """The plan as text, such as "kvr 28,42,26"."""
        label = self.name
        if REAL_RUNS[self.strategy].payload == "all-gather":
            label += f" {self.gather}"
        label += f" {self.chunks}"
        if self.stage_layers is not None:
            label += f", layers {','.join(map(str, self.stage_layers))}"
        if self.query_blocks:
            largest = [max(blocks_by_layer) for blocks_by_layer in self.query_blocks]
            label += f" in {','.join(map(str, largest))} blocks"
        return label


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """The model that the ranks run."""

    config: str | Mapping[str, object]  # a built-in name, a path, or the keys of a config.json
    dtype: str  # one of RUN_DTYPES
    attention: Attention  # attention kernel
    seed: int = 0  # seed of random weights and of the prompt
    checkpoint: str | None = None  # folder of the model's weights, as safetensors; None: random weights

    def __post_init__(self) -> None:
        if self.dtype not in RUN_DTYPES:
            raise InputError("dtype", self.dtype, "what the runtime computes in: " + ", ".join(RUN_DTYPES))

    @property
    def weights(self) -> str:
        """The weights in words; ranks compare them."""
        if self.checkpoint is None:
            return f"random, seed {self.seed}"
        sizes = [path.stat().st_size for path in Path(self.checkpoint).glob("*.safetensors")]
        return f"of the checkpoint, {len(sizes)} file{'s' * (len(sizes) != 1)} of {format_bytes(sum(sizes))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The prefills that all ranks measure."""

    model: ModelChoice
    plans: tuple[RunPlan, ...]
    repeats: int = 5
    warmups: int = 1
    check_logits: bool = True  # whether the logits are compared with those of one process

    def facts(self) -> dict[str, str]:
        """Return the facts that determine each rank's messages and therefore must be equal on all ranks."""
        facts = {name: str(getattr(self, name)) for name in ("repeats", "warmups", "check_logits")}
        facts |= {name: str(getattr(self.model, name)) for name in ("dtype", "attention", "seed")}
        plans = "; ".join(plan.label for plan in self.plans)
        first = self.plans[0]
        return facts | {"partitions": plans, "batch": str(first.batch), "output_tokens": str(first.output_tokens)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference between a prefill on several ranks and the same prefill in one process."""

    logits: float  # largest difference of the last token's logits
    logits_scale: float  # largest magnitude of a logit
    first_unequal: int | None = None  # number of the first generated token that differs, from 0; None: all are equal
    margin: float | None = None  # there, by how much one process's logit of its token exceeds that of the other token


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedTokens:
    """Tokens that ranks have generated after a prefill, each the one with the largest logit."""

    tokens: tuple[tuple[int, ...], ...]  # tokens of each prompt, the first one included
    step_s: tuple[float, ...]  # seconds of each token after the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Repeated measurements of the prefills of one plan."""

    plan: RunPlan
    ttft_s: tuple[float, ...] = ()  # TTFT of each repetition, in order of measurement, without warm-ups
    parts: tuple[tuple[Parts, ...], ...] = ()  # virtual ranks: seconds per repetition, per rank
    timeline: Timeline | None = None  # timeline of one more prefill with hooks in its layers; None: virtual ranks
    difference: Difference | None = None  # difference from the same prefill in one process; None: not compared
    decoding: GeneratedTokens | None = None  # generated tokens; None: virtual ranks

    @property
    def median_s(self) -> float:
        """Median TTFT."""
        return median(self.ttft_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the repetitions."""
        return interquartile_range(self.ttft_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Measurements of the ranks, with the conditions of the machine."""

    timings: tuple[Timing, ...]  # one per plan
    conditions: Mapping[str, str]  # machine, libraries, transport, model: all conditions that affect the results
