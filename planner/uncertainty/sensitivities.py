"""Sensitivities: the change of TTFT for an error in each source of a prediction.

There are four kinds of error sources: parts of the device's time, alone or all together; delays before the whole
prefill; perturbations of the scenario, such as a slower host; and end-to-end errors of TTFT, where a profile or an
engine was compared with whole prefills. The strategy is simulated again with each source at the low and at the high end
of its 80 % interval, DEVIATES_OF_80_PERCENT standard deviations from its central value. If the strategies of a plan
share a source (a table, a link, the host), its error is the same for all, so the sensitivities of two strategies may be
subtracted. Errors are standard deviations of a logarithm (log_sd).

Where a simulation takes long, the estimate of planner.estimate takes its place: only ratios of TTFTs are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.engine import DEVIATES_OF_80_PERCENT, NO_HOST, PRIOR_ENGINE, SHORT_TOKENS
from kvrsim.error_rule import TtftShares, error_rule
from kvrsim.execution import Execution
from kvrsim.executors.run import Runner
from kvrsim.kernels.cost import CostModel, Part, WeightedCost, listing
from kvrsim.kernels.profile import CalibrationProfile, Residual, ValidRange
from kvrsim.layout import LAYOUT_KINDS
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array
from kvrsim.scenario import Partition, Scenario
from planner.estimate import estimates_s

RUN_TO_RUN = 0.014 / 0.6745  # log_sd: medians of repeated serving runs differ by 1.4 %
_PER_DOUBLING = 0.02  # log_sd added for each doubling outside the measured range
_NOMINAL_LINKS = 0.2  # log_sd of an unmeasured bandwidth: NVLink 3 reaches 78 % of its nominal one
# Kinds that no end-to-end measurement of an engine covers; without measurements, they are estimated from FLOPs and
# bytes.
UNCOMPARED_KINDS = ("latent", "sparse", "experts", "recurrence")
_ESTIMATED = 0.5  # log_sd of estimated sources
_ISSUED = ("layer_s", "kernel_s", "gather_piece_s")  # fields of host times that scale with the host's speed
_SOURCES = {  # name of the error source for each term of an engine
    "request_s": "request",
    "token_s": "tokens",
    "step_s": "step",
    "layer_s": "host",
    "launch_s": "launches",
    "collective_s": "collectives",
}
_SECONDS = {
    "layer_s": _ISSUED,
    "step_s": ("step_s",),
    "launch_s": ("launch_s",),
    "collective_s": ("collective_s",),
}  # host times that each term scales
_ROOFLINE_FACTOR = 3.0  # a real TTFT may be this many times the datasheet's limit
_SD_OF_MEAN_ERROR = math.sqrt(math.pi / 2)  # standard deviation over mean absolute error of a normal distribution
_LEAST_CHANGE = 1e-9  # smaller changes of log TTFT count as none

ErrorSource = Part | str  # a part of the device's time, or the name of a source that affects several parts
PartErrors = Mapping[Part, float]  # log_sd of each part that a source changes


class Sensitivity(NamedTuple):
    """Changes of log TTFT with a source at the low and at the high end of its 80 % interval."""

    low: float
    high: float

    @classmethod
    def proportional(cls, log_sd: float) -> Sensitivity:
        """The sensitivity to a factor on the whole TTFT, whose logarithm has the standard deviation log_sd."""
        half_width = DEVIATES_OF_80_PERCENT * log_sd
        return cls(-half_width, half_width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivities:
    """The sensitivities of one strategy's TTFT, and the spread of the ratio of two TTFTs."""

    by_source: Mapping[ErrorSource, Sensitivity]
    # Sources that count only in the difference of two strategies, because end-to-end errors already contain them.
    in_differences: Mapping[ErrorSource, Sensitivity] = field(default_factory=dict)
    ratio_log_sd: float  # log_sd of the ratio of two TTFTs if all sources are exact


UNKNOWN = Sensitivities(by_source={}, ratio_log_sd=RUN_TO_RUN)  # only the variation between runs is known
_ROOFLINE = Sensitivities(
    by_source={"datasheet": Sensitivity(0.0, math.log(_ROOFLINE_FACTOR))}, ratio_log_sd=RUN_TO_RUN
)


