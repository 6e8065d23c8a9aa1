"""MixerCost: base class of all mixers' costs.

A mixer is the part of a layer in which tokens see each other: softmax attention, latent attention, attention to chosen
keys, or a recurrence. Arguments and results are arrays of any one shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf

import numpy as np

from kvrsim.engine import NO_HOST, HostRates
from kvrsim.kernels.cost import CostModel
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.experts import ONE_GPU, ExpertPlacement
from kvrsim.kernels.prefix import LOCAL_PREFIX, PrefixAccessPlan
from kvrsim.kernels.tensor_parallel import Group
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Mixer
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSetting:
    """All inputs of a layer's costs except the layer; by default one sequence on one GPU."""

    model: ModelSpec  # one GPU's share of the model
    cost: CostModel
    host: HostRates = NO_HOST
    cached_prefix: int = 0  # tokens of the cached prefix; its K and V are not sent
    sends_overlap: bool = True
    resync_s: float = 0.0  # device time lost after a layer's communication
    group: Group | None = None  # GPUs of the rank, which split the model; None: one GPU
    message_share: float = 0.0  # share of the compute rate that is lost while a ring's message is in flight
    message_copies: float = 0.0  # copies of a message's K and V for whose time its sender computes nothing else
    message_bytes_per_s: float = inf  # bandwidth of messages that hold their sender until they have left; inf: none do
    hbm_bytes_per_s: float = inf  # memory bandwidth by the GPU's datasheet
    placement: ExpertPlacement = ONE_GPU  # placement of routed experts
    prefix: PrefixAccessPlan = LOCAL_PREFIX  # how attention reaches the cached prefix

    @property
    def messages_cost_time(self) -> bool:
        """Whether a message takes time from its sender's computation."""
        return self.message_copies > 0 or self.message_bytes_per_s < inf

    @property
    def batch(self) -> int:
        return self.cost.traits.batch

    @property
    def element_bytes(self) -> int:
        """Bytes per element of the request's dtype."""
        return self.cost.traits.element_bytes


class MixerCost(ABC):
    """Seconds, bytes and kernels of a mixer's own operations."""

    mixer: Mixer

    def __init__(self, setting: LayerSetting, mixer: Mixer) -> None:
        self.setting = setting
        self.mixer = mixer
        self.cost = setting.cost
        self.traits = setting.cost.traits
        self._element_bytes = setting.model.cached_element_bytes(setting.element_bytes)
        # Element-wise rates count elements of two bytes.
        self._half_token_bytes = mixer.token_bytes(setting.model.cached_element_bytes(2))

    # -- before token mixing
    @property
    def projections(self) -> tuple[Gemm, ...]:
        """Weight matrices before token mixing."""
        return self.mixer.projections

    def local_op_s(self, chunk: Array) -> Array | None:
        """Seconds of the mixer's other operations before token mixing; None without such operations."""
        return None

    # -- the cache
    def cache_bytes(self, tokens: Array) -> Array:
        """Bytes of the cache and the state of `tokens` tokens."""
        return np.asarray(self.setting.batch * self.mixer.cache_bytes(tokens, self._element_bytes))

    def needed_bytes(self, tokens: Array) -> Array:
        """Bytes of the cache of `tokens` tokens that later tokens need."""
        nbytes = np.asarray(self.mixer.needed_bytes(tokens, self._element_bytes))
        if self.setting.batch == 1:  # saves a product of arrays
            return nbytes
        return self.setting.batch * nbytes

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of the copies that join the caches of prefix and chunk."""
        return self._join_s(chunk, prefix, self.traits.copies.append)

    def concat_s(self, chunk: Array, others: Array) -> Array:
        """Seconds of the copies that put gathered pieces into one cache."""
        return self._join_s(chunk, others, self.traits.copies.gather)

    def _join_s(self, chunk: Array, others: Array, more: float) -> Array:
        """Seconds of copies and of the wait after communication; `more`: additional copies where `others` > 0."""
        copies = self.traits.copies
        seconds = np.full(np.broadcast(chunk, others).shape, self.setting.resync_s)
        if copies.keep or more:
            tokens = chunk + self.visible(others)
            seconds = seconds + self._copy_s(tokens * (copies.keep + more * (others > 0)))
        if copies.own:
            seconds = seconds + self._copy_s(chunk * copies.own, kernels=1)
        return seconds

    def message_s(self, tokens: Array) -> Array:
        """Seconds that a message with the cache of `tokens` tokens takes from its sender's computation.

        They are those of the copies, or those until the message has left if it holds its sender and this is longer.
        """
        copies_s = self._copy_s(self.setting.message_copies * self.visible(tokens))
        left_s = self.needed_bytes(tokens) / self.setting.message_bytes_per_s
        return np.asarray(np.maximum(copies_s, left_s))

    def visible(self, tokens: Array) -> Array:
        """Number of tokens that a query sees, of the `tokens` tokens before it."""
        reach = self.mixer.reach
        if reach is None:
            return tokens
        return np.minimum(tokens, reach)

    def _copy_s(self, tokens: Array, kernels: int = 0) -> Array:
        """Seconds to read and write each byte of the cache of `tokens` tokens."""
        return self.cost.traffic_s(tokens, (Traffic("copy", 2.0 * self._half_token_bytes, kernels),))

    # -- token mixing
    @property
    @abstractmethod
    def kernels(self) -> int:
        """Kernels from rotary embedding to the mixer's output."""

    @abstractmethod
    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds to mix the chunk's tokens with those of the prefix and with each other."""

    @abstractmethod
    def decode_s(self, keys: Array) -> Array:
        """Seconds of one token's mixing with `keys` tokens, itself included, in a decoding kernel."""

    def score_elements(self, chunk: Array, keys: Array) -> Array:
        """Elements of the score matrix of all heads for `chunk` queries and `keys` keys; 0 for a mixer without one."""
        return 0.0 * chunk * keys

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """Number of keys, without the chunk's own, in a call on the gathered keys of the whole context."""
        return start
