"""A map as a figure, as an interactive page and in a notebook.

The page has the TTFTs of all strategies in all places. When the user switches strategies off, the page finds the
winners like StrategyMap: the fastest strategy that fits, or one GPU if predictions cannot distinguish it from the
fastest. Ties depend
on pairs of strategies, so the data has all pairs within a factor of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bandwidth, format_bytes, format_count, format_seconds, format_tokens
from kvrsim.views.figure import Head, drawing
from kvrsim.views.page import CHARTS, Html, Page, Section, Summary, facts_of, join, table, tag
from kvrsim.views.style import DIM, INK, chart_style, strategy_colour, text_on
from kvrsim.views.table import TIED, Table, Text, columns
from planner.map.map import ALONE, MapPoint, Place, StrategyMap, is_tied

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0  # width of the figure, inches
_MOST_GAINS = 12  # most contexts for which the cells show the gain over one GPU


def figure(grid: StrategyMap) -> Figure:
    """Draw one panel per bandwidth: contexts to the right, GPUs upwards, each place in its winner's colour."""
    winners = grid.winners()
    counts = grid.gpu_counts
    panels = len(grid.bandwidths)
    won = {winner.strategy for winner in winners}
    colours = {name: strategy_colour(name).light for name in grid.strategies if name in won}
    line = " · ".join((grid.model, grid.cluster.gpu.name, *grid.question.kernels()))
    marks = "×: gain over one GPU, even if it is too small · ≈: others tie with it · empty: nothing fits in memory"
    head = Head(title=headline(grid), subtitle=f"{line} · {marks}", width=_WIDTH, entries=colours)
    # heights in inches
    panel = 0.34 * len(counts) + 0.2
    gap = 0.42
    below = 0.62
    height = head.height + 0.35 + panels * panel + (panels - 1) * gap + below
    with chart_style():
        panes = drawing(_WIDTH, height)
        edges: dict[str, Any] = dict(left=0.07, right=0.985, top=1 - (head.height + 0.35) / height)
        cells = panes.add_gridspec(panels, 1, hspace=gap / panel, bottom=below / height, **edges)
        for row, bandwidth in enumerate(grid.bandwidths):
            axes = panes.add_subplot(cells[row, 0])
            _draw_panel(axes, grid, bandwidth, colours)
            axes.set_title(f"links of {format_bandwidth(bandwidth)}", loc="left", fontsize=10, color=INK)
        step = -(-len(grid.lengths) // 16)
        ticks = [index + 0.5 for index in range(0, len(grid.lengths), step)]
        axes.set_xticks(ticks, [format_tokens(length) for length in grid.lengths[::step]])
        axes.set_xlabel("context, tokens", fontsize=9, color=DIM)
        head.draw(panes)
    return panes


def _draw_panel(axes: Axes, grid: StrategyMap, bandwidth: float, colours: Mapping[str, str]) -> None:
    """Draw a cell for each context and number of GPUs at which some strategy fits."""
    from matplotlib.patches import Rectangle

    lengths = grid.lengths
    counts = grid.gpu_counts
    for x, y in product(range(len(lengths)), range(len(counts))):
        winner = grid.winner(lengths[x], bandwidth, counts[y])
        if winner is None:
            continue
        colour = colours[winner.strategy]
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
        if winner.pays and len(lengths) <= _MOST_GAINS:
            text = f"{winner.speedup_over_single:.1f} ×"
            if winner.ties:
                text += " ≈"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9, color=text_on(colour))
    axes.set(xlim=(0, len(lengths)), ylim=(0, len(counts)), xticks=[])
    axes.set_yticks([index + 0.5 for index in range(len(counts))], list(map(str, counts)))
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("GPUs", fontsize=9, color=DIM)


_FAR = 2.0  # TTFTs that differ by this factor are never ties
_DIGITS = 4
_MOST_ROWS = 300  # largest number of rows in a table
_MOST_NAMES = 5  # largest number of strategies that the headline names


