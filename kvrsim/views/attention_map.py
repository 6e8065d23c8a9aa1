"""Attention maps as a table and as a picture (Figures 2, 4 and 5 of the KV-Runahead paper)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.attention_map import AttentionMap, PaperCounts
from kvrsim.views.figure import Head, drawing
from kvrsim.views.style import INK, chart_style, strategy_colour
from kvrsim.views.table import Column, Table, format_partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAP_INCHES = 2.7  # width and height of a map
_WASTED = 0.28  # opacity of what the causal mask throws away


def counts_table(counts: PaperCounts) -> Table:
    """A row for the prefill, and for even chunks with TSP and KV-Runahead."""
    table = Table(
        columns=[
            Column(title="one head, one layer"),
            Column(title="chunks (tokens)"),
            Column(title="dot products", number=True),
            Column(title="busiest rank", number=True),
            Column(title="kept by the mask", number=True),
            Column(title="K, V entries sent", number=True),
        ]
    )
    for name, attention in counts.maps.items():
        table.add_row(
            name,
            format_partition(attention.chunks),
            f"{sum(attention.dot_products):,}",
            f"{max(attention.dot_products):,}",
            f"{attention.coverage:.0%}",
            f"{attention.kv_entries:,}",
        )
    return table


def figure(counts: PaperCounts) -> Figure:
    """Draw the maps side by side: rectangles that ranks compute; dark is what the causal mask keeps."""
    maps = counts.maps
    width = len(maps) * (_MAP_INCHES + 0.3) + 0.2
    tokens = counts.attention.num_tokens
    head = Head(
        title="What each rank multiplies",
        subtitle=f"queries from top to bottom, keys from left to right, {tokens} tokens; pale: thrown away by the mask",
        width=width,
    )
    height = head.height + _MAP_INCHES + 0.75
    with chart_style():
        drawn = drawing(width, height)
        head.draw(drawn)
        for place, (name, attention) in enumerate(maps.items()):
            left = (0.2 + place * (_MAP_INCHES + 0.3)) / width
            axes = drawn.add_axes((left, 0.3 / height, _MAP_INCHES / width, _MAP_INCHES / height))
            _draw_map(axes, attention, strategy_colour(name).light)
            axes.set_title(f"{name}: {attention.coverage:.0%} kept", fontsize=9.5, color=INK, loc="left")
    return drawn


def _draw_map(axes: Axes, attention: AttentionMap, colour: str) -> None:
    """Draw one map; a line separates ranks."""
    tokens = attention.num_tokens
    for first, queries, keys in attention.rectangles:
        end = first + queries
        axes.fill([0, keys, keys, 0], [first, first, end, end], color=colour, alpha=_WASTED, linewidth=0)
        kept: Any = [(0, first), (min(first, keys), first), (min(end, keys), end), (0, end)]
        axes.fill(*zip(*kept, strict=True), color=colour, linewidth=0)
    boundary = 0
    for chunk in attention.chunks:
        axes.axhline(boundary, color="white", linewidth=1.5)
        boundary += chunk
    axes.set_xlim(0, tokens)
    axes.set_ylim(tokens, 0)
    axes.set_xticks([])
    axes.set_yticks([])
