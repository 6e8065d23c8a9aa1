"""The subject of a prediction: a request, a model, a cluster and a profile.

A partition says how the request's context is split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self

from kvrsim.choices import DTYPE_BYTES, DTYPES
from kvrsim.engine import NO_ENGINE, NO_HOST, Engine, HostRates
from kvrsim.errors import InputError, check_whole
from kvrsim.hardware import DEFAULT_MEMORY_FRACTION, Cluster, MemoryLimit, builtin_gpus, load_gpu
from kvrsim.kernels.attention import ATTENTION_KERNELS
from kvrsim.kernels.cost import KernelTraits
from kvrsim.kernels.experts import check_imbalance, place_experts
from kvrsim.kernels.prefix import ON_EVERY_RANK, PrefixPlacement
from kvrsim.kernels.profile import CalibrationProfile, SendStyle, profiles_with
from kvrsim.layout import Degrees, Layout, layout_on
from kvrsim.model.mixers import Attention
from kvrsim.model.quantization import in_fp8
from kvrsim.model.spec import ModelSpec
from kvrsim.once import Source
from kvrsim.units import MAX_TOKENS

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
            accepted = "a chunk of at least 1 token per rank, a whole number"
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
            raise InputError("partition", text, f"{num_ranks} chunk lengths, one per GPU")
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
KERNELS = ATTENTION_KERNELS
_SAME_PEAK = 0.1  # relative difference of arithmetic rates per multiprocessor below which kernels are as efficient
LONGEST_CHECKED = 2**19  # tokens of the longest prefills of dense models with flash attention that were compared
LONGEST_CHECKED_OTHERS = 2**17  # the same of mixtures, latent attention and recurrences
_LEAST_CHECKED = 2**14  # tokens: tables of kernels that end before say less about long contexts
_MOST_MESSAGE_SHARE = 0.9  # largest share of a GPU's multiprocessors that messages take


@dataclass(frozen=True, kw_only=True)
class Scenario(Source):
    """One request to one model on one cluster, predicted from one profile (None: the datasheet's roofline).

    It is the question. A strategy's ranks see a kvrsim.placement.PlacedScenario: one GPU each, or groups of GPUs.
    """

    model: ModelSpec
    cluster: Cluster
    request: Request
    profile: CalibrationProfile | None
    kernel: str  # attention kernel, one of KERNELS
    memory_fraction: float = DEFAULT_MEMORY_FRACTION  # share of each GPU's memory that the prefill may use
    engine: Engine | None = None  # serving engine; None: the kernels and the profile's host
    expert_parallel: bool = False  # whether whole routed experts are spread over all GPUs
    expert_imbalance: float | None = (
        None  # rows of the busiest GPU's experts divided by the mean; None: mean_imbalance()
    )
    prefix_placement: PrefixPlacement = ON_EVERY_RANK  # where the cached prefix's K and V are

    def __post_init__(self) -> None:
        self.check_memory_fraction()
        self.check_experts()
        self.check_attention()
        self.check_dtype()
        if self.request.dtype == "fp8" and self.model.quantization is None:
            object.__setattr__(self, "model", in_fp8(self.model))

    def check_memory_fraction(self) -> None:
        """Raise InputError for a fraction of the memory that is out of range."""
        MemoryLimit(gpu_memory_bytes=self.cluster.gpu.memory_bytes, memory_fraction=self.memory_fraction)

    def check_experts(self) -> None:
        """Raise InputError where the GPUs cannot share the routed experts as required."""
        check_imbalance(self.expert_imbalance)
        if self.expert_parallel:
            place_experts(self.model, self.model, self.experts_on_all_gpus)

    def check_attention(self) -> None:
        """Raise InputError for an engine beside the roofline, and for an attention kernel without rates."""
        if self.profile is None:
            if self.engine is not None:
                raise InputError("engine", self.engine.name, "none beside the roofline, which has no measured kernels")
            if self.kernel not in KERNELS:
                raise InputError("attention", self.kernel, ", ".join(KERNELS))
        elif self.kernel not in self.profile.attention_kernels:
            has = ", ".join(self.profile.attention_kernels)
            others = " or ".join(profiles_with(self.kernel, self.profile.gpu))
            where = f"; `profile` {others} has {self.kernel}" if others else ""
            raise InputError("attention", self.kernel, f"a kernel that profile {self.profile.name} has: {has}{where}")

    def check_dtype(self) -> None:
        """Raise InputError for a dtype that the profile has not."""
        if self.profile is not None and self.request.dtype not in self.profile.dtypes:
            has = ", ".join(self.profile.dtypes)
            raise InputError("dtype", self.request.dtype, f"what profile {self.profile.name} has: {has}")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the fields, without the values computed from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

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
        """The limit of a GPU's peak memory."""
        return MemoryLimit(gpu_memory_bytes=self.cluster.gpu.memory_bytes, memory_fraction=self.memory_fraction)

    def on_gpus(self, num_gpus: int) -> Self:
        """Return the scenario on another number of GPUs."""
        return replace(self, cluster=replace(self.cluster, num_gpus=num_gpus))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that compute a prompt."""
        return self.cluster.num_gpus

    @property
    def has_scaled_kernels(self) -> bool:
        """Whether the kernels' rates are those of a GPU with another arithmetic rate per multiprocessor."""
        gpu = self.cluster.gpu
        if self.profile is not None and self.profile.cluster is None and self.cluster.arithmetic_share < 1:
            return True
        if self.profile is None or self.profile.gpu == gpu.name:
            return False
        if self.profile.gpu not in builtin_gpus():
            return True
        measured = load_gpu(self.profile.gpu)
        peak = gpu.peak_flops["fp16"] / gpu.num_sms
        measured_peak = measured.peak_flops["fp16"] / measured.num_sms
        return not math.isclose(peak, measured_peak, rel_tol=_SAME_PEAK)

    @property
    def context_span(self) -> tuple[int, int]:
        """Shortest and longest context for which the profile's measurements say how far off a prediction is.

        Flash attention counts FLOPs: in dense models, whole prefills of up to LONGEST_CHECKED tokens were no further
        off than those of the length of the longest measured kernel; in mixtures, latent attention and recurrences,
        those of up to LONGEST_CHECKED_OTHERS tokens. Windows in mixtures and sparse attention were off more in long
        contexts, or were not compared.
        """
        assert self.profile is not None, "a roofline has no measurements"
        shortest, longest = self.profile.valid.context_len
        if self.kernel != "flash" or longest < _LEAST_CHECKED:
            return shortest, longest
        mixers = [layer.mixer for layer in self.model.layer_kinds if layer.mixer is not None]
        if not self.model.is_mixture and all(isinstance(mixer, Attention) for mixer in mixers):
            return shortest, max(longest, LONGEST_CHECKED)
        if not any(mixer.is_sparse or mixer.reach is not None for mixer in mixers):
            longest = max(longest, LONGEST_CHECKED_OTHERS)
        return shortest, longest

    @property
    def experts_on_all_gpus(self) -> Layout:
        """The layout that spreads whole experts over all GPUs. Raises InputError for a model without experts."""
        if not any(layer.num_experts for layer in self.model.layer_kinds):
            raise InputError("expert_parallel", "yes", f"a mixture of experts, which {self.model.name} is not")
        return layout_on(Degrees(context=None, experts="ep"), self.cluster.num_gpus, is_mixture=True)

    def with_own_links(self, bandwidth_bytes_per_s: float, latency_s: float | None = None) -> Self:
        """Return the scenario with a path of this bandwidth between every pair; `sends` is unchanged."""
        links = replace(self.cluster, topology="switch").with_link(bandwidth_bytes_per_s, latency_s)
        if self.profile is None:
            return replace(self, cluster=links)
        profile = replace(self.profile, links=replace(self.profile.links, sends=self.sends))
        return replace(self, cluster=links, profile=profile)

    @property
    def host(self) -> HostRates:
        """Host costs: the engine's, or those of the profile."""
        if self.engine is not None:
            return self.engine.host_of(
                self.model.model_type, is_mixture=self.model.is_mixture, gpu=self.cluster.gpu.name
            )
        return NO_HOST if self.profile is None else self.profile.host

    def with_host(self, host: HostRates) -> Self:
        """Return the scenario with other host costs."""
        if self.engine is not None:
            return replace(self, engine=self.engine.without_factors(host))
        return self if self.profile is None else replace(self, profile=replace(self.profile, host=host))

    @property
    def kernel_scale(self) -> float:
        """Seconds of the engine's kernels divided by those of the profile's kernels."""
        return 1.0 if self.engine is None or self.profile is None else self.engine.scale_on(self.profile.gpu)

    @property
    def traits(self) -> KernelTraits:
        """Traits that all kernels share."""
        make_traits = KernelTraits if self.profile is None else self.profile.kernels.traits
        traits = make_traits(kernel=self.kernel, batch=self.request.batch, element_bytes=self.request.dtype_bytes)
        if self.engine is not None and self.engine.fused_merge:
            traits = replace(traits, fused_merge=True)
        return traits

    @property
    def links_are_measured(self) -> bool:
        """Whether the links' figures are the profile's, not a datasheet's or the user's."""
        return self.profile is not None and self.cluster.link.profile == self.profile.name

    @property
    def sends(self) -> SendStyle:
        """What messages do to the computation of their ranks; without a profile nothing."""
        if self.profile is None:
            return "overlap"
        if self.cluster.topology == "bus":
            return self.profile.links.sends_over_bus
        return self.profile.links.sends

    @property
    def sends_overlap(self) -> bool:
        """Whether a rank goes on to its next operation while its messages are in flight."""
        return self.sends != "rendezvous"

    @property
    def pending_share(self) -> float:
        """The share of a rank's compute rate that is lost while a receive waits; 0 where it was not measured."""
        return 0.0 if self.profile is None else self.profile.links.pending_share

    @property
    def message_copies(self) -> float:
        """Copies of a message's K and V for whose time its sender computes nothing else; 0 where messages hold it."""
        if self.profile is None or not self.sends_overlap:
            return 0.0
        return self.profile.links.message_copies

    @property
    def message_bytes_per_s(self) -> float:
        """Bandwidth of messages that hold their sender until they have left; infinite where none do."""
        if self.sends == "sender":
            return self.cluster.link.bandwidth_bytes_per_s
        return math.inf

    @property
    def message_share(self) -> float:
        """Share of a GPU's compute rate that a ring's messages take while they are in flight.

        The share is that of the multiprocessors that messages occupy or, if not measured, `pending_share`.
        """
        message_sms = 0 if self.profile is None else self.profile.links.message_sms
        return min(message_sms / self.cluster.gpu.num_sms, _MOST_MESSAGE_SHARE) if message_sms else self.pending_share
