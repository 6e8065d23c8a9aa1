"""Traffic beside the ranks: random pairs of neighbours, until the prefills end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvrsim.errors import InputError
from kvrsim.hardware import LinkSpec
from kvrsim.runtime import sidecar
from kvrsim.runtime.faults import Fault, RankError
from kvrsim.runtime.plan import RankSettings
from kvrsim.runtime.sidecar import Sidecar
from kvrsim.runtime.transport import DistributedTransport

MIB = 2**20
ENOUGH = 60  # exchanges after which each pair of four ranks has had its turn


class CountingPool:
    """Stand-in of a pool: it counts the exchanges of each pair, and fails after a given number of them."""

    last: CountingPool
    fails_after = 10**9

    def __init__(self, num_ranks: int, make: Callable[..., Any], *, start_s: float) -> None:
        CountingPool.last = self
        self.pairs: list[tuple[int, int]] = []
        self.enough = threading.Event()
        self.is_closed = False

    def ask(self, ranks: Sequence[int], command: tuple[str, dict[str, Any]], timeout_s: float) -> None:
        first, second = ranks
        assert command[1]["first"] == first
        assert not self.is_closed
        self.pairs.append((first, second))
        if len(self.pairs) >= self.fails_after:
            self.enough.set()
            raise RankError([Fault(rank=first, kind="link", message="no answer")])
        if len(self.pairs) >= ENOUGH:
            self.enough.set()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "RankPool", CountingPool)


def test_pairs_of_neighbours_take_turns_until_the_context_ends() -> None:
    with Sidecar(RankSettings(num_ranks=4), MIB, seed=0) as traffic:
        pool = CountingPool.last
        pool.enough.wait()
    assert pool.is_closed
    assert set(pool.pairs) == {(0, 1), (1, 2), (2, 3)}
    assert traffic.messages >= len(pool.pairs)
    assert "messages of 1.00 MiB in both directions between a random pair" in traffic.conditions()["side traffic"]


def test_traffic_that_fails_is_an_error_of_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingPool, "fails_after", 1)
    with pytest.raises(RankError, match="no answer"), Sidecar(RankSettings(num_ranks=2), MIB, seed=0):
        CountingPool.last.enough.wait()
    with pytest.raises(ValueError, match="of the ranks"), Sidecar(RankSettings(num_ranks=2), MIB, seed=0):
        CountingPool.last.enough.wait()
        raise ValueError("of the ranks")


def test_traffic_needs_two_ranks_and_real_links() -> None:
    link = LinkSpec(name="slow", bandwidth_bytes_per_s=1e9, latency_s=0.0, source="a test")
    for how, accepted in (
        (RankSettings(num_ranks=1), "at least 2 ranks"),
        (RankSettings(num_ranks=2, link=link), "real links"),
    ):
        with pytest.raises(InputError, match=accepted):
            Sidecar(how, MIB, seed=0)


def test_nccl_is_told_to_send_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    transport: Any = SimpleNamespace(backend="nccl", name="nccl")
    DistributedTransport._send_through_host_memory(transport)
    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    assert transport.name == "nccl, through host memory"
