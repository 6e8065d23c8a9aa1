"""Values between ranks are data and nothing else; a stranger's bytes are refused."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError
from kvrsim.runtime.faults import Fault, RankError
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import _DataUnpickler

PLAN = workers.kvr(3, 4)


@pytest.mark.parametrize(
    "value", [None, 1.5, "x", [1, (2, "y")], {(None, "a"): PLAN}, (PLAN, Fault(rank=0, kind="died", message="m"))]
)
def test_data_classes_and_plain_values_travel(value: Any) -> None:
    assert _DataUnpickler(io.BytesIO(pickle.dumps(value))).load() == value


@pytest.mark.parametrize("value", [Path("x"), InputError("a", 1, "b"), launch, workers.Evil("x"), Any])
def test_other_classes_and_functions_do_not(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no data class"):
        _DataUnpickler(io.BytesIO(pickle.dumps(value))).load()


def test_what_another_rank_pickles_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "run"
    with pytest.raises(RankError, match="rank 1 has sent something unexpected"):
        launch(workers.sends_a_pickle, str(trap), how=Launch(num_ranks=2))
    assert not trap.exists()
    with pytest.raises(FileNotFoundError):  # and it would have been
        pickle.loads(pickle.dumps(workers.Evil(str(trap / "deeper"))))
