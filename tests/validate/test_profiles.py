"""The page about profiles agrees with the profiles, and its commands are valid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calibrate.data import read_measurements
from kvrsim.cli.main import app
from kvrsim.kernels.profile import builtin_profiles, load_profile
from validate.profiles import PAGE, page
from validate.results import body

TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
    return [text for kind, text in found if kind == language]


def commands() -> Iterator[list[str]]:
    """Every `kvrsim ...` command of the page, without the word `kvrsim`."""
    for block in blocks(""):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("kvrsim "):
                yield shlex.split(line)[1:]


def test_the_page_is_that_of_the_profiles() -> None:
    lines = page([load_profile(name) for name in builtin_profiles()])
    assert "\n".join(lines).rstrip() + "\n" == body(TEXT), "python -m validate.profiles rewrites it"


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_a_command_is_one_that_kvrsim_takes(words: list[str]) -> None:
    """The options are parsed; the command is not run, because a fit takes a minute."""
    command: Any = app
    context: Any = None
    while hasattr(command, "commands"):
        context = command.make_context(words[0], [], parent=context, resilient_parsing=True)
        command, words = command.get_command(None, words[0]), words[1:]
    command.make_context(command.name, words, parent=context)


def test_the_measurements_shown_are_read(tmp_path: Path) -> None:
    (tmp_path / "kernels.csv").write_text(blocks("csv")[0])
    rows = read_measurements(tmp_path / "kernels.csv")
    assert [row.operation for row in rows] == ["gemm", "attention", "norm", "send_recv", "host_layer"]
