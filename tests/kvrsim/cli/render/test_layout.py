"""Tables: nothing is ever cut; a narrow terminal shows fewer columns."""

from __future__ import annotations

import io
import re
import sys

import pytest

from kvrsim.cli import main as cli
from kvrsim.cli.render.layout import Shrinkable, columns, natural_width, show

FIGURES = ("zigzag", "8 × 2048", "602 ms", "563–642 ms", "1.53×", "55.9 ms", "38.9 ms", "24.7 GiB", "yes")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(width: int, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> list[str]:
    """The lines of a plan's table at a width."""
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    table = columns("strategy", "partition")
    columns("TTFT", "low–high", "vs TSP", "exposed", "wait", "peak of", numbers=True, into=table)
    columns("fits", into=table)
    table.add_row(*FIGURES)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        show(Shrinkable(table, optional=("wait", "exposed", "low–high", "partition")), "prose " * 40)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_pipe_gets_every_figure(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(width, monkeypatch, terminal=False)
    assert [figure for figure in FIGURES if figure not in lines[1]] == []
    assert "…" not in "".join(lines)
    assert max(map(len, lines[2:])) <= width


@pytest.mark.parametrize("width", range(30, 100, 5))
def test_a_terminal_gets_whole_figures(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(width, monkeypatch, terminal=True)
    if width < 40:  # rows one below the other
        assert [figure for figure in FIGURES if not any(line.endswith(figure) for line in lines)] == []
        return
    words = [figure for figure in FIGURES if figure in lines[1]]
    assert lines[1].split() == " ".join(words).split()
    assert "…" not in lines[1]
    assert {"zigzag", "602 ms", "1.53×", "24.7 GiB", "yes"} <= set(words)
    if len(words) < len(FIGURES):
        assert "columns hidden for lack of width" in " ".join(" ".join(lines[2:]).split())
    if width >= 45:
        assert len(lines[1]) <= width


def test_the_least_important_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [sum(figure in shown(width, monkeypatch, terminal=True)[1] for figure in FIGURES) for width in (90, 65, 45)]
    assert seen == sorted(seen, reverse=True)
    assert "38.9 ms" not in shown(68, monkeypatch, terminal=True)[1]
    assert "55.9 ms" in shown(68, monkeypatch, terminal=True)[1]


def test_prose_may_wrap_inside_a_table() -> None:
    table = columns("name")
    table.add_column("what it is")
    table.add_row("x", "several words of prose")
    assert natural_width(table) < len("x several words of prose")


def test_a_long_map_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["map", "--ctx", "1k,2k", "--gpus", "2,4,8", "--strategies", "tsp,zigzag"]) == 0
    assert "…" not in capsys.readouterr().out
