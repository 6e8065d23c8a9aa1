"""Each rank's share of the context over its length, one panel a number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.plots.save import check_suffix, save_figure
from kvrsim.plots.style import styled
from kvrsim.text import printable
from kvrsim.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.table.table import PartitionTable

_MOST_LABELS = 6


def write_shares(table: PartitionTable, path: str) -> None:
    """Draw to FILE.png, .svg or .pdf; raises InputError where it cannot be written."""
    check_suffix(path)
    with styled():
        save_figure(_figure(table), path)


def _figure(table: PartitionTable) -> Figure:
    from matplotlib.figure import Figure

    counts = table.gpu_counts
    figure = Figure(figsize=(1.0 + 3.6 * len(counts), 3.8), layout="constrained")
    panels = figure.subplots(1, len(counts), squeeze=False)[0]
    for axes, num_gpus in zip(panels, counts, strict=True):
        _draw(axes, table, num_gpus)
    panels[0].set_ylabel("share of the context")
    setting = table.setting
    figure.suptitle(printable(f"{setting.model}, {setting.cluster}, profile {setting.profile}"), fontsize=11)
    return figure


def _draw(axes: Axes, table: PartitionTable, num_gpus: int) -> None:
    """Stacked areas, rank 0 at the bottom; an even plan's boundaries dotted."""
    from matplotlib import colormaps

    entries = table.of(num_gpus)
    lengths = [entry.context_len for entry in entries]
    marker = "o" if len(lengths) == 1 else ""
    below = [0.0] * len(entries)
    for rank in range(num_gpus):
        above = [base + entry.fractions[rank] for base, entry in zip(below, entries, strict=True)]
        colour = colormaps["viridis"](rank / max(1, num_gpus - 1))
        axes.fill_between(lengths, below, above, color=colour, alpha=0.75, linewidth=0)
        axes.plot(lengths, above, color="white", linewidth=0.8, marker=marker)
        if rank and num_gpus <= 16:
            axes.axhline(rank / num_gpus, color="black", linestyle=":", linewidth=0.6)
        below = above
    axes.set_ylim(0.0, 1.0)
    if len(lengths) > 1:
        axes.set_xlim(lengths[0], lengths[-1])
    shown = lengths[:: max(1, -(-len(lengths) // _MOST_LABELS))]
    axes.set_xticks(shown, [format_tokens(length) for length in shown])
    axes.set_xlabel("context, tokens")
    axes.set_title(f"{num_gpus} GPUs, rank 0 at the bottom", fontsize=10)
