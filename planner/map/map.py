"""StrategyMap: the fastest strategy and number of GPUs for each context and link bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.io.schema import fields_to_json, to_frame, to_json
from kvrsim.notes import note
from kvrsim.progress import OnProgress
from kvrsim.results.question import Question
from kvrsim.results.results import Answer, Prediction
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy, label_of, usual_names
from kvrsim.units import check_places
from planner.candidates import all_for, distinct
from planner.deploy_engines import engines_for
from planner.grid import quick_candidate
from planner.processes import Pool
from planner.uncertainty.intervals import is_indistinguishable
from planner.uncertainty.sensitivities import UNKNOWN, Sensitivities

if TYPE_CHECKING:
    import pandas

ALONE = "single"
Known = Literal["interpolated", "at or below the first length", "beyond the last length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MapPoint(Prediction):
    """The prediction for one strategy in one place: context, link bandwidth and number of GPUs."""

    context_len: int  # tokens
    link_bandwidth_bytes_per_s: float  # bandwidth in one direction
    num_gpus: int  # GPUs of the strategy; `single` uses one
    strategy: str
    peak_bytes: int  # peak memory of the GPU that needs the most
    sensitivities: Sensitivities = field(default=UNKNOWN, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("context_len", "link_bandwidth_bytes_per_s", "num_gpus", "strategy")
        return fields_to_json(self, *names, "ttft_s", "ttft_low_s", "ttft_high_s", "peak_bytes", "fits")


Place = dict[str, MapPoint]  # points of the strategies that run in a place, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """The fastest strategy that fits in one place."""

    context_len: int
    link_bandwidth_bytes_per_s: float
    num_gpus: int
    strategy: str
    ttft_s: float
    speedup_over_single: float  # TTFT on one GPU over this TTFT, even if one GPU's memory is too small
    pays: bool  # whether the fastest strategy uses more than one GPU
    ties: tuple[str, ...]  # other strategies that fit and that predictions cannot distinguish from the fastest


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """The context from which a strategy is faster than another one, up to the longest context of the map."""

    link_bandwidth_bytes_per_s: float
    num_gpus: int
    strategy: str
    over: str  # the other, slower strategy
    context_len: int | None  # tokens, interpolated in logarithms between the map's lengths; None: beyond up_to
    up_to: int  # tokens; the longest context of the map at which both strategies fit
    known: Known


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StrategyMap(Answer):
    """TTFTs of all strategies in all places, with winners and break-evens."""

    question: Question  # question with the longest context on the most GPUs
    points: tuple[MapPoint, ...]
    warnings: tuple[str, ...]
    _places: dict[tuple[float, int, int], Place] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places: dict[tuple[float, int, int], Place] = {}  # key: bandwidth, context and number of GPUs
        for point in self.points:
            place = point.link_bandwidth_bytes_per_s, point.context_len, point.num_gpus
            places.setdefault(place, {})[point.strategy] = point
        object.__setattr__(self, "_places", {place: places[place] for place in sorted(places)})

    @property
    def lengths(self) -> tuple[int, ...]:
        """Contexts, in ascending order."""
        return tuple(sorted({point.context_len for point in self.points}))

    @property
    def bandwidths(self) -> tuple[float, ...]:
        """Bandwidths of the links, in ascending order."""
        return tuple(sorted({point.link_bandwidth_bytes_per_s for point in self.points}))

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """Numbers of GPUs, in ascending order."""
        return tuple(sorted({point.num_gpus for point in self.points}))

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the strategies, in the order given."""
        return tuple(dict.fromkeys(point.strategy for point in self.points))

    def at(self, context_len: int, bandwidth: float, num_gpus: int) -> Place:
        """Points of the strategies that run in one place, by name."""
        return self._places.get((bandwidth, context_len, num_gpus), {})

    def winners(self) -> list[Winner]:
        """Winners of all places in which a strategy fits."""
        winners = map(self._winner, self._places.values())
        return [winner for winner in winners if winner is not None]

    def winner(self, context_len: int, bandwidth: float, num_gpus: int) -> Winner | None:
        """The winner in one place; None if nothing fits."""
        return self._winner(self.at(context_len, bandwidth, num_gpus))

    def nearest(self) -> list[MapPoint]:
        """The strategy that needs the least memory, for each place where nothing fits."""
        nearest = []
        for place in self._places.values():
            points = place.values()
            if not any(point.fits for point in points):
                nearest.append(min(points, key=lambda point: point.peak_bytes))
        return nearest

    def best(self) -> list[Winner]:
        """A winner per context and bandwidth: the one with the fewest GPUs that may be the fastest."""
        best = []
        for _, places in groupby(self._places.items(), key=lambda item: item[0][:2]):
            here: list[tuple[MapPoint, Winner]] = []  # by number of GPUs, the fewest first
            for _, place in places:
                winner = self._winner(place)
                if winner is not None:
                    here.append((place[winner.strategy], winner))
            if here:
                least, _ = min(here, key=lambda pair: pair[0].ttft_s)
                best.append(next(winner for point, winner in here if is_tied(least, point)))
        return best

    def _winning(self, place: Place) -> list[MapPoint]:
        """The fastest strategy in a place, then all that may be as fast; one GPU comes first if it is among them."""
        usable = [point for point in place.values() if point.fits]
        if not usable:
            return []
        fastest = min(usable, key=lambda point: point.ttft_s)
        near = [point for point in usable if is_tied(fastest, point)]
        winner = fastest
        if place[ALONE] in near:
            winner = place[ALONE]
        return [winner, *(point for point in near if point is not winner)]

    def _winner(self, place: Place) -> Winner | None:
        winning = self._winning(place)
        if not winning:
            return None
        best, *near = winning
        alone = place[ALONE]
        num_gpus = 1
        if best is not alone:
            num_gpus = best.num_gpus
        return Winner(
            context_len=best.context_len,
            link_bandwidth_bytes_per_s=best.link_bandwidth_bytes_per_s,
            num_gpus=num_gpus,
            strategy=best.strategy,
            ttft_s=best.ttft_s,
            speedup_over_single=alone.ttft_s / best.ttft_s,
            pays=best is not alone,
            ties=tuple(point.strategy for point in near),
        )

    def break_evens(self) -> Iterator[BreakEven]:
        """Break-evens of every strategy against one GPU, and the contexts at which the fastest strategy changes.

        Only contexts count at which both strategies fit; a pair that never fits has no break-even.
        """
        rows: dict[tuple[float, int], list[Place]] = {}  # places of each bandwidth and number of GPUs
        for (bandwidth, _, num_gpus), place in self._places.items():
            rows.setdefault((bandwidth, num_gpus), []).append(place)
        for (_, num_gpus), places in sorted(rows.items(), key=lambda row: row[0]):
            if num_gpus == 1:
                continue
            for over, name in self._compared_pairs(places):
                if not all({over, name} <= set(place) for place in places):
                    continue
                both_fit = [place for place in places if place[over].fits and place[name].fits]
                if both_fit:
                    yield _break_even(both_fit, name, over)

    def _compared_pairs(self, places: Sequence[Place]) -> Iterator[tuple[str, str]]:
        """One GPU with each strategy; then the fastest strategies of neighbouring contexts, where they differ."""
        for name in self.strategies:
            if name != ALONE:
                yield ALONE, name
        fastest = [min(place.values(), key=lambda point: point.ttft_s).strategy for place in places]
        for shorter, longer in dict.fromkeys(pairwise(fastest)):
            if shorter not in (ALONE, longer):
                yield shorter, longer

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = self.question.header() | fields_to_json(self, "model", "profile", "cluster", "attention")
        content |= self.memory_limit.to_dict() | fields_to_json(self, "points")
        parts = {"nothing_fits": self.nearest(), "winners": self.winners(), "best": self.best()}
        content |= to_json(parts | {"break_even": list(self.break_evens())})
        return content | fields_to_json(self, "warnings")

    def to_frame(self) -> pandas.DataFrame:
        """A table with one row per point."""
        return to_frame(to_json(self.points))


