"""Figures: the head of a chart, lanes, and reproducible files as PNG, SVG or PDF."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically
from kvrsim.text import printable
from kvrsim.views.style import DIM, INK, OPERATIONS, WAITING_LINES, chart_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
PAGE = ".html"  # suffix of an interactive page

# No dates, random ids or matplotlib version, so that the same figure gives the same bytes.
_METADATA: dict[str, Any] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_RC: dict[Any, Any] = {"svg.hashsalt": "kvrsim"}


def check_suffix(path: str | Path, argument: str = "plot", *, page: bool = False) -> str:
    """Return the path's suffix in lower case. Raises InputError naming `argument` if it is not one of SUFFIXES.

    page: accept PAGE, too.
    """
    suffix = Path(path).suffix.lower()
    accepted = (*SUFFIXES, PAGE) if page else SUFFIXES
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
    write_atomically(path, encode_figure(figure, suffix, dpi=dpi), argument=argument)


def encode_figure(figure: Figure, suffix: str = ".png", *, dpi: int = 150) -> bytes:
    """A figure in the format of one of SUFFIXES; the same figure gives the same bytes."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context(_RC):
        figure.savefig(content, format=suffix[1:], dpi=dpi, metadata=_METADATA[suffix])
    return content.getvalue()


# The head of a chart: title, subtitle and legend

WAITING = OPERATIONS["waiting"]
HATCHED: dict[str, Any] = dict(facecolor=WAITING.colour.light, edgecolor=WAITING_LINES.light, hatch="/////")

# height of a row of each, inches
_TITLE = 0.33
_LINE = 0.19
_LEGEND = 0.235
# width of a letter and of a colour sample in a legend, inches
_LETTER = 0.069
_SWATCH = 0.36


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Title, subtitle and legend of a figure; `width` in inches."""

    title: str
    subtitle: str
    width: float
    entries: Mapping[str, str] = field(default_factory=dict)  # labels and colours of the legend

    @property
    def height(self) -> float:
        """Height of the head in inches, with a margin below."""
        return self._top + _LEGEND * len(self._rows) + 0.08

    def draw(self, figure: Figure) -> None:
        """Draw the head at the top of a figure."""
        inches = figure.get_size_inches()[1]
        style: dict[str, Any] = dict(x=0.12 / self.width, va="top")
        below = 1 - (0.12 + _TITLE * len(self._titles)) / inches
        figure.text(y=1 - 0.12 / inches, s="\n".join(self._titles), fontsize=14, fontweight="bold", color=INK, **style)
        for number, line in enumerate(self._lines):
            figure.text(y=below - number * _LINE / inches, s=line, fontsize=9.5, color=DIM, **style)
        for number, row in enumerate(self._rows):
            corner = (0.06 / self.width, 1 - (self._top + number * _LEGEND) / inches)
            self._draw_row(figure, row, corner)

    def _draw_row(self, figure: Figure, row: list[str], corner: tuple[float, float]) -> None:
        from matplotlib.patches import Patch

        patches = [_patch(Patch, label, self.entries[label]) for label in row]
        place: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=corner, ncols=len(row), borderaxespad=0.2)
        style: dict[str, Any] = dict(frameon=False, fontsize=9, labelcolor=INK, handlelength=1.3, columnspacing=1.2)
        figure.legend(patches, row, **place, **style)

    @property
    def _top(self) -> float:
        """Inches above the legend."""
        return 0.12 + _TITLE * len(self._titles) + _LINE * len(self._lines)

    @property
    def _titles(self) -> list[str]:
        """The lines of the title; a longer title is cut."""
        return textwrap.wrap(printable(self.title), int(8.4 * self.width), max_lines=2, placeholder=" …")

    @property
    def _lines(self) -> list[str]:
        return textwrap.wrap(printable(self.subtitle), int(13.5 * self.width))

    @property
    def _rows(self) -> list[list[str]]:
        """Labels of the legend by row; a row has as many as fit."""
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


# Lanes: one row per rank or strategy

WIDTH = 10.0  # width of a figure, inches


def figure_with_head(head: Head, lanes_inches: float, left: float) -> tuple[Figure, Axes]:
    """Make a figure with a head above axes.

    lanes_inches: height of the axes. left: left edge of the axes as a share of the width.
    """
    height = head.height + lanes_inches + 0.85
    figure = drawing(head.width, height)
    bottom = 0.55 / height
    top = 1 - (head.height + 0.3) / height
    head.draw(figure)
    return figure, figure.add_axes((left, bottom, 0.98 - left, top - bottom))


def set_lanes(axes: Axes, names: Sequence[str], unit: str) -> None:
    """Label the lanes, the first on top, and the axis below with `unit`; of many lanes, only some get labels."""
    ticks = range(0, len(names), -(-len(names) // 32))
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(ticks, [names[lane] for lane in ticks])
    axes.tick_params(axis="y", length=0, labelsize=9, colors=INK)
    axes.tick_params(axis="x", labelsize=8.5, colors=INK)
    axes.set_xlabel(unit, fontsize=9, color=INK, labelpad=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


_NOTEBOOK_DPI = 90


def drawing(width: float, height: float, *, layout: Literal["constrained"] | None = None) -> Figure:
    """Make a figure that notebooks show without pyplot, as a PNG of 256 colours; sizes are in inches."""
    from matplotlib.figure import Figure

    class Drawing(Figure):
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            from PIL import Image

            with chart_style():
                image = Image.open(io.BytesIO(encode_figure(self))).convert("RGB").quantize(256)
            content = io.BytesIO()
            image.save(content, format="png", optimize=True)
            return content.getvalue(), {"width": round(self.get_size_inches()[0] * _NOTEBOOK_DPI)}

    return Drawing(figsize=(width, height), layout=layout)
