"""Help: commands in groups with summaries, options in sections, examples that parse, -h and `kvrsim help`."""

from __future__ import annotations

import shlex

import pytest

from kvrsim.cli import main as cli
from kvrsim.cli.guide.help import example_of
from kvrsim.cli.guide.sections import SECTIONS, place_of
from kvrsim.cli.lazy import COMMANDS as SUMMARIES
from kvrsim.cli.lazy import GROUPS
from tests.kvrsim.cli.test_flags import COMMANDS
from tests.test_docs import parse


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_program_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    alone = helped(capsys)
    assert alone == helped(capsys, "-h") == helped(capsys, "--help") == helped(capsys, "help")
    assert [line[:-1] for line in alone.splitlines() if line.endswith(":")] == [*GROUPS, "Options"]


@pytest.mark.parametrize("path", ["plan", "table", "table build", "help"])
def test_ways_to_ask_for_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = path.split()
    assert helped(capsys, *words, "-h") == helped(capsys, *words, "--help") == helped(capsys, "help", *words)


def test_help_of_a_command_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("path", [path for path in COMMANDS if path])
def test_every_command_has_a_summary_and_an_example(path: str) -> None:
    command, example = COMMANDS[path], shlex.split(example_of(COMMANDS[path]))
    first = command.help.splitlines()[0]
    assert 10 < len(first) <= 66  # columns that a list of commands has for it
    assert first.endswith(".")
    if path in SUMMARIES:
        assert SUMMARIES[path][0] == first
    assert example[: 1 + len(path.split())] == ["kvrsim", *path.split()]
    parse(tuple(example[1:]))


def test_every_option_has_a_section() -> None:
    options = {(path, param.opts[0]) for path, command in COMMANDS.items() for param in command.params if path}
    options = {(path, name) for path, name in options if name.startswith("-")} | {("", "--help")}
    assert {place_of(path, name)[0] for path, name in options} == set(SECTIONS)
    in_use = {name for _, name in options} | {" ".join(pair) for pair in options}
    assert [name for names in SECTIONS.values() for name in names if name not in in_use] == []


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("path", ["plan", "capacity", "confirm"])
def test_sections_in_order(
    path: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = helped(capsys, path, "-h").splitlines()
    titles = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [title for title in [*SECTIONS, "Example"] if title in titles]
    assert len(titles) >= 6
    prose = [line for line in lines if "kvrsim" not in line and "|" not in line]
    assert max(map(len, prose)) <= min(columns, 100)
