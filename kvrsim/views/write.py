"""Writing a result's figure or page, by the suffix of the file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from kvrsim.plots.save import check_suffix, is_page, save_figure
from kvrsim.plots.style import styled


def write(result: object, view: ModuleType, path: str | Path) -> None:
    """Write a result as its view shows it; InputError naming the argument plot where that is not possible."""
    check_suffix(path, page=True)
    if is_page(path):
        from kvrsim.pages.page import write_page

        write_page(view.page(result), path)
        return
    with styled():
        save_figure(view.figure(result), path)
