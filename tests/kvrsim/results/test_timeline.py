"""Timelines: consistent spans, and a trace that Perfetto reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import kvrsim
from kvrsim.compile import build_program, columns
from kvrsim.executors.event import EventSimulation
from kvrsim.program import AllGather, AllToAll, Compute, Op, Program, RingPass, Send, host_s_of
from kvrsim.results.timeline import Span, trace_events
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from tests.building import Draws, any_rows, any_run, draws, examples, executed

NAMES = ["tsp", "kvr-e", "kvr-s", "kvr-direct", "ring", "zigzag"]  # strategies with one GPU per rank for every model


def replayed(rng: Draws, name: str, **options: Any) -> tuple[Scenario, Program, EventSimulation]:
    options = {"topologies": ("switch", "chain", "nodes", "bus")} | options
    scenario = any_run(rng, STRATEGIES[name], **options)
    program = build_program(executed(scenario, STRATEGIES[name]), columns(any_rows(rng, scenario, STRATEGIES[name], 1)))
    return scenario, program, EventSimulation(program, scenario.cluster)


def ops_of(ops: Sequence[tuple[int | None, Op]], kind: type[Any]) -> list[Any]:
    return [op for _, op in ops if isinstance(op, kind)]


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(25)
def test_spans_can_have_happened(name: str, rng: Draws) -> None:
    _, program, replay = replayed(rng, name)
    timeline = replay.timeline
    starts = [span.start_s for span in timeline.spans]
    assert starts == sorted(starts)
    assert timeline.end_s == pytest.approx(max(replay.finish_s), rel=1e-12)
    assert all(span.start_s >= 0 for span in timeline.spans)
    assert all(span.duration_s > 0 or span.kind == "transfer" for span in timeline.spans)
    if not any(host_s_of(op) for rank in range(program.num_ranks) for _, op in program.ops(rank)):
        assert not any(span.name == "host" for span in timeline.spans), "a host that takes no time delays nothing"
    slack = 1e-12 * timeline.end_s
    for rank in range(program.num_ranks):
        stream = sorted(
            (span.start_s, span.end_s) for span in timeline.spans if span.rank == rank and span.kind != "transfer"
        )
        for (_, end_s), (start_s, _) in zip(
            [(0.0, 0.0), *stream], [*stream, (replay.finish_s[rank], 0.0)], strict=True
        ):
            assert end_s == pytest.approx(start_s, abs=slack), "a compute stream does one thing at a time, without gaps"
        ops = program.ops(rank)
        device_s = sum(op.device_s.item() for _, op in ops if isinstance(op, Compute))
        assert sum(span.duration_s for span in timeline.of(rank, "compute")) >= device_s * (1 - 1e-9)
        sent = sum(op.nbytes.item() for _, op in ops if isinstance(op, Send))
        gathered = [op.nbytes.item() for _, op in ops if isinstance(op, AllGather)]
        passed = sum(op.nbytes.sum() for op in ops_of(ops, RingPass))
        rounds = sum(len(op.nbytes) for op in ops_of(ops, RingPass))
        exchanged = [nbytes for op in ops_of(ops, AllToAll) for nbytes in op.nbytes.ravel()]
        moved = [span.nbytes or 0.0 for span in timeline.of(rank, "transfer")]
        assert len(moved) == len(ops_of(ops, Send)) + len(gathered) * (program.num_ranks - 1) + rounds + len(exchanged)
        if not gathered:
            assert sum(moved) == pytest.approx(sent + passed + sum(exchanged))


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(15)
def test_a_link_carries_one_message_at_a_time(name: str, rng: Draws) -> None:
    scenario, program, replay = replayed(rng, name, num_gpus=(2, 4), topologies=("switch", "chain", "nodes"))
    slack = 1e-12 * replay.timeline.end_s
    for rank in range(program.num_ranks):
        by_link: dict[int | None, list[Span]] = {}
        for span in replay.timeline.of(rank, "transfer"):
            by_link.setdefault(span.peer, []).append(span)
        for peer, spans in by_link.items():
            assert peer is not None
            path = scenario.cluster.path(rank, peer)
            for first, second in zip(spans, spans[1:], strict=False):
                assert first.end_s <= second.start_s + slack
            for span in spans:
                assert span.nbytes is not None
                size = np.array(span.nbytes)
                gathers = span.op == "all-gather"
                want_s = float(path.gather_step_s(size, program.num_ranks) if gathers else path.busy_s(size))
                assert abs(span.duration_s - want_s) <= 1e-9 * want_s + slack


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(10)
def test_what_perfetto_needs(name: str, rng: Draws) -> None:
    """Each track has a name, an order and no overlapping spans; each message has an arrow with both ends."""
    timeline = replayed(rng, name, num_gpus=(1, 4))[2].timeline
    events = trace_events(timeline.spans, timeline.rank_names)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            tracks.setdefault((event["pid"], event["tid"]), []).append((begin, begin + length))
    for what in ("thread_name", "thread_sort_index"):
        named = [(event["pid"], event["tid"]) for event in events if event["name"] == what]
        assert len(set(named)) == len(named)
        assert set(tracks) <= set(named)
    for spans in tracks.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(begins) == set(ends)
    assert len(begins) + len(ends) == sum(event["ph"] in "sf" for event in events), "a flow has one beginning, one end"
    for ident, end in ends.items():
        for event in (begins[ident], end):
            at = round(event["ts"] * 1e3)
            assert any(begin <= at < until for begin, until in tracks[event["pid"], event["tid"]]), "bound to nothing"
        assert begins[ident]["ts"] <= end["ts"]
    moved = [span for span in timeline.spans if span.kind == "transfer"]
    assert len(moved) >= len(begins) >= sum(span.duration_s >= 1e-9 for span in moved), "a message without an arrow"
    for event, span in zip([event for event in events if event["ph"] == "X"], timeline.spans, strict=True):
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(span.duration_s * 1e6, abs=2e-3)
        assert (event["args"].get("to"), event["args"].get("bytes")) == (span.peer, span.nbytes)


def test_a_trace_says_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kvrsim", "simulate", "--ctx", "1k"])
    options = dict(strategy="kvr-e", ctx="1k", gpus=2, seed=7)
    result = kvrsim.simulate(**options, timeline=True)  # type: ignore[arg-type]
    assert result.timeline is not None
    result.timeline.write_chrome_trace(tmp_path / "trace.json", result.question)
    content = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert content == {"command": "kvrsim simulate --ctx 1k", "version": f"kvrsim {kvrsim.__version__}"} | content
    assert content.keys() == result.question.to_dict().keys() | {"command", "version"}
    assert content["cluster"] == result.cluster.describe()
    assert (content["seed"], content["context_len"], content["num_gpus"]) == (7, 1024, 2)
    result.timeline.write_chrome_trace(tmp_path / "trace.json", result.question, cluster="two CPUs", profile=None)
    measured = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert measured == {key: value for key, value in content.items() if key != "profile"} | {"cluster": "two CPUs"}