def is_tied(faster: MapPoint, slower: MapPoint) -> bool:
    """Whether predictions cannot distinguish two points with the same requests."""
    return is_indistinguishable(faster.sensitivities, slower.sensitivities, faster.ttft_s, slower.ttft_s)


def _break_even(places: Sequence[Place], name: str, over: str) -> BreakEven:
    """The longest context at which two TTFTs cross."""
    first = places[0][name]
    gains = [math.log(place[over].ttft_s / place[name].ttft_s) for place in places]
    last = -1  # the last place where the strategy is behind
    for index, gain in enumerate(gains):
        if gain <= 0:
            last = index
    context_len: int | None
    basis: Known
    if last == -1:
        context_len = first.context_len
        basis = "at or below the first length"
    elif last == len(places) - 1:
        context_len = None
        basis = "beyond the last length"
    else:
        share = gains[last] / (gains[last] - gains[last + 1])
        low = math.log(places[last][name].context_len)
        high = math.log(places[last + 1][name].context_len)
        context_len = round(math.exp(low + share * (high - low)))
        basis = "interpolated"
    return BreakEven(
        link_bandwidth_bytes_per_s=first.link_bandwidth_bytes_per_s,
        num_gpus=first.num_gpus,
        strategy=name,
        over=over,
        context_len=context_len,
        up_to=places[-1][name].context_len,
        known=basis,
    )


def make_map(
    scenario: Scenario,
    *,
    lengths: Sequence[int],
    gpu_counts: Sequence[int],
    bandwidths: Sequence[float] | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    warnings: Sequence[str] = (),
    pool: Pool | None = None,
    on_progress: OnProgress | None = None,
) -> StrategyMap:
    """TTFTs of the strategies, and of one GPU, for every context, bandwidth and number of GPUs.

    A place with more GPUs than tokens is left out, with a note.

    scenario: model, request and links. bandwidths: link bandwidths, bytes/s in one direction; None: the cluster's own.
    strategies: names, "FILE.py:NAME" or Strategies; "all" means every strategy that runs in a place; None:
    those that are usual in maps, and their hybrids tpN+NAME in `all` that run in a place. Searched chunks are balanced;
    they are refined if links are slow. pool: processes that simulate; None: this process.

    Raises InputError for an unknown name.
    """
    check_places("ctx", lengths, gpu_counts, bandwidths or (None,))
    clusters = [scenario.cluster]
    if bandwidths is not None:
        clusters = [scenario.cluster.with_link(bandwidth_bytes_per_s=bandwidth) for bandwidth in bandwidths]
    work: list[tuple[Scenario, Sequence[str | Strategy] | None]] = []
    refused: dict[str, None] = {}  # notes, each once
    for cluster, num_gpus, length in product(clusters, gpu_counts, lengths):
        request = replace(scenario.request, context_len=length)
        if num_gpus <= request.new_tokens:
            place = replace(scenario, cluster=replace(cluster, num_gpus=num_gpus), request=request)
            work.append((place, strategies))
        else:
            refused[note("map, tokens", tokens=request.new_tokens, num_gpus=num_gpus)] = None
    if not work:
        shortest = replace(scenario.request, context_len=min(lengths)).new_tokens
        raise InputError("gpus", min(gpu_counts), f"at most one GPU per token, here {shortest}")
    points: list[MapPoint] = []
    pool = pool or Pool()
    for here, reasons in pool.run_in_order(_at_place, work, "points", on_progress):
        points.extend(here)
        refused |= dict.fromkeys(reasons)
    grid = StrategyMap(
        question=Question.of(
            scenario,
            lengths=list(lengths),
            gpu_counts=list(gpu_counts),
            link_bandwidths=None if bandwidths is None else list(bandwidths),
            strategies=None if strategies is None else [label_of(strategy) for strategy in strategies],
        ),
        points=tuple(points),
        warnings=(*warnings, *refused),
    )
    lacking = _not_launched(scenario, grid)
    if not lacking:
        return grid
    engine_note = note("map, engine", engine=scenario.engine_name, names=", ".join(lacking))
    return replace(grid, warnings=(*grid.warnings, engine_note))


def _not_launched(scenario: Scenario, grid: StrategyMap) -> list[str]:
    """Names of the best strategies that the scenario's engine does not launch."""
    if scenario.engine is None or scenario.engine.launched_as is None:
        return []
    engine = scenario.engine.launched_as
    names = dict.fromkeys(winner.strategy for winner in grid.best() if winner.pays)
    return [name for name in names if not _launches(engine, name)]


def _launches(engine: str, name: str) -> bool:
    """Whether an engine launches a strategy; never a user's own."""
    try:
        return engine in engines_for(get_strategy(name))
    except InputError:
        return False


def _at_place(place: Scenario, strategies: Sequence[str | Strategy] | None) -> tuple[list[MapPoint], list[str]]:
    """The points of a place, and why it has no point for some strategies."""
    points: list[MapPoint] = []
    refused = list[str]()
    for strategy in _strategies_at(place, strategies):
        try:
            points.append(_point(place, strategy))
        except InputError as error:
            if error.parameter != "strategies":
                raise
            reason = note("map, refused", strategy=strategy.name, num_gpus=place.num_gpus, accepted=error.accepted)
            refused.append(reason)
    return points, refused


def _strategies_at(place: Scenario, strategies: Sequence[str | Strategy] | None) -> Sequence[Strategy]:
    """One GPU, and the strategies that are compared with it."""
    if strategies is None:
        usual = usual_names("maps")
        hybrids = []
        for execution in all_for(place)[0]:
            strategy = execution.strategy
            _, _, between_groups = strategy.name.partition("+")
            if strategy.group_size != 1 and between_groups in usual:
                hybrids.append(strategy)
        return distinct((ALONE, *usual, *hybrids))
    names: list[str | Strategy] = [ALONE]
    if "all" in strategies:
        names += [execution.strategy for execution in all_for(place)[0]]
    names += [name for name in strategies if name != "all"]
    strategies_here = distinct(names)
    for strategy in strategies_here:
        if strategy.partition_rule == "table":
            raise InputError("strategies", strategy.name, "strategies that need no table")
    return strategies_here


def _point(place: Scenario, strategy: Strategy) -> MapPoint:
    candidate = quick_candidate(execution_of(place, strategy))
    return MapPoint(
        context_len=place.request.context_len,
        link_bandwidth_bytes_per_s=place.cluster.link.bandwidth_bytes_per_s,
        num_gpus=place.cluster.num_gpus,
        strategy=candidate.strategy.name,
        peak_bytes=max(rank.total for rank in candidate.memory),
        ttft_s=candidate.ttft_s,
        ttft_low_s=candidate.interval.low_s,
        ttft_high_s=candidate.interval.high_s,
        fits=candidate.fits,
        sensitivities=candidate.sensitivities,
    )
