"""The answers of kvrsim: typed results that turn into JSON, data frames, figures and notebook tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import kvrsim
from kvrsim.choices import DEPLOY_ENGINES, PrefixAccess
from kvrsim.errors import NothingFits
from kvrsim.hardware import MemoryLimit
from kvrsim.io.schema import fields_to_json, to_frame
from kvrsim.layout import Layout
from kvrsim.memory import RankMemory
from kvrsim.units import format_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from kvrsim.attention_map import PaperCounts
    from kvrsim.closed_loop import ClosedLoop
    from kvrsim.hardware import Cluster
    from kvrsim.noise import Distribution, Noise
    from kvrsim.results.question import Question
    from kvrsim.results.timeline import Breakdown, Timeline


NEAR = 1.02  # strategies within this factor of the fastest TTFT count as equal


class Viewable:
    """A result with a view: a module of kvrsim.views that has its `figure`, `page` and `summary`."""

    __slots__ = ()

    def plot(self, path: str | Path | None = None) -> Figure:
        """Make a figure of the result, which notebooks show.

        path: also write this file: .png, .svg or .pdf, or .html for an interactive page in one file.
        Raises InputError naming the argument plot if the suffix is not one of these or the file cannot be written.
        """
        if path is not None:
            self.write_plot(path)
        return kvrsim.view_of(self).figure()

    def write_plot(self, path: str | Path) -> None:
        """Write the result to a file; see `plot`."""
        kvrsim.view_of(self).write(path)

    def __repr__(self) -> str:
        """The answer in one line."""
        return f"<{type(self).__name__}: {kvrsim.view_of(self).summary().answer}>"

    def _repr_html_(self) -> str:
        """The answer, the question and a table, escaped; notebooks call it."""
        return kvrsim.view_of(self).summary().to_html()


class Answer(Viewable):
    """A result about one scenario, which its question describes."""

    __slots__ = ()
    question: Question

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.question.model

    @property
    def profile(self) -> str:
        """Name of the profile, or "roofline"."""
        return self.question.profile

    @property
    def cluster(self) -> Cluster:
        """The cluster, with the GPUs that take part."""
        return self.question.cluster

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that take part."""
        return self.question.num_gpus

    @property
    def context_len(self) -> int:
        """Tokens, the cached prefix included."""
        return self.question.context_len

    @property
    def attention(self) -> str:
        """The attention kernel."""
        return self.question.attention

    @property
    def memory_limit(self) -> MemoryLimit:
        """The limit that `fits` compares with."""
        memory_bytes = self.cluster.gpu.memory_bytes
        fraction = self.question.memory_fraction
        return MemoryLimit(gpu_memory_bytes=memory_bytes, memory_fraction=fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the question after which a strategy fits."""

    change: str  # options of the command line, such as "--gpus 16 --strategies pp"
    strategy: str
    num_gpus: int
    dtype: str
    memory_fraction: float
    peak_bytes: int  # peak memory of the GPU that needs the most


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """Memory that the nearest strategy lacks, and remedies."""

    strategy: str  # the compared strategy that comes nearest to fitting
    peak_bytes: int  # peak memory of its GPU that needs the most
    over_bytes: int  # bytes of that peak above the memory limit
    most_gpus_tried: int  # most GPUs on which a strategy was looked for that fits
    would_fit: tuple[Remedy, ...]  # empty: no change that was tried makes a strategy fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A predicted TTFT with its interval, and whether the prefill fits: the part that all results share."""

    ttft_s: float
    ttft_low_s: float  # lower end of the 80 % prediction interval
    ttft_high_s: float
    fits: bool  # whether every GPU has enough memory
    memory: tuple[RankMemory, ...] = ()  # peak memory of each GPU; empty: not part of the result


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyPrediction(Prediction):
    """A prediction for one strategy with one partition."""

    strategy: str
    partition: tuple[int, ...]  # new tokens per rank, or per piece of a pipeline
    layers: tuple[int, ...] | None = None  # layers per stage of a pipeline; None: it is no pipeline
    prefix_access: PrefixAccess | None = None  # access of ranks to a cached prefix; None: every rank holds it
    query_blocks: tuple[int, ...] | None = None  # attention calls per rank, in the layer with the most; None: one
    mean_ttft_s: float | None = None  # mean TTFT of closed-loop users; None if not requested


def stages_to_json(partition: tuple[int, ...], layers: tuple[int, ...] | None) -> dict[str, Any]:
    """A pipeline's tokens per piece and layers per stage, as JSON values; empty for other strategies."""
    if layers is None:
        return {}
    return {"pieces": list(partition), "layers": list(layers)}


def layout_to_json(result: StrategyPrediction | StrategyResult) -> dict[str, Any]:
    """What only some strategies and questions have, as JSON values.

    They are a pipeline's stages, query blocks, the access to a cached prefix that lies elsewhere, and the mean TTFT of
    closed-loop users.
    """
    content = stages_to_json(result.partition, result.layers)
    if result.query_blocks is not None:
        content["query_blocks"] = list(result.query_blocks)
    if result.prefix_access is not None:
        content["prefix_access"] = result.prefix_access
    if result.mean_ttft_s is not None:
        content["mean_ttft_s"] = result.mean_ttft_s
    return content


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's part in a simulated prefill."""

    rank: int
    chunk_len: int  # tokens
    compute_s: float  # device time of its own operations
    wait_s: float  # finish time minus compute_s: waits for data, links or the host
    sent_bytes: float
    loaded_bytes: float  # bytes of the cached prefix that come from outside or from other ranks
    memory: RankMemory

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = fields_to_json(self)
        memory = content.pop("memory")
        return content | {"peak_bytes": self.memory.total, "memory": memory}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SimResult(StrategyPrediction, Answer):
    """One strategy with one partition, simulated."""

    question: Question
    executor: str  # "batch" or "event"
    per_rank: tuple[RankReport, ...]
    warnings: tuple[str, ...]
    interval_coverage: float | None  # share of held-out TTFTs inside such intervals; None: not measured
    interval_causes: Mapping[str, tuple[float, float]]  # change of TTFT at the ends of the 80 % interval of each cause
    timeline: Timeline | None = field(default=None, repr=False, compare=False)  # spans; only from the event executor
    breakdown: Breakdown | None = field(default=None, repr=False)
    noise: Noise | None = None  # noise; `ttft_s` and `per_rank` are those of one sample
    noisy: Distribution | None = None  # TTFTs of all samples
    users: ClosedLoop | None = None  # closed-loop users of `mean_ttft_s`
    counts: PaperCounts | None = None  # the KV-Runahead paper's counts; None: not asked for

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the timeline."""
        about = ("strategy", "model", "profile", "cluster", "context_len", "partition", "executor")
        times = ("ttft_s", "ttft_low_s", "ttft_high_s", "interval_coverage", "interval_causes", "fits")
        content = self.question.header() | fields_to_json(self, *about, *times)
        content |= layout_to_json(self) | self.memory_limit.to_dict() | fields_to_json(self, "per_rank", "warnings")
        if self.breakdown is not None:
            content["breakdown"] = self.breakdown.to_dict()
        if self.noise is not None and self.noisy is not None:
            content["noise"] = {"spec": self.noise.name, **self.noise.to_dict()} | self.noisy.to_dict()
        if self.users is not None:
            content["users"] = fields_to_json(self.users)
        if self.counts is not None:
            content["counts"] = self.counts.to_dict()
        return content

    def to_frame(self) -> pandas.DataFrame:
        """One row per rank, with scalar cells; the first columns are what was asked."""
        about = self.question.columns() | {"strategy": self.strategy}
        return to_frame(about | rank.to_dict() for rank in self.per_rank)


class StrategySource(Protocol):
    """The candidate behind a row of a plan: it computes what takes long when that is read, once."""

    @property
    def is_tied(self) -> bool: ...
    @property
    def ttft_low_s(self) -> float: ...
    @property
    def ttft_high_s(self) -> float: ...
    @property
    def exposed_comm_s(self) -> float: ...
    @property
    def wait_s(self) -> tuple[float, ...]: ...
    @property
    def query_blocks(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StrategyResult:
    """One strategy in a plan, with its best partition."""

    strategy: str
    title: str  # description in one line
    partition: tuple[int, ...]  # new tokens per rank, or per piece of a pipeline
    layers: tuple[int, ...] | None = None  # layers per stage of a pipeline; None: it is no pipeline
    ttft_s: float
    mean_ttft_s: float | None = None  # mean TTFT of closed-loop users; None if not requested
    fits: bool  # whether every GPU has enough memory
    memory: tuple[RankMemory, ...]  # peak memory of each GPU
    speedup_over_tsp: float | None  # TSP's TTFT divided by this TTFT; None: TSP is not compared
    speedup: float | None  # the baseline's TTFT divided by this TTFT; None: the plan has no baseline
    noisy: Distribution | None = None  # TTFTs under the plan's noise; `ttft_s` is without the random part
    prefix_access: PrefixAccess | None = None  # access of ranks to a cached prefix; None: every rank holds it
    layout: Layout  # layout of all GPUs
    searched: bool = True  # False: a rough partition; the strategy cannot be the best, or the budget ended
    engines: Mapping[str, str] = field(default_factory=dict)  # engines with the strategy, each with the checked version
    method: str | None = None  # search method of its partition; None: nothing to search, or a table
    evaluations: int | None = None  # partitions that this search simulated; None: as `method`
    lower_bound_s: float | None = None  # proven in that search: none of its partitions is faster; None: not proven
    paper_ttft_s: float | None = None  # TTFT that the KV-Runahead paper measured; None: it did not ask this question
    source: StrategySource = field(compare=False)  # computes the properties

    @property
    def is_tied(self) -> bool:
        """Whether its difference from the best is within the interval of differences."""
        return self.source.is_tied

    @property
    def ttft_low_s(self) -> float:
        """Lower end of the 80 % prediction interval."""
        return self.source.ttft_low_s

    @property
    def ttft_high_s(self) -> float:
        """Upper end of the 80 % prediction interval."""
        return self.source.ttft_high_s

    @property
    def exposed_comm_s(self) -> float:
        """TTFT minus that of the same partition with free links."""
        return self.source.exposed_comm_s

    @property
    def wait_s(self) -> tuple[float, ...]:
        """Waiting time per GPU; see RankReport."""
        return self.source.wait_s

    @property
    def query_blocks(self) -> tuple[int, ...] | None:
        """Attention calls per rank, in the layer with the most; None: one."""
        return self.source.query_blocks

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<StrategyResult: {self.strategy}, {self.ttft_s:.4g} s, {fits}>"

    def headline(self) -> dict[str, Any]:
        """The fields of a plan's `best`, as plain JSON values."""
        content = fields_to_json(self, "strategy", "partition", "ttft_s", "ttft_low_s", "ttft_high_s", "fits")
        content |= stages_to_json(self.partition, self.layers)
        if self.mean_ttft_s is not None:
            content["mean_ttft_s"] = self.mean_ttft_s
        return content

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        times = ("ttft_s", "ttft_low_s", "ttft_high_s", "speedup_over_tsp", "speedup", "exposed_comm_s", "wait_s")
        content: dict[str, Any] = {}
        if self.noisy is not None:
            content["under_noise"] = self.noisy.to_dict()
        content |= fields_to_json(self, "strategy", "partition")
        content |= layout_to_json(self)
        content |= fields_to_json(self, *times)
        content["peak_bytes"] = [rank.total for rank in self.memory]
        content |= fields_to_json(
            self, "fits", "engines", "layout", "searched", "method", "evaluations", "lower_bound_s", "paper_ttft_s"
        )
        return content


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainBound:
    """Lower bound on the TTFT of any partition of a strategy that is a KV-Runahead chain."""

    strategy: str
    lower_bound_s: float  # proven bound, seconds
    gap: float  # the strategy's TTFT / lower_bound_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds on TTFT for KV-Runahead chains over single GPUs; other strategies may be faster."""

    ttft_star_s: float | None  # the paper's closed form: TTFT(1) / 2 x (1/p + 1/p^2); None: KVR-S does not run here
    ttft_no_comm_s: float | None  # the paper's TTFT(p): KVR-S, searched again with free links; None: it does not run
    lower_bound_s: float | None  # proven bound, seconds: no KVR partition over these GPUs is faster; None: no proof
    gap: float | None  # KVR-S's TTFT / lower_bound_s - 1; None: KVR-S is not compared, or there is no bound
    of: str = "kvr"  # the strategy whose TTFT `lower_bound_s` bounds
    best: ChainBound | None = None  # the bound of the plan's best strategy; None: none is known


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchReport:
    """Effort of a search, or of all searches of a plan together."""

    method: str  # search method of KVR-S: "auto", "analytical" or "grid"
    evaluations: int  # number of simulated partitions
    seconds: float
    unsearched: tuple[str, ...] = ()  # strategies that could be the best but exceed the budget; likeliest first


@dataclass(frozen=True, kw_only=True, slots=True)
class GridCheck:
    """What the paper's hierarchical grid search finds for KVR-S, beside the search that a plan used."""

    ttft_s: float  # of the grid's best partition
    searched_s: float  # TTFT of the plan's partition
    evaluations: int  # number of partitions that the grid simulated


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseReport:
    """The noise under which a plan ranks its strategies."""

    noise: Noise
    num_samples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        samples = {"samples": self.num_samples, "seed": self.seed}
        return {"spec": self.noise.name, **self.noise.to_dict(), **samples}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A kind of operation on the critical path."""

    operation: str
    share: float  # share of TTFT


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShare:
    """TTFTs that a given share of prompts does not exceed, where prompts differ: under noise, or in a queue."""

    percentile: float  # percentage of the prompts that do not exceed the TTFTs below
    expected_s: float | None  # if the machine is as predicted; None: the queue grows for ever
    high_s: float | None  # if the machine is as slow as the upper end of the interval; None: the queue grows for ever
    rate_per_s: float | None = None  # prompts that arrive per second; None: the GPUs are idle


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What the best strategy's TTFT will be: what is expected, and what is 90 % sure in spite of the model's errors.

    The model's error is the same for all prompts, so `high_s` is no percentile of prompts. PromptShare has percentiles.
    """

    expected_s: float  # TTFT of a prompt on idle GPUs; under noise, the mean
    high_s: float  # a prompt's TTFT on idle GPUs is below this with probability `confidence`
    confidence: float  # one-sided: an upper end of an 80 % interval has 0.9
    under_noise: PromptShare | None = None  # prompts on idle GPUs under noise; None: without noise
    at_rate: PromptShare | None = None  # prompts that arrive at a rate; None: not asked
    slo_s: float | None = None  # target of TTFT; None: no target, and the fields below are None
    meets: bool | None = None  # whether it is 90 % sure that the target is met; it decides the exit code
    most_rate_per_s: float | None = None  # largest rate of prompts at which this is 90 % sure; 0: at none
    expected_meets: bool | None = None  # whether the expected TTFT meets the target
    expected_most_rate_per_s: float | None = None  # largest rate of prompts at which it does; 0: at none

    @property
    def decisive(self) -> PromptShare | None:
        """The share of prompts that a target is compared with; None: the promise for idle GPUs is."""
        return self.at_rate or self.under_noise


@dataclass(frozen=True, kw_only=True, slots=True)
class NotTried:
    """Strategies that could fit and that a plan does not compare."""

    strategies: tuple[str, ...]
    why: str  # the reason, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A change of the question that was simulated."""

    change: str  # the options to add to the question
    ttft_s: float  # TTFT of the best plan that was simulated under the change


class PlanSource(Protocol):
    """The comparison behind a plan: it computes what takes long when that is read, once."""

    @property
    def bounds(self) -> Bounds: ...
    @property
    def grid_check(self) -> GridCheck | None: ...
    @property
    def advice(self) -> tuple[Advice, ...]: ...
    @property
    def as_fast(self) -> Advice | None: ...
    @property
    def advice_not_tried(self) -> tuple[str, ...]: ...
    @property
    def limits(self) -> tuple[Limit, ...]: ...
    @property
    def promise(self) -> Promise | None: ...
    @property
    def shortfall(self) -> Shortfall | None: ...
    @property
    def timeline(self) -> Timeline | None: ...
    @property
    def timelines(self) -> Mapping[str, Timeline]: ...


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(Answer):
    """The answer to `kvrsim plan`."""

    question: Question
    first: StrategyResult  # the best one; where none fits, the one that needs the least memory
    strategies: tuple[StrategyResult, ...]
    baseline: (
        str | None
    )  # strategy that speed-ups compare with: the first of TSP, TP, KVR-E, one GPU and the best that fits
    not_compared: tuple[str, ...]  # strategies that cannot fit, the nearest first
    not_tried: tuple[NotTried, ...] = ()  # strategies that could fit and are not compared
    engine: str | None = None  # the engine that launches the plan; None: none is asked for
    search: SearchReport
    provenance: str  # basis of the prediction: the profile's measurements and errors
    warnings: tuple[str, ...]
    interval_coverage: float | None  # share of held-out TTFTs inside such intervals; None: not measured
    noise: NoiseReport | None = None  # noise of the ranking, if any
    measured_s: Mapping[str, float] = field(default_factory=dict)  # median TTFT of a confirmation, by strategy
    users: ClosedLoop | None = None  # closed-loop users of every strategy's `mean_ttft_s`
    source: PlanSource = field(repr=False, compare=False)  # computes the properties

    @property
    def bounds(self) -> Bounds:
        """Bounds on the TTFT of KV-Runahead chains."""
        return self.source.bounds

    @property
    def grid_check(self) -> GridCheck | None:
        """The paper's grid search of KVR-S's partition; None: it is no check, or takes longer than a few seconds."""
        return self.source.grid_check

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Simulated changes of the question that are faster, the fastest first."""
        return self.source.advice

    @property
    def as_fast(self) -> Advice | None:
        """Half the GPUs, if a simulation says that they are as fast within 2 %, and not faster."""
        return self.source.as_fast

    @property
    def advice_not_tried(self) -> tuple[str, ...]:
        """Options of the changes that were not simulated, because that takes longer than the search budget."""
        return self.source.advice_not_tried

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits of the best strategy's TTFT, the largest share first."""
        return self.source.limits

    @property
    def promise(self) -> Promise | None:
        """The promise for the best strategy; None: nothing fits."""
        return self.source.promise

    @property
    def shortfall(self) -> Shortfall | None:
        """If nothing fits: the missing memory, and settings that would fit; None: a strategy fits."""
        return self.source.shortfall

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of the best strategy; None: not asked for."""
        return self.source.timeline

    @property
    def timelines(self) -> Mapping[str, Timeline]:
        """All timelines that were asked for, by strategy."""
        return self.source.timelines

    @property
    def ties(self) -> tuple[str, ...]:
        """Exact strategies that fit; the prediction interval of their difference from the best contains 0."""
        return tuple(result.strategy for result in self.strategies if result.is_tied)

    @property
    def feasible(self) -> bool:
        """Whether any strategy fits in memory."""
        return self.first.fits

    def __getitem__(self, strategy: str) -> StrategyResult:
        """Return the result of a strategy by name. Raises KeyError if it was not compared."""
        return {result.strategy: result for result in self.strategies}[strategy]

    def __iter__(self) -> Iterator[StrategyResult]:
        """The strategies, fastest first."""
        return iter(self.strategies)

    def __len__(self) -> int:
        """Number of strategies that were compared."""
        return len(self.strategies)

    def __contains__(self, strategy: object) -> bool:
        """Whether a strategy was compared, by name."""
        return any(result.strategy == strategy for result in self.strategies)

    @property
    def best(self) -> StrategyResult:
        """The fastest strategy that fits and that the plan's engine launches; among ties within 2 %, the easiest.

        Without an engine, or if the engine launches none that fits: of all that fit. Raises NothingFits, with the
        shortfall, where none fits.
        """
        if self.shortfall is not None:
            raise NothingFits(self.misfit, self.shortfall)
        return self.first

    @property
    def fastest(self) -> StrategyResult | None:
        """The fastest strategy that fits, whether or not an engine launches it; None: none fits."""
        for result in self.strategies:
            if result.fits:
                return result
        return None

    @property
    def deployable(self) -> StrategyResult | None:
        """The fastest strategy that the plan's engine launches, or without an engine any; None: none fits."""
        if self.engine is None:
            return self.best_on(*DEPLOY_ENGINES)
        return self.best_on(self.engine)

    @property
    def passed_over(self) -> StrategyResult | None:
        """The fastest strategy, if it is more than 2 % faster than the best and the plan's engine lacks it."""
        fastest = self.fastest
        if self.engine is None or fastest is None or self.engine in fastest.engines:
            return None
        if fastest.ttft_s * NEAR >= self.first.ttft_s:
            return None
        return fastest

    def best_on(self, *engines: str) -> StrategyResult | None:
        """The fastest strategy that fits and that one of these engines has; within 2 %, the easiest to deploy.

        None: they have no strategy that fits.
        """
        launched = []
        for result in self.strategies:
            if result.fits and not result.engines.keys().isdisjoint(engines):
                launched.append(result)
        near = [result for result in launched if result.ttft_s <= NEAR * launched[0].ttft_s]
        return min(near, key=lambda result: result.layout.effort, default=None)

    @property
    def nearest(self) -> StrategyResult | None:
        """The strategy that needs the least memory, if nothing fits; its TTFT is an estimate that no GPU can reach."""
        if self.feasible:
            return None
        return self.first

    @property
    def misfit(self) -> str:
        """Describe in one line how much memory is missing if nothing fits; empty if a strategy fits."""
        short = self.shortfall
        if short is None:
            return ""
        gpus = f"{self.num_gpus} GPU"
        if self.num_gpus != 1:
            gpus += "s"
        needs = f"needs {format_bytes(short.peak_bytes)} of {format_bytes(self.memory_limit.nbytes)} on a GPU"
        over = f"{format_bytes(short.over_bytes)} too much"
        return f"nothing fits on {gpus}: the nearest, {short.strategy}, {needs}, {over}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = self.question.header() | fields_to_json(self, "model", "profile", "cluster", "attention", "num_gpus")
        content |= self.memory_limit.to_dict() | {"context_len": self.context_len}
        first = self.first.headline() | {"ties": list(self.ties)}
        content |= {"best": None, "nearest": None, "fastest": None, "deployable": None}
        if self.feasible:
            content["best"] = first
        else:
            content["nearest"] = first
        fastest = self.fastest
        if fastest is not None:
            content["fastest"] = fastest.headline()
        deployable = self.deployable
        if deployable is not None:
            content["deployable"] = deployable.headline() | {"engines": list(deployable.engines)}
        content |= fields_to_json(self, "baseline", "not_compared", "not_tried", "strategies", "bounds", "search")
        content |= fields_to_json(self, "provenance", "interval_coverage", "promise", "limits", "advice")
        content |= fields_to_json(self, "as_fast", "advice_not_tried", "shortfall")
        content["warnings"] = list(self.warnings)
        if self.measured_s:
            content["measured_s"] = dict(self.measured_s)
        if self.users is not None:
            content["users"] = fields_to_json(self.users)
        if self.noise is not None:
            content["noise"] = self.noise.to_dict()
        return content

    def to_frame(self) -> pandas.DataFrame:
        """One row per strategy, with scalar cells; the first columns are what was asked."""
        about = self.question.columns()
        return to_frame(about | strategy.to_dict() for strategy in self.strategies)
