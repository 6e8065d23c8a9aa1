"""The subject of a prediction: a request, a model, a cluster and a profile.

A partition says how the request's context is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from kvrsim.choices import DTYPE_BYTES, DTYPES, PrefixAccess
from kvrsim.engine import NO_ENGINE, NO_HOST, Engine, HostRates
from kvrsim.errors import InputError, check_whole
from kvrsim.hardware import DEFAULT_MEMORY_FRACTION, Cluster, MemoryLimit
from kvrsim.kernels.attention import ATTENTION_KERNELS
from kvrsim.kernels.cost import CalibratedCost, CostModel, KernelTraits, RooflineCost
from kvrsim.kernels.experts import ExpertPlacement, check_imbalance, place_experts
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.prefix import ON_EVERY_RANK, PrefixAccessPlan, PrefixPlacement, plan_prefix_access
from kvrsim.kernels.profile import CalibrationProfile, SendStyle, profiles_with
from kvrsim.kernels.tensor_parallel import Group, group_of, grouped_cluster, one_of, share_of
from kvrsim.layout import LAYOUT_KINDS, ONE_LAYOUT, Degrees, Layout, layout_on
from kvrsim.model.mixers import Attention
from kvrsim.model.quantization import in_fp8
from kvrsim.model.spec import ModelSpec
from kvrsim.units import MAX_TOKENS, scale

MAX_BATCH = 2**20


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises InputError where the dtype is not one of DTYPES."""
    if dtype not in DTYPE_BYTES:
        raise InputError("dtype", dtype, ", ".join(DTYPES))
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prefill. The constructor raises InputError naming a wrong parameter."""

    context_len: int  # tokens of the whole context, the cached prefix included
    batch: int = 1  # sequences prefilled together, each of context_len tokens
    cached_prefix: int = 0  # leading tokens of the context whose K and V are computed already
    dtype: str = "fp16"  # one of DTYPES; fp8: only matrix products of layers, all else in half precision

    def __post_init__(self) -> None:
        check_whole("ctx", self.context_len, 1, MAX_TOKENS)
        check_whole("batch", self.batch, 1, MAX_BATCH)
        check_whole("cached_prefix", self.cached_prefix, 0, self.context_len - 1, " (less than the context)")
        dtype_bytes(self.dtype)

    @property
    def new_tokens(self) -> int:
        """Tokens of one sequence that must be computed."""
        return self.context_len - self.cached_prefix

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of activations and KV cache; with fp8, half precision: only products are FP8."""
        return dtype_bytes("fp16" if self.dtype == "fp8" else self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Chunk lengths, one per rank, in the order of the context.

    >>> Partition.even(10, 4).chunk_lens
    (3, 3, 2, 2)
    >>> Partition(chunk_lens=(28, 42, 26)).boundaries
    (0, 28, 70, 96)
    """

    chunk_lens: tuple[int, ...]  # tokens that each rank takes, every one at least 1

    def __post_init__(self) -> None:
        if set(map(type, self.chunk_lens)) != {int} or min(self.chunk_lens) < 1:
            accepted = "a chunk of at least 1 token a rank, a whole number"
            raise InputError("partition", ",".join(map(str, self.chunk_lens)), accepted)

    @classmethod
    def even(cls, num_tokens: int, num_ranks: int) -> Partition:
        """Equal chunks; the first ranks take the remainder, as the paper's example does (3, 3, 3, 2)."""
        if num_tokens < num_ranks:
            raise InputError("gpus", num_ranks, f"at most one GPU a token, here {num_tokens}")
        share, rest = divmod(num_tokens, num_ranks)
        return cls(chunk_lens=tuple(share + (rank < rest) for rank in range(num_ranks)))

    @classmethod
    def of(cls, chunk_lens: Sequence[int], *, num_tokens: int, num_ranks: int) -> Partition:
        """Return the partition that a user wrote, checked against the request.

        Raises InputError where the number of chunks or their sum is wrong.
        """
        text = ",".join(map(str, chunk_lens))
        if len(chunk_lens) != num_ranks:
            raise InputError("partition", text, f"{num_ranks} chunk lengths, one a GPU")
        if sum(chunk_lens) != num_tokens:
            raise InputError("partition", text, f"chunk lengths that sum to {num_tokens} tokens, not {sum(chunk_lens)}")
        return cls(chunk_lens=tuple(chunk_lens))

    @property
    def num_tokens(self) -> int:
        """Tokens in all chunks together."""
        return sum(self.chunk_lens)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Token at which each chunk starts, and the end; the paper's C[0, ..., C]."""
        return tuple(accumulate(self.chunk_lens, initial=0))

    @property
    def fractions(self) -> tuple[float, ...]:
        """Each rank's share of the tokens."""
        return tuple(chunk / self.num_tokens for chunk in self.chunk_lens)


ROOFLINE = "roofline"
_Value = TypeVar("_Value")
KERNELS = ATTENTION_KERNELS
_NO_TIME = 1e-30  # factor on the time of links that take none
LONGEST_CHECKED = 2**19  # tokens of the longest prefills of dense models with flash attention that were compared
_LEAST_CHECKED = 2**14  # tokens: tables of kernels that end before say less about long contexts
_MOST_MESSAGE_SHARE = 0.9  # largest share of a GPU's multiprocessors that messages take


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One request to one model on one cluster, predicted from one profile (None: the datasheet's roofline).

    A strategy gets a scenario per rank: on one GPU, or with groups of GPUs as ranks
    (planner.candidates.per_rank_scenario).
    """

    model: ModelSpec
    cluster: Cluster
    request: Request
    profile: CalibrationProfile | None
    kernel: str  # attention kernel, one of KERNELS
    layout: Layout | None = None  # layout of all GPUs; None before a strategy is applied
    group: Group | None = None  # GPUs of each rank, if several; `cluster` then has groups as ranks
    gather: Group | None = None  # ranks that gather their tokens for shared experts
    memory_fraction: float = DEFAULT_MEMORY_FRACTION  # share of each GPU's memory that the prefill may use
    engine: Engine | None = None  # serving engine; None: the kernels and the profile's host
    expert_parallel: bool = False  # whether whole routed experts are spread over all GPUs
    expert_imbalance: float | None = (
        None  # rows of the busiest GPU's experts divided by the mean; None: mean_imbalance()
    )
    prefix_placement: PrefixPlacement = ON_EVERY_RANK  # where the cached prefix's K and V are
    prefix_access: PrefixAccess | None = None  # how ranks attend to the prefix; None: not yet chosen by a strategy
    data_load: float = 1.0  # sequences of all data groups divided by those of the rank's group

    def __post_init__(self) -> None:
        self.memory_limit  # noqa: B018  # checks the fraction
        check_imbalance(self.expert_imbalance)
        if self.expert_parallel and self.layout is None:
            place_experts(self.model, self.model, self._spread_over_all)
        if self.profile is None and self.engine is not None:
            raise InputError("engine", self.engine.name, "none beside the roofline, which has no measured kernels")
        if self.profile is None and self.kernel not in KERNELS:
            raise InputError("attention", self.kernel, ", ".join(KERNELS))
        if self.profile is not None and self.kernel not in self.profile.attention_kernels:
            has = ", ".join(self.profile.attention_kernels)
            others = " or ".join(profiles_with(self.kernel, self.profile.gpu))
            where = f"; `profile` {others} has {self.kernel}" if others else ""
            raise InputError("attention", self.kernel, f"a kernel that profile {self.profile.name} has: {has}{where}")
        if self.profile is not None and self.request.dtype not in self.profile.dtypes:
            has = ", ".join(self.profile.dtypes)
            raise InputError("dtype", self.request.dtype, f"what profile {self.profile.name} has: {has}")
        if self.request.dtype == "fp8" and self.model.quantization is None:
            object.__setattr__(self, "model", in_fp8(self.model))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the fields, without the values computed from them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def _memo(self) -> dict[Hashable, Any]:
        return {}

    def memoize(self, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """A value that another module computes from this scenario, once per key."""
        if key not in self._memo:
            self._memo[key] = compute()
        value: _Value = self._memo[key]
        return value

    @property
    def profile_name(self) -> str:
        """The profile's name, or "roofline"."""
        return self.profile.name if self.profile else ROOFLINE

    @property
    def engine_name(self) -> str:
        """The engine's name, or "none"."""
        return NO_ENGINE if self.engine is None else self.engine.name

    @property
    def memory_limit(self) -> MemoryLimit:
        """The limit of a GPU's peak memory. Raises InputError for a fraction out of range."""
        return MemoryLimit(gpu_memory_bytes=self.cluster.gpu.memory_bytes, memory_fraction=self.memory_fraction)

    def on_gpus(self, num_gpus: int) -> Scenario:
        """Return the scenario on another number of GPUs."""
        return replace(self, cluster=replace(self.cluster, num_gpus=num_gpus))

    def in_layout(self, layout: Layout) -> Scenario:
        """Return the scenario of one data group, in which GPUs that split all matrices are one rank.

        The batch is that of the busiest data group. Layouts of equal sizes share one scenario and its costs.
        """
        sizes = replace(layout, scheme=None, pieces="none")
        return self.memoize(sizes, lambda: self._in_sizes(sizes))

    def _in_sizes(self, layout: Layout) -> Scenario:
        request = replace(self.request, batch=-(-self.request.batch // layout.data))
        size = layout.tensor
        cluster = self.cluster
        group = None
        if size > 1:
            cluster = grouped_cluster(self.cluster, size)
            group = group_of(self.cluster, size, share_of(self.model, size))
        gather = None
        if layout.exchange == "gather":
            gather = group_of(cluster, layout.expert_ranks, self.model)
        load = self.request.batch / request.batch
        cluster = one_of(cluster, layout.data, layout.context)
        one = replace(self, request=request, layout=layout, cluster=cluster, group=group, gather=gather, data_load=load)
        one.share  # noqa: B018  # checks that the experts divide
        return one

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

    @property
    def context_span(self) -> tuple[int, int]:
        """Shortest and longest context for which the profile's measurements say how far off a prediction is.

        Flash attention counts FLOPs: in dense models, whole prefills of up to LONGEST_CHECKED tokens were no further
        off than those of the length of the longest measured kernel. Mixtures, sparse attention, latents and recurrences
        were off more in long contexts, or were not compared.
        """
        assert self.profile is not None, "a roofline has no measurements"
        shortest, longest = self.profile.valid.context_len
        kinds = self.model.layer_kinds
        is_dense = all(isinstance(one.mixer, Attention | None) and not one.num_experts for one in kinds)
        if is_dense and self.kernel == "flash" and longest >= _LEAST_CHECKED:
            longest = max(longest, LONGEST_CHECKED)
        return shortest, longest

    @cached_property
    def share(self) -> ModelSpec:
        """The model with the share of every layer that one GPU of a rank holds."""
        share = self.model if self.group is None else self.group.model
        return share if self.layout is None else place_experts(share, self.model, self.layout)

    @cached_property
    def expert_placement(self) -> ExpertPlacement:
        """Placement of routed experts on the GPUs."""
        layout = self.layout or (self._spread_over_all if self.expert_parallel else Layout())
        return ExpertPlacement(
            layout=layout,
            gather=self.gather,
            tokens=self.request.new_tokens,
            load=self.data_load,
            imbalance=self.expert_imbalance,
        )

    @property
    def _spread_over_all(self) -> Layout:
        if not any(layer.num_experts for layer in self.model.layer_kinds):
            raise InputError("expert_parallel", "yes", f"a mixture of experts, which {self.model.name} is not")
        return layout_on(Degrees(context=None, experts="ep"), self.cluster.num_gpus, is_mixture=True)

    @cached_property
    def prefix_access_plan(self) -> PrefixAccessPlan:
        """Access of attention to the cached prefix."""
        placement = self.prefix_placement if self.request.cached_prefix else ON_EVERY_RANK
        return plan_prefix_access(placement, self.prefix_access, self.cluster)

    @property
    def chain_is_proven(self) -> bool:
        """Whether bounds of KVR's chain hold: only if its ranks exchange no tokens for routed experts."""
        return self.expert_placement.layout.exchange == "none"

    def without_communication(self) -> Scenario:
        """The scenario of the paper's TTFT(p): links without cost, and the prefix on all ranks."""
        return self.memoize("without communication", self._without_communication)

    def _without_communication(self) -> Scenario:
        quiet = self.with_own_links(1e30, latency_s=0.0)
        quiet = replace(quiet, prefix_placement=ON_EVERY_RANK, prefix_access=None)
        if self.group is not None:
            quiet = replace(quiet, group=self.group.slower(_NO_TIME))
        if self.gather is not None:
            quiet = replace(quiet, gather=self.gather.slower(_NO_TIME))
        if quiet.profile is None:
            return quiet
        links = replace(quiet.profile.links, pending_share=0.0, message_sms=0)
        host = replace(self.host, resume_s=0.0, message_s=0.0, collective_s=0.0)
        return replace(quiet, profile=replace(quiet.profile, links=links)).with_host(host)

    def with_own_links(self, bandwidth_bytes_per_s: float, latency_s: float | None = None) -> Scenario:
        """Return the scenario with a path of this bandwidth between every pair; `sends_overlap` is unchanged."""
        links = replace(self.cluster, topology="switch").with_link(bandwidth_bytes_per_s, latency_s)
        if self.profile is None:
            return replace(self, cluster=links)
        sends: SendStyle = "overlap" if self.sends_overlap else "rendezvous"
        profile = replace(self.profile, links=replace(self.profile.links, sends=sends))
        return replace(self, cluster=links, profile=profile)

    def with_slower_links(self, factor: float) -> Scenario:
        """Return the scenario with links that are slower by a factor."""
        link = scale(self.cluster.link, factor)
        network = scale(self.cluster.network, factor)
        cluster = replace(self.cluster, link=link, network=network)
        group, gather = (None if one is None else one.slower(factor) for one in (self.group, self.gather))
        return replace(self, cluster=cluster, group=group, gather=gather)._with_costs_of(self)

    @property
    def host(self) -> HostRates:
        """Host costs: the engine's, or those of the profile."""
        if self.engine is not None:
            return self.engine.host_of(self.model.model_type)
        return NO_HOST if self.profile is None else self.profile.host

    def with_host(self, host: HostRates) -> Scenario:
        """Return the scenario with other host costs."""
        if self.engine is not None:
            other = replace(self, engine=replace(self.engine, host=host, model_types={}))
        else:
            other = self if self.profile is None else replace(self, profile=replace(self.profile, host=host))
        is_alike = host.resume_s == self.host.resume_s  # the pace depends on it
        return other._with_costs_of(self) if is_alike else other

    def _with_costs_of(self, other: Scenario) -> Scenario:
        """Copy the costs that a scenario with the same device and request has computed; return this scenario."""
        vars(self).update({name: vars(other)[name] for name in ("share", "pace", "cost") if name in vars(other)})
        return self

    @property
    def kernel_scale(self) -> float:
        """Seconds of the engine's kernels divided by those of the profile's kernels."""
        return 1.0 if self.engine is None or self.profile is None else self.engine.scale_on(self.profile.gpu)

    @cached_property
    def pace(self) -> float:
        """Seconds of products and attention divided by their seconds at the burst clock.

        Under load, the clock falls with the time since the prefill began. One factor holds for the whole prefill:
        that of a GPU with an even share of the work, because balanced ranks work about equally long.
        """
        if self.profile is None or self.profile.kernels.clock is None:
            return 1.0
        tokens, prefix = np.array([[self.request.new_tokens], [self.request.cached_prefix]], dtype=float)
        costs = self._layer_costs_by(self._cost_of(self.profile, pace=1.0))
        layers_s = [
            one.qkv_s(tokens)
            + (one.mixer.append_s(tokens, prefix) + one.mixer.attention_s(tokens, prefix) if one.has_mixer else 0.0)
            + one.output_mlp_s(tokens)
            + one.exchanged_experts_s(tokens) * self.expert_placement.layout.context  # equally many on each rank
            for one in costs
        ]
        busy_s = np.sum([layers_s[kind] for kind in self.share.layer_kind_index], axis=0) / self.cluster.num_gpus
        return float((self.profile.kernels.clock.loaded_s(busy_s) / busy_s)[0])

    @property
    def traits(self) -> KernelTraits:
        """Traits that all kernels share."""
        make_traits = KernelTraits if self.profile is None else self.profile.kernels.traits
        traits = make_traits(kernel=self.kernel, batch=self.request.batch, element_bytes=self.request.dtype_bytes)
        if self.engine is not None and self.engine.fused_merge:
            traits = replace(traits, fused_merge=True)
        return traits

    @cached_property
    def cost(self) -> CalibratedCost | RooflineCost:
        """Seconds of an operation on this scenario's GPU."""
        if self.profile is None:
            return RooflineCost.of(self.cluster.gpu, self.traits, self.request.dtype)
        return self._cost_of(self.profile, self.pace)

    def _cost_of(self, profile: CalibrationProfile, pace: float) -> CalibratedCost:
        return CalibratedCost(rates=profile.kernels, traits=self.traits, scale=self.kernel_scale, clock_factor=pace)

    @property
    def links_are_measured(self) -> bool:
        """Whether the links' figures are the profile's, not a datasheet's or the user's."""
        return self.profile is not None and self.cluster.link.profile == self.profile.name

    @property
    def sends_overlap(self) -> bool:
        """Whether messages overlap with computation."""
        if self.profile is None:
            return True
        links = self.profile.links
        return (links.sends_over_bus if self.cluster.topology == "bus" else links.sends) == "overlap"

    @property
    def pending_share(self) -> float:
        """The share of a rank's compute rate that is lost while a receive waits; 0 where it was not measured."""
        return 0.0 if self.profile is None else self.profile.links.pending_share

    @property
    def message_share(self) -> float:
        """Share of a GPU's compute rate that a ring's messages take while they are in flight.

        The share is that of the multiprocessors that messages occupy or, if not measured, `pending_share`.
        """
        message_sms = 0 if self.profile is None else self.profile.links.message_sms
        return min(message_sms / self.cluster.gpu.num_sms, _MOST_MESSAGE_SHARE) if message_sms else self.pending_share

    @property
    def optimistic_cost(self) -> CostModel:
        """Cost model with a lower bound on attention time, for proofs."""
        cost = self.cost
        return replace(cost, traits=replace(cost.traits, lower_bound=True))

    def layer_costs(self, cost: CostModel | None = None) -> tuple[LayerCosts, ...]:
        """Costs of each kind of layer of the model, with `cost` instead of the scenario's own."""
        if cost is None or cost is vars(self).get("cost"):  # self.cost fails if the GPU lacks the dtype
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
            hbm_bytes_per_s=self.cluster.gpu.hbm_bytes_per_s,
            placement=self.expert_placement,
            prefix=self.prefix_access_plan,
        )
        return tuple(LayerCosts(setting, layer) for layer in self.share.layer_kinds)
