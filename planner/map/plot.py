"""The fastest strategy over contexts and numbers of GPUs, one panel a bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvrsim.units import format_bandwidth, format_tokens
from kvrsim.views.figure import Head, drawing
from kvrsim.views.style import DIM, INK, strategy_colour, styled, text_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.map.map import StrategyMap, Winner

_WIDTH = 10.0  # inches
_MOST_GAINS = 12  # contexts, up to which the gain over one GPU is written into each cell
_NOTHING = "nothing fits in memory"


def draw_map(found: StrategyMap) -> Figure:
    """A panel a bandwidth: contexts to the right, numbers of GPUs upwards, each place in its winner's colour."""
    with styled():
        return _draw_map(found)


def _draw_map(found: StrategyMap) -> Figure:
    winners = list(found.winners())
    won = {winner.strategy for winner in winners}
    colours = {name: strategy_colour(name).light for name in found.strategies if name in won}
    line = " · ".join((found.model, found.cluster.gpu.name, *found.question.kernels()))
    numbers = ["×: gain over one GPU"] if any(winner.pays for winner in winners) else []
    numbers += ["≈: others cannot be told from it"] if any(winner.ties for winner in winners) else []
    numbers += [] if all(winner.fits for winner in winners) else [f"hatched: {_NOTHING}"]
    head = Head(title=_title(winners), subtitle=" · ".join((line, *numbers)), width=_WIDTH, entries=colours)
    counts, panels = len(found.gpu_counts), len(found.bandwidths)
    each, gap = 0.34 * counts + 0.2, 0.42
    height = head.height + 0.35 + panels * each + (panels - 1) * gap + 0.62
    figure = drawing(_WIDTH, height)
    edges: dict[str, Any] = dict(left=0.07, right=0.985, top=1 - (head.height + 0.35) / height, bottom=0.62 / height)
    grid = figure.add_gridspec(panels, 1, hspace=gap / each, **edges)
    for row, bandwidth in enumerate(found.bandwidths):
        axes = figure.add_subplot(grid[row, 0])
        _draw_panel(axes, found, bandwidth, colours, labelled=row == panels - 1)
    head.draw(figure)
    return figure


def _title(winners: Sequence[Winner]) -> str:
    """Who wins most often."""
    counts = Counter(winner.strategy if winner.pays else "one GPU" for winner in winners)
    name, count = counts.most_common(1)[0]
    return f"{name} is the fastest in {count} of {len(winners)} places"


def _draw_panel(
    axes: Axes, found: StrategyMap, bandwidth: float, colours: Mapping[str, str], *, labelled: bool
) -> None:
    """A cell a context and number of GPUs; hatched where nothing fits. labelled: with contexts below."""
    from matplotlib.patches import Rectangle

    lengths, counts = found.lengths, found.gpu_counts
    places = [(length, count) for length in lengths for count in counts if found.at(length, bandwidth, count)]
    here = [one for one in found.winners() if one.link_bandwidth_bytes_per_s == bandwidth]
    for (length, count), winner in zip(places, here, strict=True):
        corner, colour = (lengths.index(length), counts.index(count)), colours[winner.strategy]
        hatch = None if winner.fits else "///"
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2, hatch=hatch))
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
