"""Saving a figure: PNG, SVG or PDF by the path's suffix, atomically and reproducibly."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically

if TYPE_CHECKING:
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
    """Whether a path asks for an interactive page; None: nothing is asked for."""
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
