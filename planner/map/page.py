"""A map as an interactive page: TTFTs of all strategies in all places, from which the page finds who wins.

What the page recomputes when strategies are switched off is what StrategyMap says of the rest: the fastest that fits,
or one GPU where a prediction cannot tell it from the fastest. Ties depend on pairs of strategies, so that all pairs
within a factor of two are in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from kvrsim.errors import InputError
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bandwidth, format_tokens
from kvrsim.views.page import (
    CHARTS,
    Cell,
    Column,
    Page,
    Section,
    facts_of,
    interval,
    join,
    seconds_cell,
    strategy_name,
    table,
    tag,
)
from planner.map.map import ALONE, MapPoint, StrategyMap, Winner, is_tied

_FAR = 2.0  # times a TTFT, from where on another is no tie with it
_DIGITS = 4
_MOST_ROWS = 300  # of the table of break-even contexts


def map_page(found: StrategyMap) -> Page:
    """The page of a map."""
    return Page(
        title=f"Fastest strategy for {found.model}",
        answer=headline(found),
        facts=_facts(found),
        sections=[
            Section(
                title="Where each strategy is the fastest",
                lead="Point at a place to see every strategy there. Click to keep it. Strategies can be switched off;"
                " the fastest of the others is then shown.",
                body=tag("div", id="map"),
            ),
            Section(title="In one place", body=tag("div", id="place")),
            Section(
                title="TTFT by context",
                lead="On these GPUs with these links. The bands are 80 % prediction intervals.",
                body=tag("div", id="by-context"),
            ),
            Section(title="Tables", body=join((_best(found), _break_evens(found)))),
        ],
        notes=found.warnings,
        data=map_data(found),
        scripts=(*CHARTS, "controls.js", "winners.js", "grid.js", "map.js"),
        strategies=found.strategies,
    )


def headline(found: StrategyMap) -> str:
    """Which strategies win, and in how many places."""
    winners = list(found.winners())
    if not any(winner.pays for winner in winners):
        return "More than one GPU is not faster in any of these places."
    wins = Counter(winner.strategy if winner.pays else "one GPU" for winner in winners)
    listed = [f"{name} in {count}" for name, count in wins.most_common()]
    rest = len(winners) - sum(count for _, count in wins.most_common(5))
    words = ", ".join(listed[:5]) + (f", others in {rest}" if rest else "")
    return f"Fastest of {len(found.strategies)} strategies in {len(winners)} place{'s' * (len(winners) > 1)}: {words}."


def _facts(found: StrategyMap) -> dict[str, str]:
    """The question, with the axes of the map as they are written."""
    facts = facts_of(found.question)
    for name in ("context", "GPUs"):  # of the largest place alone
        del facts[name]
    facts |= {"cluster": found.cluster.describe(), "lengths": ", ".join(map(format_tokens, found.lengths))}
    return facts | {"link bandwidths": ", ".join(map(format_bandwidth, found.bandwidths))}


def map_data(found: StrategyMap) -> dict[str, Any]:
    """Plain JSON values; a place is (bandwidth * contexts + context) * numbers of GPUs + number of GPUs, as indices."""
    names, contexts, counts = found.strategies, found.lengths, found.gpu_counts
    places = [found.at(length, rate, count) for rate in found.bandwidths for length in contexts for count in counts]

    def column(name: str, value: str) -> list[float | None]:
        return [_short(getattr(place[name], value)) if name in place else None for place in places]

    return {
        "contexts": list(contexts),
        "gpus": list(counts),
        "bandwidths": list(found.bandwidths),
        "bandwidth_names": [format_bandwidth(one) for one in found.bandwidths],
        "alone": names.index(ALONE),
        "strategies": [
            {
                "name": name,
                "title": _title(name),
                "approximate": name in found.approximate,
                "ttft_s": column(name, "ttft_s"),
                "low_s": column(name, "ttft_low_s"),
                "high_s": column(name, "ttft_high_s"),
                "fits": [int(place[name].fits) if name in place else None for place in places],
            }
            for name in names
        ],
        "ties": [[[names.index(one), names.index(other)] for one, other in _ties(place.values())] for place in places],
    }


def _ties(points: Iterable[MapPoint]) -> Iterable[tuple[str, str]]:
    """All pairs that a prediction cannot tell apart, the faster one first."""
    for faster, slower in combinations(sorted(points, key=lambda point: point.ttft_s), 2):
        if slower.ttft_s <= _FAR * faster.ttft_s and is_tied(faster, slower):
            yield faster.strategy, slower.strategy


def _title(name: str) -> str:
    """What a strategy does; nothing for one of another's own."""
    try:
        return get_strategy(name).title
    except InputError:
        return ""


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _best(found: StrategyMap) -> str:
    columns = (
        Column(title="links"),
        Column(title="context", number=True),
        Column(title="best"),
        Column(title="GPUs", number=True),
        Column(title="TTFT", number=True),
        Column(title="80 % interval", number=True, rank=2),
        Column(title="over one GPU", number=True, hint="TTFT of one GPU over this one"),
        Column(title="ties", rank=2, hint="Others that a prediction cannot tell from the fastest"),
        Column(title="fits"),
    )
    rows = [_best_row(found, winner) for winner in found.best()]
    return tag("div", tag("h3", "The fewest GPUs that tie with the fastest"), table(columns, rows, caption="Best"))


def _best_row(found: StrategyMap, winner: Winner) -> list[str | Cell]:
    place = winner.context_len, winner.link_bandwidth_bytes_per_s
    point = next(
        one
        for count in found.gpu_counts
        for one in found.at(*place, count).values()
        if one.strategy == winner.strategy and one.ttft_s == winner.ttft_s
    )
    return [
        Cell(shown=format_bandwidth(place[1]), value=place[1]),
        Cell(shown=format_tokens(place[0]), value=place[0]),
        strategy_name(winner.strategy) if winner.pays else "one GPU",
        str(winner.num_gpus),
        seconds_cell(winner.ttft_s),
        Cell(shown=interval(point.ttft_low_s, point.ttft_high_s), value=point.ttft_low_s),
        Cell(shown=f"{winner.speedup_over_single:.2f}×", value=winner.speedup_over_single),
        ", ".join(winner.ties),
        "yes" if winner.fits else tag("span", "NO", class_="bad"),
    ]


def _break_evens(found: StrategyMap) -> str:
    evens = list(found.break_evens())
    rows = [
        [
            Cell(shown=format_bandwidth(one.link_bandwidth_bytes_per_s), value=one.link_bandwidth_bytes_per_s),
            str(one.num_gpus),
            strategy_name(one.strategy),
            strategy_name(one.over),
            Cell(
                shown="never here" if one.context_len is None else str(one.context_len),
                value=one.context_len,
            ),
            one.known,
        ]
        for one in evens[:_MOST_ROWS]
    ]
    if not rows:
        return tag("p", "No strategy overtakes another here.", class_="lead")
    columns = (
        Column(title="links"),
        Column(title="GPUs", number=True),
        Column(title="strategy"),
        Column(title="faster than"),
        Column(title="from context", number=True),
        Column(title="known", rank=2),
    )
    shown = table(columns, rows, caption="Break-even contexts")
    count = str(len(evens)) if len(rows) == len(evens) else f"{len(rows)} of {len(evens)}, all with --json"
    return tag("details", tag("summary", f"From which context on one is faster than another ({count})"), shown)
