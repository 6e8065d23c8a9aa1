"""Make text from outside safe for a terminal or a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# C0 and C1 control characters except tab and newline, DEL, and characters that reverse the writing direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*\[\]|])")


def printable(text: str) -> str:
    r"""Escape every control character, such as \x1b, so that no terminal interprets it."""
    return _CONTROLS.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def in_markdown(text: str) -> str:
    """Escape a text for Markdown: no HTML, link, emphasis, line break or table cell."""
    words = " ".join(printable(text).split())
    escaped = _MARKDOWN.sub(r"\\\1", words)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]], rule: str | Sequence[str] = "---:") -> str:
    """A Markdown table; `rule` aligns each column, or each column after the first ("---:" to the right)."""
    rules = ("---", *[rule] * (len(heads) - 1)) if isinstance(rule, str) else rule
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rules, *rows))
