"""Architectures in one file: found in the folders and by entry points of other packages, as the docs show."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest

from calibrate.reference import counted_parameters
from kvrsim.errors import InputError
from kvrsim.model import architectures
from tests.kvrsim.model.model_configs import GQA, load

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "how-to" / "own-architecture.md").read_text("utf-8")
CODE = re.search(r"```python title=\"olmoe.py\"\n(.*?)```", PAGE, re.S)
ENTRY = re.search(r"```toml\n(.*?)```", PAGE, re.S)
OLMOE: dict[str, Any] = {"model_type": "olmoe", **GQA, "num_experts": 8, "num_experts_per_tok": 2}


def example() -> str:
    assert CODE is not None
    assert len(CODE[1].splitlines()) < 80
    return CODE[1]


def install(folder: Path, code: str) -> None:
    """What pip leaves of a package: a module, and the metadata with its entry points."""
    assert ENTRY is not None
    (folder / "olmoe.py").write_text(code, "utf-8")
    metadata = folder / "olmoe-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: olmoe\nVersion: 1.0\n")
    entries = "\n".join(line.replace('"', "") for line in ENTRY[1].splitlines()[1:])
    (metadata / "entry_points.txt").write_text(f"[{architectures.ENTRY_POINTS}]\n{entries}\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("olmoe", None)
    importlib.invalidate_caches()


def test_a_file_in_the_folder_adds_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "olmoe.py").write_text(example(), "utf-8")
    before = dict(architectures._readers())
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    assert set(dict(architectures._readers())) - set(before) == {"olmoe"}
    assert load(tmp_path, OLMOE).num_parameters == counted_parameters(OLMOE)
    sys.modules.pop("kvrsim.model.architectures.olmoe")


def test_another_package_adds_a_type(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: model_type: got 'olmoe'"):
        load(tmp_path, OLMOE)
    install(folder, example())
    importlib.invalidate_caches()
    assert load(tmp_path, OLMOE).num_parameters == counted_parameters(OLMOE)


@pytest.mark.parametrize("code", ["import no_such_module", "OTHER = 3", "olmoe = 3"])
def test_a_package_without_a_reader_is_refused(folder: Path, tmp_path: Path, code: str) -> None:
    install(folder, code)
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=r"^entry point kvrsim\.architectures: olmoe: got 'olmoe:olmoe'"):
        load(tmp_path, OLMOE)


def test_each_type_has_one_reader() -> None:
    modules = [
        importlib.import_module(one.name)
        for one in walk_packages(architectures.__path__, "kvrsim.model.architectures.")
    ]
    types = [model_type for module in modules for model_type in getattr(module, "READERS", {})]
    assert sorted(types) == sorted(dict(architectures._readers()))
