"""The runtime and the link bench where a link's first use blocks, as with NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from calibrate.measure.links import LinkBench
from kvrsim.runtime import ranks as launching
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.ranks import Launch, launch
from tests.kvrsim.runtime.ranks import nccl_rule
from tests.kvrsim.runtime.runtime_models import KINDS
from tests.planner.confirm.confirm_setup import BUSY, arguments, folder_with, said

SMALL = 2**16


@pytest.fixture
def _rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launching, "LaunchedRank", nccl_rule.RuleRank)
    return


@pytest.mark.usefixtures("_rule")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_whole_runtime(num_ranks: int) -> None:
    found = launch(nccl_rule.whole_runtime, how=Launch(num_ranks=num_ranks, timeout_s=20, deadline_s=60))[-1]
    assert len(found) >= 8
    assert [difference for difference in found if not workers.within(difference, 1e-5)] == []


@pytest.mark.usefixtures("_rule")
def test_every_strategy_with_a_chunk_a_rank() -> None:
    found = launch(nccl_rule.strategies, how=Launch(num_ranks=4, timeout_s=20, deadline_s=60))[-1]
    assert len(found) >= 12
    assert [difference for difference in found if not workers.within(difference, 1e-5)] == []


@pytest.mark.usefixtures("_rule")
def test_every_kind_of_layer() -> None:
    how = Launch(num_ranks=3, timeout_s=20, deadline_s=60)
    found = launch(nccl_rule.kinds_of_layers, ["sdpa"], how=how)[-1]
    assert len(found) == 5 * len(KINDS)
    assert [difference for difference in found if not workers.exact(difference)] == []


@pytest.mark.usefixtures("_rule")
def test_confirm(tmp_path: Path) -> None:
    few = ("--top", "2", "--repeats", "1", "--warmups", "0", "--no-virtual", *BUSY, "--json")
    code, found, errors = said(arguments(folder_with(tmp_path), "confirm", *few))
    assert code == 0, errors
    assert len(found["candidates"]) == 5


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_link_bench(num_ranks: int) -> None:
    bench = LinkBench(num_ranks=num_ranks, device_name="CPU", max_bytes=SMALL, timeout_s=30.0)
    bench._make = partial(nccl_rule.RuleLinkRank, **bench._make.keywords)
    with closing(bench):
        for point in bench.points():
            kind, _, nbytes = point.partition(":")[0], *point.rpartition(":")[1:]
            if kind in ("pairs", "gather", "issue") and int(nbytes) > SMALL // 4:
                assert min(bench.sample(point).values()) > 0


@pytest.mark.usefixtures("_rule")
@pytest.mark.parametrize("mistake", [nccl_rule.receives_first, nccl_rule.shares_a_group])
def test_the_rule_finds_what_nccl_would_not_stand(mistake: object) -> None:
    with pytest.raises(RankError):
        launch(mistake, how=Launch(num_ranks=2, timeout_s=20, deadline_s=6))  # type: ignore[arg-type]


@pytest.mark.parametrize("fine", [nccl_rule.receives_first, nccl_rule.shares_a_group])
def test_gloo_alone_would_not(fine: object) -> None:
    launch(fine, how=Launch(num_ranks=2, timeout_s=20, deadline_s=30))  # type: ignore[arg-type]
