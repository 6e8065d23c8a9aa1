"""Markup for pages: every text is escaped, and tables can be sorted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from kvrsim.text import printable

_EMPTY = ("br", "hr", "input", "meta")


class Html(str):
    """Markup. Every string that is not one is text, and is escaped where it meets markup."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a table that is sorted by something other than what it shows."""

    shown: str | Html
    value: float | str | None = None  # to sort by; None: after all others


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    number: bool = False  # aligned to the right; sorted from the smallest
    hint: str = ""  # what the column means, shown by the pointer
    rank: int = 1  # 1: on every screen; 2: not on a phone


def text(content: str) -> Html:
    """Text as markup: escaped, with control characters spelled out."""
    return content if isinstance(content, Html) else Html(escape(printable(content)))


def join(parts: Iterable[str]) -> Html:
    """Parts behind each other."""
    return Html("".join(text(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Html:
    """An element: `tag("p", "a < b", class_="dim")`.

    attributes: class_ is class, data_value is data-value; True is an attribute without a value, None and False none.
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
    return Html(opening if name in _EMPTY else f"{opening}{join(children)}</{name}>")


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Cell]],
    *,
    caption: str,
    sortable: bool = True,
    ident: str | None = None,
    row_names: Sequence[str] | None = None,
) -> Html:
    """A table that a reader can sort by each column, and that scrolls by itself where it is too wide.

    caption: what it holds, for screen readers. ident: its id. row_names: data-name of each row, for scripts.
    """
    heads = (
        tag("th", column.title, scope="col", title=column.hint or None, class_=_class(column) or None)
        for column in columns
    )
    held = list(rows)
    names: Sequence[str | None] = row_names or [None] * len(held)
    lines = (
        tag("tr", *(_cell(column, cell) for column, cell in zip(columns, row, strict=True)), data_name=name)
        for row, name in zip(held, names, strict=True)
    )
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


def _class(column: Column) -> str:
    return " ".join((["number"] if column.number else []) + (["second"] if column.rank > 1 else []))


def _cell(column: Column, cell: str | Cell) -> Html:
    names = _class(column) or None
    if isinstance(cell, Cell):
        return tag("td", cell.shown, class_=names, data_value="" if cell.value is None else cell.value)
    return tag("td", cell, class_=names)
