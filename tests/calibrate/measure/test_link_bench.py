"""What there is to time about links, and timing it between real processes over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.measure.links import LinkBench, counts_to, link_points, patterns, sizes_to
from kvrsim.errors import InputError, KvrsimError

ROOT = Path(__file__).resolve().parents[3]
SMALL = 2**16


# What there is to time.


@given(num_ranks=st.integers(2, 9), max_bytes=st.integers(1024, 2**30), backend=st.sampled_from(["gloo", "nccl"]))
def test_points_are_what_their_keys_say(num_ranks: int, max_bytes: int, backend: str) -> None:
    points = link_points(num_ranks, backend, max_bytes)
    assert len({point.key for point in points}) == len(points)
    first = [point for point in points if point.kind == "send" and set(point.flows[0]) == {0, 1}]
    others = [point for point in points if point.kind in ("send", "pairs") and point not in first]
    assert all(points.index(one) < points.index(other) for one in first for other in others), "a pair at all sizes"
    sends = {point.flows[0] for point in points if point.kind == "send"}
    assert len(sends) == num_ranks * (num_ranks - 1)
    for point in points:
        assert set(point.ranks) <= set(range(num_ranks))
        assert 0 < point.nbytes <= max_bytes
        assert point.kind != "gather" or point.nbytes % point.num_ranks == 0
        assert point.kind != "pairs" or point.nbytes * 16 >= max_bytes


@given(num_ranks=st.integers(2, 32))
def test_no_rank_sends_or_receives_two_messages_at_once(num_ranks: int) -> None:
    for flows in patterns(num_ranks):
        assert len({src for src, _ in flows}) == len({dst for _, dst in flows}) == len(flows) > 1


def test_sizes_and_counts() -> None:
    assert sizes_to(2**16) == [2**10, 2**12, 2**14, 2**16]
    assert sizes_to(5000) == [1024, 4096, 5000]
    assert (counts_to(2), counts_to(6), counts_to(8)) == ([2], [2, 4, 6], [2, 4, 8])
    assert patterns(2) == [((0, 1), (1, 0))]
    assert ((0, 1), (2, 3)) in patterns(4)
    assert ((0, 2), (1, 3)) in patterns(4)


def test_what_is_no_point_is_refused() -> None:
    bench = LinkBench(num_ranks=2, device_name="made")
    for key in ("", "send:0>2:1024", "gather:gloo:8"):
        with pytest.raises(InputError, match="point: got"):
            bench.sample(key)


def test_rows_are_medians_and_interquartile_ranges() -> None:
    bench = LinkBench(num_ranks=2, device_name="made")
    pair = [{"0>1": second, "1>0": 2 * second} for second in (1.0, 2.0, 3.0, 4.0, 9.0)]
    rows = bench.rows({"pairs:0>1+1>0:67108864": pair, "gather:gloo:2:1024": [{"all_gather": 5.0}]})
    assert [(row.operation, row.src, row.dst, row.messages, row.ranks, row.nodes) for row in rows] == [
        ("all_gather", None, None, 1, 2, 1),
        ("send_recv", 0, 1, 2, 2, 1),
        ("send_recv", 1, 0, 2, 2, 1),
    ]
    assert [(row.median_s, row.spread_s) for row in rows] == [(5.0, None), (3.0, 2.0), (6.0, 4.0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 1}, "num_ranks: got '1'"),
        ({"backend": "mpi"}, "backend: got 'mpi', accepted: gloo, nccl"),
        ({"backend": "nccl"}, "device: got 'cpu', accepted: cuda with nccl"),
        ({"max_bytes": 7}, "max_bytes: got '7'"),
        ({"timeout_s": 0.0}, "timeout_s: got '0.0'"),
    ],
)
def test_what_cannot_be_timed_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinkBench(**({"num_ranks": 2, "device_name": "made"} | settings))


def test_points_of_other_benches_are_refused() -> None:
    bench = LinkBench(num_ranks=2, device_name="made", max_bytes=SMALL)
    with pytest.raises(InputError, match="a point of 2 ranks over gloo"):
        bench.sample("send:0>7:1024")


# Real processes.


def gloo(timeout_s: float = 30.0) -> LinkBench:
    pytest.importorskip("torch")
    return LinkBench(num_ranks=2, device_name="CPU", max_bytes=SMALL, timeout_s=timeout_s)


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process that is not waited for ends in time; zombies have."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_gloo_is_timed() -> None:
    bench = gloo()
    try:
        samples = {point: [bench.sample(point) for _ in range(3)] for point in bench.points()}
        rows = bench.rows(samples)
        pids = bench.pids()
    finally:
        bench.close()
    assert all(gone(pid) for pid in pids)
    assert len(rows) == len(samples) + sum(point.startswith("pairs") for point in samples)  # a row a message
    assert {(row.operation, row.kernel) for row in rows} == {
        ("send_recv", "gloo"),
        ("all_gather", "gloo"),
        ("all_gather", "gloo_p2p_ring"),
        ("all_reduce", "gloo"),
        ("all_reduce", "gloo_p2p_ring"),
        ("host_message", "gloo"),
    }
    assert all(1e-6 < row.median_s < 5.0 for row in rows)
    assert {row.nodes for row in rows if row.operation != "host_message"} == {1}
    assert all(bench.expected_s(point) > 0 for point in samples)


def test_a_rank_that_dies_is_named() -> None:
    bench = gloo()
    try:
        os.kill(bench.pids()[1], signal.SIGKILL)
        with pytest.raises(KvrsimError, match="rank 1: killed by SIGKILL"):
            bench.sample("send:0>1:1024")
        with pytest.raises(KvrsimError, match="the ranks have ended"):
            bench.sample("send:0>1:1024")
    finally:
        bench.close()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_in_time() -> None:
    bench = gloo(timeout_s=4.0)
    try:
        first, second = bench.pids()
        os.kill(second, signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(KvrsimError, match=r"rank 1: no answer.*; it is stopped"):
            bench.sample("send:0>1:1024")
        assert time.monotonic() - started_s < 4.0 + 5.0  # and what it takes to end it
        assert gone(first)
        assert gone(second)
    finally:
        bench.close()


BENCH = """
import signal, time
from calibrate.measure.links import LinkBench

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
if __name__ == "__main__":
    bench = LinkBench(num_ranks=2, device_name="CPU", max_bytes=2**16)
    try:
        print(bench.pool._folder, *bench.pids(), flush=True)
        while True:
            bench.sample("send:0>1:1024")
    except KeyboardInterrupt:
        bench.close()
        print("closed", flush=True)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A bench in a process of its own, which is the first of its group, as a command in a terminal is."""
    pytest.importorskip("torch")
    script = tmp_path / "bench.py"
    script.write_text(BENCH, "utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def started(process: subprocess.Popen[str]) -> tuple[Path, list[int]]:
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    time.sleep(0.2)
    return Path(folder), [int(pid) for pid in pids]


def test_ranks_end_with_a_parent_that_is_killed(running: subprocess.Popen[str]) -> None:
    folder, pids = started(running)
    running.kill()
    assert all(gone(pid) for pid in pids)
    assert not folder.exists()


@pytest.mark.slow
def test_an_interrupt_ends_all_of_them_in_peace(running: subprocess.Popen[str]) -> None:
    folder, pids = started(running)
    os.killpg(running.pid, signal.SIGINT)
    said, complained = running.communicate(timeout=20)
    assert (said, complained, running.returncode) == ("closed\n", "", 0)
    assert all(gone(pid) for pid in pids)
    assert not folder.exists()
