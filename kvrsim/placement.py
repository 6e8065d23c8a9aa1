"""The scenario as one rank of a strategy sees it, with everything computed from its place in the layout.

Ranks are single GPUs, or groups of GPUs that split every matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from kvrsim.choices import PrefixAccess
from kvrsim.engine import Engine, HostRates
from kvrsim.kernels.cost import CalibratedCost, CostModel, RooflineCost
from kvrsim.kernels.experts import ExpertPlacement, place_experts
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.prefix import ON_EVERY_RANK, PrefixAccessPlan, plan_prefix_access
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.tensor_parallel import Group, group_of, grouped_cluster, one_of, share_of
from kvrsim.layout import LAYOUT_KINDS, ONE_LAYOUT, Layout
from kvrsim.model.spec import ModelSpec
from kvrsim.once import once
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.units import scale

_NO_TIME = 1e-30  # factor on the time of links that take none


@dataclass(frozen=True, kw_only=True)
class PlacedScenario(Scenario):
    """A scenario as one rank sees it: `cluster` has ranks, `request` the sequences of one data group."""

    layout: Layout | None = None  # layout of all GPUs; None: one GPU
    group: Group | None = None  # GPUs of each rank, if several; `cluster` then has groups as ranks
    gather: Group | None = None  # ranks that gather their tokens for shared experts
    prefix_access: PrefixAccess | None = None  # how ranks attend to the prefix; None: not yet chosen
    data_load: float = 1.0  # sequences of all data groups divided by those of the rank's group

    @classmethod
    def of(cls, scenario: Scenario) -> Self:
        """Return the scenario with a rank per GPU, in which no layout divides anything but the context."""
        return cls(**{field.name: getattr(scenario, field.name) for field in fields(Scenario)})

    def check_experts(self) -> None:
        """See Scenario. In a layout, `place_in` checks that experts divide: its ranks may be groups of GPUs."""
        if self.layout is None:
            super().check_experts()

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that compute a prompt."""
        return self.cluster.num_gpus * self.gpus_per_rank

    @property
    def gpus_per_rank(self) -> int:
        """Number of GPUs per rank."""
        return 1 if self.group is None else self.group.size

    @property
    def data_groups(self) -> int:
        """Number of equal groups of GPUs, each with prompts of its own."""
        return 1 if self.layout is None else self.layout.data

    @property
    def layout_kinds(self) -> tuple[str, ...]:
        """The ways, of LAYOUT_KINDS, in which the layout divides a prefill; empty on one GPU."""
        layout = self.layout or ONE_LAYOUT
        has = {
            "tensor": layout.tensor > 1,
            "pipeline": layout.pipeline > 1,
            "context": layout.context > 1,
            "data": layout.data > 1,
            "experts": layout.expert_parallel > 1,
            "nodes": self._spans_nodes,
        }
        return tuple(kind for kind in LAYOUT_KINDS if has[kind])

    @property
    def _spans_nodes(self) -> bool:
        """Whether ranks, or the GPUs of a rank, are on several nodes."""
        groups = [group for group in (self.group, self.gather) if group is not None]
        if any(group.across.size > 1 for group in groups):
            return True
        per_node = self.cluster.gpus_per_node
        return per_node is not None and self.cluster.num_gpus > per_node

    def check_division(self) -> None:
        """Raise InputError where the layout's GPUs cannot divide the experts."""
        if self.layout is not None:
            place_experts(self._rank_share, self.model, self.layout)

    @property
    def _rank_share(self) -> ModelSpec:
        """The model with one GPU's share of the matrices, and whole experts."""
        return self.model if self.group is None else self.group.model

    @cached_property
    def share(self) -> ModelSpec:
        """The model with the share of every layer that one GPU of a rank holds."""
        share = self._rank_share
        return share if self.layout is None else place_experts(share, self.model, self.layout)

    @cached_property
    def expert_placement(self) -> ExpertPlacement:
        """Placement of routed experts on the GPUs."""
        layout = self.layout or (self.experts_on_all_gpus if self.expert_parallel else Layout())
        return ExpertPlacement(
            layout=layout,
            gather=self.gather,
            tokens=self.request.new_tokens,
            load=self.data_load,
            imbalance=self.expert_imbalance,
        )

    @cached_property
    def prefix_access_plan(self) -> PrefixAccessPlan:
        """Access of attention to the cached prefix."""
        placement = self.prefix_placement if self.request.cached_prefix else ON_EVERY_RANK
        return plan_prefix_access(placement, self.prefix_access, self.cluster)

    @property
    def chain_is_proven(self) -> bool:
        """Whether bounds of KVR's chain hold: only if its ranks exchange no tokens for routed experts."""
        return self.expert_placement.layout.exchange == "none"

    @cached_property
    def without_communication(self) -> PlacedScenario:
        """The scenario of the paper's TTFT(p): links without cost, and the prefix on all ranks."""
        quiet = self.with_own_links(1e30, latency_s=0.0)
        quiet = replace(quiet, prefix_placement=ON_EVERY_RANK, prefix_access=None)
        if self.group is not None:
            quiet = replace(quiet, group=self.group.slower(_NO_TIME))
        if self.gather is not None:
            quiet = replace(quiet, gather=self.gather.slower(_NO_TIME))
        if quiet.profile is None:
            return quiet
        links = replace(quiet.profile.links, pending_share=0.0, message_sms=0, message_copies=0.0)
        host = replace(self.host, resume_s=0.0, message_s=0.0, collective_s=0.0)
        return replace(quiet, profile=replace(quiet.profile, links=links)).with_host(host)

    def with_slower_links(self, factor: float) -> Self:
        """Return the scenario with links that are slower by a factor."""
        link = scale(self.cluster.link, factor)
        network = scale(self.cluster.network, factor)
        cluster = replace(self.cluster, link=link, network=network)
        group, gather = (None if one is None else one.slower(factor) for one in (self.group, self.gather))
        return replace(self, cluster=cluster, group=group, gather=gather)._with_costs_of(self)

    def with_host(self, host: HostRates) -> Self:
        """Return the scenario with other host costs."""
        other = super().with_host(host)
        is_alike = host.resume_s == self.host.resume_s  # the pace depends on it
        return other._with_costs_of(self) if is_alike else other

    def with_engine(self, engine: Engine) -> Self:
        """Return the scenario with another engine. If only host costs differ, it has the costs of this scenario."""
        other = replace(self, engine=engine)
        is_alike = (
            other.kernel_scale == self.kernel_scale
            and other.traits == self.traits
            and other.host.resume_s == self.host.resume_s
        )
        if is_alike:
            vars(other).update(share=self.share, pace=self.pace, cost=self.cost)
        return other

    def _with_costs_of(self, other: PlacedScenario) -> Self:
        """Copy the costs that a scenario with the same device and request has computed; return this scenario."""
        vars(self).update({name: vars(other)[name] for name in ("share", "pace", "cost") if name in vars(other)})
        return self

    @cached_property
    def pace(self) -> float:
        """Seconds of products and attention divided by their seconds at the burst clock.

        Under load, the clock falls with the time since the prefill began. One factor holds for the whole prefill:
        that of a GPU with an even share of the work, because balanced ranks work about equally long.
        """
        if self.profile is None or self.profile.kernels.clock is None:
            return 1.0
        tokens = np.array([self.request.new_tokens], dtype=float)
        prefix = np.array([self.request.cached_prefix], dtype=float)
        layers_s: list[Array] = []
        for costs in self._layer_costs_by(self._cost_of(self.profile, pace=1.0)):
            layer_s = costs.qkv_s(tokens) + costs.output_mlp_s(tokens)
            # Experts receive equally many tokens from each rank of the context.
            layer_s += costs.exchanged_experts_s(tokens) * self.expert_placement.layout.context
            if costs.has_mixer:
                layer_s += costs.mixer.append_s(tokens, prefix) + costs.mixer.attention_s(tokens, prefix)
            layers_s.append(layer_s)
        busy_s = np.sum([layers_s[kind] for kind in self.share.layer_kind_index], axis=0) / self.cluster.num_gpus
        return float((self.profile.kernels.clock.loaded_s(busy_s) / busy_s)[0])

    @cached_property
    def cost(self) -> CalibratedCost | RooflineCost:
        """Seconds of an operation on this scenario's GPU."""
        if self.profile is None:
            return RooflineCost.of(self.cluster.gpu, self.traits, self.request.dtype)
        return self._cost_of(self.profile, self.pace)

    def _cost_of(self, profile: CalibrationProfile, pace: float) -> CalibratedCost:
        return CalibratedCost(rates=profile.kernels, traits=self.traits, scale=self.kernel_scale, clock_factor=pace)

    @property
    def optimistic_cost(self) -> CostModel:
        """Cost model with a lower bound on attention time, for proofs."""
        cost = self.cost
        return replace(cost, traits=replace(cost.traits, lower_bound=True))

    @property
    def decode_cost(self) -> CostModel:
        """Cost model of a decode step, whose kernels have few rows and wait for memory, whatever the clock."""
        cost = self.cost
        if isinstance(cost, RooflineCost):
            return cost
        assert self.profile is not None
        return replace(cost, rates=self.profile.kernels.in_decode, clock_factor=1.0)

    def layer_costs(self, cost: CostModel | None = None) -> tuple[LayerCosts, ...]:
        """Costs of each kind of layer of the model, with `cost` instead of the scenario's own."""
        computed_cost = vars(self).get("cost")  # None: not yet computed; reading self.cost fails without its dtype
        if cost is None or cost is computed_cost:
            return self._layer_costs
        return self._layer_costs_by(cost)

    @cached_property
    def _layer_costs(self) -> tuple[LayerCosts, ...]:
        return self._layer_costs_by(self.cost)

    def _layer_costs_by(self, cost: CostModel) -> tuple[LayerCosts, ...]:
        setting = LayerSetting(
            model=self.share,
            cost=cost,
            host=self.host,
            cached_prefix=self.request.cached_prefix,
            sends_overlap=self.sends_overlap,
            resync_s=self.host.resume_s if self.num_gpus > 1 else 0.0,
            group=self.group,
            message_share=self.message_share,
            message_copies=self.message_copies,
            message_bytes_per_s=self.message_bytes_per_s,
            hbm_bytes_per_s=self.cluster.gpu.hbm_bytes_per_s,
            placement=self.expert_placement,
            prefix=self.prefix_access_plan,
        )
        return tuple(LayerCosts(setting, layer) for layer in self.share.layer_kinds)


