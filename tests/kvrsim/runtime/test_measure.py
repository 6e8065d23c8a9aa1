"""Measured TTFTs, timelines of real prefills with the simulator's names, and virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import kvrsim
import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.exchange.chain import ChainExchange
from kvrsim.runtime.measure import _VirtualTransport, run_virtual
from kvrsim.runtime.plan import Job, ModelChoice, Report
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS

NUM_RANKS = 2
OnRanks = Callable[..., list[Any]]  # fixture two_ranks


@pytest.fixture(scope="module")
def report(two_ranks: OnRanks) -> Report:
    reports = two_ranks(workers.benched)
    assert reports[0] == reports[-1]
    return reports[-1]


def names(timeline: Timeline, rank: int) -> set[str]:
    return {span.name for kind in ("compute", "wait") for span in timeline.of(rank, kind)}  # type: ignore[arg-type]


def test_real_and_simulated_timelines_use_the_same_words(report: Report) -> None:
    for number, strategy in ((1, "tsp"), (2, "kvr-e")):
        simulated = kvrsim.simulate(ctx="1k", gpus=NUM_RANKS, strategy=strategy, timeline=True).timeline
        assert simulated is not None
        real = report.timings[number].timeline
        for rank in range(NUM_RANKS):
            only_simulated = {"host", f"send to rank {rank + 1}", "copies for the send"}
            assert names(real, rank) - only_simulated == names(simulated, rank) - only_simulated


def test_a_ranks_spans_follow_one_another_and_cover_its_prefill(report: Report) -> None:
    for timeline in [one.timeline for one in report.timings]:
        assert timeline is not None
        for rank in range(NUM_RANKS):
            kinds = ("compute", "wait")
            spans = sorted((span for kind in kinds for span in timeline.of(rank, kind)), key=lambda span: span.start_s)
            assert all(second.start_s >= first.end_s for first, second in pairwise(spans))
            if spans:
                assert sum(span.duration_s for span in spans) > 0.5 * (spans[-1].end_s - spans[0].start_s)
        assert min(span.start_s for span in timeline.spans) == 0
        layers = [span.layer for span in timeline.of(NUM_RANKS - 1, "compute") if span.name == "attention"]
        assert layers == [0, 1, 2]


def test_messages_are_as_long_as_the_prefix_they_carry(report: Report) -> None:
    transfers = list(report.timings[3].timeline.of(0, "transfer"))
    assert [(span.layer, span.peer, span.nbytes) for span in transfers] == [
        (layer, 1, 15 * 2 * 2 * 16 * 4) for layer in range(3)
    ]
    assert all(span.end_s >= span.start_s for span in transfers)
    # By the clock of the marks (on CUDA the device's), a transfer begins when its K and V have been written.
    written = {span.layer: span.end_s for span in report.timings[3].timeline.of(0, "compute") if span.name == "append"}
    assert [span.start_s for span in transfers] == [written[span.layer] for span in transfers]


def test_plans_share_their_buffers_and_compute_what_they_did_alone(two_ranks: OnRanks) -> None:
    whole = 3 * workers.CONTEXT_LEN * 2 * 2 * 16 * 4  # tsp keeps all tokens
    assert two_ranks(workers.sharing) == [(whole, True)] * 2


# Virtual ranks compute the same values as real ranks.


def virtual(name: str, kernel: Any, batch: int = 1) -> Report:
    """Measure plans on virtual ranks; models with own attention run query blocks, too."""
    model = ModelChoice(config=(CONFIGS | KINDS)[name], dtype="fp32", attention=kernel, seed=1)
    chunks = [("single", 23), ("kvr", 12, 11), ("kvr", 9, 7, 1, 6), ("tsp", 12, 11), ("tsp", 11, 1, 11)]
    plans = [workers.run_plan(strategy, *lens, batch=batch) for strategy, *lens in chunks]
    if name not in ("falcon-alibi", "gpt_oss", "deepseek_v3"):
        plans.append(workers.kvr(9, 14, batch=batch, query_blocks=((2, 3, 1), (3, 64, 2))))
    return run_virtual(_VirtualTransport(0, 1), Job(model=model, plans=tuple(plans), repeats=2, warmups=1))


@pytest.mark.parametrize(
    ("name", "kernel", "batch"),
    [
        ("llama-gqa", "eager", 1), ("llama-mha", "flash", 1), ("falcon-grouped", "sdpa", 1),
        ("falcon-alibi", "sdpa", 1), ("gemma3", "sdpa", 2), ("gpt_oss", "eager", 1), ("deepseek_v3", "flash", 1),
        ("qwen3_next", "sdpa", 2),
    ],
)  # fmt: skip
def test_logits_are_one_processs(name: str, kernel: str, batch: int) -> None:
    for timing in virtual(name, kernel, batch).timings:
        assert timing.difference is not None
        assert timing.difference.logits <= 1e-5 * max(1.0, timing.difference.logits_scale), timing.plan.label
        assert timing.difference.logits_scale > 1  # small logits would pass any tolerance


def test_every_part_of_every_layer_is_measured_on_every_rank() -> None:
    report = virtual("llama-gqa", "sdpa")
    for timing in report.timings:
        assert len(timing.parts) == 2
        for ranks in timing.parts:
            assert len(ranks) == len(timing.plan.partition.chunk_lens)
            for rank, parts in enumerate(ranks):
                append = "assemble" if timing.plan.strategy == "tsp" else "append"
                inside = {(layer, part) for layer in range(3) for part in ("qkv", append, "attention", "output+mlp")}
                ends = {(None, "embedding")} | ({(None, "head")} if rank == len(ranks) - 1 else set())
                assert set(parts) == inside | ends
                assert all(seconds >= 0 for seconds in parts.values())
    assert report.conditions["attention"] == "sdpa"


def test_a_rank_that_had_no_prefix_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ChainExchange.run

    def spoilt(self: ChainExchange, ids: Any) -> Any:
        for layer in range(3 if self.rank else 0):
            self.buffer(layer).data.zero_()
        return real(self, ids)

    monkeypatch.setattr(ChainExchange, "run", spoilt)
    kvr = virtual("llama-gqa", "sdpa").timings[1]
    assert kvr.difference is not None
    assert kvr.difference.logits > 0.1
