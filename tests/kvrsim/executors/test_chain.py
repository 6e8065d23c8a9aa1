"""The recurrence of chains: rows of messages that hold both ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.engine import NO_HOST
from kvrsim.execution import place
from kvrsim.executors.chain import last_of_row, row_after
from kvrsim.executors.run import Runner, run_program
from kvrsim.program import Array
from kvrsim.strategies import STRATEGIES
from tests.building import Draws, any_engine, any_rows, any_run, draws, examples, executed
from tests.laws.test_executors import assert_executors_agree

KVR = STRATEGIES["kvr-s"]


def row_by_row(x: Array, on: Array, back: Array, periods: int) -> Array:
    """The definition of row_after, node by node."""
    now = x.copy()
    for _ in range(periods):
        before = np.concatenate([now, now[-1:]])
        for node in range(len(x)):
            now[node] = np.maximum((now[node - 1] if node else before[0]) + on[node], before[node + 1] + back[node])
    return now


@given(rng=draws())
@examples(60)
def test_rows(rng: Draws) -> None:
    """Starts of the first period may, but need not, be those of a chain whose last rank waits for no message."""
    nodes, more = rng.randint(1, 5), rng.randint(0, 6)
    on, back = (np.array([[rng.uniform(0, 3)] for _ in range(nodes)]) for _ in range(2))
    x = np.maximum.accumulate(np.array([[rng.uniform(0, 9)] for _ in range(nodes)]) - np.cumsum(on, axis=0), axis=0)
    x = row_by_row(x + np.cumsum(on, axis=0), on, back, rng.randint(0, 1))
    want = row_by_row(x, on, back, more)
    assert row_after(x, on, back, more) == pytest.approx(want, rel=1e-12)
    periods = 2 * nodes + more
    want = row_by_row(x, on, back, periods)
    assert last_of_row(x, on, back, periods) == pytest.approx(want[-1], rel=1e-12)


@given(rng=draws())
@examples(60)
def test_any_chain(rng: Draws) -> None:
    """A chain equals its program: few and many layers and ranks, uneven machines, hosts that lead or delay."""
    layers, num_gpus = rng.choice([(1, 3), (4, 30)]), rng.choice([(2, 3), (4, 12)])
    scenario = any_run(rng, KVR, topologies=("switch", "nodes"), layers=layers, num_gpus=num_gpus)
    runner, rows = Runner(executed(scenario, KVR)), any_rows(rng, scenario, KVR, 8)
    if runner.chain is None:
        return
    chunks = np.stack(columns(rows))
    finish_s, holds = runner.chain.finish_s(chunks)
    last_s, last_holds = runner.chain.finish_s(chunks, last_only=True)
    want_s = run_program(build_program(executed(scenario, KVR), list(chunks)), scenario.cluster)
    assert finish_s[:, holds] == pytest.approx(want_s[:, holds], rel=1e-11, abs=0)
    assert last_s[0] == pytest.approx(finish_s[-1], rel=1e-11, abs=0)
    assert (last_holds == holds).all()
    assert scenario.host.layer_s or scenario.host.message_s or holds.all()


@pytest.mark.parametrize("decode_step", [False, True])
@pytest.mark.parametrize(
    ("model", "profile"), [("llama-7b", "a100-eager"), ("llama-7b", "a100-flash"), ("nemotron-h-56b", "h100-flash")]
)
def test_hosts_that_are_about_as_fast_as_their_devices(model: str, profile: str, decode_step: bool) -> None:
    """Hosts delay some operations, all, or none; the last operation, a decode step, comes after all layers.

    The first layer of the last model is a recurrence, whose scan comes between the receive and the send.
    """
    scenario, _ = make_scenario(ctx=2000, gpus=3, model=model, profile=profile)
    engine = replace(any_engine(random.Random(0)), decode_step=decode_step, host=NO_HOST)
    layers = scenario.model.layers[:1] * 4
    scenario = replace(scenario, model=replace(scenario.model, layers=layers, num_hidden_layers=4), engine=engine)
    scenario = place(scenario, KVR).placed
    rows = [(700, 700, 600), (1200, 700, 100)]
    layer_s = Runner(executed(scenario, KVR)).finish_s(np.array(rows, dtype=float).T).min() / 4
    kernel_s = layer_s / sum(scenario.layer_costs()[0].kernels)
    for share in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 10.0):
        for host in (replace(NO_HOST, layer_s=share * layer_s), replace(NO_HOST, kernel_s=share * kernel_s)):
            assert Runner(executed(scenario.with_host(host), KVR)).chain is not None
            assert_executors_agree(scenario.with_host(host), KVR, rows)
