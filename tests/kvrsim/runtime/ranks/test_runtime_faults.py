"""A rank in trouble ends the run soon, with an error that names it."""

from __future__ import annotations

import time
from typing import Any

import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError, NotWrittenError
from kvrsim.runtime.faults import Fault, RankError, faults_of, is_out_of_memory
from kvrsim.runtime.ranks import Launch, launch

pytestmark = pytest.mark.slow

TIMEOUT_S, DEADLINE_S = 5.0, 40.0


def failing(function: Any, *arguments: Any, num_ranks: int = 2, deadline_s: float = DEADLINE_S) -> RankError:
    """The error that a launch ends in, which must come well before the deadline."""
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(function, *arguments, how=Launch(num_ranks=num_ranks, timeout_s=TIMEOUT_S, deadline_s=deadline_s))
    assert time.monotonic() - started_s < 30
    return caught.value


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_dies_is_named_with_its_layer(rank: int) -> None:
    error = failing(workers.troubled, "dies", rank, 1, num_ranks=3)
    assert (error.cause.rank, error.cause.kind, error.cause.layer) == (rank, "died", 1)
    assert f"rank {rank}, layer 1: killed by SIGKILL" in str(error)


@pytest.mark.parametrize(("strategy", "layer"), [("kvr", 0), ("kvr", 2), ("tsp", 0)])
def test_a_rank_that_dies_before_it_hands_on_a_state_is_named(strategy: str, layer: int) -> None:
    error = failing(workers.troubled, "dies", 0, layer, 1, "qwen3_next", strategy, num_ranks=3)
    assert (error.cause.rank, error.cause.kind, error.cause.layer) == (0, "died", layer)


@pytest.mark.parametrize(("strategy", "kind", "rank", "layer"), [("tp", "dies", 0, 1), ("pp", "hangs", 1, 2)])
def test_a_rank_that_fails_with_a_part_of_the_model_is_named_with_its_layer(
    strategy: str, kind: str, rank: int, layer: int
) -> None:
    error = failing(workers.troubled, kind, rank, layer, 1, "llama-gqa", strategy)
    assert (error.cause.rank, error.cause.layer) == (rank, layer)
    assert error.cause.kind == {"dies": "died", "hangs": "silent"}[kind]


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 2), (1, 3)])
def test_a_rank_that_hangs_is_named_with_its_layer(rank: int, num_ranks: int) -> None:
    error = failing(workers.troubled, "hangs", rank, 1, num_ranks=num_ranks)
    assert (error.cause.rank, error.cause.kind, error.cause.layer) == (rank, "silent", 1)
    assert any(fault.kind == "link" and f"rank {rank}" in fault.message for fault in error.faults)


def test_a_rank_that_is_late_but_not_too_late_holds_up_nothing() -> None:
    found = launch(workers.troubled, "late", 0, 1, how=Launch(num_ranks=2, timeout_s=20, deadline_s=DEADLINE_S))
    assert found == launch(workers.troubled, "not at all", 0, 1, how=Launch(num_ranks=2, deadline_s=DEADLINE_S))


def test_out_of_memory_is_said_as_such_before_the_others_lost_connections() -> None:
    error = failing(workers.troubled, "memory", 1, 2)
    assert (error.cause.rank, error.cause.kind, error.cause.layer) == (1, "memory", 2)
    assert "out of memory" in str(error)


def test_a_mistake_in_the_code_is_said_with_its_place() -> None:
    error = failing(workers.troubled, "error", 0, 0)
    assert (error.cause.rank, error.cause.kind, error.cause.layer) == (0, "error", 0)
    assert "ValueError: a shape that does not fit (runtime_workers.py" in str(error)


@pytest.mark.parametrize("what", ["plan", "model"])
def test_ranks_that_disagree_do_not_start(what: str) -> None:
    error = failing(workers.mismatched, what)
    assert {fault.kind for fault in error.faults} == {"mismatch"}
    assert error.cause.rank == 1
    assert error.cause.message.startswith(f"{what} is ")


def test_a_rank_that_never_answers_is_waited_for_until_the_deadline_only() -> None:
    launch(workers.rank_of, how=Launch(num_ranks=2, deadline_s=DEADLINE_S))  # which loads torch, once for all
    error = failing(workers.silent, 1, deadline_s=5)
    assert str(error) == "rank 1: no answer within 5 s"


def test_the_first_ranks_progress_is_heard_before_the_result() -> None:
    heard: list[tuple[int, int, str]] = []
    how = Launch(num_ranks=2, deadline_s=DEADLINE_S)
    found = launch(workers.reporting, 3, how=how, on_progress=lambda *progress: heard.append(progress))
    assert heard == [(1, 3, "steps"), (2, 3, "steps"), (3, 3, "steps")]
    assert found == [0, 1]
    assert launch(workers.reporting, 3, how=how) == [0, 1]


def test_the_likeliest_cause_comes_first() -> None:
    lost = Fault(rank=0, kind="link", message="connection closed", layer=3)
    dead = Fault(rank=2, kind="died", message="killed by SIGKILL", layer=2)
    error = RankError([lost, dead])
    assert error.cause == dead
    assert str(error) == "rank 2, layer 2: killed by SIGKILL; rank 0, layer 3: connection closed"


def test_a_full_disk_is_no_ranks_fault() -> None:
    full = NotWrittenError("t.json.search", OSError(28, "No space left on device"))
    lost = Fault(rank=1, kind="link", message="the connection was closed", layer=1)
    error = RankError([lost, *faults_of(full, 0, 1)])
    assert str(error) == "t.json.search: cannot be written (No space left on device)"
    assert error.exit_code == 74


def test_of_the_silent_the_one_that_was_waited_for_comes_first() -> None:
    silent = [Fault(rank=rank, kind="silent", message="no answer") for rank in range(3)]
    lost = Fault(rank=3, kind="link", message="nothing came from rank 2", peer=2)
    assert RankError([*silent, lost]).cause.rank == 2


def test_the_hosts_lack_of_memory_is_known_too() -> None:
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_launch_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1 rank"):
        Launch(num_ranks=0)