class StartupDelay(NamedTuple):
    """A delay in seconds before the whole prefill."""

    name: str
    seconds: float
    log_sd: float


class Perturbation(NamedTuple):
    """A change of the scenario; `by(factor)` is the scenario where the source takes `factor` times as long."""

    name: str
    log_sd: float
    by: Callable[[float], PlacedScenario]


def sensitivities(
    execution: Execution,
    partition: Partition,
    *,
    for_differences: bool = True,
    ttft_s: float | None = None,
    is_estimated: bool = False,
) -> Sensitivities:
    """The sensitivities of log TTFT by source.

    for_differences: also those that count only in the difference of two strategies, which take most of the simulations.
    ttft_s: TTFT of the partition; None: it is simulated. is_estimated: nothing is simulated under changed sources; TTFT
    changes as the estimate of even chunks changes.
    """
    profile = execution.placed.profile
    if profile is None:
        return _ROOFLINE
    by_source = dict[ErrorSource, Sensitivity]()
    in_differences = dict[ErrorSource, Sensitivity]()
    runs = _Estimates(execution, partition, ttft_s) if is_estimated else _Runs(execution, partition, ttft_s)
    residual = end_to_end_residual(execution.placed)
    engine = execution.placed.engine
    has_shares = engine is not None and engine.has_share_interval
    rows_log_sd = None if engine is None or has_shares else engine_log_sd(runs)
    ratio_log_sd = ratio_log_sd_of(execution.placed)
    if residual is not None:
        half_width = math.log1p(residual.p80_ape)
        by_source["published TTFTs"] = Sensitivity(-half_width, half_width)
    elif has_shares:
        if for_differences:
            alone, _ = runs.device()
            in_differences |= alone
        causes = error_rule().log_sds(runs.shares())
        by_source |= {cause: Sensitivity.proportional(log_sd) for cause, log_sd in causes.items()}
    else:
        alone, together = runs.device()
        by_source |= together
        if rows_log_sd is None:
            by_source |= {**alone, "run to run": Sensitivity.proportional(ratio_log_sd)}
        else:
            for source, one in alone.items():
                uncompared = isinstance(source, Part) and source.kind in UNCOMPARED_KINDS
                (by_source if uncompared else in_differences)[source] = one
            by_source["model"] = Sensitivity.proportional(rows_log_sd)
        by_source |= {one.name: runs.to(one) for one in _software(execution)}
    links = _links(execution.placed)
    measured = execution.placed.links_are_measured
    if links.log_sd and not (measured and residual is not None):
        is_shared = measured and (has_shares or rows_log_sd is not None)
        if for_differences or not is_shared:
            (in_differences if is_shared else by_source)["links"] = runs.to(links)
    prefix = _prefix_link(execution.placed)
    if prefix.log_sd:
        by_source[prefix.name] = runs.to(prefix)
    if not has_shares:
        for kind in unmeasured_layouts(execution.placed):
            log_sd = error_rule().layouts[kind]
            by_source[f"{LAYOUT_KINDS[kind]}, not measured"] = Sensitivity.proportional(log_sd)
    if beyond := _PER_DOUBLING * doublings_beyond(execution.placed, profile.valid):
        by_source["extrapolation"] = Sensitivity.proportional(beyond)
    return Sensitivities(by_source=by_source, in_differences=in_differences, ratio_log_sd=ratio_log_sd)


def ratio_log_sd_of(scenario: Scenario) -> float:
    """The log_sd of the ratio of two strategies' TTFTs if all sources are exact."""
    if scenario.profile is None:
        return RUN_TO_RUN
    residual = end_to_end_residual(scenario)
    if residual is not None:
        return residual.cross_validated_speedup_mape * _SD_OF_MEAN_ERROR
    return run_to_run_log_sd(scenario.profile)


