"""The 80 % prediction interval of a TTFT, and whether one TTFT is distinguishable from another.

If a profile was fitted to whole TTFTs, the interval is that of its errors on models left out of the fit. If each
operation was fitted separately, the simulation propagates the operation's errors on rows left out (sensitivities.py).
Sources are independent, so their sensitivities are added in squares, separately on each side of the prediction, because
some sources can only make a prefill longer. An error that all products and attention share is a separate source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvrsim.engine import DEVIATES_OF_80_PERCENT, SHORT_TOKENS, Engine
from kvrsim.error_rule import error_rule
from kvrsim.execution import Execution
from kvrsim.kernels.profile import LinkCoverage, Residual
from kvrsim.layout import LAYOUT_KINDS
from kvrsim.notes import note
from kvrsim.scenario import Partition, Scenario
from kvrsim.units import format_bandwidth, format_seconds
from planner.uncertainty.sensitivities import (
    Sensitivities,
    Sensitivity,
    end_to_end_residual,
    sensitivities,
    unmeasured_layouts,
)

_WIDE = 2.0  # ratio of the ends from which an interval is wide, and a note gives the main cause
_WORTHWHILE = 0.8  # a calibration is suggested if it narrows the logarithmic width below this share
_CAUSES = {  # causes of the rule's errors, in words; others are their own words
    "engine": "the time that engine {engine} adds to the kernels",
    "kernels": "the time of the kernels",
    "unexplained": "differences that no other cause explains",
    "short prompt": "a prompt of few tokens",
    "engine, not measured": "an engine that was not measured",
    "GPU, not measured": "kernel times scaled from another GPU",
    "links": "links that were not measured",
}
_SAME_DECADE = 0.5  # largest log10 of a ratio of bandwidths for which coverage on one link is that of the other


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Low and high end of a TTFT, and the causes of its width."""

    low_s: float
    high_s: float
    by_source: Mapping[str, Sensitivity]  # changes of log TTFT at the ends of the 80 % interval of one source

    def causes(self) -> dict[str, tuple[float, float]]:
        """The relative changes of TTFT by source, the widest first."""
        ranked = sorted(self.by_source.items(), key=lambda item: item[1].low - item[1].high)
        return {name: (math.expm1(one.low), math.expm1(one.high)) for name, one in ranked}


def interval(execution: Execution, partition: Partition, ttft_s: float) -> Interval:
    """The 80 % interval of a predicted TTFT; `scenario` is per rank."""
    return interval_of(sensitivities(execution, partition), ttft_s)


def interval_of(one: Sensitivities, ttft_s: float) -> Interval:
    """The 80 % interval of a predicted TTFT with these sensitivities."""
    squares: dict[str, tuple[float, float]] = {}
    for source, sensitivity in one.by_source.items():
        name = source if isinstance(source, str) else source.kind
        below, above = squares.get(name, (0.0, 0.0))
        squares[name] = below + min(0.0, *sensitivity) ** 2, above + max(0.0, *sensitivity) ** 2
    below, above = (math.sqrt(sum(side)) for side in zip(*squares.values(), strict=True)) if squares else (0.0, 0.0)
    return Interval(
        low_s=ttft_s * math.exp(-below),
        high_s=ttft_s * math.exp(above),
        by_source={name: Sensitivity(0.0 - math.sqrt(low), math.sqrt(high)) for name, (low, high) in squares.items()},
    )


def is_indistinguishable(faster: Sensitivities, slower: Sensitivities, faster_s: float, slower_s: float) -> bool:
    """Whether the 80 % interval of log(slower / faster) contains 0; errors that both strategies share cancel.

    faster_s, slower_s: predicted TTFTs, seconds, or a quantity that scales with TTFT.
    """
    squares = (DEVIATES_OF_80_PERCENT * max(faster.ratio_log_sd, slower.ratio_log_sd)) ** 2
    none = Sensitivity(0.0, 0.0)
    ours_by, theirs_by = ({**one.by_source, **one.in_differences} for one in (faster, slower))
    for source in {**ours_by, **theirs_by}:
        ours = ours_by.get(source, none)
        theirs = theirs_by.get(source, none)
        squares += min(0.0, theirs.low - ours.low, theirs.high - ours.high) ** 2
    return math.log(slower_s / faster_s) <= math.sqrt(squares)


