"""Transports: only data is unpickled, emulated links take their time, the backend suits the devices."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError
from kvrsim.runtime.faults import Fault, RankError
from kvrsim.runtime.plan import RankSettings
from kvrsim.runtime.ranks import launch
from kvrsim.runtime.transport import _DataUnpickler, choose_backend

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
        launch(workers.sends_a_pickle, str(trap), how=RankSettings(num_ranks=2))
    assert not trap.exists()
    with pytest.raises(FileNotFoundError):  # reading the pickle would indeed run code
        pickle.loads(pickle.dumps(workers.Evil(str(trap / "deeper"))))


def test_equal_pieces_are_gathered_without_copies(two_ranks: Callable[..., list[Any]]) -> None:
    results = two_ranks(workers.gathered)
    for even, even_scratch, uneven, uneven_scratch in results:
        assert even == [1.0, 1.0, 2.0, 2.0, 9.0]
        assert even_scratch == []
        assert uneven == [1.0, 2.0, 2.0, 2.0, 9.0]
        assert uneven_scratch == ["gathered", "piece"]


def test_direct_access_between_gpus_is_not_switched_off_where_there_is_none() -> None:
    with pytest.raises(RankError, match="host_memory: got 'gloo', accepted: ranks that have a GPU each") as error:
        launch(workers.rank_of, how=RankSettings(num_ranks=2, peer_to_peer=False))
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ([f"GPU-{number}" for number in range(16)], "nccl"),  # two nodes of 8 GPUs; a rank sees 8 or 1 of them
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),
        (["GPU-a", None], "gloo"),
        ([None, None], "gloo"),
        (["GPU-a"], "nccl"),
    ],
)
def test_nccl_where_each_rank_has_a_gpu_of_its_own(devices: list[str | None], backend: str) -> None:
    assert choose_backend(devices, None) == backend
    assert choose_backend(devices, "gloo") == "gloo"
    if backend == "nccl":
        assert choose_backend(devices, "nccl") == "nccl"
    else:
        with pytest.raises(InputError, match="accepted: gloo"):
            choose_backend(devices, "nccl")
