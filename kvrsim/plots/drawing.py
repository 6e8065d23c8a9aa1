"""Drawing: a figure that notebooks show without pyplot."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvrsim.plots.save import encoded
from kvrsim.plots.style import styled

_DPI = 150
_SHOWN = 90  # pixels an inch in a notebook


class Drawing(Figure):
    """A figure in kvrsim's style."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """PNG, and how large to show it."""
        with styled():
            return encoded(self, dpi=_DPI), {"width": round(self.get_size_inches()[0] * _SHOWN)}