def measured_coverage(scenario: Scenario) -> float | None:
    """Share of held-out TTFTs inside their prediction intervals; None: not measured."""
    residual = end_to_end_residual(scenario)
    request = scenario.request
    if residual is not None and (scenario.links_are_measured or scenario.num_gpus == 1):
        return residual.coverage
    if residual is not None:
        on_link = link_coverage(scenario, residual)
        return None if on_link is None else on_link.coverage
    fit = None if scenario.engine is None else scenario.engine.fit
    if fit is None:
        return None
    is_short = request.batch * request.new_tokens < SHORT_TOKENS
    if fit.interval == "shares":
        scores = error_rule().scores
        kind = "mixture" if scenario.model.is_mixture else "dense"
        return scores["short" if is_short else kind].coverage
    return fit.short_coverage if is_short and fit.short_coverage is not None else fit.coverage


def link_coverage(scenario: Scenario, residual: Residual) -> LinkCoverage | None:
    """The coverage on the link that is most like the scenario's; None: no bandwidth is within the same decade."""
    bytes_per_s = scenario.cluster.link.bandwidth_bytes_per_s
    apart = {one: abs(math.log10(one.bytes_per_s / bytes_per_s)) for one in residual.links}
    nearest = min(apart, key=lambda one: apart[one], default=None)
    return nearest if nearest is not None and apart[nearest] <= _SAME_DECADE else None


def coverage_notes_of(scenario: Scenario) -> Iterator[str]:
    """A note on links where the intervals held too few or too many of the TTFTs."""
    residual = end_to_end_residual(scenario)
    if residual is None or scenario.links_are_measured or scenario.num_gpus == 1:
        return
    on_link = link_coverage(scenario, residual)
    if on_link is not None:
        rate = format_bandwidth(on_link.bytes_per_s)
        yield note("links, coverage", rows=on_link.num_rows, rate=rate, share=on_link.coverage)


def layout_notes(execution: Execution) -> Iterator[str]:
    """A note if no measured prefill divides the work over GPUs as this strategy does; scenario: per rank."""
    kinds = [LAYOUT_KINDS[kind] for kind in unmeasured_layouts(execution.placed)]
    if not kinds:
        return
    residual = end_to_end_residual(execution.placed)
    engine = execution.placed.engine
    where = (
        f"profile {execution.placed.profile_name}"
        if residual is not None or engine is None
        else f"engine {engine.name}"
    )
    yield note("layout", where=where, kinds=" or ".join(kinds), strategy=execution.strategy.name)


def width_notes(execution: Execution, interval: Interval) -> Iterator[str]:
    """A note on a wide interval: its main cause, and the interval after a calibration with prefills of the user."""
    engine = execution.placed.engine
    if engine is None or not engine.has_share_interval or interval.high_s < _WIDE * interval.low_s:
        return
    rule = error_rule()
    squares = {name: sensitivity.high**2 for name, sensitivity in interval.by_source.items()}
    cause = max(squares, key=lambda name: squares[name])
    half_width = DEVIATES_OF_80_PERCENT * rule.calibrated
    if half_width > _WORTHWHILE * math.sqrt(sum(squares.values())):
        return
    ttft_s = math.sqrt(interval.low_s * interval.high_s)
    yield note(
        "interval",
        strategy=execution.strategy.name,
        factor=f"{interval.high_s / interval.low_s:.1f}",
        share=squares[cause] / sum(squares.values()),
        cause=_CAUSES.get(cause, cause).format(engine=engine.name),
        rows=rule.calibrated_rows,
        low=format_seconds(ttft_s * math.exp(-half_width)),
        high=format_seconds(ttft_s * math.exp(half_width)),
    )


def provenance(scenario: Scenario) -> str:
    """A text about the measurements of the profile and the engine, their errors, and the limits of the profile."""
    profile = scenario.profile
    if profile is None:
        return f"the datasheet of {scenario.cluster.gpu.name}: no measurement"
    parts = [f"{profile.name}: {profile.description}"]
    if end_to_end_residual(scenario) is not None and profile.residual is not None:
        parts.append(
            f"Off by {profile.residual.cross_validated_mape:.1%} on average on models left out of the fit, 80 % of"
            f" their errors below {profile.residual.p80_ape:.1%}; by {profile.residual.other_family_mape:.1%} on"
            " average on other families."
        )
    elif scenario.engine is not None:
        parts.append(_engine_provenance(scenario.engine))
    coverage = measured_coverage(scenario)
    check = "were not checked on whole prefills" if coverage is None else f"contain {coverage:.0%} of held-out TTFTs"
    parts += [f"The 80 % intervals {check}.", profile.not_covered]
    return " ".join(parts)


def _engine_provenance(engine: Engine) -> str:
    text = f"Engine {engine.name}: {engine.title}"
    fit = engine.fit
    if fit is None:
        return f"{text}, never compared with whole prefills."
    return (
        f"{text}, fitted to {fit.num_rows} prefills; median error {fit.left_out_median_ape:.1%} with one"
        f" {fit.left_out} left out."
    )
