"""The frame of every page: header, sections, data and scripts in one HTML file.

A page is made in three steps:

1. The module of the result makes a `Page`: text for people, sections of markup (`tag`, `table` of
   kvrsim/views/page.py), `data` of plain JSON values, and the names of the scripts that draw them. A script is a file
   of kvrsim/views/assets.
2. `write_page` writes it, atomically. Styles and scripts are inside. The policy in its head names their hashes and
   allows nothing else: no other script, no `style` attribute, no request.
3. In the browser, assets/base.js gives scripts the object `kv`, whose members are listed at the top of that file. A
   script begins with `kv.ready((data) => { ... })`, gets `data`, and draws into elements of its sections.

Colours are CSS variables (assets/base.css, kvrsim/views/style.py): `--ink`, `--dim`, `--paper`, `--card`, `--line`,
`--accent`, and one for each strategy and kind of operation, such as `--strategy-kvr-s` and `--op-attention`, from
kvrsim/views/style.py. `kv.colour("--ink")` reads one; a listener of `kv.onTheme` draws anew when the reader switches
between light and dark.

Charts of lines and points: name the scripts `*CHARTS` and call `kv.chart` (assets/chart.js).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvrsim.io.files import write_atomically
from kvrsim.results.question import Question
from kvrsim.results.results import Answer, Prediction, StrategyResult
from kvrsim.text import printable
from kvrsim.units import format_bandwidth, format_seconds
from kvrsim.version import __version__, command_line
from kvrsim.views.style import rules, variable
from kvrsim.views.table import Cell, Column, format_interval

CHARTS = ("uPlot.iife.min.js", "chart.js")  # the chart library, and its settings for our pages
_STYLES = {
    "uPlot.iife.min.js": "uPlot.min.css",
    "controls.js": "controls.css",
    "serve.js": "serve.css",
}  # style sheets of scripts
_COMPLETE = "This file is complete in itself and loads nothing."
_LIVE = "Answers come from the kvrsim serve of this machine."
_LONG = 28  # number of letters above which a fact is two columns wide
_SHORT = 3  # number of facts that are always visible; a click shows the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page with a heading of its own."""

    title: str
    body: Html
    lead: str = ""  # a sentence below the heading
    ident: str | None = None  # id of the section, for scripts and links


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Content of a page."""

    title: str  # title of the window and of the page
    answer: str = ""  # text below the title; the first of several lines is emphasised
    facts: Mapping[str, str] = field(default_factory=dict)  # parts of the whole question by label; folded
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()  # assumptions of the answer, and warnings
    data: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values for the scripts
    scripts: Sequence[str] = ()  # files of kvrsim/views/assets, in the order in which they run
    live: bool = False  # whether scripts ask the server that the page is from (`kvrsim serve`)
    strategies: Sequence[str] = ()  # further strategies that need a colour, such as hybrids
    command: str | None = field(default_factory=command_line)  # command that makes the page; None: unknown
    framed: bool = False  # whether the page is part of another one, which has the title, the answer and the colours


def write_page(page: Page, path: str | Path, *, argument: str = "plot") -> None:
    """Write the file; InputError naming `argument` where it cannot be written."""
    write_atomically(path, render(page).encode(), argument=argument)


def render(page: Page) -> str:
    """Return the text of the whole file."""
    scripts = [asset(name) for name in ("base.js", *page.scripts)]
    styles = [asset("base.css") + rules(page.strategies)]
    for name in page.scripts:
        if name in _STYLES:
            styles.append(asset(_STYLES[name]))
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts, styles, live=page.live)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"kvrsim {__version__}"),
        tag("title", page.title),
        *(Html(f"<style>{style}</style>") for style in styles),
    )
    source = _LIVE if page.live else _COMPLETE
    body = (
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _header(page),
        tag("main", *(_section(section) for section in page.sections), *_notes(page), id="content"),
        tag("footer", f"kvrsim {__version__}. {source}"),
        tag("div", id="kv-tip", role="tooltip", hidden=True),
        tag("div", id="kv-said", class_="hidden", aria_live="polite"),
        Html(f'<script type="application/octet-stream" id="kv-data">{pack(page.data)}</script>'),
        *(Html(f"<script>{script}</script>") for script in scripts),
    )
    whole = tag("html", tag("head", *head), tag("body", *body), lang="en", data_framed=page.framed)
    return f"<!DOCTYPE html>\n{whole}\n"


def pack(data: Mapping[str, Any]) -> str:
    """Encode data for a page: JSON, compressed (RFC 1950), in base64, so that no text can end the HTML element."""
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(content.encode(), 9)).decode()


@cache
def asset(name: str) -> str:
    """Text of a style or script of the package."""
    content = files("kvrsim.views").joinpath("assets", name).read_text("utf-8")
    assert "</s" not in content.lower(), f"{name} would end its element"
    return content


def _policy(scripts: Sequence[str], styles: Sequence[str], *, live: bool) -> str:
    """Content security policy: only these scripts and styles; no request, except by a live page to its own server."""
    parts = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data:"]
    if live:
        parts += ["connect-src 'self'", "frame-src 'self'"]
    return "; ".join((*parts, f"script-src {_hashes(scripts)}", f"style-src {_hashes(styles)}"))


def _hashes(contents: Sequence[str]) -> str:
    hashes = []
    for content in contents:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
    return " ".join(hashes)


def _header(page: Page) -> Html:
    switch = tag("button", "Dark", id="kv-theme", type="button", class_="switch", aria_pressed="false")
    answer = [tag("p", line, class_="answer") for line in page.answer.split("\n") if line]
    top = tag("div", tag("h1", page.title), switch, class_="top")
    return tag("header", top, *answer, _folded_question(page))


def _folded_question(page: Page) -> Html:
    """The parts of the question; a click unfolds them."""
    first = [value for value in list(page.facts.values())[:_SHORT] if value]
    parts = [tag("summary", " · ".join(first) or "About this page")]
    facts = {**page.facts, "version": f"kvrsim {__version__}"}
    parts.append(tag("dl", *(_fact(label, value) for label, value in facts.items() if value), class_="facts"))
    if page.command is not None:
        parts.append(tag("p", tag("code", page.command, id="command"), class_="command"))
    return tag("details", *parts, class_="question")


def _fact(label: str, value: str) -> Html:
    width = "long" if len(value) > _LONG else None
    return tag("div", tag("dt", label), tag("dd", value), class_=width)


def _section(section: Section) -> Html:
    parts = [tag("h2", section.title)]
    if section.lead:
        parts.append(tag("p", section.lead, class_="lead"))
    return tag("section", *parts, section.body, id=section.ident)


def _notes(page: Page) -> tuple[Html, ...]:
    needs = tag("noscript", tag("p", "The pictures of this page need JavaScript; the tables do not.", class_="note"))
    if not page.notes:
        return (needs,)
    return needs, tag("section", tag("h2", "What this rests on"), items(page.notes), class_="notes")


# Markup: every text is escaped, and tables can be sorted

_EMPTY = ("br", "hr", "input", "meta")


class Html(str):
    """Markup, which is inserted unchanged. Plain strings are escaped."""

    __slots__ = ()


def text(content: str) -> Html:
    """Text as markup, escaped, with control characters spelled out."""
    if isinstance(content, Html):
        return content
    return Html(escape(printable(content)))


def join(parts: Iterable[str]) -> Html:
    """Join parts of markup."""
    return Html("".join(text(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Html:
    """Make an element: `tag("p", "a < b", class_="dim")`.

    attributes: class_ is class, data_value is data-value; True is an attribute without a value, None and False omit it.
    A page's policy allows neither `style` nor handlers such as `onclick`, so neither is taken.
    """
    parts = [name]
    for key, value in attributes.items():
        written = key.rstrip("_").replace("_", "-")
        assert not re.match("style$|on", written), f"a page's policy forbids {written}"
        if value is True:
            parts.append(written)
        elif value is not None and value is not False:
            parts.append(f'{written}="{text(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    if name in _EMPTY:
        return Html(opening)
    return Html(f"{opening}{join(children)}</{name}>")


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Cell]],
    *,
    caption: str,
    sortable: bool = True,
    ident: str | None = None,
    row_names: Sequence[str] | None = None,
) -> Html:
    """Make a table that a reader can sort by column and that scrolls if it is too wide.

    caption: content, for screen readers. ident: its id. row_names: data-name of each row, for scripts.
    """
    heads = []
    for column in columns:
        heads.append(tag("th", column.label, scope="col", title=column.hint or None, class_=_class(column)))
    body = list(rows)
    names: Sequence[str | None] = row_names or [None] * len(body)
    lines = []
    for row, name in zip(body, names, strict=True):
        cells = [_cell(column, cell) for column, cell in zip(columns, row, strict=True)]
        lines.append(tag("tr", *cells, data_name=name))
    whole = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *lines),
        id=ident,
        class_="sortable" if sortable else None,
    )
    return tag("div", whole, class_="scrolls", tabindex=0, role="region", aria_label=caption)


def items(lines: Iterable[str]) -> Html:
    """A list of lines."""
    return tag("ul", *(tag("li", line) for line in lines))


def _class(column: Column) -> str | None:
    names = []
    if column.number:
        names.append("number")
    if column.rank > 1:
        names.append("second")
    return " ".join(names) or None


def _cell(column: Column, cell: str | Cell) -> Html:
    if not isinstance(cell, Cell):
        return tag("td", cell, class_=_class(column))
    value: float | str = ""
    if cell.value is not None:
        value = cell.value
    return tag("td", cell.shown, class_=_class(column), data_value=value)


# Values as text, and small bars

_BAR = 150  # width of an interval bar, pixels
_FAR = 3.0  # an interval that ends above this factor of the lowest upper end has no bar
_LABELS = {"num_gpus": "GPUs", "context_len": "context", "dtype": "data type", "slo_ttft_s": "target"}


def facts_of(question: Question) -> dict[str, str]:
    """Every part of a question in words, by label."""
    fields = question.to_dict() | {"cluster": question.cluster.describe()}
    return {label_of(name): in_words(value, name) for name, value in fields.items() if value is not None}


def label_of(name: str) -> str:
    """Label of a part of a question."""
    return _LABELS.get(name, name.removesuffix("_s").removesuffix("_bytes_per").replace("_", " "))


def in_words(value: object, name: str = "") -> str:
    """A plain JSON value as people write it; its name gives the unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {in_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    if isinstance(value, int | float):
        if name.endswith("_bytes_per_s"):
            return format_bandwidth(value)
        if name.endswith("_s"):
            return format_seconds(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def strategy_name(name: str, *, colour_of: str | None = None) -> Html:
    """The strategy's name next to a square of its colour, or of the colour of `colour_of`."""
    dot = tag("rect", width=10, height=10, rx=2, fill=f"var({variable('strategy', colour_of or name)})")
    square = tag("svg", dot, class_="dot", width=10, height=10, aria_hidden="true")
    return tag("span", square, f" {name}", class_="strategy")


def interval_bar(
    low: float, value: float, high: float, span: tuple[float, float], colour: str, *, measured: float | None = None
) -> Html:
    """Draw an interval on an axis that several intervals share.

    span: both ends of the axis; an interval beyond it has no bar. colour: a CSS variable, for the value.
    measured: a value marked by a line across the bar.
    """

    if high > span[1]:
        beyond = tag("text", "off the axis", x=_BAR - 4, y=13, text_anchor="end", fill="var(--dim)", class_="mark")
        return tag("svg", beyond, class_="interval", width=_BAR, height=16, aria_hidden="true")

    def place(number: float) -> float:
        return round(4 + (_BAR - 8) * (number - span[0]) / max(span[1] - span[0], 1e-300), 1)

    lines = [
        tag("line", x1=place(low), x2=place(high), y1=8, y2=8, stroke_width=2),
        tag("line", x1=place(low), x2=place(low), y1=4, y2=12, stroke_width=1.5),
        tag("line", x1=place(high), x2=place(high), y1=4, y2=12, stroke_width=1.5),
        tag("circle", cx=place(value), cy=8, r=4, fill=f"var({colour})"),
    ]
    if measured is not None:
        lines.append(tag("line", x1=place(measured), x2=place(measured), y1=0, y2=16, class_="real"))
    return tag("svg", *lines, class_="interval", width=_BAR, height=16, aria_hidden="true")


def interval_cell(
    result: Prediction | StrategyResult, strategy: str, span: tuple[float, float], *, measured: float | None = None
) -> Cell:
    """The interval as a bar in the strategy's colour and as text. span: ends of the axis, from `span_of`."""
    colour = variable("strategy", strategy)
    bar = interval_bar(result.ttft_low_s, result.ttft_s, result.ttft_high_s, span, colour, measured=measured)
    text = format_interval(result.ttft_low_s, result.ttft_high_s)
    return Cell(shown=tag("span", bar, text, class_="range"), value=result.ttft_high_s)


def span_of(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Ends of the axis of bars: it spans all intervals except those far above the lowest."""
    least = min(low for low, _ in intervals)
    most = _FAR * min(high for _, high in intervals)
    return least, max(high for _, high in intervals if high <= most)


# Notebooks

_MOST_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The answer, the question, a table and notes, all text."""

    answer: str
    question: str
    caption: str  # what the table holds
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Cell]]
    notes: Sequence[str] = ()

    def to_html(self) -> str:
        """Escaped and compact markup, the answer first; a long table shows only its first rows."""
        body = table(self.columns, self.rows[:_MOST_ROWS], caption=self.caption, sortable=False)
        parts = [tag("p", tag("strong", self.answer)), tag("p", self.question), body]
        notes = list(self.notes)
        rest = len(self.rows) - _MOST_ROWS
        if rest > 0:
            notes.insert(0, f"{rest} more rows: to_frame() has all.")
        if notes:
            parts.append(items(notes))
        return tag("div", *parts)


# The question in one line


def question_line(answer: Answer) -> str:
    """The question, in one line."""
    question = answer.question
    request = question.request()
    if question.batch > 1:
        request += f", batch {question.batch}"
    return " · ".join((question.model, request, answer.cluster.describe(), *question.kernels()))
