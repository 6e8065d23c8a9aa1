"""Output of every command at 60, 80, 120 and 200 columns and piped: no number is cut, no line is too wide.

A command runs once; its output is then formatted for each width.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.cli import text as layout
from kvrsim.strategies import STRATEGIES

WIDTHS = (60, 80, 120, 200)
PIPED = 118
STYLES = re.compile(r"\x1b\[[0-9;]*m")
FIGURES = re.compile(r"\d[\d.,]*")
TINY = ("--gpus", "2", "--ctx", "512")
TOO_LARGE = ("--gpus", "2", "--ctx", "64k", "--model", "llama-3-70b", "--cluster", "h100-nvlink")
REQUESTS = ("--requests", "synthetic:poisson,rate=1,requests=50,context=1k", "--replications", "2", "--max-gpus", "8")
COMMANDS = [
    ("plan", *TINY),
    ("plan", *TINY, "--strategies", "all", "--cached-prefix", "128", "--prefix-placement", "host"),
    ("plan", *TOO_LARGE, "--strategies", "tsp,tp", "--explain"),
    ("plan", *TINY, "--strategies", "kvr-e,tsp", "--noise", "jitter:0.1", "--samples", "20"),
    ("simulate", "--strategy", "pp", *TOO_LARGE),
    ("map", "--ctx", "1k,2k", "--gpus", "2,4,8", "--strategies", "tsp,zigzag", "--link-bandwidths", "1GB/s,200GB/s"),
    ("table", "build", "--gpus", "2", "--ctx", "512", "-o", "new.json"),
    ("table", "show", "table.json"),
    ("table", "lookup", "table.json", "--gpus", "2", "--ctx", "700"),
    ("capacity", "llama-7b", "a100-nvlink", *REQUESTS, "--slo-ttft", "1ms", "--strategies", "single,tp"),
    ("strategies", "show", "kvr-s"),
    ("models", "show", "qwen3-30b-a3b"),
    ("clusters", "show", "h100-2x8-ndr400"),
    ("engines", "show", "serving"),
]


_RUN: dict[tuple[Path, tuple[str, ...]], list[layout.Part]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table."""
    made = tmp_path_factory.mktemp("widths")
    kvrsim.build_table(gpus=[2], ctx=["512", "1k"]).write(made / "table.json")
    return made


def parts_of(command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[layout.Part]:
    """The parts of a command's output; the command runs only once."""
    if (folder, command) in _RUN:
        return _RUN[folder, command]
    shown: list[layout.Part] = []

    def noted(parts: Sequence[layout.Part], width: int, *, terminal: bool) -> str:
        shown.extend(parts)
        return ""

    monkeypatch.setattr(layout, "page", noted)
    monkeypatch.chdir(folder)
    assert cli.main(list(command)) in (0, 1)
    monkeypatch.undo()
    assert shown
    _RUN[folder, command] = shown
    return shown


def figures(text: str) -> Counter[str]:
    """All numbers of a text."""
    return Counter(FIGURES.findall(text))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_figure_is_cut(command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = parts_of(command, folder, monkeypatch)
    piped = layout.page(shown, PIPED, terminal=False)
    whole = figures(STYLES.sub("", layout.page(shown, 10**4, terminal=True)))
    assert figures(piped) <= whole
    for width in WIDTHS:
        text = STYLES.sub("", layout.page(shown, width, terminal=True))
        assert [line for line in text.splitlines() if len(line) > width] == []
        assert [line for line in (piped + text).splitlines() if "…" in re.sub(r"\d …( \d|$)", "", line)] == []
        assert set(figures(text)) <= set(whole)  # a number that was cut would appear as another number
        if "columns hidden" not in text:
            assert whole <= figures(text)  # rows in several lines repeat the titles


def test_the_least_important_columns_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 columns, the table of a plan still has the strategy, its TTFT and its speed-up."""
    shown = parts_of(("plan", *TINY, "--strategies", "tsp,kvr-e"), folder, monkeypatch)
    titles = ["strategy", "TTFT", "vs TSP"]
    narrow = STYLES.sub("", layout.page(shown, 40, terminal=True))
    (header,) = [line for line in narrow.splitlines() if line.startswith("strategy ")]
    assert [title for title in titles if title not in header] == []
    assert "columns hidden for lack of width:" in " ".join(narrow.split())


def labels_of(parts: Sequence[layout.Part]) -> Iterator[str]:
    """Titles of columns and labels of lines, without names of strategies."""
    for part in parts:
        if isinstance(part, layout.Table | layout.Facts):
            titles = part.columns if isinstance(part, layout.Table) else ()
            cells = [column.title for column in titles] or [label for label, _ in part.rows]
            for cell in map(str, cells):
                label = re.sub(
                    r"\(.*\)|, [\d.]+ [GMk]?B/s|\d+ (?=GPUs)|(?<=rank) \d+|:$", "", " ".join(cell.split())
                ).strip()
                if label and label not in STRATEGIES:
                    yield label.lower()


def defined_terms() -> set[str]:
    """Terms of the glossary: bold terms, and the first cells of its table."""
    text = (Path(__file__).parents[3] / "docs/reference/glossary.md").read_text("utf-8")
    terms = re.findall(r"^\*\*(.+?)\*\*(?: \(.*\))?$", text, re.M) + re.findall(r"^\| ([^|]+?) \|", text, re.M)
    return {term.strip().lower() for shown in terms for term in shown.split(", ")} | {"gpus"}


@pytest.mark.parametrize("command", COMMANDS[:9], ids=" ".join)
def test_every_label_is_in_the_glossary(
    command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = set(labels_of(parts_of(command, folder, monkeypatch)))
    assert len(labels) >= 3
    assert labels - defined_terms() == set()


@pytest.mark.parametrize(
    ("pieces", "layers", "tokens"),
    [((2048,) * 32, (8,) * 4, 65536), ((3000, 2000, 2000), (10, 11), 7000), ((512,), (4, 4), 512)],
)
def test_pieces_of_a_pipeline_add_up(pieces: tuple[int, ...], layers: tuple[int, ...], tokens: int) -> None:
    """Read as products and sums, the sentence gives the tokens and layers of the plan."""

    def total(text: str) -> int:
        number, sizes = re.fullmatch(r"(\d+) \w+ of ([\d×, ]+) \w+", text).groups()  # type: ignore[union-attr]
        terms = [list(map(int, term.split(" × "))) for term in sizes.split(", ")]
        if len(terms) == 1 and len(terms[0]) == 1:
            return int(number) * terms[0][0]
        assert sum(term[0] if len(term) == 2 else 1 for term in terms) == int(number)
        return sum(math.prod(term) for term in terms)

    first, second = layout.stages_text(pieces, layers).split("; ")
    assert (total(first), total(second)) == (tokens, sum(layers))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_command_can_be_copied(width: int) -> None:
    words = ["kvrsim", "confirm", "a plan of mine.json", *(f"--option-{number}" for number in range(12))]
    command = layout.ShellCommand(shlex.join(words))
    shown = layout.page([layout.facts(("next:", command))], width, terminal=False)
    assert max(map(len, shown.splitlines())) <= width
    pasted = shown.removeprefix("next:").replace("\\\n", "")  # a shell removes a backslash before the end of a line
    assert shlex.split(pasted) == words