def page(grid: StrategyMap) -> Page:
    """The interactive page of a map."""
    return Page(
        title=f"Fastest strategy for {grid.model}",
        answer=headline(grid),
        facts=_facts(grid),
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
                lead="On these GPUs with these links. The band is the 80 % interval of the fastest in the place.",
                body=tag("div", id="by-context"),
            ),
            Section(title="Tables", body=_tables(grid)),
        ],
        notes=grid.warnings,
        data=map_data(grid),
        scripts=(*CHARTS, "controls.js", "winners.js", "grid.js", "map.js"),
        strategies=grid.strategies,
    )


def headline(grid: StrategyMap) -> str:
    """The winning strategies, and the number of places that each wins."""
    winners = grid.winners()
    if not winners:
        return "No strategy fits in memory in any of these places."
    if not any(winner.pays for winner in winners):
        return "More than one GPU is not faster in any of these places."
    wins: Counter[str] = Counter()
    for winner in winners:
        if winner.pays:
            wins[winner.strategy] += 1
        else:
            wins["one GPU"] += 1
    named = wins.most_common(_MOST_NAMES)
    texts = [f"{name} in {count}" for name, count in named]
    rest = len(winners) - sum(count for _, count in named)
    if rest:
        texts.append(f"others in {rest}")
    places = format_count(len(winners), "place")
    return f"Fastest of {len(grid.strategies)} strategies in {places}: {', '.join(texts)}."


def _facts(grid: StrategyMap) -> dict[str, str]:
    """The facts of the question, with the map's axes in place of context and GPUs."""
    facts = facts_of(grid.question)
    for name in ("context", "GPUs"):  # these are the values of the largest place only
        del facts[name]
    facts |= {"cluster": grid.cluster.describe(), "lengths": ", ".join(map(format_tokens, grid.lengths))}
    return facts | {"link bandwidths": ", ".join(map(format_bandwidth, grid.bandwidths))}


def map_data(grid: StrategyMap) -> dict[str, Any]:
    """Plain JSON values; places are ordered by bandwidth, then by context, then by number of GPUs."""
    names = grid.strategies
    contexts = grid.lengths
    counts = grid.gpu_counts
    places = [grid.at(length, rate, count) for rate, length, count in product(grid.bandwidths, contexts, counts)]
    return {
        "contexts": list(contexts),
        "gpus": list(counts),
        "bandwidths": list(grid.bandwidths),
        "bandwidth_names": list(map(format_bandwidth, grid.bandwidths)),
        "alone": names.index(ALONE),
        "strategies": [_strategy_data(name, places) for name in names],
        "ties": [_ties_data(place, names) for place in places],
    }


def _strategy_data(name: str, places: Sequence[Place]) -> dict[str, Any]:
    """A strategy's values by place; None where it does not run."""
    data: dict[str, Any] = {"name": name, "title": _title(name), "ttft_s": [], "low_s": [], "high_s": [], "fits": []}
    for place in places:
        point = place.get(name)
        if point is None:
            for key in ("ttft_s", "low_s", "high_s", "fits"):
                data[key].append(None)
            continue
        data["ttft_s"].append(_short(point.ttft_s))
        data["low_s"].append(_short(point.ttft_low_s))
        data["high_s"].append(_short(point.ttft_high_s))
        data["fits"].append(int(point.fits))
    return data


def _ties_data(place: Place, names: Sequence[str]) -> list[list[int]]:
    """The pairs of strategies in a place that predictions cannot distinguish, by their index."""
    return [[names.index(faster), names.index(slower)] for faster, slower in _ties(place.values())]


def _ties(points: Iterable[MapPoint]) -> Iterable[tuple[str, str]]:
    """All pairs of points that predictions cannot distinguish, the faster point first."""
    for faster, slower in combinations(sorted(points, key=lambda point: point.ttft_s), 2):
        if slower.ttft_s <= _FAR * faster.ttft_s and is_tied(faster, slower):
            yield faster.strategy, slower.strategy


