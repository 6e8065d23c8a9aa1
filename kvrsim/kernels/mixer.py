"""Mixing: the interface of all mixers' costs, and what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.gemm import GEMM_TYPES, Product, merged
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Mixer
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array

if TYPE_CHECKING:
    from kvrsim.kernels.calibrated import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the costs of a mixer depend on besides the mixer."""

    model: ModelSpec
    cost: CostModel
    batch: int
    element_bytes: int
    kernel: str  # of softmax attention
    resume_s: float  # device time lost after a layer's communication
    hbm_bytes_per_s: float  # of the GPU's datasheet


def products_of(
    cost: CostModel, gemms: Sequence[Gemm], num_matrices: int = 1, share: float = 1.0
) -> tuple[Product, ...]:
    """Products of tokens with weight matrices; those of one input are one where the engine fuses."""
    products = tuple(
        Product(
            gemm.in_features // gemm.groups,
            gemm.out_features // gemm.groups,
            num_matrices * gemm.groups,
            share,
            gemm.compute,
        )
        for gemm in gemms
    )
    return merged(products) if cost.fused else products


def launches(cost: CostModel, products: Sequence[Product]) -> int:
    """Kernels of products and of what quantises their inputs; engines compute products of several matrices in one."""
    matrices = sum(1 if cost.fused else product.num_matrices for product in products)
    return matrices + sum(
        product.compute is not None and GEMM_TYPES[product.compute].quantised > 0 for product in products
    )


class Mixing(ABC):
    """Seconds, bytes and kernels of a mixer's own operations; arguments and results are arrays of any one shape."""

    mixer: Mixer
    has_own: ClassVar[bool] = False  # whether own_s is anything

    def __init__(self, setting: Setting, mixer: Mixer) -> None:
        self.setting, self.mixer, self.cost = setting, mixer, setting.cost
        self._width = setting.model.cached_element_bytes(setting.element_bytes)
        # Element-wise rates count elements of two bytes.
        self._half_token_bytes = mixer.token_bytes(setting.model.cached_element_bytes(2))

    # -- products and element-wise steps of the chunk alone
    @property
    def projections(self) -> tuple[Gemm, ...]:
        """Matrices before tokens see each other."""
        return self.mixer.projections

    def own_s(self, chunk: Array) -> Array:
        """What else the mixer does to the chunk before tokens see each other; nothing unless `has_own`."""
        return 0.0 * chunk

    # -- the cache
    def cache_bytes(self, tokens: Array) -> Array:
        """Cache and state of so many tokens."""
        return np.asarray(self.setting.batch * self.mixer.cache_bytes(tokens, self._width))

    def needed_bytes(self, tokens: Array) -> Array:
        """Of the cache of so many tokens, what the tokens after them need."""
        nbytes = np.asarray(self.mixer.needed_bytes(tokens, self._width))
        return nbytes if self.setting.batch == 1 else self.setting.batch * nbytes

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Copies that put the cache of prefix and chunk into one: one more where there is a prefix."""
        copies = self.cost.copies
        if not copies.keep and not copies.append:
            seconds = np.full(np.broadcast(chunk, prefix).shape, self.setting.resume_s)
        else:
            tokens = self.seen(prefix) + chunk
            copied = np.asarray(tokens * (copies.keep + copies.append))
            np.multiply(tokens, copies.keep, out=copied, where=prefix <= 0)
            seconds = self._copy_s(copied) + self.setting.resume_s
        return seconds + self._write_s(chunk) if copies.own else seconds

    def assemble_s(self, chunk: Array, others: Array) -> Array:
        """Copies that put gathered pieces into one cache; alone, a rank only keeps its own."""
        copies = self.cost.copies
        seconds = self.setting.resume_s + self._copy_s(
            (chunk + self.seen(others)) * (copies.keep + copies.gather * (others > 0))
        )
        return seconds + self._write_s(chunk) if copies.own else seconds

    def seen(self, tokens: Array) -> Array:
        """Of so many tokens before a query, those that it can see."""
        reach = self.mixer.reach
        return tokens if reach is None else np.minimum(tokens, reach)

    def _copy_s(self, tokens: Array, kernels: int = 0) -> Array:
        """Each byte of the cache is read and written."""
        return self.cost.traffic_s(tokens, (Traffic("copy", 2.0 * self._half_token_bytes, kernels),))

    def _write_s(self, chunk: Array) -> Array:
        """The chunk's own part of the cache into a buffer."""
        return self._copy_s(chunk * self.cost.copies.own, kernels=1)

    # -- tokens see each other
    @property
    @abstractmethod
    def kernels(self) -> int:
        """Kernels from rotary embedding to the mixer's output."""

    @abstractmethod
    def mix_s(self, chunk: Array, prefix: Array) -> Array:
        """The chunk's tokens see the prefix and the chunk."""

    def in_blocks_s(self, chunk: Array, prefix: Array, blocks: int) -> Array:
        """The same in so many calls, each of as many of the chunk's tokens, which see the keys up to their own end."""
        assert blocks == 1, "a mixer whose queries are not called in blocks"
        return self.mix_s(chunk, prefix)

    @abstractmethod
    def decode_s(self, keys: Array) -> Array:
        """One token sees `keys` tokens, itself included, in a decoding kernel."""

    def score_elements(self, chunk: Array, keys: Array) -> Array:
        """Elements of the score matrix of so many queries and keys, all heads; 0 where there is none."""
        return 0.0 * chunk * keys

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """Tokens besides the chunk that it sees, or has masked, where it is given the whole context."""
        return start


class BlockMixing(Mixing):
    """A mixer whose results for blocks of keys can be merged, as rings do."""

    @abstractmethod
    def block_s(self, chunk: Array, start: Array, keys: Array, end: Array, *, part: bool = False) -> Array:
        """The chunk's queries, which begin at `start`, against `keys` tokens before them that end at `end`.

        The result is merged with that of other blocks; a block that no query sees takes no time.
        part: the queries are a part of the rank's chunk.
        """

    @abstractmethod
    def share_s(self, chunk: Array, start: Array, prefix: Array, share: float) -> Array:
        """The chunk's queries, which begin at `start`, against an even share of the first `prefix` tokens, not merged.

        The share's tokens are spread over all, so a window leaves as many of each share.
        """

    @abstractmethod
    def merge_s(self, chunk: Array, *, part: bool = False) -> Array:
        """A block's result for these queries merged with that of the blocks before; `part`: as in block_s."""

    @abstractmethod
    def cast_s(self, chunk: Array) -> Array:
        """The chunk's output to fp32, in which results are merged, or back."""

    @property
    @abstractmethod
    def merge_kernels(self) -> int:
        """Kernels of merge_s."""
