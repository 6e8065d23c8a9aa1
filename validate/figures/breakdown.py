"""Who takes how much of the context: the paper's figure 10 (a)."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvrsim.units import format_tokens
from validate.figures.predictions import Predictions
from validate.figures.printed import Printed, PrintedPartition
from validate.figures.scope import Scope
from validate.figures.style import INK, new_figure, png, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 0.74  # of a bar
_ROOM = 0.055  # share of the context in which a number can be read


def draw_breakdown(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: shares of KVR-S's partitions by context, one panel a number of GPUs."""
    title = f"{scope.partition_model}: KVR-S's partitions over NVLink"
    subtitle = "Each rank's share in per cent, first rank on the left. Triangles: boundaries that the paper prints."
    contexts = breakdown_contexts(scope)
    figure = new_figure(10.5, 1.5 + 0.3 * len(contexts), title, subtitle)
    panels = figure.subplots(1, len(scope.gpu_counts), sharey=True, squeeze=False)[0]
    for axes, num_gpus in zip(panels, scope.gpu_counts, strict=True):
        for position, tokens in enumerate(contexts):
            chunks = predictions.of(scope.partition_model, tokens, num_gpus, "kvr-s").partition
            _bar(axes, position, [chunk / tokens for chunk in chunks])
            for partition in printed.partitions:
                if _matches(partition, scope.partition_model, tokens, num_gpus):
                    _marks(axes, position, partition)
        _axes(axes, num_gpus, contexts)
    panels[0].set_ylabel("context, tokens")
    return png(figure)


def breakdown_contexts(scope: Scope) -> tuple[int, ...]:
    """The lookup table's contexts, and those halfway between."""
    halfway = [(low + high) // 2 for low, high in zip(scope.knots, scope.knots[1:], strict=False)]
    return tuple(sorted({*scope.knots, *halfway}))


def _matches(partition: PrintedPartition, model: str, context_len: int, num_gpus: int) -> bool:
    return (partition.model, partition.context_len, partition.num_gpus) == (model, context_len, num_gpus)


def _bar(axes: Axes, position: int, shares: list[float]) -> None:
    from matplotlib import colormaps

    for rank, (share, end) in enumerate(zip(shares, accumulate(shares), strict=True)):
        shade = rank / max(1, len(shares) - 1)
        colour = colormaps["viridis"](0.18 + 0.77 * shade)
        axes.barh(position, share, left=end - share, height=_HEIGHT, color=colour, edgecolor="white", linewidth=0.4)
        if share >= _ROOM:
            style: dict[str, Any] = dict(ha="center", va="center", fontsize=7.5, color=INK if shade > 0.45 else "white")
            axes.text(end - share / 2, position, f"{100 * share:.0f}", **style)


def _marks(axes: Axes, position: int, partition: PrintedPartition) -> None:
    """Where the paper's partition puts the boundaries: on the bar's upper and lower edge."""
    ends = list(accumulate(partition.shares))[:-1]
    for side, marker in ((-1, "v"), (1, "^")):
        edge = position + side * (_HEIGHT / 2 + 0.06)
        axes.scatter(ends, [edge] * len(ends), marker=marker, s=30, color=INK, linewidth=0, zorder=4)


def _axes(axes: Axes, num_gpus: int, contexts: tuple[int, ...]) -> None:
    tidy(axes, f"{num_gpus} GPUs")
    axes.grid(visible=False)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(contexts) - 0.4, -0.6)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
    axes.set_yticks(range(len(contexts)), labels=[format_tokens(tokens) for tokens in contexts])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of the context, %")
    axes.spines["left"].set_visible(False)
