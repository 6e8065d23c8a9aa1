"""Measured TTFT, and the timeline of a real prefill with the simulator's names."""

from __future__ import annotations

from itertools import pairwise

import pytest

import kvrsim
import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.plan import Launch, Report
from kvrsim.runtime.ranks import launch

NUM_RANKS = 2


@pytest.fixture(scope="module")
def report() -> Report:
    reports = launch(workers.benched, how=Launch(num_ranks=NUM_RANKS))
    assert reports[0] == reports[-1]
    return reports[-1]


def test_every_plan_is_measured_and_its_conditions_are_told(report: Report) -> None:
    assert [timing.plan.strategy for timing in report.timings] == ["single", "tsp", "kvr", "kvr"]
    assert all(len(timing.ttft_s) == 4 and min(timing.ttft_s) > 0 for timing in report.timings)
    told = {"kvrsim", "python", "torch", "transformers", "device", "transport", "dtype", "attention"}
    assert told <= set(report.conditions)
    assert report.conditions["transport"] == "gloo"


def names(timeline: Timeline, rank: int) -> set[str]:
    return {span.name for kind in ("compute", "wait") for span in timeline.of(rank, kind)}  # type: ignore[arg-type]


def test_real_and_simulated_timelines_use_the_same_words(report: Report) -> None:
    for number, strategy in ((1, "tsp"), (2, "kvr-e")):
        simulated = kvrsim.simulate(ctx="1k", gpus=NUM_RANKS, strategy=strategy, timeline=True).timeline
        assert simulated is not None
        real = report.timings[number].timeline
        for rank in range(NUM_RANKS):
            only_under_rendezvous = {"host", f"send to rank {rank + 1}"}
            assert names(real, rank) - only_under_rendezvous == names(simulated, rank) - only_under_rendezvous


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


def test_plans_share_their_buffers_and_compute_what_they_did_alone() -> None:
    whole = 3 * workers.CONTEXT_LEN * 2 * 2 * 16 * 4  # tsp keeps all tokens
    assert launch(workers.sharing, how=Launch(num_ranks=2)) == [(whole, True)] * 2
