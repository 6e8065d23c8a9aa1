"""The shell of every page: header, sections, data and scripts, put into one HTML file.

A page is made in three steps:

1. A module of the package whose result it shows makes a `Page`: text for people, sections of markup (`tag`, `table` of
   kvrsim/pages/html.py), `data` of plain JSON values, and the names of the scripts that draw them. A script is a file
   of kvrsim/pages/assets.
2. `write_page` writes it, atomically. Styles and scripts are inside. The policy in its head names their hashes and
   allows nothing else: no other script, no `style` attribute, no request.
3. In the browser, assets/base.js gives scripts the object `kv`; its head says what is in it. A script begins with
   `kv.ready((data) => { ... })`, gets `data`, and draws into elements of its sections.

Colours are CSS variables (assets/base.css, kvrsim/pages/colours.py): `--ink`, `--dim`, `--paper`, `--card`, `--line`,
`--accent`, and one of each strategy and kind of operation, such as `--strategy-kvr-s` and `--op-attention`, from
kvrsim/plots/style.py. `kv.colour("--ink")` reads one; a listener of `kv.onTheme` draws anew when the reader switches
between light and dark.

Charts of lines and points: name the scripts `*CHARTS` and call `kv.chart` (assets/chart.js).
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvrsim.io.files import write_atomically
from kvrsim.pages.colours import rules
from kvrsim.pages.html import Html, items, tag
from kvrsim.version import __version__, command_line

CHARTS = ("uPlot.iife.min.js", "chart.js")  # the chart library and what makes its charts those of a page
_STYLES = {"uPlot.iife.min.js": "uPlot.min.css", "controls.js": "controls.css"}  # that a script needs
_LONG = 28  # characters of a fact that takes two places


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page with a heading of its own."""

    title: str
    body: Html
    lead: str = ""  # a sentence below the heading
    ident: str | None = None  # its id, by which a script and a link find it


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a page shows."""

    title: str  # in the window's title and at the top
    answer: str = ""  # the answer in one line, below the title
    facts: Mapping[str, str] = field(default_factory=dict)  # the question in full, each part with its label
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()  # what the answer rests on, and warnings
    data: Mapping[str, Any] = field(default_factory=dict)  # for the scripts: plain JSON values
    scripts: Sequence[str] = ()  # files of assets, in the order in which they run
    strategies: Sequence[str] = ()  # whose colours the page needs beyond those of kvrsim's own, such as hybrids


def write_page(page: Page, path: str | Path, *, argument: str = "plot") -> None:
    """Write the file; InputError naming `argument` where it cannot be written."""
    write_atomically(path, render(page).encode(), argument=argument)


def render(page: Page) -> str:
    """The whole file."""
    scripts = [asset(name) for name in ("base.js", *page.scripts)]
    styles = [
        asset("base.css") + rules(page.strategies),
        *(asset(_STYLES[name]) for name in page.scripts if name in _STYLES),
    ]
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts, styles)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"kvrsim {__version__}"),
        tag("title", page.title),
        *(Html(f"<style>{style}</style>") for style in styles),
    )
    body = (
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _header(page),
        tag("main", *(_section(section) for section in page.sections), *_notes(page), id="content"),
        tag("footer", f"kvrsim {__version__}. This file is complete in itself and loads nothing."),
        tag("div", id="kv-tip", role="tooltip", hidden=True),
        tag("div", id="kv-said", class_="hidden", aria_live="polite"),
        Html(f'<script type="application/octet-stream" id="kv-data">{packed(page.data)}</script>'),
        *(Html(f"<script>{script}</script>") for script in scripts),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n{tag("head", *head)}\n{tag("body", *body)}\n</html>\n'


def packed(data: Mapping[str, Any]) -> str:
    """Data as a page holds it: JSON, compressed (RFC 1950), in base64, which no text in it can leave."""
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(content.encode(), 9)).decode()


def unpacked(page: str) -> dict[str, Any]:
    """The data of a page that `render` made."""
    held = page.split('id="kv-data">', 1)[1].split("<", 1)[0]
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(held)))
    return found


@cache
def asset(name: str) -> str:
    """A style or script that the package holds."""
    content = files("kvrsim.pages").joinpath("assets", name).read_text("utf-8")
    assert "</s" not in content.lower(), f"{name} would end its element"
    return content


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Nothing but these scripts and styles, and no request at all."""
    parts = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data:")
    return "; ".join((*parts, f"script-src {_hashes(scripts)}", f"style-src {_hashes(styles)}"))


def _hashes(contents: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _header(page: Page) -> Html:
    command = command_line()
    facts = {**page.facts, "version": f"kvrsim {__version__}"}
    listed = (
        tag("div", tag("dt", label), tag("dd", value), class_="long" if len(value) > _LONG else None)
        for label, value in facts.items()
        if value
    )
    shown = () if command is None else (tag("p", tag("code", command, id="command"), class_="command"),)
    title = tag("h1", page.title)
    switch = tag("button", "Dark", id="kv-theme", type="button", class_="switch", aria_pressed="false")
    answer = (tag("p", page.answer, class_="answer"),) if page.answer else ()
    return tag("header", tag("div", title, switch, class_="top"), *answer, tag("dl", *listed, class_="facts"), *shown)


def _section(section: Section) -> Html:
    lead = (tag("p", section.lead, class_="lead"),) if section.lead else ()
    return tag("section", tag("h2", section.title), *lead, section.body, id=section.ident)


def _notes(page: Page) -> tuple[Html, ...]:
    needs = tag("noscript", tag("p", "The pictures of this page need JavaScript; the tables do not.", class_="note"))
    if not page.notes:
        return (needs,)
    return needs, tag("section", tag("h2", "What this rests on"), items(page.notes), class_="notes")
