"""Made-up tables in the folder layout of the package aiconfigurator-core."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def perf_table(folder: Path, place: str, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a table to a place such as t1/gemm/vllm/1.0/gemm; return the folder of the unpacked package."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    root = folder / "aiconfigurator_core"
    path = root / f"systems/data/{place}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(list(rows)).to_parquet(path)
    return root


def at(source: str, root: Path) -> str:
    """A source such as aiconfigurator:t1/vllm that reads from the folder of an unpacked package."""
    word, _, rest = source.partition(":")
    return f"{word}:{root}:{rest}"
