"""An execution: a scenario placed for a strategy. It is the value that programs, searches and intervals are about."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from kvrsim.errors import InputError
from kvrsim.hardware import Cluster
from kvrsim.kernels.tensor_parallel import share_of
from kvrsim.layout import Degrees, Layout, layout_on
from kvrsim.once import Source, once
from kvrsim.placement import PlacedScenario, on_one_gpu, place_in
from kvrsim.scenario import Request, Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.layers import placement_refusal, refusal
from kvrsim.strategies.pipeline import stages


@dataclass(frozen=True, kw_only=True)
class Execution(Source):
    """A strategy on the ranks of a scenario. `place` makes it; other modules keep what they compute from it in it."""

    scenario: Scenario  # the question: all GPUs, the whole batch; `on` and `with_request` leave it as it is
    placed: PlacedScenario  # the scenario as one rank sees it
    strategy: Strategy  # for a pipeline, with the layers of its stages if they are chosen

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the fields, without the values computed from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def cluster(self) -> Cluster:
        """The ranks: GPUs, or groups of GPUs, and the links between them."""
        return self.placed.cluster

    @property
    def request(self) -> Request:
        """The prefill of one data group."""
        return self.placed.request

    @cached_property
    def layout(self) -> Layout:
        """The layout of all GPUs of the scenario; a layout of one GPU for a strategy that uses one."""
        scenario = self.scenario
        if self.strategy.partition_rule == "whole":
            scenario = scenario.on_gpus(1)
        return layout_of(scenario, self.strategy.degrees)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """Layer numbers of each stage of a pipeline."""
        return stages(self.strategy, self.placed.share.num_hidden_layers, self.cluster.num_gpus)

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """Number of layers of each stage; None if the strategy is not a pipeline."""
        if not self.strategy.is_pipeline:
            return None
        return tuple(map(len, self.stages))

    def on(self, placed: PlacedScenario) -> Execution:
        """Return the same strategy on other ranks, such as ranks with slower links."""
        return execute(placed, self.strategy, self.scenario)

    def with_request(self, request: Request) -> Execution:
        """Return the same strategy on the same ranks, for another prefill."""
        return self.on(replace(self.placed, request=request))

    def by(self, strategy: Strategy) -> Execution:
        """Return another strategy on the same ranks, such as one with other layers per stage."""
        return execute(self.placed, strategy, self.scenario)


def place(scenario: Scenario, strategy: Strategy) -> Execution:
    """Place a scenario for a strategy: on one GPU, or on ranks of one or more GPUs.

    Raises InputError where the strategy cannot use the prefix, or divide the GPUs or the model's heads into groups.
    """
    executions = _executions(scenario)
    if strategy not in executions:
        executions[strategy] = execute(_placed_for(scenario, strategy), strategy, scenario)
    return executions[strategy]


def execute(placed: PlacedScenario, strategy: Strategy, scenario: Scenario | None = None) -> Execution:
    """Return the execution of a strategy on ranks that are placed for it. There is one for each strategy.

    scenario: the question that was placed; None: the ranks are single GPUs with the whole batch, and are the question.
    """
    executions = _executions(placed)
    if strategy not in executions:
        executions[strategy] = Execution(scenario=scenario or placed, placed=placed, strategy=strategy)
    return executions[strategy]


@once
def _executions(scenario: Scenario) -> dict[Strategy, Execution]:
    """The executions of a scenario so far, by strategy."""
    return {}


def _placed_for(scenario: Scenario, strategy: Strategy) -> PlacedScenario:
    if strategy.partition_rule == "whole":
        return on_one_gpu(scenario)
    if scenario.request.cached_prefix and (why := placement_refusal(strategy, scenario.prefix_placement)):
        raise InputError("strategies", strategy.name, why)
    num_gpus = scenario.cluster.num_gpus
    placed = place_in(scenario, layout_of(scenario, strategy.degrees))
    if why := refusal(strategy, placed.share, placed.cluster.num_gpus):
        raise InputError("strategies", strategy.name, f"with {num_gpus} GPUs, {why}")
    return placed


def layout_of(scenario: Scenario, degrees: Degrees) -> Layout:
    """Return the layout of a strategy's degrees on the scenario's GPUs.

    Experts are spread over GPUs if the scenario requires it, or if a rank cannot hold all experts.
    """
    is_mixture = scenario.model.is_mixture
    if scenario.expert_parallel and degrees.experts == "default":
        degrees = replace(degrees, experts="ep")
    fits = True
    if is_mixture and not degrees.is_deployable and degrees.experts == "default":
        whole = share_of(scenario.model, degrees.on(scenario.cluster.num_gpus).tensor or 1)
        fits = whole.weight_bytes(scenario.request.dtype_bytes) <= scenario.memory_limit.nbytes
        fits = fits or scenario.cluster.num_gpus == 1
    return layout_on(degrees, scenario.cluster.num_gpus, is_mixture=is_mixture, whole_experts_fit=fits)
