"""What all pictures share: fonts, ink, and names that are drawn as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, DIM = "#2b2f36", "#5b616b"

# Names of models, clusters and files are no formulas: a $ in one is a dollar sign.
_RC: dict[Any, Any] = {"font.family": "DejaVu Sans", "hatch.linewidth": 0.6, "text.parse_math": False}


@contextmanager
def styled() -> Iterator[None]:
    """While this lasts, figures are made and saved in kvrsim's style."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield
