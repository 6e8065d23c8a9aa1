"""A map as a figure, as an interactive page and in a notebook.

The page has the TTFTs of all strategies in all places. When strategies are switched off, it finds the winners itself,
as StrategyMap does: the fastest that fits, or one GPU where a prediction cannot tell it from the fastest. Ties depend
on pairs of strategies, so the data has all pairs within a factor of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bandwidth, format_tokens
from kvrsim.views.figure import Head, drawing
from kvrsim.views.page import CHARTS, Html, Page, Section, Summary, facts_of, join, strategy_name, table, tag
from kvrsim.views.style import DIM, INK, strategy_colour, styled, text_on
from kvrsim.views.table import Cell, Column, seconds_cell
from planner.map.map import ALONE, MapPoint, StrategyMap, Winner, is_tied

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0  # inches
_MOST_GAINS = 12  # contexts, up to which the gain over one GPU is written into each cell
_NOTHING = "nothing fits in memory"


def figure(grid: StrategyMap) -> Figure:
    """A panel a bandwidth: contexts to the right, numbers of GPUs upwards, each place in its winner's colour."""
    with styled():
        return _draw_map(grid)


def _draw_map(grid: StrategyMap) -> Figure:
    winners = list(grid.winners())
    won = {winner.strategy for winner in winners}
    colours = {name: strategy_colour(name).light for name in grid.strategies if name in won}
    line = " · ".join((grid.model, grid.cluster.gpu.name, *grid.question.kernels()))
    numbers = ["×: gain over one GPU"] if any(winner.pays for winner in winners) else []
    numbers += ["≈: others cannot be told from it"] if any(winner.ties for winner in winners) else []
    numbers += [f"empty: {_NOTHING}"] if any(grid.nearest()) else []
    head = Head(title=_title(winners), subtitle=" · ".join((line, *numbers)), width=_WIDTH, entries=colours)
    counts, panels = len(grid.gpu_counts), len(grid.bandwidths)
    each, gap = 0.34 * counts + 0.2, 0.42
    height = head.height + 0.35 + panels * each + (panels - 1) * gap + 0.62
    panes = drawing(_WIDTH, height)
    edges: dict[str, Any] = dict(left=0.07, right=0.985, top=1 - (head.height + 0.35) / height, bottom=0.62 / height)
    cells = panes.add_gridspec(panels, 1, hspace=gap / each, **edges)
    for row, bandwidth in enumerate(grid.bandwidths):
        axes = panes.add_subplot(cells[row, 0])
        _draw_panel(axes, grid, bandwidth, colours, labelled=row == panels - 1)
    head.draw(panes)
    return panes


def _title(winners: Sequence[Winner]) -> str:
    """Who wins most often."""
    if not winners:
        return "Nothing fits in memory in any place"
    counts = Counter(winner.strategy if winner.pays else "one GPU" for winner in winners)
    name, count = counts.most_common(1)[0]
    return f"{name} is the fastest in {count} of {len(winners)} places"


def _draw_panel(axes: Axes, grid: StrategyMap, bandwidth: float, colours: Mapping[str, str], *, labelled: bool) -> None:
    """A cell per context and number of GPUs; none where nothing fits. labelled: with contexts below."""
    from matplotlib.patches import Rectangle

    lengths, counts = grid.lengths, grid.gpu_counts
    for corner in product(range(len(lengths)), range(len(counts))):
        if (winner := grid.winner(lengths[corner[0]], bandwidth, counts[corner[1]])) is None:
            continue
        colour = colours[winner.strategy]
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
        if winner.pays and len(lengths) <= _MOST_GAINS:
            text = f"{winner.speedup_over_single:.1f} ×{' ≈' if winner.ties else ''}"
            style: dict[str, Any] = dict(ha="center", va="center", fontsize=9, color=text_on(colour))
            axes.text(corner[0] + 0.5, corner[1] + 0.5, text, **style)
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(0, len(counts))
    step = -(-len(lengths) // 16)
    axes.set_xticks(
        [index + 0.5 for index in range(0, len(lengths), step)],
        [format_tokens(length) for length in lengths[::step]] if labelled else [],
    )
    axes.set_yticks([index + 0.5 for index in range(len(counts))], list(map(str, counts)))
    axes.tick_params(length=0, labelsize=9, colors=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_ylabel("GPUs", fontsize=9, color=DIM)
    if labelled:
        axes.set_xlabel("context, tokens", fontsize=9, color=DIM)
    axes.set_title(f"links of {format_bandwidth(bandwidth)}", loc="left", fontsize=10, color=INK)


_FAR = 2.0  # times a TTFT, from where on another is no tie with it
_DIGITS = 4
_MOST_ROWS = 300  # of the table of break-even contexts


def page(grid: StrategyMap) -> Page:
    """The page of a map."""
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
                lead="On these GPUs with these links. The bands are 80 % prediction intervals.",
                body=tag("div", id="by-context"),
            ),
            Section(title="Tables", body=join((_best(grid), _break_evens(grid)))),
        ],
        notes=grid.warnings,
        data=map_data(grid),
        scripts=(*CHARTS, "controls.js", "winners.js", "grid.js", "map.js"),
        strategies=grid.strategies,
    )


