"""A StrategyMap, place by place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvrsim.choices import MAP_STRATEGIES
from kvrsim.errors import InputError
from kvrsim.results.question import Question
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, label_of
from kvrsim.units import check_places
from planner.candidates import all_for, distinct
from planner.grid import quick_candidate
from planner.map.map import ALONE, MapPoint, StrategyMap
from planner.processes import Pool

OnPlace = Callable[[int, int], None]  # places done, places in all


def make_map(
    scenario: Scenario,
    *,
    lengths: Sequence[int],
    gpu_counts: Sequence[int],
    bandwidths: Sequence[float] | None = None,
    strategies: Sequence[str | Strategy] = MAP_STRATEGIES,
    warnings: Sequence[str] = (),
    pool: Pool | None = None,
    on_place: OnPlace | None = None,
) -> StrategyMap:
    """TTFTs of the strategies, and of one GPU, for every context, bandwidth and number of GPUs.

    A place with more GPUs than tokens is left out, with a note.

    scenario: model, request and links. bandwidths: of links, bytes a second one way; None: the cluster's own.
    strategies: names, "FILE.py:NAME" or Strategies; "all" stands for every one that runs in a place.
    Searched chunks are balanced, or, where links are slow, refined. pool: who works; None: this process.

    Raises InputError for an unknown name.
    """
    check_places("ctx", lengths, gpu_counts, bandwidths or (None,))
    clusters = [scenario.cluster]
    if bandwidths is not None:
        clusters = [scenario.cluster.with_link(bandwidth_bytes_per_s=one) for one in bandwidths]
    wanted = [
        replace(
            scenario,
            cluster=cluster.with_num_gpus(num_gpus),
            request=replace(scenario.request, context_len=context_len),
        )
        for cluster in clusters
        for num_gpus in gpu_counts
        for context_len in lengths
    ]
    points: list[MapPoint] = []
    compared: dict[str, Strategy] = {}
    places = [place for place in wanted if place.cluster.num_gpus <= place.request.new_tokens]
    if not places:
        shortest = min(place.request.new_tokens for place in wanted)
        raise InputError("gpus", min(gpu_counts), f"at most one GPU a token, here {shortest}")
    refused = dict.fromkeys(_left_out(place) for place in wanted if place.cluster.num_gpus > place.request.new_tokens)
    found = (pool or Pool()).ordered(_at_place, [(place, strategies) for place in places], on_place)
    for here, chosen, reasons in found:
        points.extend(here)
        compared |= chosen
        refused |= dict.fromkeys(reasons)
    return StrategyMap(
        question=Question.of(
            scenario,
            lengths=list(lengths),
            gpu_counts=list(gpu_counts),
            link_bandwidths=None if bandwidths is None else list(bandwidths),
            strategies=[label_of(strategy) for strategy in strategies],
        ),
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=scenario.cluster,
        attention=scenario.kernel,
        memory_limit=scenario.memory_limit,
        points=tuple(points),
        approximate=tuple(one.name for one in compared.values() if one.approximate is not None),
        warnings=(*warnings, *refused, *_approximate_notes(compared.values())),
    )


def _at_place(
    place: Scenario, strategies: Sequence[str | Strategy]
) -> tuple[list[MapPoint], dict[str, Strategy], list[str]]:
    """The points of a place, the strategies compared in it by name, and why others are not."""
    found: list[MapPoint] = []
    compared: dict[str, Strategy] = {}
    refused = []
    for strategy in _chosen(place, strategies):
        compared[strategy.name] = strategy
        try:
            found.append(_point(place, strategy))
        except InputError as error:
            if error.parameter != "strategies":
                raise
            refused.append(
                f"{strategy.name} is not on the map for {place.cluster.num_gpus} GPUs: it takes {error.accepted}"
            )
    return found, compared, refused


def _left_out(place: Scenario) -> str:
    tokens, num_gpus = place.request.new_tokens, place.cluster.num_gpus
    return f"not on the map: {tokens} tokens on {num_gpus} GPUs, which would leave some without a token"


def _approximate_notes(compared: Iterable[Strategy]) -> list[str]:
    """Which strategies compute something else than the model's own prefill, so that none of them wins."""
    return [
        f"{one.name} is approximate, so it is never the best: {one.approximate}"
        for one in compared
        if one.approximate is not None
    ]


def _chosen(place: Scenario, strategies: Sequence[str | Strategy]) -> Sequence[Strategy]:
    """One GPU, and what is compared with it."""
    everything = all_for(place)[0] if "all" in strategies else ()
    chosen = distinct((ALONE, *everything, *(one for one in strategies if one != "all")))
    for strategy in chosen:
        if strategy.partition_rule == "table":
            raise InputError("strategies", strategy.name, "strategies that need no table")
    return chosen


def _point(place: Scenario, strategy: Strategy) -> MapPoint:
    one = quick_candidate(place, strategy)
    return MapPoint(
        context_len=place.request.context_len,
        link_bandwidth_bytes_per_s=place.cluster.link.bandwidth_bytes_per_s,
        num_gpus=place.cluster.num_gpus,
        strategy=one.strategy.name,
        ttft_s=one.ttft_s,
        ttft_low_s=one.interval.low_s,
        ttft_high_s=one.interval.high_s,
        fits=one.fits,
        sensitivities=one.sensitivities,
    )
