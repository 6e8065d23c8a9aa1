"""Each rank's share of the context over its length, one panel a number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.units import format_tokens
from kvrsim.views.figure import Head, check_suffix, drawing, save_figure
from kvrsim.views.style import DIM, INK, faded, styled, text_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.table.table import PartitionTable

_WIDTH = 10.0  # inches
_PANELS = 3  # a row
_MOST_LABELS = 6


def write_shares(table: PartitionTable, path: str) -> None:
    """Draw to FILE.png, .svg or .pdf; raises InputError where it cannot be written."""
    check_suffix(path)
    with styled():
        save_figure(draw_shares(table), path)


def draw_shares(table: PartitionTable) -> Figure:
    """Stacked areas, rank 0 at the bottom, over a logarithmic context."""

    setting, counts = table.setting, table.gpu_counts
    line = f"{setting.model} · {setting.cluster} · profile {setting.profile} · dotted: equal chunks"
    head = Head(title=_title(table), subtitle=line, width=_WIDTH)
    columns, rows = min(_PANELS, len(counts)), -(-len(counts) // _PANELS)
    height = head.height + 2.9 * rows + 0.25
    figure = drawing(_WIDTH, height, layout="constrained")
    if (layout := figure.get_layout_engine()) is not None:
        layout.set(rect=(0, 0, 1, 1 - head.height / height), w_pad=0.08, h_pad=0.06)  # type: ignore[call-arg]
    for number, num_gpus in enumerate(counts):
        axes = figure.add_subplot(rows, columns, number + 1)
        _draw(axes, table, num_gpus)
        if number % columns == 0:
            axes.set_ylabel("share of the context", fontsize=9, color=DIM)
    head.draw(figure)
    return figure


def _title(table: PartitionTable) -> str:
    """How unequal the longest context's chunks are on the most GPUs."""
    num_gpus = max(table.gpu_counts)
    entry = table.of(num_gpus)[-1]
    first, last = entry.fractions[0], entry.fractions[-1]
    where = f"of {format_tokens(entry.context_len)} tokens on {num_gpus} GPUs"
    return f"Rank 0 has {first:.0%}, the last rank {last:.0%} {where}" if num_gpus > 1 else f"One rank has all {where}"


def _draw(axes: Axes, table: PartitionTable, num_gpus: int) -> None:
    """One number of GPUs."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    entries = table.of(num_gpus)
    lengths = [entry.context_len for entry in entries]
    marker = "o" if len(lengths) == 1 else ""
    below = [0.0] * len(entries)
    for rank in range(num_gpus):
        above = [base + entry.fractions[rank] for base, entry in zip(below, entries, strict=True)]
        colour = faded(to_hex(colormaps["viridis"](rank / max(1, num_gpus - 1))), share=0.25)
        axes.fill_between(lengths, below, above, color=colour, linewidth=0)
        axes.plot(lengths, above, color="white", linewidth=0.8, marker=marker)
        if rank and num_gpus <= 16:
            axes.axhline(rank / num_gpus, xmax=0.84, color="black", linestyle=":", linewidth=0.7)
        if num_gpus <= 8:
            style: dict[str, Any] = dict(fontsize=7.5, ha="right", va="center", color=text_on(colour))
            axes.annotate(
                f"rank {rank}", (lengths[-1], (below[-1] + above[-1]) / 2), (-4, 0), textcoords="offset points", **style
            )
        below = above
    axes.set_ylim(0.0, 1.0)
    axes.set_xscale("log", base=2)
    if len(lengths) > 1:
        axes.set_xlim(lengths[0], lengths[-1])
    shown = lengths[:: max(1, -(-len(lengths) // _MOST_LABELS))]
    axes.set_xticks(shown, [format_tokens(length) for length in shown])
    axes.set_xticks([], minor=True)
    axes.tick_params(labelsize=8.5, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("context, tokens", fontsize=9, color=DIM)
    axes.set_title(f"{num_gpus} GPU{'s' * (num_gpus > 1)}", loc="left", fontsize=10, color=INK)
