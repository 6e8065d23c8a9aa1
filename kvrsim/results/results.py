"""The answers of kvrsim: typed results that turn into JSON, data frames, figures and notebook tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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

    from kvrsim.closed_loop import ClosedLoop
    from kvrsim.hardware import Cluster
    from kvrsim.noise import Distribution, Noise
    from kvrsim.results.question import Question
    from kvrsim.results.timeline import Breakdown, Timeline


NEAR = 1.02  # strategies within this factor of the fastest TTFT count as equal


class OnFirstUse:
    """A frozen dataclass with fields that are computed on first use, by the functions in `later`."""

    __slots__ = ()
    later: Mapping[str, Callable[[], Any]]

    @classmethod
    def of(cls, later: Mapping[str, Callable[[], Any]], **values: Any) -> Self:
        """Make an object from values, and from functions for the fields that are computed on first use."""
        make: Any = cls
        one: Self = make(**values, **dict.fromkeys(later), later=later)
        for name in later:
            object.__delattr__(one, name)
        return one

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "later" or name not in self.later:
                raise AttributeError(f"{type(self).__name__} has no {name}")
            object.__setattr__(self, name, self.later[name]())
            return getattr(self, name)

    def __reduce__(self) -> Any:
        """Pickle the values without their functions."""
        names = [one.name for one in fields(self) if one.name != "later"]  # type: ignore[arg-type]
        return partial(type(self), **{name: getattr(self, name) for name in names}), ()


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

    def layout_to_dict(self) -> dict[str, Any]:
        """A pipeline's stages, query blocks, and the access to a cached prefix that lies elsewhere, as JSON values."""
        access = {} if self.prefix_access is None else {"prefix_access": self.prefix_access}
        blocks = {} if self.query_blocks is None else {"query_blocks": list(self.query_blocks)}
        return stages_to_json(self.partition, self.layers) | blocks | access | self.users_to_dict()

    def users_to_dict(self) -> dict[str, Any]:
        """The mean TTFT of closed-loop users as JSON values, if requested."""
        return {} if self.mean_ttft_s is None else {"mean_ttft_s": self.mean_ttft_s}


