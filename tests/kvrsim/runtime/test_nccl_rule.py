"""The runtime and the link bench also work if the first use of a link blocks, as with NCCL."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from calibrate.measure.links import LinkBench
from calibrate.measure.ranks import LinkSetup
from kvrsim.runtime import ranks
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.plan import RankSettings
from kvrsim.runtime.ranks import launch
from kvrsim.runtime.transport import BLOCKS_VARIABLE, MAX_BLOCKS, LinkGroups
from tests.kvrsim.runtime import nccl_rule
from tests.kvrsim.runtime.runtime_workers import exact

SMALL = 2**16


@pytest.fixture
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LaunchedRank", nccl_rule.rule_rank)


@pytest.mark.slow
@pytest.mark.usefixtures("_rule")
@pytest.mark.parametrize(("num_ranks", "name"), [(2, "llama-gqa"), (3, "nemotron_h")])
def test_the_whole_runtime(num_ranks: int, name: str) -> None:
    results = launch(nccl_rule.whole_runtime, [(name, "sdpa")], how=RankSettings(num_ranks=num_ranks))[-1]
    assert results
    assert [one for one in results if not exact(one[-1])] == []


@pytest.mark.slow
def test_the_link_bench() -> None:
    bench = LinkBench(LinkSetup(num_ranks=3, max_bytes=SMALL), "CPU")
    bench._make = partial(nccl_rule.rule_link_rank, **bench._make.keywords)
    with closing(bench):
        for point in bench.points():
            if point.kind in ("pairs", "gather", "issue") and point.nbytes > SMALL // 4:
                assert min(bench.sample(point).values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_rule")
def test_the_rule_finds_what_nccl_would_not_stand() -> None:
    with pytest.raises(RankError):
        launch(nccl_rule.receives_first, how=RankSettings(num_ranks=2, deadline_s=6))


@pytest.mark.parametrize(("variable", "blocks"), [(None, MAX_BLOCKS), ("24", 24), ("many", MAX_BLOCKS)])
def test_messages_and_collectives_have_equal_limits(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, blocks: int
) -> None:
    """Options of NCCL groups are tested without NCCL."""
    monkeypatch.setenv(BLOCKS_VARIABLE, variable or "")
    made: list[tuple[list[int], str, timedelta, Any]] = []

    def new_group(ranks: list[int], *, backend: str, timeout: timedelta, pg_options: Any = None) -> tuple[int, ...]:
        made.append((ranks, backend, timeout, pg_options))
        return tuple(ranks)

    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    LinkGroups(rank=0, backend="nccl", device="cuda:0", edges=[(0, 1), (1, 0)], gathers=[range(2)], timeout_s=8.0)
    assert [(ranks, backend, timeout) for ranks, backend, timeout, _ in made] == [
        ([0, 1], "nccl", timedelta(seconds=8))
    ] * 3
    *edges, gather = (one for *_, one in made)
    assert all(one.is_high_priority_stream for one in edges)
    assert not gather.is_high_priority_stream
    assert {one.config.max_ctas for one in (*edges, gather)} == {blocks}
    assert os.environ[BLOCKS_VARIABLE] == str(blocks)


def test_an_older_torch_gathers_by_its_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.13 has all_gather_into_tensor only."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **settings: tuple(ranks))
    monkeypatch.delattr(dist, "all_gather_single")
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda whole, piece, group: calls.append(str(group)))
    links = LinkGroups(rank=0, backend="gloo", device="cpu", edges=[], gathers=[range(2)], timeout_s=8.0)
    links.all_gather(range(2), torch.zeros(2), torch.zeros(1))
    assert calls == ["(0, 1)"]
