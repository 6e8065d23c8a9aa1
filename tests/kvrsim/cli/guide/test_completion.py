"""Completion: what a shell is answered, and the three shells' scripts that ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrsim.cli import main as cli
from kvrsim.cli.guide.completion import FILES, SCRIPTS
from kvrsim.cli.guide.values import shipped
from kvrsim.cli.lazy import COMMANDS
from kvrsim.strategies import STRATEGIES
from tests.kvrsim.cli.test_flags import COMMANDS as EVERY

ROOT = Path(__file__).parents[4]
LLAMAS = [name for name in shipped("models") if name.startswith("llama-3")]


def completed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The words of the answer."""
    assert cli.main(["__complete", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.partition("\t")[0] for line in out.splitlines()]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), [*COMMANDS]),
        (("pl",), ["plan"]),
        (("help", "pl"), ["plan"]),
        (("table", ""), ["build", "lookup", "show"]),
        (("help", "table", "l"), ["lookup"]),
        (("plan", "--model", "llama-3"), [*LLAMAS, FILES]),
        (("plan", "--model=llama-3"), [*(f"--model={name}" for name in LLAMAS), FILES]),
        (("plan", "--model", "=", "llama-3"), [*LLAMAS, FILES]),  # as bash splits it
        (("plan", "--model", "="), [*shipped("models"), FILES]),
        (("models", "show", "llama-3"), [*LLAMAS, FILES]),
        (("profiles", "diff", "a100-eager", "h100"), ["h100-flash"]),
        (("plan", "--cluster", "h200"), ["h200-nvlink", FILES]),
        (("plan", "--profile", "roof"), ["roofline", FILES]),
        (("plan", "--engine", "n"), ["none", FILES]),
        (("simulate", "--strategy", "zig"), ["zigzag-ring", "zigzag", FILES]),
        (("plan", "--strategies", "tsp,kvr-s,t"), ["tsp,kvr-s,tp", FILES]),
        (("plan", "--strategies", ""), [*STRATEGIES, "all", FILES]),
        (("plan", "--dtype", "f"), ["fp16", "fp8", "fp32"]),
        (("plan", "--prefix-placement", "h"), ["host"]),
        (("plan", "--trace", ""), [FILES]),
        (("plan", "--ctx", "8"), []),
        (("plan", "--expert-parallel", "--gpu"), ["--gpus"]),
        (("plan", "--gpus", "4", "--g"), []),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("nothing", "--unknown", "x"), []),
    ],
)
def test_ways_to_go_on(words: tuple[str, ...], found: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(capsys, *words) == found


@pytest.mark.parametrize("path", [path for path in EVERY if path not in ("", "help")])
def test_every_option_is_completed(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {name for param in EVERY[path].params for name in (*param.opts, *param.secondary_opts)}
    assert {*completed(capsys, *path.split(), "--")} == {name for name in options if name.startswith("--")} | {"--help"}


@pytest.fixture
def kvrsim(tmp_path: Path) -> dict[str, str]:
    """An environment in which `kvrsim` is the command line of this checkout."""
    program = tmp_path / "kvrsim"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m kvrsim "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


# How each shell is made to complete `kvrsim plan --model llama-3`, and to print what it found.
ASKS = {
    "bash": "COMP_WORDS=(kvrsim plan --model llama-3); COMP_CWORD=3; _kvrsim_completion kvrsim 2>/dev/null;"
    ' printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "compdef() { }; _files() { }; _describe() { print -l -- ${(P)${@[-1]}} };"
    " words=(kvrsim plan --model llama-3); CURRENT=4; _kvrsim",
    "fish": "complete --do-complete 'kvrsim plan --model llama-3'",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_completes(
    shell: str, kvrsim: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert cli.main(["completion", shell]) == 0
    script = tmp_path / "script"
    stub = "compdef() { }\n" if shell == "zsh" else ""  # of zsh's completion system, which -f leaves out
    script.write_text(stub + capsys.readouterr().out)
    plain = {"bash": ["--norc", "-c"], "zsh": ["-f", "-c"], "fish": ["--no-config", "-c"]}[shell]
    asked = f"source {script}; {ASKS[shell]}"
    done = subprocess.run([shell, *plain, asked], env=kvrsim, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert [line.partition("\t")[0].rstrip(":") for line in done.stdout.split("\n") if line] == LLAMAS, done.stderr


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "accepted: one of bash, zsh, fish" in capsys.readouterr().err