class _Runs:
    """Simulations of one strategy with one partition under changed sources."""

    def __init__(self, execution: Execution, partition: Partition, ttft_s: float | None) -> None:
        """ttft_s: TTFT of the unchanged scenario; None: unknown."""
        self.execution = execution
        self.chunks = columns(partition.chunk_lens)
        self._known_s = ttft_s
        is_known = ttft_s is not None and not execution.cluster.shares_bandwidth  # on a bus, see _ttft_s
        self._log_s = math.log(ttft_s) if is_known and ttft_s else None  # log TTFT of the unchanged scenario

    def device(self) -> tuple[dict[ErrorSource, Sensitivity], dict[ErrorSource, Sensitivity]]:
        """Sensitivities to each part of the device's time, and to errors of all parts; each source has two columns."""
        scenario = self.execution.placed
        assert scenario.profile is not None, "a roofline has no measured parts"
        cost, parts = listing(scenario.cost)
        self._price(cost)
        alone = part_errors(scenario.profile, parts)
        together = common_errors(scenario, parts)
        every = {**alone, **together}
        weights = {part: np.ones(2 * len(every) + 1) for part in parts}
        for index, log_sds in enumerate(every.values()):
            for part, log_sd in log_sds.items():
                weights[part][2 * index + 1 : 2 * index + 3] = _end(-log_sd), _end(log_sd)
        wide = [np.repeat(chunk, 2 * len(every) + 1) for chunk in self.chunks]
        log_s = np.log(self._ttft_s(scenario, wide, WeightedCost(cost=scenario.cost, weights=weights)))
        if self._log_s is None:
            self._log_s = float(log_s[0])
        pairs = (log_s[1:] - log_s[0]).reshape(-1, 2)
        by_source = {source: Sensitivity(*map(float, pair)) for source, pair in zip(every, pairs, strict=True)}
        return {source: by_source[source] for source in alone}, {source: by_source[source] for source in together}

    def _price(self, cost: CostModel) -> None:
        """Price every part of the device's time once. All pieces of a pipeline have the same parts."""
        build_program(self.execution, self.chunks[: 1 if self.execution.strategy.is_pipeline else None], cost)

    def to(self, source: StartupDelay | Perturbation) -> Sensitivity:
        """The sensitivity to a source. If a slower source does not change TTFT, a faster one does not either."""
        if isinstance(source, StartupDelay):
            added_s = (source.seconds * (_end(sign * source.log_sd) - 1) for sign in (-1, 1))
            ttft_s = self._known_s or math.exp(self.log_s)
            return Sensitivity(*(math.log1p(one / ttft_s) for one in added_s))
        high = self._log_ttft(source.by(_end(source.log_sd))) - self.log_s
        low = self._log_ttft(source.by(_end(-source.log_sd))) - self.log_s if abs(high) > _LEAST_CHANGE else 0.0
        return Sensitivity(low, high)

    def shares(self) -> TtftShares:
        """The engine's share of TTFT, and the other facts that the rule for errors needs."""
        scenario = self.execution.placed
        engine = scenario.engine
        assert engine is not None
        without_engine_s = math.exp(self._log_ttft(scenario.with_host(NO_HOST)) - self.log_s)
        return TtftShares(
            engine=engine.name.partition("@")[0],
            engine_share=min(1.0, max(0.0, 1 - without_engine_s)),
            is_mixture=scenario.model.is_mixture,
            is_sibling=scenario.has_scaled_kernels,
            is_unknown_engine=engine.name == PRIOR_ENGINE or not engine.has_share_interval,
            is_short=scenario.request.batch * scenario.request.new_tokens < SHORT_TOKENS,
            new_layouts=unmeasured_layouts(scenario),
        )

    @property
    def log_s(self) -> float:
        """Log TTFT of the unchanged scenario."""
        if self._log_s is None:
            self._log_s = self._log_ttft(self.execution.placed)
        return self._log_s

    def _log_ttft(self, scenario: PlacedScenario) -> float:
        return math.log(self._ttft_s(scenario, self.chunks)[0])

    def _ttft_s(self, scenario: PlacedScenario, chunks: list[Array], cost: CostModel | None = None) -> Array:
        """TTFT of each column. Flows on a bus have fair shares of bandwidth here, because only ratios are needed."""
        cluster = scenario.cluster
        if cluster.shares_bandwidth:
            flows = max(1, cluster.num_gpus - 1)
            cluster = scenario.with_own_links(cluster.link.bandwidth_bytes_per_s / flows).cluster
        runner = Runner(self.execution.on(scenario), cost=cost, cluster=cluster)
        return np.asarray(runner.finish_s(np.stack(chunks))[-1])