def place_in(scenario: Scenario, layout: Layout) -> PlacedScenario:
    """Return the scenario of one data group, in which GPUs that split all matrices are one rank.

    The batch is that of the busiest data group. Layouts of equal sizes share one scenario and its costs.
    Raises InputError where the GPUs cannot divide the experts or the heads.
    """
    sizes = replace(layout, scheme=None, pieces="none")
    placements = _placements(scenario)
    if sizes not in placements:
        placements[sizes] = _place_in_sizes(scenario, sizes)
    return placements[sizes]


@once
def on_one_gpu(scenario: Scenario) -> PlacedScenario:
    """Return the scenario of a single GPU that computes all."""
    return PlacedScenario.of(scenario.on_gpus(1))


@once
def _placements(scenario: Scenario) -> dict[Layout, PlacedScenario]:
    """The placements of a scenario so far, by the sizes of their layouts."""
    return {}


def _place_in_sizes(scenario: Scenario, layout: Layout) -> PlacedScenario:
    request = replace(scenario.request, batch=-(-scenario.request.batch // layout.data))
    size = layout.tensor
    cluster = scenario.cluster
    group = None
    if size > 1:
        cluster = grouped_cluster(scenario.cluster, size)
        group = group_of(scenario.cluster, size, share_of(scenario.model, size))
    gather = None
    if layout.exchange == "gather":
        gather = group_of(cluster, layout.expert_ranks, scenario.model)
    placed = replace(
        PlacedScenario.of(scenario),
        request=request,
        layout=layout,
        cluster=one_of(cluster, layout.data, layout.context),
        group=group,
        gather=gather,
        data_load=scenario.request.batch / request.batch,
    )
    placed.check_division()
    return placed
