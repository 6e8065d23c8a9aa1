"""Random calls, commands and files give a result or a one-line error that names a parameter. See also `make fuzz`."""

from __future__ import annotations

import time
from pathlib import Path

import fuzz_files
import pytest
from fuzz_long import FUZZERS, run_case

SEED = 20260
CASES = {"calls": 300, "commands": 60, "files": 300}
LEAST = 12  # number of cases that every machine runs; with LEAST cases, some succeed and others are refused
ENOUGH_S = 2.0  # after this time no more cases run than LEAST; `make fuzz` runs many


@pytest.mark.parametrize("kind", FUZZERS)
def test_an_answer_or_a_parameter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz_files.originals.cache_clear()
    until_s = time.monotonic() + ENOUGH_S
    answers = set()
    for number in range(CASES[kind]):
        if number >= LEAST and time.monotonic() > until_s:
            break
        answers.add(run_case(kind, SEED, number))
    assert len(answers) >= 2  # some cases succeed, others are refused
