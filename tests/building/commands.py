"""Run commands in this process and return their JSON, their output or their error message."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

from kvrsim.cli import main as cli

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: object, code: int = 0) -> tuple[str, str]:
    """Run a command that must end with this exit code; return its standard output and standard error."""
    result = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert result == code, err
    return out, err


def answer(capsys: Capture, *words: object, code: int = 0) -> Any:
    """The JSON that a command prints with --json."""
    out, _ = run(capsys, *words, "--json", code=code)
    return json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


def screen(capsys: Capture, *words: object, code: int = 0) -> str:
    """The standard output of a command; its standard error must be empty."""
    out, err = run(capsys, *words, code=code)
    assert err == ""
    return out


def refusal(capsys: Capture, *words: object) -> str:
    """The error message of a command with exit code 2: a single line on standard error."""
    out, err = run(capsys, *words, code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvrsim: error: ")
    assert len(err) < 1500
    return err


def page_data(page: str) -> dict[str, Any]:
    """Decode the JSON data inside an HTML page that kvrsim.views.page.render wrote."""
    text = page.split('id="kv-data">', 1)[1].split("<", 1)[0]
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return data
