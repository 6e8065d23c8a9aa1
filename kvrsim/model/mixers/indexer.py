"""What all mixers share: numbers of tokens, and an indexer that chooses keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrsim.model.gemm import Gemm

Tokens = Any  # a number or an array of tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """Scores all earlier keys with a few small heads and keeps the best for attention."""

    num_heads: int  # of the queries; all share one key
    head_dim: int  # of queries and keys
    top_k: int  # keys that a query then attends to
    block: int = 1  # tokens that are chosen together
    projections: tuple[Gemm, ...] = ()  # from the layer's input or its latent to index queries, keys and weights
    key_bytes: int = 0  # of one stored index key, scales included, whatever the request's dtype
    shared: bool = False  # takes the choice of an earlier layer: scores nothing and stores nothing

    @property
    def cached_bytes(self) -> int:
        """Of one token's index key; none where the choice is an earlier layer's."""
        return 0 if self.shared else self.key_bytes

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices."""
        return self.projections


def index_key_bytes(indexer: Indexer | None) -> int:
    """Of one token's index key; 0 without an indexer."""
    return 0 if indexer is None else indexer.cached_bytes
