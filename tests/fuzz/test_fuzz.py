"""Random calls, command lines and files: an answer, or one line that names a parameter. See also `make fuzz`."""

from __future__ import annotations

import time
from pathlib import Path

import fuzz_files
import pytest
from fuzz_long import FUZZERS, run_case

SEED = 20260
CASES = {"calls": 300, "commands": 60, "files": 300}
MOST_S = 8.0  # a loaded machine tries fewer


@pytest.mark.parametrize("kind", FUZZERS)
def test_an_answer_or_a_parameter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz_files.originals.cache_clear()
    until_s, tried = time.monotonic() + MOST_S, 0
    answers = set()
    for number in range(CASES[kind]):
        answers.add(run_case(kind, SEED, number))
        tried += 1
        if time.monotonic() > until_s:
            break
    assert tried >= 3
    assert len(answers) >= 2 or tried < 20  # some were answered, some refused
