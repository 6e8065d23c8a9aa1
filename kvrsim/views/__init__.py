"""Views: what a result looks like as a figure, as a page, and in a notebook.

A module of this folder shows one class of results: it has the functions `figure`, `page` and `summary`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvrsim.views.page import Summary

# Module of each class of results. The classes are named, so that a view is loaded only when a result is shown.
_MODULES = {
    "CapacityPlan": "capacity",
    "Confirmation": "confirm",
    "Plan": "plan",
    "RunResult": "run",
    "SimResult": "simulation",
    "StrategyMap": "map",
}


class View:
    """How a result is shown. Raises TypeError for a value that has no view."""

    def __init__(self, result: object) -> None:
        self.result = result
        self._module = _module_of(type(result))

    def figure(self) -> Figure:
        """Make the figure."""
        figure: Figure = self._module.figure(self.result)
        return figure

    def summary(self) -> Summary:
        """Return the answer, the question and a table, for notebooks."""
        summary: Summary = self._module.summary(self.result)
        return summary

    def write(self, path: str | Path) -> None:
        """Write the figure, or the page where the path ends in .html.

        Raises InputError naming the argument plot if the suffix is another one or the file cannot be written.
        """
        from kvrsim.views import figure

        figure.check_suffix(path, page=True)
        if figure.is_page(path):
            from kvrsim.views.page import write_page

            write_page(self._module.page(self.result), path)
            return
        from kvrsim.views.style import chart_style

        with chart_style():
            figure.save_figure(self.figure(), path)


def _module_of(cls: type) -> ModuleType:
    for base in cls.__mro__:
        if base.__name__ in _MODULES:
            return import_module(f"{__name__}.{_MODULES[base.__name__]}")
    raise TypeError(f"{cls.__name__} has no view")
