"""Figures in words and small bars, as several pages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrsim.pages.colours import variable
from kvrsim.pages.html import Cell, Html, tag
from kvrsim.results.question import Question
from kvrsim.units import format_bytes, format_seconds

_BAR = 150  # pixels
_FAR = 3.0  # times the lowest upper end, above which an interval has no bar
_LABELS = {"num_gpus": "GPUs", "context_len": "context", "dtype": "data type", "slo_ttft_s": "target"}


def facts_of(question: Question) -> dict[str, str]:
    """Every part of a question in words, by label."""
    asked = question.to_dict() | {"cluster": question.cluster.describe()}
    return {_label(name): in_words(_seconds(name, value)) for name, value in asked.items() if value is not None}


def _label(name: str) -> str:
    return _LABELS.get(name, name.removesuffix("_s").replace("_", " "))


def _seconds(name: str, value: object) -> object:
    return format_seconds(value) if name.endswith("_s") and isinstance(value, int | float) else value


def in_words(value: object) -> str:
    """A plain JSON value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {in_words(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def interval(low_s: float, high_s: float) -> str:
    """Both ends: "612 ms to 771 ms"."""
    return f"{format_seconds(low_s)} to {format_seconds(high_s)}"


def partition(chunks: Sequence[int]) -> str:
    """Tokens of each rank: "8 × 2048" where they are equal."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    return ", ".join(map(str, chunks))


def seconds_cell(seconds: float | None) -> Cell:
    """Seconds, sorted by their number."""
    return Cell(shown="" if seconds is None else format_seconds(seconds), value=seconds)


def bytes_cell(size: float) -> Cell:
    """Bytes, sorted by their number."""
    return Cell(shown=format_bytes(size), value=size)


def strategy_name(name: str, *, colour_of: str | None = None) -> Html:
    """A name with its colour; colour_of: the strategy whose colour it has, where it is not its own."""
    dot = tag("rect", width=10, height=10, rx=2, fill=f"var({variable('strategy', colour_of or name)})")
    square = tag("svg", dot, class_="dot", width=10, height=10, aria_hidden="true")
    return tag("span", square, f" {name}", class_="strategy")


def interval_bar(
    low: float, value: float, high: float, span: tuple[float, float], colour: str, *, measured: float | None = None
) -> Html:
    """An interval on an axis that several share.

    span: both ends of the axis; an interval beyond it has no bar. colour: a CSS variable, for the value.
    measured: marked by a line across.
    """

    if high > span[1]:
        return tag("svg", class_="interval", width=_BAR, height=16, aria_hidden="true")

    def place(number: float) -> float:
        return round(4 + (_BAR - 8) * (number - span[0]) / max(span[1] - span[0], 1e-300), 1)

    lines = (
        tag("line", x1=place(low), x2=place(high), y1=8, y2=8, stroke_width=2),
        *(tag("line", x1=place(end), x2=place(end), y1=4, y2=12, stroke_width=1.5) for end in (low, high)),
        tag("circle", cx=place(value), cy=8, r=4, fill=f"var({colour})"),
        *(
            []
            if measured is None
            else [tag("line", x1=place(measured), x2=place(measured), y1=0, y2=16, class_="real")]
        ),
    )
    return tag("svg", *lines, class_="interval", width=_BAR, height=16, aria_hidden="true")


def span_of(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The axis of bars: it holds all intervals but for those that are far above the lowest."""
    least = min(low for low, _ in intervals)
    most = _FAR * min(high for _, high in intervals)
    return least, max(high for _, high in intervals if high <= most)