class _Estimates(_Runs):
    """The same with estimates of TTFT in place of simulations."""

    def __init__(self, execution: Execution, partition: Partition, ttft_s: float | None) -> None:
        super().__init__(execution, partition, ttft_s)
        self._log_s = None  # changes are those of the estimate

    def _price(self, cost: CostModel) -> None:
        estimates_s(self.execution, cost)

    def _ttft_s(self, scenario: PlacedScenario, chunks: list[Array], cost: CostModel | None = None) -> Array:
        """The estimate of each column."""
        return estimates_s(self.execution.on(scenario), cost or scenario.cost, len(chunks[0]))


def _end(log_sd: float) -> float:
    """The upper end of an 80 % interval over its central value."""
    return math.exp(DEVIATES_OF_80_PERCENT * log_sd)


# -- the error sources


def end_to_end_residual(scenario: Scenario) -> Residual | None:
    """Errors of the profile on whole TTFTs; None: never compared with whole prefills of this host and engine."""
    profile = scenario.profile
    if profile is None or scenario.host != profile.host or scenario.kernel_scale != 1:
        return None
    return profile.residual


def engine_log_sd(runs: _Runs) -> float | None:
    """Standard deviation of log TTFT by the errors of the engine's rows; None: never compared with whole prefills.

    It is at least the floor of the rule for the engines that ship, except where single rows were left out, because the
    others show the same machine. For a layout that none of its rows has, it is at least that of the whole rule.
    """
    scenario = runs.execution.placed
    engine = scenario.engine
    assert engine is not None
    log_sd = engine.rows_log_sd
    if log_sd is None:
        return None
    rule = error_rule()
    if engine.fit is not None and engine.fit.left_out != "row":
        log_sd = max(log_sd, rule.floor)
    if not unmeasured_layouts(scenario):
        return log_sd
    by_rule = rule.log_sds(replace(runs.shares(), new_layouts=()))
    return max(log_sd, math.hypot(*by_rule.values()))


def unmeasured_layouts(scenario: PlacedScenario) -> tuple[str, ...]:
    """Ways to divide work over GPUs that none of the prefills behind the interval has; scenario: per rank.

    Empty if no whole prefills are known, because the interval is then made from the errors of operations.
    """
    residual = end_to_end_residual(scenario)
    engine = scenario.engine
    known = engine.layouts if engine is not None else None
    if residual is not None:
        known = residual.layouts
    return () if known is None else tuple(kind for kind in scenario.layout_kinds if kind not in known)


def part_errors(profile: CalibrationProfile, parts: Iterable[Part]) -> dict[ErrorSource, PartErrors]:
    """Errors of the single parts of the device's time, independent of each other."""
    return {part: {part: log_sd} for part in parts if (log_sd := _part_log_sd(profile, part))}


def common_errors(scenario: Scenario, parts: Iterable[Part]) -> dict[ErrorSource, PartErrors]:
    """The error common to all parts: the error of an engine's kernel scale, or of the profile's tables.

    Rows of the same engine already contain the error of the tables; other engines may have run other kernels. No row
    has a part of UNCOMPARED_KINDS.
    """
    engine = scenario.engine
    operations = {} if scenario.profile is None else scenario.profile.operations
    if engine is not None and engine.has_share_interval:  # the rule has the errors of kernels
        return {}
    of_table = {part: operations[part.kind].systematic_log_sd or 0.0 for part in parts if part.kind in operations}
    if engine is not None and scenario.profile and (log_sd := engine.scale_log_sd(scenario.profile.gpu)):
        own = engine.fit is not None and engine.fit.left_out != "engine"
        return {"kernels": {part: log_sd if own else max(log_sd, of_table.get(part, 0.0)) for part in parts}}
    uncertain = {part: log_sd for part, log_sd in of_table.items() if log_sd}
    return {"table and clock": uncertain} if uncertain else {}


