"""A parameter's name in Python is an option's on the command line; the core knows only the former."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import kvrsim
from kvrsim.cli.main import app, main
from kvrsim.cli.mistakes import as_options, command_of
from kvrsim.errors import InputError
from kvrsim.runtime.faults import RankError, faults_of

ROOT = Path(kvrsim.__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["plan"], ("gpus", 0, "1"), "--gpus: got '0', accepted: 1"),
        (["plan"], ("link_bandwidth", 0, "1"), "--link-bandwidth: got '0', accepted: 1"),
        (["plan"], ("model a.json: hidden_size", 0, "1"), "--model a.json: hidden_size: got '0', accepted: 1"),
        (["plan"], ("noise dwell", 0, "1"), "--noise dwell: got '0', accepted: 1"),
        (["plan"], ("--gpus", 0, "1"), "--gpus: got '0', accepted: 1"),
        (["plan"], ("slo_ttft", 0, "1"), "slo_ttft: got '0', accepted: 1"),  # an option of another command
        (["plan"], ("model.csv: header", 0, "1"), "model.csv: header: got '0', accepted: 1"),
        (["simulate"], ("strategies", 0, "1"), "--strategy: got '0', accepted: 1"),
        (["plan"], ("strategy", 0, "1"), "--strategies: got '0', accepted: 1"),
        (["models", "show"], ("model", 0, "1"), "model: got '0', accepted: 1"),
        (["capacity"], ("objective", "cost", "with `price_per_gpu_hour`"), "with --price-per-gpu-hour"),
        (
            ["table", "build"],
            ("output", "a", "nothing without `noise`"),
            "--output: got 'a', accepted: nothing without `noise`",
        ),
    ],
)
def test_parameters_are_shown_as_options(arguments: list[str], error: tuple[str, object, str], line: str) -> None:
    command, _ = command_of([*arguments, "--gpus", "2"], typer.main.get_command(app))
    assert as_options(InputError(*error), command).endswith(line)


def test_a_mistake_that_a_rank_reports_is_shown_as_an_option() -> None:
    faults = faults_of(InputError("attention", "flash", "eager"), 1, None)
    command, _ = command_of(["run"], typer.main.get_command(app))
    line = "rank 1: --attention: got 'flash', accepted: eager"
    assert as_options(RankError(faults), command) == line
    assert str(RankError(faults)) == line.replace("--", "")


def test_the_same_mistake_in_both_places(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError) as caught:
        kvrsim.plan(ctx=512, gpus=2, link_bandwidth="fast")
    assert main(["plan", "--ctx", "512", "--gpus", "2", "--link-bandwidth", "fast"]) == 2
    assert str(caught.value).startswith("link_bandwidth: got 'fast'")
    assert capsys.readouterr().err == f"kvrsim: error: --{str(caught.value).replace('link_b', 'link-b')}\n"


def test_only_the_command_line_writes_dashes() -> None:
    dashed = re.compile(r"InputError\(\s*f?\"--|argument: str = \"--|argument=\"--")
    files = [path for room in ("kvrsim", "planner", "calibrate", "validate") for path in (ROOT / room).rglob("*.py")]
    core = [path for path in files if "cli" not in path.relative_to(ROOT).parts]
    assert len(core) > 100
    assert [str(path) for path in core if dashed.search(path.read_text(encoding="utf-8"))] == []
