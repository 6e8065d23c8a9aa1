"""Strategies from a file in the form of docs/how-to/own-strategy.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy, get_strategy

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "own-strategy.md").read_text("utf-8")
FILES = dict(re.findall(r"```python title=\"([^\"]+)\"\n(.*?)```", PAGE, re.S))
REQUESTS = "synthetic:poisson,rate=2,requests=60,context=lognormal:3k:0.5,max=8k"


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for title, code in FILES.items():
        (tmp_path / title).write_text(code, "utf-8")
    monkeypatch.chdir(tmp_path)
    return "./mine.py:KVR_ZIGZAG"


@pytest.fixture
def own(named: str) -> Strategy:
    return get_strategy(named)


def test_both_executors_agree_and_a_trace_shows_both_chains(named: str) -> None:
    runs = [kvrsim.simulate(strategy=named, ctx="6k", gpus=4, executor=kind) for kind in ("batch", "event")]
    assert runs[0].ttft_s == pytest.approx(runs[1].ttft_s, rel=1e-12)
    traced = kvrsim.simulate(strategy=named, ctx="6k", gpus=4, timeline=True).timeline
    assert traced is not None
    assert {"early attention", "late attention"} <= {span.name for span in traced.spans}
    alone = kvrsim.simulate(strategy=named, ctx="6k", gpus=1)
    assert alone.ttft_s == kvrsim.simulate(strategy="single", ctx="6k", gpus=1).ttft_s
    assert kvrsim.simulate(strategy=f"tp2+{named}", ctx="6k", gpus=4).ttft_s > 0


def test_an_object_is_as_good_as_its_file(named: str, own: Strategy) -> None:
    one, other = (kvrsim.plan(ctx="4k", gpus=2, strategies=["tsp", strategy]) for strategy in (named, own))
    assert [result.to_dict() for result in one.strategies] == [result.to_dict() for result in other.strategies]
    assert one.to_dict()["question"]["strategies"] == ["tsp", named]
    assert other.to_dict()["question"]["strategies"] == ["tsp", "kvr-zigzag"]
    assert kvrsim.simulate(strategy=own, ctx="2k", gpus=2).strategy == "kvr-zigzag"
    assert kvrsim.plan(ctx="2k", gpus=2, strategies=own).best.strategy == "kvr-zigzag"  # type: ignore[arg-type]


def test_its_chunks_are_searched(own: Strategy) -> None:
    plan = kvrsim.plan(ctx="4k", gpus=4, strategies=[own])
    even = kvrsim.simulate(strategy=replace(own, partition_rule="even"), ctx="4k", gpus=4)
    assert plan.best.ttft_s < even.ttft_s
    assert plan.search.method == "auto"
    assert plan.search.evaluations > 100
    assert plan.to_dict()["bounds"]["best"] is None  # the bound is that of KVR's chain
    grid = kvrsim.plan(ctx="1k", gpus=2, strategies=[own], method="grid")
    assert grid.search.method == "grid"


def test_a_table_of_it_says_whose_it_is(named: str, own: Strategy) -> None:
    table = kvrsim.build_table(ctx="1k,2k,3k", gpus=[2], strategy=named)
    assert table.setting.strategy == "kvr-zigzag"
    entry = table.of(2)[1]
    assert entry.gap is None
    looks_up = replace(own, name="kvr-zigzag-p", partition_rule="table", looks_up="kvr-zigzag")
    plan = kvrsim.plan(ctx="2k", gpus=2, strategies=[looks_up], table=table)
    assert plan.best.partition == entry.partition
    assert not [note for note in plan.warnings if "another setting" in note]
    other = kvrsim.simulate(strategy="kvr-p", ctx="2k", gpus=2, table=table)
    assert any("strategy kvr-zigzag, not kvr-s" in note for note in other.warnings)


@pytest.mark.slow
def test_a_table_of_a_file_is_built_by_several_processes(named: str, tmp_path: Path) -> None:
    command = ["table", "build", "--strategy", named, "--gpus", "2", "--ctx", "512,1k", "--jobs", "2", "-o", "t.json"]
    assert cli.main(command) == 0
    assert json.loads((tmp_path / "t.json").read_text())["setting"]["strategy"] == "kvr-zigzag"
    assert cli.main(["table", "show", "t.json"]) == 0


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("./file.py:A", "B = 1", "FILE.py:NAME with the name of a Strategy; file.py has none"),
        ("./file.py:KVR", FILES["mine.py"], "file.py has KVR_ZIGZAG"),
        ("./file.py:A", "A = 1", "which a int is not"),
        ("./file.py:A", "A = (", "line 1 of file.py: SyntaxError"),
        ("./file.py:A", "import sys\nsys.exit(3)", "line 2 of file.py: SystemExit: 3"),
        ("./file.py:A", "from kvrsim.strategies import *\nA = KVR_S.__class__(name='a b')", "TypeError"),
    ],
)
def test_a_wrong_file_is_said_in_one_line(
    text: str,
    code: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if code is not None:
        (tmp_path / "file.py").write_text(code)
    for command in (["simulate", "--strategy", text], ["plan", "--strategies", f"tsp,{text}"]):
        assert cli.main([*command, "--gpus", "2", "--ctx", "1k"]) == 2
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1
        assert says in error[0]
        assert command[1] in error[0]


def test_a_layer_that_raises_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.py").write_text(FILES["mine.py"].replace("step.qkv(rank)", "step.qvk(rank)"))
    assert cli.main(["simulate", "--strategy", "./file.py:KVR_ZIGZAG", "--gpus", "2", "--ctx", "1k"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert "kvr-zigzag" in error[0]
    assert "file.py" in error[0]
    assert "qvk" in error[0]


def test_names_are_unique() -> None:
    with pytest.raises(InputError, match="no strategy of kvrsim has"):
        kvrsim.plan(ctx="1k", gpus=2, strategies=[replace(STRATEGIES["ring"], name="tsp")])
    mine = replace(KVR_S, name="mine")
    with pytest.raises(InputError, match="a name each"):
        kvrsim.plan(ctx="1k", gpus=2, strategies=[mine, replace(mine, partition_rule="even")])
    for wrong in ({"name": "a b"}, {"name": ""}, {"partition_rule": "searched"}):
        with pytest.raises(InputError):
            replace(KVR_S, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["tsp", "kvr-e", "tp2+kvr-s", "pp", 5])
def test_tables_and_fleets_take_searched_strategies_over_single_gpus(strategy: object) -> None:
    with pytest.raises(InputError) as caught:
        kvrsim.build_table(ctx="1k", gpus=[2], strategy=strategy)  # type: ignore[arg-type]
    assert caught.value.parameter == "strategy"
