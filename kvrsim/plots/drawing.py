"""Drawing: a figure that notebooks show without pyplot."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure
from PIL import Image

from kvrsim.plots.save import encoded
from kvrsim.plots.style import styled

_DPI = 150
_SHOWN = 90  # pixels an inch in a notebook


class Drawing(Figure):
    """A figure in kvrsim's style."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """PNG of 256 colours, as notebooks are kept, and how large to show it."""
        with styled():
            image = Image.open(BytesIO(encoded(self, dpi=_DPI))).convert("RGB").quantize(256)
        content = BytesIO()
        image.save(content, format="png", optimize=True)
        return content.getvalue(), {"width": round(self.get_size_inches()[0] * _SHOWN)}
