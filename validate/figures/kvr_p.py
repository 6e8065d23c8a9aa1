"""What a looked-up partition costs: the paper's figures 10 (b) and (c)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.units import format_tokens
from validate.figures.lookup import Interpolated, interpolated
from validate.figures.predictions import Predictions
from validate.figures.printed import Printed
from validate.figures.scope import Scope
from validate.figures.style import GREY, LOOKS, new_figure, png, ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SHOWN = 1.9  # per cent; beyond, a number stands in the place of the curve
_COLOURS = (LOOKS["kvr-s"].colour, LOOKS["tsp"].colour)


def tables(scope: Scope) -> dict[str, tuple[int, ...]]:
    """Lookup tables by what they are called: every knot, and every second one, the last included."""
    every = scope.knots[1] - scope.knots[0]
    return {
        f"entries {every // 1024}k apart": scope.knots,
        f"entries {2 * every // 1024}k apart": scope.knots[::-2][::-1],
    }


def comparison(scope: Scope, predictions: Predictions, num_gpus: int, knots: tuple[int, ...]) -> list[Interpolated]:
    """KVR-P at all compared contexts that lie within the knots."""
    inside = [tokens for tokens in scope.compared if knots[0] <= tokens <= knots[-1]]
    return [interpolated(predictions, scope.partition_model, tokens, num_gpus, knots) for tokens in inside]


def draw_kvr_p(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: TTFT of KVR-P above KVR-S by context, one panel a number of GPUs."""
    title = f"{scope.partition_model}: KVR-P, partitions looked up and interpolated, against KVR-S, searched"
    subtitle = (
        "Predicted TTFT of KVR-P above that of KVR-S's own search at the same context. Dots: entries of the table."
    )
    figure = new_figure(10.5, 3.9, title, subtitle)
    panels = figure.subplots(1, len(scope.lookup_gpu_counts), sharey=True, squeeze=False)[0]
    for axes, num_gpus in zip(panels, scope.lookup_gpu_counts, strict=True):
        for colour, (name, knots) in zip(_COLOURS, tables(scope).items(), strict=True):
            found = comparison(scope, predictions, num_gpus, knots)
            _curve(axes, found, knots, colour, name)
        _axes(axes, scope, num_gpus)
        _claim(axes, scope, printed)
    panels[0].set_ylabel("KVR-P above KVR-S, % of TTFT")
    panels[0].legend(loc="upper left", frameon=False, fontsize=9)
    return png(figure)


def _curve(axes: Axes, found: list[Interpolated], knots: tuple[int, ...], colour: str, name: str) -> None:
    percent = {one.context_len: 100 * one.above_searched for one in found}
    axes.plot(list(percent), list(percent.values()), color=colour, linewidth=1.5, label=name)
    dots: dict[str, Any] = dict(marker="o", markersize=6, linestyle="", color=colour, markeredgecolor="white", zorder=3)
    axes.plot(list(knots), [percent.get(tokens, 0.0) for tokens in knots], **dots)
    worst = max(found, key=lambda one: one.above_searched)
    if 100 * worst.above_searched > _MOST_SHOWN:
        text = f"up to {worst.above_searched:.0%}\nat {format_tokens(worst.context_len)}"
        style: dict[str, Any] = dict(fontsize=8.5, color=colour, ha="center", va="top")
        axes.text(sum(worst.neighbours) / 2, 0.98 * _MOST_SHOWN, text, **style)


def _claim(axes: Axes, scope: Scope, printed: Printed) -> None:
    most = 100 * max(printed.kvr_p_above_kvr_s)
    axes.axhline(most, color=GREY, linestyle=(0, (1, 3)), linewidth=1)
    note: dict[str, Any] = dict(xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8.5, color=GREY)
    axes.annotate(f"the paper: up to {most:g} %", xy=(scope.knots[-1], most), **note)


def _axes(axes: Axes, scope: Scope, num_gpus: int) -> None:
    tidy(axes, f"{num_gpus} GPUs")
    ticks(axes.xaxis, scope.knots, [format_tokens(tokens) for tokens in scope.knots])
    axes.set_xlabel("context, tokens")
    axes.set_ylim(-0.12, _MOST_SHOWN)
