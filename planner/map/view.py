"""A map as a figure, as a page, and in a notebook."""

from __future__ import annotations

from kvrsim.units import format_bandwidth, format_seconds, format_tokens
from kvrsim.views.page import Column, Summary
from planner.map.map import StrategyMap
from planner.map.page import headline
from planner.map.page import map_page as page
from planner.map.plot import draw_map as figure

__all__ = ["figure", "page", "summary"]

_TITLES = ("context", "links", "strategy", "GPUs", "TTFT", "gain over one GPU", "cannot be told from")


def summary(found: StrategyMap) -> Summary:
    """The best of each context and bandwidth."""
    return Summary(
        answer=headline(found),
        question=" · ".join((found.model, found.cluster.describe(), *found.question.kernels())),
        caption="the best of each context",
        columns=[Column(title=title, number=place in (0, 1, 3, 4, 5)) for place, title in enumerate(_TITLES)],
        rows=[
            (
                format_tokens(best.context_len),
                format_bandwidth(best.link_bandwidth_bytes_per_s),
                best.strategy if best.fits else f"{best.strategy} (does not fit)",
                str(best.num_gpus),
                format_seconds(best.ttft_s),
                f"{best.speedup_over_single:.1f}",
                ", ".join(best.ties),
            )
            for best in found.best()
        ],
        notes=found.warnings,
    )