def _title(name: str) -> str:
    """The title of a strategy; empty for the user's own strategies."""
    try:
        return get_strategy(name).title
    except InputError:
        return ""


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _tables(grid: StrategyMap) -> Html:
    parts = []
    tables = {"The fastest": winners_table(grid), "Break-even contexts": break_even_table(grid)}
    for name, rows in tables.items():
        if rows.rows:
            parts.append(table(rows.columns, rows.rows[:_MOST_ROWS], caption=name))
    return join(parts)


def winners_table(grid: StrategyMap) -> Table:
    """The table of winners by bandwidth, context and number of GPUs: strategy, TTFT and speedup over one GPU."""
    several = [count for count in grid.gpu_counts if count > 1]
    rows = columns("links", "context", "best", *(f"{count} GPUs" for count in several))
    best = {(winner.link_bandwidth_bytes_per_s, winner.context_len): winner for winner in grid.best()}
    for bandwidth, context_len in product(grid.bandwidths, grid.lengths):
        fastest = best.get((bandwidth, context_len))
        if fastest is None:
            on = "nothing fits"
        elif fastest.pays:
            on = f"{fastest.strategy} on {fastest.num_gpus}"
        else:
            on = "one GPU"
        cells = (_cell(grid, context_len, bandwidth, count) for count in several)
        rows.add_row(format_bandwidth(bandwidth), format_tokens(context_len), Text(on, style="bold"), *cells)
    return rows


def _cell(grid: StrategyMap, context_len: int, bandwidth: float, num_gpus: int) -> str:
    """The cell of a place: the winner or, if nothing fits, the least memory that a strategy needs."""
    winner = grid.winner(context_len, bandwidth, num_gpus)
    if winner is None:
        points = grid.at(context_len, bandwidth, num_gpus).values()
        nearest = min(points, key=lambda point: point.peak_bytes, default=None)
        if nearest is None:
            return ""
        limit = format_bytes(grid.memory_limit.nbytes)
        return f"{nearest.strategy} needs {format_bytes(nearest.peak_bytes)} of {limit}"
    if not winner.pays:
        return f"no gain ({format_seconds(winner.ttft_s)})"
    text = f"{winner.strategy} {format_seconds(winner.ttft_s)} {winner.speedup_over_single:.2f}×"
    if winner.ties:
        text += f" {TIED}{len(winner.ties)}"
    return text


def break_even_table(grid: StrategyMap) -> Table:
    """The context from which each strategy is faster than another, by bandwidth and number of GPUs."""
    several = [count for count in grid.gpu_counts if count > 1]
    rows = columns("links", "faster from context", *(f"{count} GPUs" for count in several))
    cells: dict[tuple[float, str, str], dict[int, str]] = {}
    for change in grid.break_evens():
        if change.context_len is None:
            length = f"beyond {format_tokens(change.up_to)}"
        elif change.known == "interpolated":
            length = f"{change.context_len} tokens"
        else:
            length = f"at most {format_tokens(change.context_len)}"
        row = (change.link_bandwidth_bytes_per_s, change.strategy, change.over)
        cells.setdefault(row, {})[change.num_gpus] = length
    for (bandwidth, strategy, over), lengths in cells.items():
        rows.add_row(
            format_bandwidth(bandwidth), f"{strategy} than {over}", *(lengths.get(count, "") for count in several)
        )
    return rows


def summary(grid: StrategyMap) -> Summary:
    """The notebook's table of the fastest strategies."""
    rows = winners_table(grid)
    return Summary(
        answer=headline(grid),
        question=" · ".join((grid.model, grid.cluster.describe(), *grid.question.kernels())),
        caption="the fastest in each place",
        columns=rows.columns,
        rows=rows.texts(),
        notes=grid.warnings,
    )