def stages_to_json(partition: tuple[int, ...], layers: tuple[int, ...] | None) -> dict[str, Any]:
    """A pipeline's tokens per piece and layers per stage, as JSON values; empty for other strategies."""
    return {} if layers is None else {"pieces": list(partition), "layers": list(layers)}


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the timeline."""
        about = ("strategy", "model", "profile", "cluster", "context_len", "partition", "executor")
        times = ("ttft_s", "ttft_low_s", "ttft_high_s", "interval_coverage", "interval_causes", "fits")
        content = self.question.header() | fields_to_json(self, *about, *times)
        content |= self.layout_to_dict() | self.memory_limit.to_dict() | fields_to_json(self, "per_rank", "warnings")
        if self.breakdown is not None:
            content["breakdown"] = self.breakdown.to_dict()
        if self.noise is not None and self.noisy is not None:
            content["noise"] = {"spec": self.noise.name, **self.noise.to_dict()} | self.noisy.to_dict()
        return content | ({} if self.users is None else {"users": fields_to_json(self.users)})

    def to_frame(self) -> pandas.DataFrame:
        """One row per rank, with scalar cells; the first columns are what was asked."""
        about = self.question.columns() | {"strategy": self.strategy}
        return to_frame(about | rank.to_dict() for rank in self.per_rank)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StrategyResult(StrategyPrediction, OnFirstUse):
    """One strategy in a plan, with its best partition."""

    title: str  # description in one line
    is_tied: bool  # whether its difference from the best is within the interval of differences
    speedup_over_tsp: float | None  # TSP's TTFT divided by this TTFT; None: TSP is not compared
    speedup: float | None  # the baseline's TTFT divided by this TTFT; None: the plan has no baseline
    exposed_comm_s: float  # TTFT minus that of the same partition with free links
    wait_s: tuple[float, ...]  # waiting time per GPU; see RankReport
    noisy: Distribution | None = None  # TTFTs under the plan's noise; `ttft_s` is without the random part
    layout: Layout  # layout of all GPUs
    searched: bool = True  # False: a rough partition; the strategy cannot be the best, or the budget ended
    engines: Mapping[str, str] = field(default_factory=dict)  # engines with the strategy, each with the checked version
    effort: SearchReport | None = None  # effort of the search of its partition; None: nothing to search, or a table
    lower_bound_s: float | None = None  # proven in that search: none of its partitions is faster; None: not proven
    paper_ttft_s: float | None = None  # TTFT that the KV-Runahead paper measured; None: it did not ask this question
    later: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False, compare=False)  # see OnFirstUse

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<StrategyResult: {self.strategy}, {self.ttft_s:.4g} s, {fits}>"

    def headline(self) -> dict[str, Any]:
        """The fields of a plan's `best`, as plain JSON values."""
        content = fields_to_json(self, "strategy", "partition", "ttft_s", "ttft_low_s", "ttft_high_s", "fits")
        return content | stages_to_json(self.partition, self.layers) | self.users_to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        times = ("ttft_s", "ttft_low_s", "ttft_high_s", "speedup_over_tsp", "speedup", "exposed_comm_s", "wait_s")
        content = {} if self.noisy is None else {"under_noise": self.noisy.to_dict()}
        content |= fields_to_json(self, "strategy", "partition") | self.layout_to_dict() | fields_to_json(self, *times)
        return (
            content
            | {"peak_bytes": [rank.total for rank in self.memory]}
            | fields_to_json(self, "fits", "engines", "layout", "searched", "effort", "lower_bound_s", "paper_ttft_s")
        )


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
    limit: int | None = None  # number of partitions at which a search on a bus ended early; None: no search did
    unsearched: tuple[str, ...] = ()  # strategies that could be the best but exceed the budget; likeliest first


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
    """A change of the question that was simulated and is faster."""

    change: str  # the options to add to the question
    ttft_s: float  # TTFT of the best plan that was simulated under the change


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(Answer, OnFirstUse):
    """The answer to `kvrsim plan`."""

    question: Question
    first: StrategyResult  # the best one; where none fits, the one that needs the least memory
    strategies: tuple[StrategyResult, ...]
    yardstick: str | None  # baseline of speed-ups: the first of TSP, TP, KVR-E, one GPU and the best that fits
    not_compared: tuple[str, ...]  # strategies that cannot fit, the nearest first
    not_tried: tuple[NotTried, ...] = ()  # strategies that could fit and are not compared
    engine: str | None = None  # the engine that launches the plan; None: none is asked for
    advice: tuple[Advice, ...] = ()  # simulated changes of the question that are faster, the fastest first
    bounds: Bounds
    search: SearchReport
    rests_on: str  # basis of the prediction: the profile's measurements and errors
    warnings: tuple[str, ...]
    interval_coverage: float | None  # share of held-out TTFTs inside such intervals; None: not measured
    timeline: Timeline | None = field(default=None, repr=False, compare=False)  # timeline of the best
    timelines: Mapping[str, Timeline] = field(default_factory=dict, repr=False, compare=False)  # all timelines
    noise: NoiseReport | None = None  # noise of the ranking, if any
    promise: Promise | None = None  # promise for the best strategy; None: nothing fits
    limits: tuple[Limit, ...] = ()  # limits of the best strategy's TTFT, the largest share first
    shortfall: Shortfall | None = None  # if nothing fits: the missing memory, and settings that would fit
    users: ClosedLoop | None = None  # closed-loop users of every strategy's `mean_ttft_s`
    later: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False, compare=False)  # see OnFirstUse

    @property
    def ties(self) -> tuple[str, ...]:
        """Exact strategies that fit; the prediction interval of their difference from the best contains 0."""
        return tuple(one.strategy for one in self.strategies if one.is_tied)

    @property
    def feasible(self) -> bool:
        """Whether any strategy fits in memory."""
        return self.first.fits

    def __getitem__(self, strategy: str) -> StrategyResult:
        """Return the result of a strategy by name. Raises KeyError if it was not compared."""
        return {one.strategy: one for one in self.strategies}[strategy]

    def __iter__(self) -> Iterator[StrategyResult]:
        """The strategies, fastest first."""
        return iter(self.strategies)

    def __len__(self) -> int:
        """Number of strategies that were compared."""
        return len(self.strategies)

    def __contains__(self, strategy: object) -> bool:
        """Whether a strategy was compared, by name."""
        return any(one.strategy == strategy for one in self.strategies)

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
        return next((one for one in self.strategies if one.fits), None)

    @property
    def deployable(self) -> StrategyResult | None:
        """The fastest strategy that the plan's engine launches, or without an engine any; None: none fits."""
        return self.best_on(*(DEPLOY_ENGINES if self.engine is None else [self.engine]))

    @property
    def passed_over(self) -> StrategyResult | None:
        """The fastest strategy, if it is more than 2 % faster than the best and the plan's engine lacks it."""
        fastest = self.fastest
        if self.engine is None or fastest is None or self.engine in fastest.engines:
            return None
        return fastest if fastest.ttft_s * NEAR < self.first.ttft_s else None

    def best_on(self, *engines: str) -> StrategyResult | None:
        """The fastest strategy that fits and that one of these engines has; within 2 %, the easiest to deploy.

        None: they have no strategy that fits.
        """
        has = [one for one in self.strategies if one.fits and not one.engines.keys().isdisjoint(engines)]
        near = [one for one in has if one.ttft_s <= NEAR * has[0].ttft_s]
        return min(near, key=lambda one: one.layout.effort, default=None)

    @property
    def nearest(self) -> StrategyResult | None:
        """The strategy that needs the least memory, if nothing fits; its TTFT is an estimate that no GPU can reach."""
        return None if self.feasible else self.first

    @property
    def misfit(self) -> str:
        """Describe in one line how much memory is missing if nothing fits; empty if a strategy fits."""
        if (short := self.shortfall) is None:
            return ""
        gpus = f"{self.num_gpus} GPU{'s' * (self.num_gpus != 1)}"
        needs = f"needs {format_bytes(short.peak_bytes)} of {format_bytes(self.memory_limit.nbytes)} on a GPU"
        over = f"{format_bytes(short.over_bytes)} too much"
        return f"nothing fits on {gpus}: the nearest, {short.strategy}, {needs}, {over}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = self.question.header() | fields_to_json(self, "model", "profile", "cluster", "attention", "num_gpus")
        content |= self.memory_limit.to_dict() | {"context_len": self.context_len}
        about = self.first.headline() | {"ties": list(self.ties)}
        content |= {"best": about if self.feasible else None, "nearest": None if self.feasible else about}
        fastest = self.fastest
        deployable = self.deployable
        content["fastest"] = None if fastest is None else fastest.headline()
        content["deployable"] = None
        if deployable is not None:
            content["deployable"] = deployable.headline() | {"engines": list(deployable.engines)}
        content |= fields_to_json(self, "yardstick", "not_compared", "not_tried", "strategies", "bounds", "search")
        content |= fields_to_json(self, "rests_on", "interval_coverage", "promise", "limits", "advice", "shortfall")
        content["warnings"] = list(self.warnings)
        content |= {} if self.users is None else {"users": fields_to_json(self.users)}
        return content | ({} if self.noise is None else {"noise": self.noise.to_dict()})

    def to_frame(self) -> pandas.DataFrame:
        """One row per strategy, with scalar cells; the first columns are what was asked."""
        about = self.question.columns()
        return to_frame(about | strategy.to_dict() for strategy in self.strategies)