def headline(grid: StrategyMap) -> str:
    """Which strategies win, and in how many places."""
    winners = list(grid.winners())
    if not winners:
        return "No strategy fits in memory in any of these places."
    if not any(winner.pays for winner in winners):
        return "More than one GPU is not faster in any of these places."
    wins = Counter(winner.strategy if winner.pays else "one GPU" for winner in winners)
    listed = [f"{name} in {count}" for name, count in wins.most_common()]
    rest = len(winners) - sum(count for _, count in wins.most_common(5))
    words = ", ".join(listed[:5]) + (f", others in {rest}" if rest else "")
    return f"Fastest of {len(grid.strategies)} strategies in {len(winners)} place{'s' * (len(winners) > 1)}: {words}."


def _facts(grid: StrategyMap) -> dict[str, str]:
    """The question, with the axes of the map as they are written."""
    facts = facts_of(grid.question)
    for name in ("context", "GPUs"):  # of the largest place alone
        del facts[name]
    facts |= {
        "cluster": grid.cluster.describe(),
        "lengths": ", ".join(map(format_tokens, grid.lengths)),
    }
    return facts | {"link bandwidths": ", ".join(map(format_bandwidth, grid.bandwidths))}


def map_data(grid: StrategyMap) -> dict[str, Any]:
    """Plain JSON values; a place is (bandwidth * contexts + context) * numbers of GPUs + number of GPUs, as indices."""
    names, contexts, counts = grid.strategies, grid.lengths, grid.gpu_counts
    places = [grid.at(length, rate, count) for rate in grid.bandwidths for length in contexts for count in counts]

    def column(name: str, value: str) -> list[float | None]:
        return [_short(getattr(place[name], value)) if name in place else None for place in places]

    return {
        "contexts": list(contexts),
        "gpus": list(counts),
        "bandwidths": list(grid.bandwidths),
        "bandwidth_names": [format_bandwidth(one) for one in grid.bandwidths],
        "alone": names.index(ALONE),
        "strategies": [
            {
                "name": name,
                "title": _title_page(name),
                "approximate": name in grid.approximate,
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


def _title_page(name: str) -> str:
    """What a strategy does; nothing for one of another's own."""
    try:
        return get_strategy(name).title
    except InputError:
        return ""


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _break_evens(grid: StrategyMap) -> str:
    evens = list(grid.break_evens())
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


_BEST = (
    Column(title="context", number=True),
    Column(title="links", number=True),
    Column(title="strategy"),
    Column(title="GPUs", number=True),
    Column(title="TTFT", number=True),
    Column(title="over one GPU", number=True, hint="TTFT of one GPU over this one"),
    Column(title="ties", rank=2, hint="Others that a prediction cannot tell from the fastest"),
)


def _best(grid: StrategyMap) -> Html:
    shown = table(_BEST, _best_rows(grid), caption="Best")
    return tag("div", tag("h3", "The fewest GPUs that tie with the fastest"), shown)


def _best_rows(grid: StrategyMap) -> list[tuple[str | Cell, ...]]:
    """The fewest GPUs that tie with the fastest, for each context and bandwidth."""
    return [
        (
            Cell(shown=format_tokens(best.context_len), value=best.context_len),
            Cell(shown=format_bandwidth(best.link_bandwidth_bytes_per_s), value=best.link_bandwidth_bytes_per_s),
            best.strategy,
            str(best.num_gpus),
            seconds_cell(best.ttft_s),
            Cell(shown=f"{best.speedup_over_single:.2f}×", value=best.speedup_over_single),
            ", ".join(best.ties),
        )
        for best in grid.best()
    ]


def summary(grid: StrategyMap) -> Summary:
    """The best of each context and bandwidth."""
    return Summary(
        answer=headline(grid),
        question=" · ".join((grid.model, grid.cluster.describe(), *grid.question.kernels())),
        caption="the best of each context",
        columns=_BEST,
        rows=_best_rows(grid),
        notes=grid.warnings,
    )
