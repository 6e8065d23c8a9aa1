"""Sentences of README, docs and help texts, drawn at random: `python tests/reading.py [--seed N] [--count 40]`.

Read each as a new user would, without its context. Rewrite those that need a second reading, then draw others.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from kvrsim.cli.main import app

ROOT = Path(__file__).parent.parent


def pages() -> Iterator[tuple[str, str]]:
    """Sentences of README and docs, with the name of the page. Code, tables of figures and headings are left out."""
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
    todo: list[tuple[str, click.Command]] = [("kvrsim", typer.main.get_command(app))]
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


def main() -> None:
    """Print the seed and the sentences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=40)
    wanted = parser.parse_args()
    found = sorted({(text, where) for where, text in [*pages(), *helps()] if text})
    print(f"seed {wanted.seed}: {wanted.count} of {len(found)} sentences")
    for number, (text, where) in enumerate(random.Random(wanted.seed).sample(found, wanted.count), 1):
        print(f"{number:3} {text}   [{where}]")


if __name__ == "__main__":
    main()
