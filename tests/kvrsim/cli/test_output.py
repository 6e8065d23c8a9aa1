"""--format prints the table of an answer as CSV or Markdown, with the names and values of --json."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from kvrsim.cli import main as cli
from kvrsim.cli.output import print_csv
from tests.building.commands import answer, refusal, run, screen

SETTING = ("--gpus", "2", "--profile", "roofline")
TABLES = {  # command -> key of the list in its JSON
    ("plan", "--ctx", "1k", *SETTING): "strategies",
    ("simulate", "--strategy", "kvr-e", "--ctx", "1k", *SETTING): "per_rank",
    ("map", "--ctx", "1k,2k", *SETTING): "points",
    ("table", "show", "table.json"): "entries",
    ("strategies", "list"): "strategies",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table."""
    path = tmp_path_factory.mktemp("formats")
    table = ("table", "build", "--ctx", "1k", *SETTING, "--jobs", "1", "-o", str(path / "table.json"))
    assert cli.main(table) == 0
    return path


@pytest.mark.parametrize("arguments", TABLES, ids=" ".join)
def test_tables_hold_what_json_holds(
    arguments: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    content = answer(capsys, *arguments)
    rows = list(csv.DictReader(io.StringIO(run(capsys, *arguments, "--format", "csv")[0])))
    assert len(rows) == len(content[TABLES[arguments]]) > 0
    compared = 0
    for row, whole in zip(rows, content[TABLES[arguments]], strict=True):
        for name, value in whole.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                compared += 1
                assert float(row[name]) == value
            elif isinstance(value, str) and name in row:
                compared += 1
                assert row[name] == value
    assert compared >= len(rows)


@pytest.mark.parametrize("arguments", TABLES, ids=" ".join)
def test_markdown_is_the_terminals_own_table(
    arguments: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    shown = screen(capsys, *arguments)
    for table in run(capsys, *arguments, "--format", "md")[0].split("\n\n"):
        head, rule, *lines = table.splitlines()
        assert {line.count("|") for line in (head, rule, *lines)} == {rule.count("---") + 1}
        for line in lines:
            cells = line.replace("\\", "").split("|")[1:-1]
            assert all(word in shown for cell in cells for word in cell.split())


@pytest.mark.parametrize(
    "others", [("--json", "--format", "csv"), ("--format", "xml"), ("--format", "md", "--emit", "vllm")], ids=" ".join
)
def test_what_formats_do_not_go_with(others: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: --format: got " in refusal(capsys, "plan", "--ctx", "1k", *others)


def test_cells(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"name": "a|b\x1b", "x_s": 0.123456789, "parts": [1, 2], "link": {"x": None}, "no": None, "deep": [{"x": 1}]},
        {"name": 'c, "d"', "x_s": None, "parts": [], "link": {"x": True}, "no": None},
    ]
    print_csv(rows)
    assert capsys.readouterr().out == ('name,x_s,parts,link.x,no\na|b\\x1b,0.123456789,"1,2",,\n"c, ""d""",,,true,\n')


@pytest.mark.parametrize("name", ["=1+1", "+1", "-2", "@SUM(A1)", "\t=1"])
def test_a_spreadsheet_computes_no_cell(capsys: pytest.CaptureFixture[str], name: str) -> None:
    print_csv([{"strategy": name, "gain": -0.5}])
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["strategy"].startswith("'")
    assert float(row["gain"]) == -0.5
