"""What stands above a chart: the title with the answer, the question beneath it, and the legend in rows."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrsim.plots.style import DIM, INK, OPERATIONS, WAITING_LINES
from kvrsim.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        """What fits in one line."""
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
