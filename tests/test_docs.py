"""Commands and code of README and docs run, and their output is as on the page.

The line `<!-- not run: REASON -->` comes before a block that needs a GPU, hours, or a file of the reader. The commands
of such a block and of docs/results are parsed, but not run. A Python block with a title becomes a file of that name for
the commands of the page.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from kvrsim.cli import main as cli
from tests.building.remembered import Question, remember

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```",
    re.M | re.S,
)


@dataclass(frozen=True, kw_only=True)
class PageCommand:
    """One command of a page."""

    arguments: tuple[str, ...]  # words after `kvrsim`
    into: str | None  # file that receives the output
    runs: bool  # False: the command is parsed only
    output: tuple[str, ...]  # lines below the command; "..." stands for omitted lines


def commands(page: Path) -> list[PageCommand]:
    """The `kvrsim` commands of a page's blocks, in order."""
    result = []
    for block in BLOCK.finditer(page.read_text("utf-8")):
        if block["language"] not in ("", "sh", "console"):
            continue
        console = block["language"] == "console"
        text = block["text"].replace("\\\n", " ")
        parts = re.split(r"^\$ ", text, flags=re.M)[1:] if console else text.splitlines()
        for part in parts:
            line, *output = part.splitlines() or [""]
            for one in re.sub(r"(^|\s)#.*", "", line).split(";"):
                words = shlex.split(one) if re.match(r"\s*(kvrsim|torchrun) ", one) else []
                if "kvrsim" in words:
                    arguments, into = tuple(words[words.index("kvrsim") + 1 :]), None
                    if ">" in arguments:
                        *rest, _, into = arguments
                        arguments = tuple(rest)
                    runs = block["reason"] is None and words[0] == "kvrsim" and "results" not in page.parts
                    result.append(PageCommand(arguments=arguments, into=into, runs=runs, output=tuple(output)))
    return result


def first_shown() -> dict[str, list[PageCommand]]:
    """Commands by page; a command that an earlier page has is omitted, unless it has output or writes files."""
    seen: set[tuple[str, ...]] = set()
    result: dict[str, list[PageCommand]] = {}
    for name, page in zip(NAMES, PAGES, strict=True):
        result[name] = []
        for one in commands(page):
            if one.arguments not in seen or one.output or "-o" in one.arguments:
                result[name].append(one)
            seen.add(one.arguments)
    return result


def parse(arguments: tuple[str, ...]) -> None:
    """Parse a command as `kvrsim` does, without running it."""
    command: click.Command = cli.app
    context = command.make_context("kvrsim", list(arguments[:1]), resilient_parsing=True)
    if arguments[0].startswith("--"):
        assert arguments[0] in [name for parameter in command.params for name in parameter.opts]
        return
    rest = list(arguments)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        assert name is not None
        context = command.make_context(name, list(rest), parent=context, resilient_parsing=hasattr(command, "commands"))


COMMANDS = first_shown()
SLOW = {
    "README.md",
    "docs/explanation/strategies.md",
    "docs/how-to/capacity.md",
    "docs/how-to/deploy.md",
    "docs/how-to/noise.md",
    "docs/how-to/own-engine.md",
    "docs/how-to/own-strategy.md",
    "docs/how-to/partition-table.md",
    "docs/how-to/pictures.md",
    "docs/how-to/plan.md",
    "docs/how-to/questions.md",
    "docs/how-to/several-machines.md",
    "docs/tutorial/first-plan.md",
}
TESTED_ELSEWHERE = {("validate", "published")}  # simulated whole in tests/validate/test_accuracy.py; only parsed here


@pytest.fixture(scope="module")
def answers() -> dict[Question, Any]:
    """Answers of the pages so far: several pages ask the same question."""
    return {}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES if COMMANDS[name]]
)
def test_the_commands_of_a_page(
    name: str,
    answers: dict[Question, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    remember(answers, monkeypatch)
    monkeypatch.setenv("COLUMNS", "118")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer((ROOT / name).read_text("utf-8")):
        if block["title"]:
            (tmp_path / block["title"]).write_text(block["text"], "utf-8")
    for one in COMMANDS[name]:
        if not one.runs or one.arguments in TESTED_ELSEWHERE:
            parse(one.arguments)
            continue
        assert cli.main(list(one.arguments)) == 0, one.arguments
        out = capsys.readouterr().out
        if one.into is not None:
            (tmp_path / one.into).write_text(out, "utf-8")
        printed = [line.rstrip() for line in out.splitlines()]
        for line in one.output:
            assert line.rstrip() in {*printed, "", "..."}, one.arguments
        for option in ("--plot", "--trace", "--html"):
            if option in one.arguments:
                assert (tmp_path / one.arguments[one.arguments.index(option) + 1]).stat().st_size > 1000


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_python_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {"__name__": "shown"}
    for block in BLOCK.finditer(page.read_text("utf-8")):
        if block["title"]:
            (tmp_path / block["title"]).write_text(block["text"], "utf-8")
            monkeypatch.delitem(sys.modules, Path(block["title"]).stem, raising=False)
        if block["language"] == "python":
            code = compile(block["text"], str(page), "exec")
            if block["reason"] is None:
                exec(code, names)
        elif block["language"] == "json":
            json.loads(block["text"])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_a_sentence_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text("utf-8"))
    for shown in re.findall(r"`kvrsim ([a-z][^`]*)`", text):
        command: click.Command = cli.app
        words = shown.split()
        while hasattr(command, "commands") and words and re.fullmatch("[a-z]+", words[0]):
            context = click.Context(command)
            inner = command.get_command(context, words.pop(0))
            assert inner is not None, shown
            command = inner
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, shown


def test_the_docs_are_short() -> None:
    """Short docs are easier to read; a new page must make other pages shorter. Pages of results are written by code.

    33,000 words until November 2026; then launches of KV-Runahead, six formats of logs, checks of predictors, shared
    rows, limits of validate and power limits of machines were added.
    """
    written = [page for page in PAGES if "docs" in page.parts and "results" not in page.parts]
    assert sum(len(page.read_text("utf-8").split()) for page in written) <= 35_500


@pytest.mark.parametrize("page", PAGES[:2], ids=NAMES[:2])
def test_links_lead_somewhere(page: Path) -> None:
    """Links of README and CONTRIBUTING lead to files; `make docs` checks links inside docs/."""
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for page in PAGES:
        shown = re.findall(r"^(?:\$ )?make ([a-z ]+?)(?= *#|$| [A-Z])|`make ([a-z]+)", page.read_text("utf-8"), re.M)
        names = {name for pair in shown for name in " ".join(pair).split()}
        assert names <= targets, page.name


@pytest.mark.parametrize(
    "command",
    [
        "plan --gpus 2 --ctx 2k",
        "simulate --strategy kvr-e --gpus 2 --ctx 2k --breakdown --noise jitter:0.1 --samples 20",
        "map --gpus 2 --ctx 1k,2k",
        "capacity llama-7b a100 --slo-ttft 2s --max-gpus 8 --requests synthetic:poisson,rate=1,requests=50,context=1k",
    ],
)
def test_every_json_field_is_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/reference/json.md").read_text("utf-8")
    documented = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", page))))
    assert cli.main([*command.split(), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) <= documented
