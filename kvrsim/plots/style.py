"""What all figures share: font, text colours, and names that are drawn literally."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

INK, DIM = "#2b2f36", "#5b616b"

# Names of models, clusters and files are not formulas: a $ in one is a dollar sign.
_RC: dict[Any, Any] = {"font.family": "DejaVu Sans", "hatch.linewidth": 0.6, "text.parse_math": False}


@contextmanager
def styled(more: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """Figures made and saved inside this context have kvrsim's style, and `more` of matplotlib's settings."""
    import matplotlib

    with matplotlib.rc_context(_RC | dict(more or {})):
        yield
