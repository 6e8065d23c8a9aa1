"""The documents run: commands and code shown in the README do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvrsim.cli import main as cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Every `kvrsim ...` line of the README's shell blocks, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("#")[0].split(";")]
    return [part for part in parts if part.startswith("kvrsim ") and part != "kvrsim validate published"]


def test_commands_are_found() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0
    for name in re.findall(r"--(?:plot|trace) (\S+)", command):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_plan_shown_is_the_plan_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = re.search(r"^```console\n\$ make plan\n(.*?)^```", README, re.M | re.S)
    assert shown is not None
    monkeypatch.setenv("COLUMNS", "118")
    assert cli.main(["plan", "--gpus", "8", "--ctx", "16k"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in shown[1].rstrip().splitlines():
        assert line.rstrip() in printed


def test_the_python_of_the_readme() -> None:
    code = re.search(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert code is not None
    names: dict[str, object] = {}
    exec(code[1], names)
    assert {"plan", "run"} <= set(names)


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
