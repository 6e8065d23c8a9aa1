"""Sentences drawn at random, to be read without context: `python tests/reading.py [--code] [--seed N] [--count 40]`.

They come from README, docs and help texts, or with --code from docstrings and comments. Rewrite those that need a
second reading, then draw others.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click

from kvrsim.cli.main import app

ROOT = Path(__file__).parent.parent


def pages() -> Iterator[tuple[str, str]]:
    """Sentences of README and docs with the name of their page, without code, tables of numbers and headings."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(
            r"^```.*?^```|<!--.*?-->|^#.*?$|^!\[.*?$|^:::.*?$", "", path.read_text("utf-8"), flags=re.M | re.S
        )
        rows = [cell for row in re.findall(r"^\|(.*)\|$", text, re.M) for cell in row.split("|")]
        prose = re.sub(r"^\|.*\|$", "", text, flags=re.M)
        for paragraph in [*re.split(r"\n\s*\n|^\s*(?:[-*]|\d\.|:) ", prose, flags=re.M), *rows]:
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split())):
                if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence))) >= 6:
                    yield path.relative_to(ROOT).as_posix(), sentence


def helps() -> Iterator[tuple[str, str]]:
    """Help texts of commands and options."""
    todo: list[tuple[str, click.Command]] = [("kvrsim", app)]
    for path, command in todo:
        context = click.Context(command)
        yield f"{path} --help", " ".join((command.help or "").split())
        for parameter in command.params:
            yield f"{path} {parameter.opts[0]}", " ".join((getattr(parameter, "help", None) or "").split())
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                todo.append((f"{path} {name}", inner))


def code() -> Iterator[tuple[str, str]]:
    """Docstrings and comments of the packages."""
    for package in ("kvrsim", "planner", "calibrate", "validate"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text, where = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    docstring = ast.get_docstring(node)
                    if docstring:
                        yield f"{where}:{getattr(node, 'lineno', 1)}", " ".join(docstring.split())
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.COMMENT and len(token.string.split()) > 4:
                    yield f"{where}:{token.start[0]}", token.string


def main() -> None:
    """Print the seed and random sentences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--code", action="store_true", help="docstrings and comments instead of pages and help texts")
    options = parser.parse_args()
    sources = code() if options.code else [*pages(), *helps()]
    sentences = sorted({(text, where) for where, text in sources if text})
    print(f"seed {options.seed}: {options.count} of {len(sentences)} sentences")
    for number, (text, where) in enumerate(random.Random(options.seed).sample(sentences, options.count), 1):
        print(f"{number:3} {text}   [{where}]")


if __name__ == "__main__":
    main()
