"""The fastest strategy over contexts and numbers of GPUs, one panel a bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvrsim.plots.save import check_suffix, is_page, save_figure
from kvrsim.plots.style import styled
from kvrsim.text import printable
from kvrsim.units import format_bandwidth, format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.map.map import StrategyMap

_LEAST_WIDTH = 5.0  # inches
_MOST_GAINS = 12  # contexts, up to which the gain over one GPU is written into each cell


def write_map(found: StrategyMap, path: str) -> None:
    """Draw to FILE.png, .svg or .pdf, or write the page FILE.html; raises InputError where it cannot be written."""
    check_suffix(path, page=True)
    if is_page(path):
        from planner.map.page import write_map_page  # what a picture does not need

        write_map_page(found, path)
        return
    with styled():
        save_figure(_figure(found), path)


def _figure(found: StrategyMap) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    width = max(_LEAST_WIDTH, 2.4 + 0.75 * len(found.lengths))
    figure = Figure(figsize=(width, 1.8 + 1.7 * len(found.bandwidths)), layout="constrained")
    panels = figure.subplots(len(found.bandwidths), 1, squeeze=False, sharex=True)[:, 0]
    colours = {name: colormaps["tab20"](index % 20) for index, name in enumerate(found.strategies)}
    for axes, bandwidth in zip(panels, found.bandwidths, strict=True):
        _draw(axes, found, bandwidth, colours)
    panels[-1].set_xlabel("context, tokens")
    won = {winner.strategy for winner in found.winners()}
    figure.legend(
        handles=[Patch(color=colours[name], label=name) for name in found.strategies if name in won],
        loc="outside right center",
        frameon=False,
    )
    about = printable(", ".join((found.model, *found.question.kernels())))
    ties = " (≈: others tie)" if any(winner.ties for winner in found.winners()) else ""
    figure.suptitle(f"Fastest strategy, gain over one GPU{ties}\n{about}", fontsize=10)
    return figure


def _draw(axes: Axes, found: StrategyMap, bandwidth: float, colours: Mapping[str, tuple[float, ...]]) -> None:
    """A cell a context and number of GPUs; hatched where nothing fits."""
    from matplotlib.patches import Rectangle

    lengths, counts = found.lengths, found.gpu_counts
    places = [(length, count) for length in lengths for count in counts if found.at(length, bandwidth, count)]
    winners = [one for one in found.winners() if one.link_bandwidth_bytes_per_s == bandwidth]
    for (length, count), winner in zip(places, winners, strict=True):
        corner = lengths.index(length), counts.index(count)
        hatch = None if winner.fits else "///"
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colours[winner.strategy], edgecolor="white", hatch=hatch))
        if winner.pays and len(lengths) <= _MOST_GAINS:
            middle = corner[0] + 0.5, corner[1] + 0.5
            ties = "\n≈" if winner.ties else ""
            axes.text(*middle, f"{winner.speedup_over_single:.1f}×{ties}", ha="center", va="center", fontsize=8)
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(0, len(counts))
    step = -(-len(lengths) // 16)
    axes.set_xticks(
        [index + 0.5 for index in range(0, len(lengths), step)], [format_tokens(n) for n in lengths[::step]]
    )
    axes.set_yticks([index + 0.5 for index in range(len(counts))], list(map(str, counts)))
    axes.set_ylabel("GPUs")
    axes.set_title(f"links of {format_bandwidth(bandwidth)}", fontsize=9)
