"""What merging partial results of attention moves, and what messages beside a ring's work take from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.kernels.elementwise import PYTORCH_SHARE, merge, upcast
from kvrsim.kernels.layer import LayerCosts
from kvrsim.model.load import load_model
from kvrsim.model.mixers import Attention
from kvrsim.program import RingPass, beside_message_s
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from tests.building import Draws, any_partition, any_scenario, draws, examples

RINGS = ("ring", "striped", "zigzag-ring")


def test_bytes_by_hand() -> None:
    """Kernel by kernel for one token of 32 heads of 128: elements of the output, and a log-sum-exp a head."""
    mixer = load_model("llama-3-8b").main_mixer
    assert isinstance(mixer, Attention)
    output, heads = 32 * 128, 32
    separate = [6, 4 + 4 + 4, 4 + 4, 4 + 4 + 4]
    of_heads = [4 + 4 + 4, 4 + 4, 4 + 4 + 4, 4 + 4, 4 + 4 + 4]
    whole = merge(mixer, fused=False, part=False)
    assert whole.nbytes == output * sum(separate) + heads * sum(of_heads)
    assert whole.kernels == len(separate) + len(of_heads)
    part = merge(mixer, fused=False, part=True)
    assert (part.nbytes - whole.nbytes, part.kernels - whole.kernels) == (8 * (output + heads), 2)
    fused = merge(mixer, fused=True, part=False)
    assert fused == merge(mixer, fused=True, part=True)
    assert (fused.nbytes, fused.kernels) == (output * (4 + 2 + 4) + heads * (4 + 4 + 4), 1)
    assert (upcast(mixer).nbytes, upcast(mixer).kernels) == (output * (2 + 4), 1)


@given(
    work=st.floats(0, 1e3),
    flight=st.floats(0, 1e3),
    longer=st.floats(0, 1e3),
    share=st.floats(0, 0.9),
    more=st.floats(0, 0.9),
)
@examples(100)
def test_work_beside_a_message(work: float, flight: float, longer: float, share: float, more: float) -> None:
    """At 1 - share of its rate while the message is in flight, at its own after that."""
    took_s = float(beside_message_s(np.array(work), np.array(flight), share))
    slow_s = min(took_s, flight)
    assert slow_s * (1 - share) + (took_s - slow_s) == pytest.approx(work, rel=1e-9, abs=1e-9)
    assert beside_message_s(np.array(work), np.array(flight + longer), share) >= took_s * (1 - 1e-12)
    assert beside_message_s(np.array(work), np.array(flight), max(share, more)) >= took_s * (1 - 1e-12)
    assert beside_message_s(np.array(work), np.array(flight), 0.0) == work


@examples(10)
@given(rng=draws(), rate=st.floats(1e6, 1e13))
def test_a_measured_merge_moves_two_results_and_writes_one(rng: Draws, rate: float) -> None:
    scenario, cut = measured(rng)
    assert scenario.profile is not None
    kernels = scenario.profile.kernels
    elementwise = replace(kernels.elementwise, merge_bytes_per_s=rate)
    own = replace(scenario, profile=replace(scenario.profile, kernels=replace(kernels, elementwise=elementwise)))
    for costs in own.layer_costs():
        mixer = costs.layer.mixer
        if not isinstance(mixer, Attention) or mixer.is_sparse:
            continue
        heads, width = mixer.num_attention_heads, 3 * own.request.dtype_bytes
        nbytes = own.request.batch * cut[0] * heads * width * (mixer.v_head_dim + 1)
        seconds = float(costs.merging.merge_s(np.array([float(cut[0])]))[0])
        assert seconds == pytest.approx(own.cost.scale * nbytes / rate)  # type: ignore[attr-defined]


def measured(rng: Draws) -> tuple[Scenario, tuple[int, ...]]:
    scenario = any_scenario(rng, num_gpus=(2, 6), roofline=False)
    return scenario, any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)


def finish_s(scenario: Scenario, name: str, cut: tuple[int, ...]) -> float:
    program = build_program(scenario, get_strategy(name), [np.array([float(chunk)]) for chunk in cut])
    return float(run_batch(program, scenario.cluster).max())


def with_merges(scenario: Scenario, *, fused: bool, sms: int) -> Scenario:
    assert scenario.profile is not None
    profile = scenario.profile
    kernels = replace(profile.kernels, elementwise=replace(profile.kernels.elementwise, fused_merge=fused))
    return replace(scenario, profile=replace(profile, kernels=kernels, links=replace(profile.links, message_sms=sms)))


@pytest.mark.parametrize("name", RINGS)
@given(rng=draws(), sms=st.integers(0, 64))
@examples(25)
def test_separate_kernels_and_held_multiprocessors_only_add(name: str, rng: Draws, sms: int) -> None:
    scenario, cut = measured(rng)
    least_s = finish_s(with_merges(scenario, fused=True, sms=0), name, cut)
    separate_s = finish_s(with_merges(scenario, fused=False, sms=0), name, cut)
    all_s = finish_s(with_merges(scenario, fused=False, sms=sms), name, cut)
    assert least_s <= separate_s * (1 + 1e-12)
    assert separate_s <= all_s * (1 + 1e-12)


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("sends", ["overlap", "rendezvous"])
@given(rng=draws(), sms=st.integers(1, 200))
@examples(15)
def test_executors_agree_where_messages_hold_multiprocessors(name: str, sends: str, rng: Draws, sms: int) -> None:
    scenario = with_merges(any_scenario(rng, num_gpus=(2, 6), roofline=False, sends=sends), fused=False, sms=sms)
    cut = Partition.even(scenario.request.new_tokens, scenario.cluster.num_gpus).chunk_lens
    program = build_program(scenario, get_strategy(name), [np.array([float(chunk)]) for chunk in cut])
    (ring,) = {op.message_share for ranks in program.layers for ops in ranks for op in ops if isinstance(op, RingPass)}
    assert ring == min(0.9, sms / scenario.cluster.gpu.num_sms)
    event = EventSimulation(program, scenario.cluster, record=False).finish_s
    assert run_batch(program, scenario.cluster)[:, 0] == pytest.approx(np.array(event), rel=1e-12, abs=0)
    assert scenario.without_communication().message_share == 0.0


@given(rng=draws(), tokens=st.integers(1, 10_000), part=st.booleans())
@examples(25)
def test_separate_kernels_are_pytorchs(rng: Draws, tokens: int, part: bool) -> None:
    """Whatever rates an engine's own kernels have; one fused kernel is the engine's."""
    scenario = any_scenario(rng, roofline=False)
    chunk = np.array([float(tokens)])
    separate, fused = (with_merges(scenario, fused=fused, sms=0).layer_costs()[0] for fused in (False, True))
    for costs in (separate, fused):
        width = costs.setting.batch * costs.setting.element_bytes / 2
        step = merge(costs.layer.mixer, fused=costs.cost.traits.fused_merge, part=part)
        own_s = costs.cost.traffic_s(chunk, (step,))
        least_s = tokens * step.nbytes * width / (PYTORCH_SHARE * scenario.cluster.gpu.hbm_bytes_per_s)
        took_s = costs.merging.merge_s(chunk, part=part)
        assert took_s >= own_s
        assert took_s == own_s if costs is fused else took_s >= least_s
        assert costs.merging.upcast_s(chunk) < took_s


@given(rng=draws(), tokens=st.integers(1, 10_000), part=st.booleans())
@examples(25)
def test_sequences_of_a_batch_are_merged_together(rng: Draws, tokens: int, part: bool) -> None:
    """As many times the bytes, in the same kernels."""
    costs = any_scenario(rng, roofline=False).layer_costs()[0]
    both = []
    for batch in (1, 3):
        cost = replace(costs.cost, traits=replace(costs.cost.traits, batch=batch))
        both.append(LayerCosts(replace(costs.setting, cost=cost), costs.layer))
    one_s, three_s = (own.merging.merge_s(np.array([float(tokens)]), part=part) for own in both)
    start_s = both[0].merging.merge_s(np.zeros(1), part=part)
    assert three_s - start_s == pytest.approx(3 * (one_s - start_s))
