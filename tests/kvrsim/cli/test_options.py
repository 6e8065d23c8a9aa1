"""Commands and options: recorded in flags.json, with help in sections and a valid example."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrsim.choices import FEW_OPTIONS
from kvrsim.cli import main as cli
from tests.building.commands import screen
from tests.building.snapshot import assert_recorded
from tests.test_docs import parse


def commands(command: Any, path: str = "") -> dict[str, Any]:
    """Every command by its path."""
    is_group = hasattr(command, "list_commands")
    result = {path: command} if path == "" or not is_group else {}
    for name in command.list_commands(None) if is_group else ():
        result |= commands(command.get_command(None, name), f"{path} {name}".strip())
    return result


ROOT = Path(__file__).resolve().parents[3]
COMMANDS = commands(cli.app)


def test_flags_are_recorded() -> None:
    result = {
        path: [param.opts[0] if param.param_type_name == "option" else param.metavar for param in command.params]
        for path, command in COMMANDS.items()
    }
    assert_recorded(Path(__file__).parent / "flags.json", result)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = screen(capsys, *path.split(), "--help")
    assert out.startswith(f"Usage: kvrsim {path}".strip())
    assert out == screen(capsys, *path.split(), "-h") == screen(capsys, "help", *path.split())


def test_the_program_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    alone = screen(capsys)
    assert alone == screen(capsys, "-h")
    assert [line[:-1] for line in alone.splitlines() if line.endswith(":")] == [*cli.GROUPS, "Options"]


LONG = [path for path, command in COMMANDS.items() if any(param.name == "help_all" for param in command.params)]


@pytest.mark.parametrize("path", LONG)
def test_help_is_short_and_help_all_is_whole(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The short help has few options, among them all required options, and the example."""
    short, whole = screen(capsys, *path.split(), "-h"), screen(capsys, *path.split(), "--help-all")
    options = {param.opts[0] for param in COMMANDS[path].params if param.param_type_name == "option"}

    def shown(text: str) -> set[str]:
        return {word for line in text.splitlines() for word in re.findall(r"^  (?:-\w, )?(--[\w-]+)", line)}

    assert len(shown(short) - {"--help-all", "--help"}) <= FEW_OPTIONS
    assert shown(whole) == options | {"--help"}
    assert {param.opts[0] for param in COMMANDS[path].params if param.required} & options <= shown(short)
    assert all("Example:" in text for text in (short, whole))


def test_long_commands_are_those_with_many_options() -> None:
    assert {"plan", "simulate", "map", "capacity", "run", "confirm", "table build"} <= set(LONG)
    assert not {"table lookup", "models list", "serve"} & set(LONG)


@pytest.mark.parametrize("path", [path for path in COMMANDS if path])
def test_every_command_has_a_summary_and_an_example(path: str) -> None:
    command = COMMANDS[path]
    example = shlex.split(command.example)
    first = command.help.splitlines()[0]
    assert 10 < len(first) <= 66  # width of this column in a list of commands
    assert first.endswith(".")
    if path in cli.COMMANDS:
        assert cli.COMMANDS[path][0] == first
    assert example[: 1 + len(path.split())] == ["kvrsim", *path.split()]
    parse(tuple(example[1:]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [("kvrsim pl", "plan"), ("kvrsim plan --gp", "--gpus"), ("kvrsim plan --model llama-3-7", "llama-3-70b")],
)
def test_shells_complete_commands_options_and_names(words: str, expected: str) -> None:
    environment = {"_KVRSIM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-m", "kvrsim"]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"plain,{expected}" in done.stdout.split()


def test_the_help_of_plan_shows_what_users_of_engines_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    short = screen(capsys, "plan", "-h")
    wanted = (
        "--engine",
        "--only-deployable",
        "--rate",
        "--slo",
        "--dtype",
        "--cached-prefix",
        "--emit",
        "--strategies",
    )
    assert [name for name in wanted if f"  {name} " not in short] == []
