"""A layer that runs during a pending receive: measured on two ranks, fitted, and used in plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from calibrate.fit.elementwise import fit_host, fit_pending_share
from calibrate.measure.compute import compute_rows
from calibrate.measure.forward import ComputeSetup, Point
from calibrate.measure.ranks import PendingRanks
from kvrsim.compile import build_program
from kvrsim.execution import place
from kvrsim.executors.batch import run_batch
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import load_profile
from kvrsim.model.load import read_config
from kvrsim.program import Compute, Program, Send
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from tests.building import examples, executed
from tests.building.measurements import row as measured

# -- A layer during a pending receive: measured on two ranks, fitted, and used where a rank receives.


def test_the_share_is_what_the_layer_loses_of_its_rate() -> None:
    rows = [measured("layer_alone", 3e-3, chunk=512, prefix=0), measured("layer_pending", 4e-3, chunk=512, prefix=0)]
    assert fit_pending_share(rows) == pytest.approx(0.25)
    assert fit_pending_share([]) == 0.0
    assert fit_pending_share([measured("layer_pending", 4e-3, chunk=64, prefix=0), rows[0]]) == 0.0, "of another shape"
    faster = [
        measured("layer_alone", 3e-3, chunk=512, prefix=0),
        measured("layer_pending", 2.9e-3, chunk=512, prefix=0),
    ]
    assert fit_pending_share(faster) == 0.0, "waiting makes nothing faster"


def test_a_message_takes_the_host_as_long_as_was_measured() -> None:
    layers = [measured("host_layer", 1e-3, dtype=None)]
    rates, operation = fit_host(layers, [], [measured("host_message", 4e-5, dtype=None)])
    assert (rates.message_s, rates.gather_piece_s) == (pytest.approx(4e-5), pytest.approx(8e-5))
    assert operation.num_rows == 2
    gathers = [measured("host_collective", 6e-5, dtype=None, ranks=2)]
    assert fit_host(layers, gathers, [])[0].gather_piece_s == pytest.approx(6e-5)


def scenario_of(gpus: int, share: float = 0.0, message_s: float = 0.0) -> Scenario:
    shipped = load_profile("a100-eager")
    links = replace(shipped.links, pending_share=share, sends="overlap")
    profile = replace(shipped, links=links, host=replace(shipped.host, message_s=message_s))
    return kvrsim.make_scenario(ctx="8k", gpus=gpus, profile=profile, cluster="a100-nvlink")[0]


def even(scenario: Scenario, strategy: str) -> Program:
    chunks = Partition.even(scenario.request.new_tokens, scenario.num_gpus).chunk_lens
    return build_program(executed(scenario, STRATEGIES[strategy]), [np.array([float(chunk)]) for chunk in chunks])


def layer_s(program: Program, rank: int) -> float:
    return sum(float(op.device_s[0]) for op in program.layers[0][rank] if isinstance(op, Compute))


@pytest.mark.parametrize("strategy", ["kvr-e", "kvr-direct"])
def test_ranks_that_receive_compute_slower_and_the_first_one_does_not(strategy: str) -> None:
    plain, slowed = (even(scenario_of(4, share), strategy) for share in (0.0, 0.25))
    assert layer_s(slowed, 0) == layer_s(plain, 0)
    for rank in (1, 2, 3):
        assert layer_s(slowed, rank) == pytest.approx(layer_s(plain, rank) / 0.75)


def simulated_s(scenario: Scenario, strategy: str) -> float:
    one = place(scenario, STRATEGIES[strategy]).placed
    return float(run_batch(even(one, strategy), one.cluster)[-1, 0])


@given(st.floats(0.0, 0.6), st.floats(0.0, 1e-4))
@examples(25)
def test_a_chain_is_slower_by_at_most_what_its_ranks_lose(share: float, message_s: float) -> None:
    plain, slowed = scenario_of(4), scenario_of(4, share, message_s)
    before_s, after_s = simulated_s(plain, "kvr-e"), simulated_s(slowed, "kvr-e")
    calls = 4 * 2 * plain.model.num_hidden_layers * message_s
    assert before_s * (1 - 1e-12) <= after_s <= before_s / (1 - share) + calls + 1e-12


def with_pending_sends(program: Program, scenario: Scenario, share: float) -> tuple[float, float]:
    """TTFT of a chain, and the seconds in which sends wait, if a sender loses this share of its rate meanwhile.

    As in the runtime, a rank posts the receive of a layer when it has received the layer before.
    """
    last = program.num_ranks - 1
    arrives_s = np.zeros(last + 2)
    posted_s = np.zeros(last + 2)
    left_s = np.zeros(last + 1)
    reached_s = [_seconds_before(program, rank) for rank in range(last + 1)]
    waited_s = 0.0
    num_layers = len(program.layer_kind_index)
    for layer in range(num_layers):
        got_s = np.zeros(last + 2)
        for rank in range(last + 1):
            got_s[rank] = max(reached_s[rank], arrives_s[rank])
            ready_s = got_s[rank] + _append_s(program, rank)
            begins_s = ready_s
            if rank < last:
                begins_s = max(ready_s, posted_s[rank + 1], left_s[rank])
                left_s[rank] = begins_s + _message_s(program, scenario, rank)
                arrives_s[rank + 1] = left_s[rank]
                waited_s += begins_s - ready_s
            work_s = layer_s(program, rank) - _append_s(program, rank)
            if layer == num_layers - 1:
                work_s -= _seconds_before(program, rank)
            done_s = min(work_s, (begins_s - ready_s) * (1 - share))
            reached_s[rank] = ready_s + done_s / (1 - share) + work_s - done_s
        posted_s = got_s
    return reached_s[last], waited_s


def _seconds_before(program: Program, rank: int) -> float:
    """Seconds of a layer before its receive."""
    return float(program.layers[0][rank][0].device_s[0])  # type: ignore[union-attr]


def _append_s(program: Program, rank: int) -> float:
    """Seconds of a layer between its receive and its send."""
    return float(
        next(op.device_s[0] for op in program.layers[0][rank] if isinstance(op, Compute) and op.kind == "append")
    )


def _message_s(program: Program, scenario: Scenario, rank: int) -> float:
    """Seconds of the rank's message."""
    path = scenario.cluster.path(rank, rank + 1)
    nbytes = next(op.nbytes for op in program.layers[0][rank] if isinstance(op, Send))
    return float(path.busy_s(nbytes)[0]) + path.latency_s


