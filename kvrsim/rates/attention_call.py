"""AttentionCall: what one attention call covers, whatever kernel does it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """What one attention call covers."""

    chunk: Array  # queries
    prefix: Array  # keys before the first query's own, as far as the window lets any query see
    causal: Array  # elements of one head's score matrix that are not masked
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    score_bytes: float  # that an eager kernel moves per element of the score matrix
    own: bool = True  # the chunk's own keys follow the prefix, and are masked and appended; False: the prefix alone

    @property
    def keys(self) -> Array:
        """Keys that the kernel is given."""
        return self.prefix + self.chunk if self.own else self.prefix
