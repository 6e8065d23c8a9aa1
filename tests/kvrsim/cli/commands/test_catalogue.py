"""`kvrsim strategies`: every strategy in words, as a table, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvrsim.builder import make_scenario
from kvrsim.cli import main as cli
from kvrsim.cli.commands.catalogue import about
from kvrsim.runtime.plan import RUN_STRATEGIES
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.deploy import engines_with

ROOT = Path(__file__).parents[4]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["strategies", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = json.loads(printed(capsys, "list", "--json"))["strategies"]
    assert isinstance(found, list)
    return found


def test_all_are_listed_as_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert [one["name"] for one in found][: len(STRATEGIES)] == list(STRATEGIES)
    for one in found[: len(STRATEGIES)]:
        assert one == json.loads(printed(capsys, "show", one["name"], "--json"))
        assert all(one[key] for key in ("title", "each_rank", "communication", "holds", "source"))
        page, _, anchor = one["docs"].partition("#")
        assert (
            f"\n## {anchor.capitalize()}\n" in (ROOT / page).read_text("utf-8") if anchor else (ROOT / page).is_file()
        )
        assert one["runs_here"] == (one["name"] in RUN_STRATEGIES)
    table = printed(capsys, "list")
    assert all(f"\n{name} " in table for name in STRATEGIES)


@pytest.mark.parametrize("name", [*STRATEGIES, "tp2+zigzag", "tp2+kvr-s", "tp2+pp2+cp2"])
def test_engines_are_those_of_a_plan(name: str) -> None:
    """With a model whose context vLLM and SGLang split."""
    scenario, _ = make_scenario(model="deepseek-v3", cluster="h100-nvlink", gpus="8", ctx="8k")
    if name != "single":
        assert about(name)["engines"] == list(engines_with(get_strategy(name), scenario))


def test_a_hybrid_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = " ".join(printed(capsys, "show", "tp8+kvr-s").split())
    assert "a rank is 8 GPUs that split every matrix; a chunk whose length is searched" in text
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\nfrom kvrsim.strategies import KVR_S\nS = replace(KVR_S, name='mine')"
    )
    found = json.loads(printed(capsys, "show", f"{path}:S", "--json"))
    assert (found["name"], found["runs_here"], found["engines"], found["docs"]) == ("mine", False, [], None)


def test_tables_hold_what_json_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "list", "--format", "csv"))))
    assert [row["name"] for row in rows] == [one["name"] for one in found]
    assert [row["engines"] for row in rows] == [",".join(one["engines"]) for one in found]
    assert [row["runs_here"] for row in rows] == [str(one["runs_here"]).lower() for one in found]
    head, rule, *lines = printed(capsys, "list", "--format", "md").splitlines()
    assert head.startswith("| name | title | ")
    assert set(rule) == {"|", "-"}
    assert len(lines) == len(found)
    assert {line.count(" | ") for line in [head, *lines]} == {head.count(" | ")}
