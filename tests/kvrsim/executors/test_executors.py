"""Executors on small programs. Laws for all strategies: tests/laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch, segment_of
from kvrsim.program import Compute
from kvrsim.strategies import get_strategy
from tests.building import examples


@given(
    seconds=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20),
    clock_s=st.floats(0, 50),
    host_s=st.floats(0, 50),
)
@examples(200)
def test_operations_in_a_row_are_one_segment(seconds: list[tuple[float, float]], clock_s: float, host_s: float) -> None:
    """A segment equals `end = max(max(device, host_begin) + device_s, host_begin + host_s)`, operation by operation."""
    segment = segment_of([Compute(name="work", device_s=np.array([one]), host_s=host) for one, host in seconds])
    at_once_s = np.maximum(clock_s + segment.device_s, host_s + segment.floor_s)
    for device_s, own_host_s in seconds:
        clock_s, host_s = max(max(clock_s, host_s) + device_s, host_s + own_host_s), host_s + own_host_s
    assert at_once_s == pytest.approx(clock_s, rel=1e-12)
    assert segment.host_s + 1.0 == pytest.approx(sum(host for _, host in seconds) + 1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "model"), [("zigzag-ring", "llama-7b"), ("zigzag", "llama-7b"), ("kvr-s", "gemma-3-27b")]
)
def test_partitions_do_not_depend_on_the_others_of_their_batch(name: str, model: str) -> None:
    """A large batch leaves its last partitions to a second run; a small batch waits until all are steady."""
    scenario = make_scenario(ctx=16384, gpus=8, model=model)[0]
    chunks = np.random.default_rng(0).dirichlet(np.full(8, 50.0), size=2048) * 16384
    program = build_program(scenario, get_strategy(name), list(np.ascontiguousarray(chunks.T)))
    together_s = run_batch(program, scenario.cluster)
    parts_s = [run_batch(program.rows(rows), scenario.cluster) for rows in np.split(np.arange(2048), 8)]
    assert together_s == pytest.approx(np.concatenate(parts_s, axis=1), rel=1e-11, abs=0)
