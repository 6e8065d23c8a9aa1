"""Layouts: names correspond to sizes, weights add up to the model's, exchanges between ranks have closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.execution import layout_of, place
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import run_partition
from kvrsim.layout import Degrees, Layout, layout_on, parse_degrees
from kvrsim.memory import memory_of
from kvrsim.program import Collective, Compute
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import Search
from tests.building import Draws, any_divisible, draws, examples, executed
from tests.building.scenarios import any_rows

QWEN: dict[str, Any] = {"model": "qwen3-30b-a3b", "cluster": "h100-nvlink", "ctx": "4k", "gpus": 8}
EXCHANGE = ("dispatch", "experts", "combine")  # operations of experts on several nodes
NAMES = (
    "tp",
    "tp+ep",
    "cp",
    "cp+ep",
    "cp-i",
    "tp2+cp",
    "dp",
    "dp+ep",
    "dp2+tp+ep",
    "dp2+cp+ep2",
    "pp2+cp4+ep",
    "dp2+pp2+tp",
)


def on_eight(name: str, **more: Any) -> Scenario:
    return place(make_scenario(**QWEN | more)[0], get_strategy(name)).placed


@given(rng=draws())
@examples(100)
def test_a_layout_is_its_name(rng: Draws) -> None:
    """The name of a layout is parsed into the same layout."""
    sizes = {name: rng.choice([1, 2, 4]) for name in ("data", "tensor", "pipeline", "context")}
    scheme = None if sizes["context"] == 1 else rng.choice(["zigzag", "interleave"])
    gpus = sizes["data"] * sizes["tensor"] * sizes["context"]
    spread = rng.choice([one for one in (1, 2, 4, gpus) if gpus % one == 0])
    layout = Layout(
        **sizes,
        scheme=scheme,
        pieces="even" if sizes["pipeline"] > 1 else "none",
        expert_tensor=gpus // spread,
        expert_parallel=spread,
        is_mixture=True,
    )
    degrees, rest = parse_degrees(layout.name)
    assert rest is None
    assert layout_on(degrees, layout.num_gpus, is_mixture=True) == layout
    assert get_strategy(layout.name).name == layout.name
    assert layout.stage_gpus == layout.expert_tensor * layout.expert_parallel * layout.expert_data


@pytest.mark.parametrize(
    "name",
    [
        *("tp2+tp2", "dp2+kvr-s", "dp+tp", "ep2+edp2", "cp2+ring", "pp2+ring", "pp2+cp", "tp2-s", "pp2-s+cp2", "cp2-s"),
        *("tp2+single", "tp2+tp", "tp2+kvr-p", "tp0+ring", "tp2+", "pp2+cp0", "pp-s+cp2", "kvr"),
    ],
)
def test_names_that_stand_for_nothing(name: str) -> None:
    with pytest.raises(InputError) as caught:
        get_strategy(name, "strategies")
    assert caught.value.parameter == "strategies"


@pytest.mark.parametrize("name", NAMES)
def test_the_gpus_hold_the_model(name: str) -> None:
    """Routed experts are stored once per copy; every other matrix once per group of GPUs that splits it."""
    scenario = on_eight(name)
    strategy, layout = get_strategy(name), scenario.layout
    assert layout is not None
    cut = (2048, 2048) if strategy.is_pipeline else any_rows(np.random.default_rng(0), scenario, strategy, 1)[0]
    parts = memory_of(executed(scenario, strategy), Partition(chunk_lens=cut))
    assert len(parts) == layout.num_gpus == 8
    width, model = scenario.request.dtype_bytes, scenario.model
    experts = sum(layer.num_experts * sum(gemm.weight_bytes(width) for gemm in layer.mlp) for layer in model.layers)
    rest = model.weight_bytes(width) - experts
    total = sum(part.weights for part in parts)
    least = layout.expert_data * experts + layout.data * layout.context * rest
    norms = 8 * sum(layer.other_parameters for layer in model.layers) * width
    assert least * (1 - 1e-9) <= total <= 1.01 * least + norms + 0.5 * rest


@pytest.mark.slow
@given(rng=draws())
@examples(40)
def test_the_executors_agree(rng: Draws) -> None:
    """The event and the batch executor agree on random mixtures whose experts are on other ranks."""
    name = rng.choice(["cp", "cp+ep2", "cp-i", "dp2+cp", "dp2+tp2", "pp2+cp2", "dp2+pp2", "dp2+pp2+ep"])
    scenario = replace(any_divisible(rng, kind=rng.choice(["mixtral", "qwen3_moe"])), expert_imbalance=None)
    strategy = get_strategy(name)
    try:
        placed = place(scenario, strategy).placed
    except InputError:
        return
    for cut in any_rows(rng, placed, strategy, 2):
        batch, event = (
            run_partition(executed(placed, strategy), Partition(chunk_lens=cut), executor=kind)
            for kind in ("batch", "event")
        )
        assert batch.finish_s == pytest.approx(event.finish_s, rel=1e-9)


def test_all_tokens_go_round_twice_in_a_layer() -> None:
    """A layer has an all-gather of the tokens and a reduce-scatter of the experts' results, each with a ring's time."""
    scenario = on_eight("dp8+ep8")
    strategy = get_strategy("dp8+ep8")
    program = build_program(executed(scenario, strategy), columns((4096,)))
    ops = program.layers[0][0]
    exchanges = [op for op in ops if isinstance(op, Collective) and op.name in ("all-gather", "reduce-scatter")]
    nbytes = 4096 * scenario.model.hidden_size * 2
    assert [op.name for op in exchanges] == ["all-gather", "reduce-scatter"]
    assert [op.nbytes.item() for op in exchanges] == pytest.approx([nbytes * 7 / 8] * 2)
    path = make_scenario(**QWEN)[0].cluster.path(0, 7)
    step_s = path.gather_step_s(np.array(nbytes / 8), 8) + path.gather_latency_s
    assert exchanges[0].seconds.item() == pytest.approx(
        scenario.host.collective_s + path.gather_launch_s + 7 * float(step_s)
    )


def test_tokens_go_once_to_each_node_with_an_expert() -> None:
    """Over nodes, data groups send a token once to each node that has one of its experts, and there to its GPUs."""
    asked = QWEN | {"cluster": "2x8xh100", "gpus": 16}
    strategy = get_strategy("dp16+ep16")
    scenario = make_scenario(**asked, batch=16)[0]
    execution = place(scenario, strategy)
    ops = build_program(execution, columns((4096,))).layers[0][0]
    names = [op.name for op in ops if isinstance(op, Collective | Compute) and op.name in EXCHANGE]
    assert names == list(EXCHANGE)
    dispatch = next(op for op in ops if isinstance(op, Collective) and op.name == "dispatch")
    model = scenario.model
    layer = model.layers[0]
    whole, chosen = layer.num_experts, layer.num_experts_per_tok

    def reach(experts: int) -> float:
        return 1 - math.comb(whole - experts, chosen) / math.comb(whole, chosen)

    token_bytes = 4096 * model.hidden_size * 2
    across = reach(whole // 2) * token_bytes
    inside = 15 * reach(whole // 16) * token_bytes
    assert dispatch.nbytes.item() == pytest.approx(across + inside)
    near = scenario.cluster.path(0, 1)
    far = scenario.cluster.path(0, 8)
    busy_s = max(float(near.busy_s(np.array(inside))), float(far.busy_s(np.array(across))))
    expected_s = execution.placed.host.collective_s + busy_s + near.latency_s + far.latency_s
    assert dispatch.seconds.item() == pytest.approx(expected_s)
    group = execution.placed.gather
    assert group is not None
    assert dispatch.seconds.item() < group.all_gather_s(np.array(16.0 * token_bytes))


def test_a_prompt_per_data_group() -> None:
    """With eight prompts on eight data groups, a GPU attends to one prompt, and its experts process tokens of all."""
    one, eight = (on_eight("dp8+ep8", batch=batch) for batch in (1, 8))
    assert (one.request.batch, eight.request.batch) == (1, 1)
    programs = [build_program(executed(placed, get_strategy("dp8+ep8")), columns((4096,))) for placed in (one, eight)]
    own, others = ({op.name: op for op in program.layers[0][0] if isinstance(op, Compute)} for program in programs)
    assert own["attention"].device_s == pytest.approx(others["attention"].device_s, rel=0.05)  # the GPU clock may drop
    assert 4 * own["experts"].device_s < others["experts"].device_s < 8.5 * own["experts"].device_s
    tensor = [
        Search().candidate(execution_of(make_scenario(**QWEN, batch=batch)[0], get_strategy("tp"))).ttft_s
        for batch in (1, 8)
    ]
    data = [
        Search().candidate(execution_of(make_scenario(**QWEN, batch=batch)[0], get_strategy("dp+ep"))).ttft_s
        for batch in (1, 8)
    ]
    assert data[1] / data[0] < tensor[1] / tensor[0]


def test_whole_experts_that_do_not_fit_are_spread() -> None:
    """Strategies that no engine has keep whole experts on each rank if these fit; otherwise the name contains `ep`."""
    small, large = (make_scenario(**QWEN | {"model": model, "cluster": "h200-nvlink"})[0] for model in MODELS)
    kvr, tensor = Degrees(context=None, scheme="kvr-s"), Degrees(tensor=None)
    assert [layout_of(one, kvr).name for one in (small, large)] == ["kvr-s", "kvr-s+ep8"]
    assert [layout_of(one, tensor).name for one in (small, large)] == ["tp8", "tp8"]
    assert layout_of(replace(small, expert_parallel=True), kvr).name == "kvr-s+ep8"
    assert layout_of(small, get_strategy("cp8+edp8").degrees).expert_data == 8


MODELS = ("qwen3-30b-a3b", "deepseek-v3")


def test_data_groups_on_two_nodes() -> None:
    """The ranks of one prompt are on one node; stages that neither fill nor divide a node are refused."""
    two = {"cluster": "h100-2x8-ndr400", "gpus": 16, "model": "qwen3-235b-a22b"}
    placed = on_eight("dp2+tp4+pp2+ep8", **two)
    assert (placed.cluster.num_gpus, placed.cluster.gpus_per_node) == (2, 1)
    assert placed.cluster.path(0, 1).bandwidth_bytes_per_s == placed.cluster.network.bandwidth_bytes_per_s  # type: ignore[union-attr]
    assert on_eight("dp4+tp2+pp2", **two).num_gpus == 4