def _part_log_sd(profile: CalibrationProfile, part: Part) -> float:
    """The error of one part of the device's time; measured shapes of products have smaller errors."""
    fit = profile.operations.get(part.kind)
    if fit is None:
        return _ESTIMATED if part.kind in UNCOMPARED_KINDS else 0.0
    if part.variant is not None and (rates := profile.kernels.recurrence) and part.variant not in rates.kinds:
        return math.hypot(fit.log_sd, rates.alike_log_sd)
    measured = part.product is not None and profile.kernels.is_measured(part.product)
    return fit.interpolated_log_sd if measured and fit.interpolated_log_sd is not None else fit.log_sd


def _software(execution: Execution) -> Iterator[StartupDelay | Perturbation]:
    """The terms of the engine, or of the profile's host, that are not known exactly."""
    host = execution.placed.host
    request = execution.request
    for term, log_sd in _term_errors(execution.placed).items():
        if not log_sd:
            continue
        if term == "request_s":
            yield StartupDelay(_SOURCES[term], host.request_s, log_sd)
        elif term == "token_s":
            yield StartupDelay(_SOURCES[term], host.token_s * request.batch * request.context_len, log_sd)
        elif term == "step_s" and not execution.strategy.is_pipeline and host.prepare_s is None:
            yield StartupDelay(_SOURCES[term], host.step_s, log_sd)  # a single pass through the layers
        elif term in _SECONDS and (term != "collective_s" or execution.placed.group is not None):
            seconds = {name: getattr(host, name) for name in _SECONDS[term]}
            if any(seconds.values()):
                yield Perturbation(_SOURCES[term], log_sd, partial(_with_slower_host, execution.placed, seconds))


def _term_errors(scenario: Scenario) -> Mapping[str, float]:
    if scenario.engine is not None:
        return scenario.engine.spread
    fit = None if scenario.profile is None else scenario.profile.operations.get("host")
    return {} if fit is None else {"layer_s": fit.log_sd}


def _with_slower_host(scenario: PlacedScenario, seconds: Mapping[str, float], factor: float) -> PlacedScenario:
    longer = {name: value * factor for name, value in seconds.items()}
    return scenario.with_host(replace(scenario.host, **longer))


def _links(scenario: PlacedScenario) -> Perturbation:
    """Perturbation of the latency and bandwidth of all links; its error is 0 on one GPU."""
    if scenario.num_gpus == 1:
        log_sd = 0.0
    elif not scenario.links_are_measured or scenario.profile is None:
        log_sd = _NOMINAL_LINKS
    else:
        fits = scenario.profile.operations
        log_sd = max((fits[kind].log_sd for kind in ("send_recv", "all_gather") if kind in fits), default=0.0)
    return Perturbation("links", log_sd, scenario.with_slower_links)


def _prefix_link(scenario: PlacedScenario) -> Perturbation:
    """Perturbation of the unmeasured bandwidth of a cached prefix; its error is 0 if the prefix is on the GPUs."""

    def by(factor: float) -> PlacedScenario:
        return replace(scenario, prefix_placement=scenario.prefix_placement.slower(scenario.cluster, factor))

    return Perturbation("prefix link", 0.0 if scenario.prefix_access_plan.source is None else _NOMINAL_LINKS, by)


def run_to_run_log_sd(profile: CalibrationProfile) -> float:
    """log_sd of repeated runs: the profile's value, but at least that of serving engines."""
    measured = profile.run_to_run_log_sd
    return RUN_TO_RUN if measured is None else max(measured, RUN_TO_RUN)


def doublings_beyond(scenario: Scenario, valid: ValidRange) -> float:
    """Number of doublings by which the scenario is outside the profile's measured range, summed over all sizes."""
    sizes = {"num_gpus": scenario.num_gpus, "hidden_size": scenario.model.hidden_size}
    spans = [(size, getattr(valid, key)) for key, size in sizes.items()]
    spans.append((scenario.request.context_len, scenario.context_span))
    if scenario.profile is not None:
        widths = [(width, valid.head_dim) for width in scenario.profile.kernels.head_dims(scenario.model)]
        spans += sorted(widths, key=lambda one: _doublings(*one))[-1:]  # the width that is furthest outside the range
    return sum(_doublings(size, span) for size, span in spans)


def _doublings(size: float, span: tuple[int, int]) -> float:
    low, high = span
    return max(0.0, math.log2(low / size), math.log2(size / high))
