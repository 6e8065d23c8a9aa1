"""Strategies from other packages: found by their entry points, only where they are asked for, as the docs show."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvrsim
from kvrsim.errors import InputError
from kvrsim.strategies import STRATEGIES, get_strategy, strategy_names
from kvrsim.strategies.load import installed

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "own-strategy.md").read_text("utf-8")
CODE = re.search(r"```python title=\"my_strategies.py\"\n(.*?)```", PAGE, re.S)
ENTRY = re.search(r"```toml\n(.*?)```", PAGE, re.S)


def install(folder: Path, code: str, entry: str) -> None:
    """What pip leaves of a package: a module, and the metadata with its entry points."""
    (folder / "my_strategies.py").write_text(code, "utf-8")
    metadata = folder / "my_strategies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[kvrsim.strategies]\n{entry}\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_strategies", None)
    installed.cache_clear()
    importlib.invalidate_caches()


def example() -> tuple[str, str]:
    """The docs' strategy, and its entry point in the form of entry_points.txt."""
    assert CODE is not None
    assert ENTRY is not None
    lines = [line for line in ENTRY[1].splitlines() if "=" in line]
    return CODE[1], "\n".join(line.replace('"', "") for line in lines)


def test_the_example_of_the_docs_runs(folder: Path) -> None:
    install(folder, *example())
    assert strategy_names() == (*STRATEGIES, "kvr-window")
    plan = kvrsim.plan(ctx="4k", gpus=4, strategies=["tsp", "kvr-e", "kvr-window"])
    chain, limited = plan.strategies[1:]
    assert limited.strategy == "kvr-window"
    assert limited.ttft_s < chain.ttft_s
    runs = [kvrsim.simulate(strategy="kvr-window", ctx="4k", gpus=4, executor=kind) for kind in ("batch", "event")]
    assert runs[0].ttft_s == pytest.approx(runs[1].ttft_s, rel=1e-12)
    assert kvrsim.simulate(strategy="tp2+kvr-window", ctx="4k", gpus=4).ttft_s > 0
    alone = kvrsim.simulate(strategy="kvr-window", ctx="4k", gpus=1)
    assert alone.ttft_s == pytest.approx(kvrsim.simulate(strategy="single", ctx="4k", gpus=1).ttft_s, rel=1e-12)


def test_all_includes_what_other_packages_add(folder: Path) -> None:
    install(folder, *example())
    plan = kvrsim.plan(ctx="1k", gpus=2, strategies=["all"])
    assert "kvr-window" in [result.strategy for result in plan.strategies]


@pytest.mark.parametrize(
    ("code", "entry", "says"),
    [
        ("", "mine = nothing_there:STRATEGY", "No module named"),
        ("", "mine = my_strategies:STRATEGY", "my_strategies:STRATEGY"),
        ("STRATEGY = 1", "mine = my_strategies:STRATEGY", "a kvrsim Strategy named mine"),
        (
            "from kvrsim.strategies import STRATEGIES\nSTRATEGY = STRATEGIES['tsp']",
            "mine = my_strategies:STRATEGY",
            "named mine",
        ),
    ],
)
def test_what_is_wrong_with_an_entry_point_is_said(folder: Path, code: str, entry: str, says: str) -> None:
    install(folder, code, entry)
    with pytest.raises(InputError, match=says) as caught:
        get_strategy("mine")
    assert caught.value.parameter == "entry point kvrsim.strategies: mine"


def test_an_unknown_name_lists_all(folder: Path) -> None:
    install(folder, *example())
    with pytest.raises(InputError, match="kvr-window, tpN"):
        get_strategy("nonsense")


def test_nothing_is_looked_for_where_names_are_known() -> None:
    """importlib.metadata reads every installed package: not for a plan of kvrsim's own strategies."""
    code = (
        "import sys, kvrsim; kvrsim.plan(ctx='1k', gpus=2, strategies=['tsp', 'tp2+kvr-s', 'ring']);"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]
