"""The style of the paper's figures: colours that colour-blind readers can tell apart, and small PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrsim.views.figure import encoded
from kvrsim.views.style import DIM, INK, STRATEGY_COLOURS, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, FAINT = DIM, "#e3e3e3"
_DPI = 110
_RC: dict[Any, Any] = {"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK}


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How a series is drawn; a strategy has its colour."""

    label: str
    colour: str
    marker: str
    dashes: Any = "-"


LOOKS = {
    "tsp": Look(label="TSP", colour=STRATEGY_COLOURS["tsp"].light, marker="s"),
    "kvr-e": Look(label="KVR-E", colour=STRATEGY_COLOURS["kvr-e"].light, marker="^", dashes=(0, (4, 1.6))),
    "kvr-s": Look(label="KVR-S", colour=STRATEGY_COLOURS["kvr-s"].light, marker="o"),
}
NO_COMMUNICATION = Look(label="TTFT(p): KVR-S without communication", colour="#000000", marker="D", dashes=(0, (1, 1)))
CLOSED_FORM = Look(label="TTFT*(p): closed form", colour="#8a8f98", marker="v", dashes=(0, (6, 2, 1, 2)))


def new_figure(width: float, height: float, title: str, subtitle: str) -> Any:
    """A figure of that many inches with its title; the axes are added with a constrained layout beneath."""
    from matplotlib.figure import Figure

    with styled(_RC):
        figure: Any = Figure(figsize=(width, height), layout="constrained")
    top = 1 - 0.66 / height
    figure.get_layout_engine().set(rect=(0.005, 0.005, 0.99, top), w_pad=0.06, h_pad=0.05)
    left: dict[str, Any] = dict(x=0.012, ha="left", va="top")
    figure.text(y=1 - 0.1 / height, s=title, fontsize=12.5, fontweight="bold", color=INK, **left)
    figure.text(y=1 - 0.37 / height, s=subtitle, fontsize=9, color=GREY, **left)
    return figure


def tidy(axes: Axes, title: str = "") -> None:
    """Light grid, two spines, small ticks."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa0a8")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, which="both", color="#9aa0a8")
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def ticks(axis: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    """These ticks and no others, also on a logarithmic axis."""
    axis.set_ticks(list(values), labels=list(labels))
    axis.set_ticks([], minor=True)


def png(figure: Any) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    with styled(_RC):
        return encoded(figure, dpi=_DPI)
