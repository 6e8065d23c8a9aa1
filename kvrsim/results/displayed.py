"""Displayed: results that draw themselves, and that notebooks show as a table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Displayed:
    """A result with a view: a module that has `figure`, `page` and `summary` of it, loaded when it is needed."""

    __slots__ = ()
    view: ClassVar[str]

    def plot(self, path: str | Path | None = None) -> Figure:
        """The result as a figure, which notebooks show.

        path: where to write it, too, as .png, .svg or .pdf, or as .html: an interactive page in one file.
        Raises InputError naming the argument plot where the suffix is another or the file cannot be written.
        """
        if path is not None:
            self.write_plot(path)
        figure: Figure = self._in_view("figure")
        return figure

    def write_plot(self, path: str | Path) -> None:
        """Write the file alone; see `plot`."""
        import_module("kvrsim.views.figure").write(self, import_module(self.view), path)

    def _repr_html_(self) -> str:
        """The answer, the question and a table, escaped; notebooks call it."""
        shown: str = self._in_view("summary").to_html()
        return shown

    def _in_view(self, name: str) -> Any:
        return getattr(import_module(self.view), name)(self)
