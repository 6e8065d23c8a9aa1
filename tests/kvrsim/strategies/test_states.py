"""Layers with a state: scans run one after another along the chain, and TTFT contains this wait once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvrsim
from kvrsim.compile import build_program, columns
from kvrsim.executors.run import run_program
from kvrsim.model.load import load_model
from kvrsim.model.mixers import Recurrence
from kvrsim.placement import PlacedScenario
from kvrsim.program import Compute
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from tests.building import executed


def of_states_alone(num_gpus: int, ctx: int, bandwidth: str) -> Scenario:
    """A scenario with Qwen3.5's layers with a state only: rates of the datasheet, one path per pair."""
    scenario, _ = kvrsim.make_scenario(
        ctx=ctx,
        gpus=num_gpus,
        model="qwen3.5-27b",
        profile="roofline",
        cluster="h100-nvlink",
        link_bandwidth=bandwidth,
        link_latency="20us",
    )
    model = load_model("qwen3.5-27b")
    layers = tuple(layer for layer in model.layers if isinstance(layer.mixer, Recurrence))
    return replace(scenario, model=replace(model, layers=layers))


@pytest.mark.parametrize("bandwidth", ["300GB/s", "2GB/s"])
@pytest.mark.parametrize("num_gpus", [2, 8])
def test_the_wait_for_states_is_paid_once(num_gpus: int, bandwidth: str) -> None:
    """With even chunks, TTFT = L w + (p - 1)(s + h) plus embedding and head; see docs/explanation/hybrids.md."""
    scenario = of_states_alone(num_gpus, 16384, bandwidth)
    chunk = np.array([16384.0 / num_gpus])
    strategy = STRATEGIES["kvr-e"]
    program = build_program(executed(scenario, strategy), columns([int(chunk[0])] * num_gpus))
    finish_s = run_program(program, scenario.cluster)[:, 0]
    (costs,) = PlacedScenario.of(scenario).layer_costs()
    scan_s = costs.mixer.attention_s(chunk, chunk)[0]
    layer_s = costs.qkv_s(chunk)[0] + scan_s + costs.output_mlp_s(chunk)[0]
    (mixer,) = {layer.mixer for layer in scenario.model.layers}
    assert isinstance(mixer, Recurrence)
    link = scenario.cluster.link
    message_s = mixer.state_bytes(2) / link.bandwidth_bytes_per_s + link.latency_s
    ends = (*program.prologue[-1], *program.epilogue[-1])
    ends_s = sum(float(op.device_s[0]) for op in ends if isinstance(op, Compute))
    expected_s = len(scenario.model.layers) * layer_s + (num_gpus - 1) * (scan_s + message_s) + ends_s
    assert finish_s[-1] == pytest.approx(expected_s, rel=1e-9)


def test_uneven_chunks_gain_nothing_where_all_layers_have_a_state() -> None:
    """Work is proportional to tokens, so a shorter chunk makes another chunk longer."""
    scenario = of_states_alone(4, 16384, "300GB/s")
    strategy, even = STRATEGIES["kvr-s"], [4096] * 4
    rng = np.random.default_rng(0)
    cuts = [even, *(np.diff([0, *sorted(rng.integers(3000, 13000, 3)), 16384]).tolist() for _ in range(50))]
    cuts = [cut for cut in cuts if min(cut) > 0]
    ttft_s = [
        run_program(build_program(executed(scenario, strategy), columns(cut)), scenario.cluster)[-1][0] for cut in cuts
    ]
    assert int(np.argmin(ttft_s)) == 0
