"""Commands run in this process: their JSON, what they show, and the line of a mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrsim.cli import main as cli

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: object, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of a command that ends with an exit code."""
    found = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def answer(capsys: Capture, *words: object, code: int = 0) -> Any:
    """What a command prints with --json."""
    out, _ = run(capsys, *words, "--json", code=code)
    return json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


def screen(capsys: Capture, *words: object, code: int = 0) -> str:
    """What a command shows; it says nothing on standard error."""
    out, err = run(capsys, *words, code=code)
    assert err == ""
    return out


def refusal(capsys: Capture, *words: object) -> str:
    """The one line on standard error of a command that a user got wrong."""
    out, err = run(capsys, *words, code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvrsim: error: ")
    assert len(err) < 1500
    return err
