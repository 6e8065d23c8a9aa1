"""Costs of attention to chosen keys: tokens' latents, keys of heads, or entries that stand for several tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvrsim.cost.mixing.base import Mixing, Setting
from kvrsim.cost.mixing.chosen import SparseMixer, sparse_call
from kvrsim.cost.mixing.latent import absorbing
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import LatentAttention
from kvrsim.program import Array


class SparseMixing(Mixing):
    """An indexer scores all keys before a query, the best are chosen, all heads attend to these.

    Where keys are latents, their expansion is absorbed into queries and outputs.
    """

    mixer: SparseMixer

    def __init__(self, setting: Setting, mixer: SparseMixer) -> None:
        super().__init__(setting, mixer)
        self._absorb: Callable[[Array], Array] | None = None
        if isinstance(mixer, LatentAttention):
            self._absorb = self.cost.row_cost(absorbing(mixer), ())

    @property
    def projections(self) -> tuple[Gemm, ...]:
        """Those of the indexer, too."""
        indexer = self.mixer.indexer
        return (*self.mixer.projections, *(() if indexer is None else indexer.projections))

    @property
    def kernels(self) -> int:
        """Scores and choice, attention, the absorbed products, and the cache's copy."""
        indexer = self.mixer.indexer
        chosen = 0 if indexer is None or indexer.shared else 2
        return chosen + 1 + 2 * (self._absorb is not None) + (self.cost.copies.own > 0)

    def mix_s(self, chunk: Array, prefix: Array) -> Array:
        """Scores, choice and attention of the chunk."""
        seconds = self.cost.sparse_s(sparse_call(self.mixer, chunk, prefix))
        return seconds if self._absorb is None else seconds + self._absorb(chunk)

    def decode_s(self, keys: Array) -> Array:
        """As a chunk of one token."""
        one = np.ones_like(keys)
        return self.mix_s(one, keys - one)