@pytest.mark.parametrize(("shares", "waits"), [((1, 1, 1, 1), True), ((0.351, 0.251, 0.205, 0.193), False)])
def test_a_send_that_waits_costs_no_ttft(shares: tuple[float, ...], waits: bool) -> None:
    """So only pending receives are measured: a sender waits where it is more than a layer ahead of its receiver."""
    scenario = scenario_of(4)
    chunks = [np.array([float(round(8192 * share / sum(shares)))]) for share in shares]
    program = build_program(executed(scenario, STRATEGIES["kvr-s"]), chunks)
    free_s, waited_s = with_pending_sends(program, scenario, 0.0)
    assert (waited_s > free_s) == waits, "over all layers and ranks"
    assert free_s == pytest.approx(simulated_chain_s(program, scenario), rel=0.02), (
        "without the work outside the layers"
    )
    for share in (0.1, 0.3, 0.6):
        assert with_pending_sends(program, scenario, share)[0] == pytest.approx(free_s, rel=1e-9)


def simulated_chain_s(program: Program, scenario: Scenario) -> float:
    return float(run_batch(program, scenario.cluster)[-1, 0])


def test_two_ranks_time_a_layer_alone_and_beside_a_receive_that_waits() -> None:
    """Measured on a CPU over gloo; the sender answers the receive only after the layer."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 3, "vocab_size": 128, "intermediate_size": 96}
    model = read_config(JsonObject(fields=config, where="test"), "tiny")
    setup = ComputeSetup(
        model=model, config=config, device="cpu", dtype="fp32", kernels=("sdpa",), max_context=256, threads=1
    )
    at = Point(kernel="sdpa", chunk=64, prefix=0, kind="pending")
    ranks = PendingRanks(setup)
    try:
        samples = [ranks.sample(at) for _ in range(2)]
    finally:
        ranks.close()
    assert all(set(sample) == {"layer_alone", "layer_pending"} for sample in samples)
    assert all(seconds > 0 for sample in samples for seconds in sample.values())
    rows = compute_rows({at: samples}, model, dtype="fp32", device="x")
    assert [(row.operation, row.chunk, row.prefix) for row in rows] == [
        ("layer_alone", 64, 0),
        ("layer_pending", 64, 0),
    ]
    assert 0.0 <= fit_pending_share(rows) <= 0.9
