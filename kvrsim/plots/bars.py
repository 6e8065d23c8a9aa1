"""Bars: the TTFT of each strategy, or how long each rank computes and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrsim.plots.head import HATCHED, WAITING, Head
from kvrsim.plots.style import DIM, INK, strategy_colour, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0  # inches
_BAR = 0.34  # inches a bar, with its gap
_COMPUTING = "#166c94"
_LONGEST = 2.0  # times the longest bar that fits
_LETTER = 0.0115  # of the axes, about
_MOST_NAMES = 32  # of ranks; with more, some are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The TTFT of one strategy."""

    strategy: str
    label: str  # behind the bar
    seconds: float
    low_s: float  # prediction interval
    high_s: float
    fits: bool  # else it is drawn in outline


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank does until it has finished."""

    computes_s: float
    waits_s: float


def draw_ttfts(bars: Sequence[Bar], title: str, subtitle: str, *, unit: str) -> Figure:
    """A bar a strategy in its colour, the first one on top, each with its prediction interval.

    Bars that do not fit are drawn in outline, and cut off where they are far longer than those that do.
    """
    with styled():
        head = Head(title=title, subtitle=subtitle, width=_WIDTH)
        figure, axes = _figure(head, len(bars), left=0.03 + 0.0085 * max(len(bar.strategy) for bar in bars))
        most_s = max(bar.high_s for bar in bars)
        if fitting := [bar.high_s for bar in bars if bar.fits]:
            most_s = min(most_s, _LONGEST * max(fitting))
        for place, bar in enumerate(bars):
            colour = strategy_colour(bar.strategy).light
            face = colour if bar.fits else "none"
            cut, end_s = bar.seconds > most_s, min(bar.high_s, most_s)
            axes.barh(place, min(bar.seconds, most_s), height=0.66, facecolor=face, edgecolor=colour, linewidth=1.2)
            if not cut:
                for colour, width in (("white", 3.2), (INK, 1.4)):
                    axes.plot([bar.low_s, end_s], [place] * 2, color=colour, linewidth=width, solid_capstyle="butt")
            label = f"{bar.label}{', cut off' if cut else ''}"
            axes.text(end_s + 0.008 * most_s, place, label, va="center", fontsize=9, color=INK)
        longest = max(min(bar.high_s / most_s, 1.0) + _LETTER * (len(bar.label) + 9) for bar in bars)
        axes.set_xlim(0, most_s * max(1.05, longest))
        axes.set_yticks(range(len(bars)), [bar.strategy for bar in bars])
        axes.set_xlabel(unit, fontsize=9, color=DIM)
        head.draw(figure)
    return figure


def draw_ranks(shares: Sequence[Share], title: str, subtitle: str) -> Figure:
    """A bar a rank: how long it computes, and how long it waits until it has finished."""
    with styled():
        entries = {"computing": _COMPUTING, WAITING.label: WAITING.colour.light}
        head = Head(title=title, subtitle=subtitle, width=_WIDTH, entries=entries)
        figure, axes = _figure(head, len(shares), left=0.075)
        for place, share in enumerate(shares):
            axes.barh(place, share.computes_s, height=0.66, color=_COMPUTING)
            axes.barh(place, share.waits_s, left=share.computes_s, height=0.66, linewidth=0, **HATCHED)
        step = -(-len(shares) // _MOST_NAMES)
        axes.set_yticks(range(0, len(shares), step), [f"rank {rank}" for rank in range(0, len(shares), step)])
        axes.set_xlabel("seconds", fontsize=9, color=DIM)
        head.draw(figure)
    return figure


def _figure(head: Head, bars: int, *, left: float) -> tuple[Figure, Axes]:
    """A figure with room for a head and so many bars."""
    from kvrsim.plots.drawing import Drawing

    lanes = min(10.0, max(0.6, _BAR * bars))
    height = head.height + lanes + 0.75
    figure = Drawing(figsize=(_WIDTH, height))
    edges: dict[str, Any] = dict(left=left, right=0.98, top=1 - (head.height + 0.1) / height, bottom=0.6 / height)
    axes = figure.add_subplot(figure.add_gridspec(1, 1, **edges)[0, 0])
    axes.set_ylim(bars - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=9.5, colors=INK)
    axes.tick_params(axis="x", labelsize=8.5, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes
