"""Random calls, commands and files give a result or a one-line error that names a parameter. See also `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import fuzz_files
import pytest
from fuzz_long import FUZZERS, run_case

SEED = 20260
CASES = {"calls": 30, "commands": 30, "files": 60}  # `make fuzz` runs many


@pytest.mark.parametrize("kind", FUZZERS)
def test_an_answer_or_a_parameter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz_files.originals.cache_clear()
    answers = {run_case(kind, SEED, number) for number in range(CASES[kind])}
    assert len(answers) >= 2  # some cases succeed, others are refused
