"""Measured TTFT, and the timeline of a real prefill in the simulator's words."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

import kvrsim
import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.bench import BenchReport
from kvrsim.runtime.hooks import Mark
from kvrsim.runtime.host import HostLoad
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.trace import RankTrace, Sent, timeline_of

NUM_RANKS = 2


@pytest.fixture(scope="module")
def report() -> BenchReport:
    reports = launch(workers.benched, how=Launch(num_ranks=NUM_RANKS, timeout_s=20, deadline_s=55))
    assert reports[0] == reports[-1]
    return reports[-1]


def test_every_plan_is_measured_and_its_conditions_are_told(report: BenchReport) -> None:
    assert [timing.plan.strategy for timing in report.timings] == ["single", "tsp", "kvr", "kvr"]
    assert all(len(timing.ttft_s) == 4 and min(timing.ttft_s) > 0 for timing in report.timings)
    assert all(len(timing.other_cores) == 4 for timing in report.timings)
    told = {"kvrsim", "python", "torch", "transformers", "device", "transport", "dtype", "attention", "repetitions"}
    assert told <= set(report.conditions)
    assert report.conditions["transport"] == "gloo"


def test_every_round_times_the_ranks_side_by_side(report: BenchReport) -> None:
    assert len(report.drift_s) == 4
    assert all(seconds > 0 for seconds in report.drift_s)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell")
def test_own_work_is_not_others_work() -> None:
    load = HostLoad()
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 0.5:
        pass
    asleep = load.other_cores(time.process_time())
    assert asleep is not None
    assert 0 <= asleep < (os.cpu_count() or 1)
    begun_s, others = time.monotonic(), HostLoad()
    others.other_cores(0.0)
    while time.monotonic() < begun_s + 0.5:
        pass
    busy = others.other_cores(0.0)  # as if this process were another
    assert busy is not None
    assert busy > 0.5


def names(timeline: Timeline, rank: int) -> set[str]:
    return {span.name for kind in ("compute", "wait") for span in timeline.of(rank, kind)}  # type: ignore[arg-type]


def test_real_and_simulated_timelines_use_the_same_words(report: BenchReport) -> None:
    for number, strategy in ((1, "tsp"), (2, "kvr-e")):
        simulated = kvrsim.simulate(ctx="1k", gpus=NUM_RANKS, strategy=strategy, timeline=True).timeline
        assert simulated is not None
        real = report.timelines[number]
        for rank in range(NUM_RANKS):
            only_under_rendezvous = {"host", f"send to rank {rank + 1}"}
            assert names(real, rank) - only_under_rendezvous == names(simulated, rank) - only_under_rendezvous


def test_a_ranks_spans_follow_one_another_and_cover_its_prefill(report: BenchReport) -> None:
    for timeline in report.timelines:
        for rank in range(NUM_RANKS):
            kinds = ("compute", "wait")
            spans = sorted((span for kind in kinds for span in timeline.of(rank, kind)), key=lambda span: span.start_s)
            assert all(second.start_s >= first.end_s for first, second in pairwise(spans))
            if spans:
                assert sum(span.duration_s for span in spans) > 0.5 * (spans[-1].end_s - spans[0].start_s)
        assert min(span.start_s for span in timeline.spans) == 0
        layers = [span.layer for span in timeline.of(NUM_RANKS - 1, "compute") if span.name == "attention"]
        assert layers == [0, 1, 2]


def test_messages_are_as_long_as_the_prefix_they_carry(report: BenchReport) -> None:
    transfers = list(report.timelines[3].of(0, "transfer"))
    assert [(span.layer, span.peer, span.nbytes) for span in transfers] == [
        (layer, 1, 15 * 2 * 2 * 16 * 4) for layer in range(3)
    ]
    assert all(span.end_s >= span.start_s for span in transfers)
    # By the clock of the marks, which on CUDA is the device's: a transfer begins when its K and V are there.
    written = {span.layer: span.end_s for span in report.timelines[3].of(0, "compute") if span.name == "append"}
    assert [span.start_s for span in transfers] == [written[span.layer] for span in transfers]


def test_marks_become_spans() -> None:
    def marks(*moments: tuple[str, int | None, float]) -> tuple[Mark, ...]:
        first_s = moments[0][2]
        return tuple(Mark(name=name, layer=layer, device_s=at - first_s, host_s=0.0) for name, layer, at in moments)

    first = RankTrace(
        rank=0,
        start_s=10.0,
        marks=marks(
            ("start", None, 10.0), ("layer", 0, 11.0), ("update", 0, 12.0), ("send", 0, 13.0), ("updated", 0, 13.5),
            ("output", 0, 14.0), ("layer_end", 0, 15.0), ("token", None, 15.0),
        ),
        sends=(Sent(layer=0, nbytes=64.0, dst=1),),
    )  # fmt: skip
    second = RankTrace(
        rank=1,
        start_s=10.5,
        marks=marks(
            ("start", None, 10.5), ("layer", 0, 11.0), ("update", 0, 12.0), ("wait", 0, 12.5), ("received", 0, 14.0),
            ("updated", 0, 14.0), ("output", 0, 16.0), ("layer_end", 0, 17.0), ("token", None, 18.0),
        ),
        receipts=(0,),
        gives_token=True,
    )  # fmt: skip
    timeline = timeline_of("kvr", [first, second])
    found = {(span.rank, span.name): (span.layer, span.kind, span.start_s, span.end_s) for span in timeline.spans}
    assert found == {
        (0, "embedding"): (None, "compute", 0.0, 1.0),
        (0, "qkv"): (0, "compute", 1.0, 2.0),
        (0, "append"): (0, "compute", 2.0, 3.0),
        (0, "send to rank 1"): (0, "wait", 3.0, 3.5),
        (0, "KV 0→1"): (0, "transfer", 3.0, 4.0),
        (0, "attention"): (0, "compute", 3.5, 4.0),
        (0, "output+mlp"): (0, "compute", 4.0, 5.0),
        (1, "embedding"): (None, "compute", 0.5, 1.0),
        (1, "qkv"): (0, "compute", 1.0, 2.0),
        (1, "append"): (0, "compute", 2.0, 2.5),
        (1, "KV from rank 0"): (0, "wait", 2.5, 4.0),
        (1, "attention"): (0, "compute", 4.0, 6.0),
        (1, "output+mlp"): (0, "compute", 6.0, 7.0),
        (1, "head"): (None, "compute", 7.0, 8.0),
    }


def test_layers_with_a_state_and_without_attention_are_told_in_the_simulators_words() -> None:
    report = launch(workers.benched_kind, "nemotron_h", how=Launch(num_ranks=2, timeout_s=20, deadline_s=55))[-1]
    assert report.conditions["handed on"] == "1 layer: K and V of all tokens; 2 layers: a state"
    tsp, kvr = report.timelines
    inside = {0: {"qkv", "scan", "output+mlp"}, 1: {"qkv", "append", "attention", "output+mlp"}, 2: {"output+mlp"}}
    inside |= {3: inside[0], 4: inside[2]}
    for timeline, gathered in ((tsp, "assemble"), (kvr, "append")):
        for rank in range(2):
            spans = list(timeline.of(rank, "compute"))
            found = {layer: {span.name for span in spans if span.layer == layer} for layer in inside}
            named = {layer: {gathered if name == "append" else name for name in inside[layer]} for layer in inside}
            assert found == named
        assert {(span.layer, span.op) for span in timeline.of(1, "wait") if span.name != "all-gather"} >= {(0, "state")}
    state_bytes = (4 * 8 * 16 + 96 * 3) * 4
    sent = {(span.layer, span.name, span.nbytes) for span in kvr.of(0, "transfer")}
    kv = (1, "KV 0→1", 15 * 2 * 2 * 16 * 4)
    assert sent == {(0, "state 0→1", state_bytes), kv, (3, "state 0→1", state_bytes)}
    assert {span.name for span in tsp.of(0, "transfer")} == {"state 0→1"}
