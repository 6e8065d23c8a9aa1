"""Lanes as rows of pixels, for bars that are thinner: each pixel has the mean of the colours that it covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.program import Array
from kvrsim.results.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CROWDED = 0.5  # share of the bins that have a message, above which bins are shaded
_FAINTEST = 0.12


def covered_shares(spans: Sequence[Span], start_s: float, end_s: float, bins: int) -> Array:
    """How much of each of `bins` equal time bins some spans cover, shape (bins,); at most 1 where they overlap."""
    edges = np.linspace(start_s, max(end_s, start_s + 1e-12), bins + 1)
    covered_s = _since([span.start_s for span in spans], edges) - _since([span.end_s for span in spans], edges)
    shares: Array = np.diff(covered_s) / np.diff(edges)
    return shares.clip(0.0, 1.0)


def touched(spans: Iterable[Span], start_s: float, end_s: float, bins: int) -> Array:
    """How many spans touch each of `bins` equal time bins, shape (bins,); they may overlap."""
    length_s = max(end_s - start_s, 1e-12)
    times = np.array([(span.start_s, span.end_s) for span in spans]).reshape(-1, 2)
    places = np.floor((times - start_s) / length_s * bins).astype(np.intp)
    inside = (places[:, 1] >= 0) & (places[:, 0] < bins)
    first, last = places[inside].clip(0, bins - 1).T
    changes = np.zeros(bins + 1)
    np.add.at(changes, first, 1.0)
    np.add.at(changes, last + 1, -1.0)
    return np.asarray(np.cumsum(changes)[:-1])


def mean_colours(shares: Mapping[str, Array], ground: str) -> Array:
    """RGB of each bin, 0 to 1, shape (bins, 3): the colours by their shares, and the ground where nothing is."""
    left: Array = 1.0 - np.sum(list(shares.values()), axis=0)
    mixed: Array = left[:, None] * _rgb(ground)
    for colour, share in shares.items():
        mixed = mixed + share[:, None] * _rgb(colour)
    return mixed.clip(0.0, 1.0)


def any_colour(counts: Mapping[str, Array], shares: Array) -> Array:
    """RGBA of each bin, shape (bins, 4): the colour with the most spans there; transparent where there are none.

    A bin with a span is opaque, so that it is seen; or, where most bins have one, as opaque as its share is covered.
    """
    stacked = np.stack(list(counts.values()))
    colours = np.array([_rgb(colour) for colour in counts])[stacked.argmax(axis=0)]
    seen = stacked.max(axis=0) > 0
    opacity = np.where(seen, np.maximum(shares, _FAINTEST) if seen.mean() > _CROWDED else 1.0, 0.0)
    return np.concatenate([colours, opacity[:, None]], axis=1)


def draw_row(axes: Axes, colours: Array, box: tuple[float, float, float, float], *, zorder: int = 2) -> None:
    """Draw bins beside each other; box: start_s, end_s, top and bottom of the row."""
    start_s, end_s, top, bottom = box
    extent = (start_s, max(end_s, start_s + 1e-12), bottom, top)
    axes.imshow(colours[None], extent=extent, aspect="auto", interpolation="nearest", zorder=zorder)


def _since(moments_s: Sequence[float], edges_s: Array) -> Array:
    """Seconds since each of some moments, where they have passed, summed; at each edge."""
    ordered = np.sort(moments_s)
    passed = np.searchsorted(ordered, edges_s)
    since: Array = passed * edges_s - np.concatenate([[0.0], np.cumsum(ordered)])[passed]
    return since


def _rgb(colour: str) -> Array:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
