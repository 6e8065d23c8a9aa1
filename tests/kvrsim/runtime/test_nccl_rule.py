"""The runtime and the link bench where a link's first use blocks, as with NCCL."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest

from calibrate.measure.links import LinkBench
from calibrate.measure.ranks import LinkSetup
from kvrsim.runtime import ranks
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.ranks import Launch, launch
from tests.kvrsim.runtime import nccl_rule
from tests.kvrsim.runtime.runtime_workers import exact

SMALL = 2**16


@pytest.fixture
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LaunchedRank", nccl_rule.RuleRank)


@pytest.mark.slow
@pytest.mark.usefixtures("_rule")
@pytest.mark.parametrize(
    ("num_ranks", "models"),
    [
        (2, [("llama-gqa", "sdpa")]),
        (3, [("llama-gqa", "sdpa"), ("gemma3", "sdpa"), ("nemotron_h", "sdpa"), ("deepseek_v3", "sdpa")]),
        (4, [("llama-mha", "sdpa")]),
    ],
)
def test_the_whole_runtime(num_ranks: int, models: list[tuple[str, str]]) -> None:
    results = launch(nccl_rule.whole_runtime, models, how=Launch(num_ranks=num_ranks))[-1]
    assert {name for name, *_ in results} == {name for name, _ in models}
    assert [one for one in results if not exact(one[-1])] == []


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_link_bench(num_ranks: int) -> None:
    bench = LinkBench(LinkSetup(num_ranks=num_ranks, max_bytes=SMALL), "CPU")
    bench._make = partial(nccl_rule.RuleLinkRank, **bench._make.keywords)
    with closing(bench):
        for point in bench.points():
            kind, nbytes = point.partition(":")[0], point.rpartition(":")[2]
            if kind in ("pairs", "gather", "issue") and int(nbytes) > SMALL // 4:
                assert min(bench.sample(point).values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_rule")
@pytest.mark.parametrize("mistake", [nccl_rule.receives_first, nccl_rule.shares_a_group])
def test_the_rule_finds_what_nccl_would_not_stand(mistake: object) -> None:
    with pytest.raises(RankError):
        launch(mistake, how=Launch(num_ranks=2, deadline_s=6))  # type: ignore[arg-type]


@pytest.mark.parametrize("fine", [nccl_rule.receives_first, nccl_rule.shares_a_group])
def test_gloo_alone_would_not(fine: object) -> None:
    launch(fine, how=Launch(num_ranks=2))  # type: ignore[arg-type]
