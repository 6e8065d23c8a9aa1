"""The page lists launches that an engine refuses or lays out differently; a small script replaces the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrsim.errors import InputError
from planner.deploy_engines import deploy_engine
from validate import engine_flags
from validate.engine_flags import launches, page, resolve_all

SCRIPT = """
import json, sys
asked = json.load(sys.stdin)["launches"]
flags = [dict(zip(one["args"][1::2], one["args"][2::2])) for one in asked]
tensor = [int(one.get("--tensor-parallel-size", 1)) for one in flags]
answers = [{"refused": "ValueError: odd"} if one == 1 else {"tensor": one, "data": 3} for one in tensor]
print(json.dumps({"version": "1", "answers": answers}))
"""


def test_what_an_engine_makes_of_a_launch_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "resolve_launches.py").write_text(SCRIPT)
    monkeypatch.setattr(engine_flags, "__file__", str(tmp_path / "engine_flags.py"))
    two = [
        one
        for one in launches("vllm")
        if one[0] in ("llama-3.1-8b, h100-nvlink, single", "gpt-oss-120b, h100-nvlink, tp")
    ]
    monkeypatch.setattr(engine_flags, "launches", lambda _: two)
    result = resolve_all(deploy_engine("vllm"), sys.executable)
    assert result.refused == {"llama-3.1-8b, h100-nvlink, single": "ValueError: odd"}
    assert result.differs == {"gpt-oss-120b, h100-nvlink, tp": "data 3, not 1"}
    assert "- vllm, llama-3.1-8b, h100-nvlink, single: ValueError: odd" in page([result])


def test_an_interpreter_without_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "resolve_launches.py").write_text("import an_engine")
    monkeypatch.setattr(engine_flags, "__file__", str(tmp_path / "engine_flags.py"))
    monkeypatch.setattr(engine_flags, "launches", lambda _: [])
    with pytest.raises(InputError, match=r"an interpreter with vllm installed.*No module named 'an_engine'"):
        resolve_all(deploy_engine("vllm"), sys.executable)
