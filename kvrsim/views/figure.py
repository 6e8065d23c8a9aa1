"""Saving a figure: PNG, SVG or PDF by the path's suffix, atomically and reproducibly."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically
from kvrsim.text import printable
from kvrsim.views.style import DIM, INK, OPERATIONS, WAITING_LINES, strategy_colour, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
PAGE = ".html"  # of an interactive page, for results that have one

# No dates, random ids or matplotlib version, so that the same figure gives the same bytes.
_METADATA: dict[str, Any] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_RC: dict[Any, Any] = {"svg.hashsalt": "kvrsim"}


def check_suffix(path: str | Path, argument: str = "plot", *, page: bool = False) -> str:
    """The path's suffix in lower case; InputError naming `argument` where it is not one of SUFFIXES.

    page: PAGE is accepted, too.
    """
    suffix, accepted = Path(path).suffix.lower(), (*SUFFIXES, PAGE) if page else SUFFIXES
    if suffix not in accepted:
        raise InputError(argument, path, f"a file name that ends in {', '.join(accepted[:-1])} or {accepted[-1]}")
    return suffix


def is_page(path: str | Path | None) -> bool:
    """Whether a path names an interactive page."""
    return path is not None and Path(path).suffix.lower() == PAGE


def save_figure(figure: Figure, path: str | Path, *, argument: str = "plot", dpi: int = 150) -> None:
    """Write a figure atomically.

    Raises InputError naming `argument` where the suffix is not one of SUFFIXES or the file cannot be written.
    """
    suffix = check_suffix(path, argument)
    write_atomically(path, encoded(figure, suffix, dpi=dpi), argument=argument)


def encoded(figure: Figure, suffix: str = ".png", *, dpi: int = 150) -> bytes:
    """A figure in the format of one of SUFFIXES; the same figure gives the same bytes."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context(_RC):
        figure.savefig(content, format=suffix[1:], dpi=dpi, metadata=_METADATA[suffix])
    return content.getvalue()


# The head of a chart: title, subtitle and legend

WAITING = OPERATIONS["waiting"]
HATCHED: dict[str, Any] = dict(facecolor=WAITING.colour.light, edgecolor=WAITING_LINES.light, hatch="/////")

_TITLE, _LINE, _LEGEND = 0.36, 0.19, 0.235  # heights of a row, inches
_LETTER, _SWATCH = 0.069, 0.36  # widths in a legend, inches


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Title, subtitle and legend of a figure `width` inches wide."""

    title: str
    subtitle: str
    width: float
    entries: Mapping[str, str] = field(default_factory=dict)  # of the legend: labels and colours

    @property
    def height(self) -> float:
        """Inches, with some room below."""
        return 0.12 + _TITLE + _LINE * len(self._lines) + _LEGEND * len(self._rows) + 0.08

    def draw(self, figure: Figure) -> None:
        """Draw at the top of a figure."""
        inches = figure.get_size_inches()[1]
        style: dict[str, Any] = dict(x=0.12 / self.width, va="top")
        figure.text(y=1 - 0.12 / inches, s=self._short_title, fontsize=14, fontweight="bold", color=INK, **style)
        for number, line in enumerate(self._lines):
            figure.text(y=1 - (0.12 + _TITLE + number * _LINE) / inches, s=line, fontsize=9.5, color=DIM, **style)
        top = 0.12 + _TITLE + _LINE * len(self._lines)
        for number, row in enumerate(self._rows):
            corner = (0.06 / self.width, 1 - (top + number * _LEGEND) / inches)
            self._draw_row(figure, row, corner)

    def _draw_row(self, figure: Figure, row: list[str], corner: tuple[float, float]) -> None:
        from matplotlib.patches import Patch

        patches = [_patch(Patch, label, self.entries[label]) for label in row]
        place: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=corner, ncols=len(row), borderaxespad=0.2)
        style: dict[str, Any] = dict(frameon=False, fontsize=9, labelcolor=INK, handlelength=1.3, columnspacing=1.2)
        figure.legend(patches, row, **place, **style)

    @property
    def _short_title(self) -> str:
        """The words that fit in one line."""
        return textwrap.shorten(printable(self.title), int(8.4 * self.width), placeholder=" …")

    @property
    def _lines(self) -> list[str]:
        return textwrap.wrap(printable(self.subtitle), int(13.5 * self.width))

    @property
    def _rows(self) -> list[list[str]]:
        """Labels, as many a row as there is room for."""
        rows: list[list[str]] = []
        left = 0.0
        for label in self.entries:
            needed = _SWATCH + _LETTER * len(label)
            if needed > left:
                rows.append([])
                left = self.width - 0.1
            rows[-1].append(label)
            left -= needed
        return rows


def _patch(patch: Any, label: str, colour: str) -> Any:
    if label == WAITING.label:
        return patch(**HATCHED, linewidth=0)
    return patch(facecolor=colour)


# Bars

_WIDTH = 10.0  # inches
_BAR = 0.34  # inches a bar, with its gap
_COMPUTING = "#166c94"
_LONGEST = 2.0  # times the longest bar that fits
_LETTER_bars = 0.0115  # of the axes, about
_MOST_NAMES = 32  # most names of ranks; with more ranks, some are left out


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
    """Time of one rank by activity, until it ends."""

    computes_s: float
    waits_s: float


def draw_ttfts(bars: Sequence[Bar], title: str, subtitle: str, *, unit: str) -> Figure:
    """One bar per strategy in its colour, the first one on top, each with its prediction interval.

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
        longest = max(min(bar.high_s / most_s, 1.0) + _LETTER_bars * (len(bar.label) + 9) for bar in bars)
        axes.set_xlim(0, most_s * max(1.05, longest))
        axes.set_yticks(range(len(bars)), [bar.strategy for bar in bars])
        axes.set_xlabel(unit, fontsize=9, color=DIM)
        head.draw(figure)
    return figure


def draw_ranks(shares: Sequence[Share], title: str, subtitle: str) -> Figure:
    """One bar per rank: how long it computes, and how long it waits until it has finished."""
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
    """A figure with room for a head and this number of bars."""
    lanes = min(10.0, max(0.6, _BAR * bars))
    height = head.height + lanes + 0.75
    figure = drawing(_WIDTH, height)
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


_DPI = 150
_NOTEBOOK_DPI = 90


def drawing(width: float, height: float, *, layout: Literal["constrained"] | None = None) -> Figure:
    """Make a figure (sizes in inches) that notebooks show without pyplot, as a PNG of 256 colours."""
    from matplotlib.figure import Figure

    class Drawing(Figure):
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            from PIL import Image

            with styled():
                image = Image.open(io.BytesIO(encoded(self, dpi=_DPI))).convert("RGB").quantize(256)
            content = io.BytesIO()
            image.save(content, format="png", optimize=True)
            return content.getvalue(), {"width": round(self.get_size_inches()[0] * _NOTEBOOK_DPI)}

    return Drawing(figsize=(width, height), layout=layout)


# Files


def write(result: object, view: ModuleType, path: str | Path) -> None:
    """Write a result as its view shows it; InputError naming the argument plot where that is not possible."""
    check_suffix(path, page=True)
    if is_page(path):
        from kvrsim.views.page import write_page

        write_page(view.page(result), path)
        return
    with styled():
        save_figure(view.figure(result), path)
