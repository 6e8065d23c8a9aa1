"""Which cases are drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from validate.published.reference import Row, read_rows

FAST = "300GB/s"  # the link of the figures, as the publication names it


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """The published rows, and where between them the simulator is asked."""

    rows: tuple[Row, ...]
    gpu_counts: tuple[int, ...] = (2, 4, 8)  # panels of the TTFT and partition figures
    points: int = 27  # contexts along a curve of TTFT
    scaling_context_len: int = 16384  # tokens, scalability
    scaling_gpu_counts: tuple[int, ...] = (1, 2, 4, 8)
    partition_model: str = "llama-7b"  # of scalability and partitions
    knots: tuple[int, ...] = (4096, 8192, 12288, 16384)  # tokens; contexts in the lookup table
    interpolated_every: int = 512  # tokens; contexts at which KVR-P is compared with a search
    lookup_gpu_counts: tuple[int, ...] = (4, 8)
    noise: str = "paper"  # of the noisy network
    noise_samples: int = 400  # runs a bar

    @property
    def models(self) -> tuple[str, ...]:
        """Models with published TTFTs over NVLink, in the publication's order."""
        return tuple(dict.fromkeys(row.model for row in self.rows if row.link == FAST))

    def reported(self, model: str, num_gpus: int, strategy: str) -> tuple[Row, ...]:
        """Published rows over NVLink, by context."""
        wanted = (model, num_gpus, strategy, FAST)
        found = [row for row in self.rows if (row.model, row.num_gpus, row.strategy, row.link) == wanted]
        return tuple(sorted(found, key=lambda row: row.context_len))

    def contexts(self, model: str) -> tuple[int, ...]:
        """The published contexts of a model over NVLink."""
        return tuple(sorted({row.context_len for row in self.rows if row.model == model and row.link == FAST}))

    def curve(self, model: str) -> tuple[int, ...]:
        """The published contexts and points between them, in steps that grow with the context."""
        published = self.contexts(model)
        between = np.geomspace(published[0], published[-1], self.points)
        return tuple(sorted({*published, *(_multiple(tokens, 128) for tokens in between)}))

    @property
    def compared(self) -> tuple[int, ...]:
        """Contexts between the knots, and the knots."""
        return tuple(range(self.knots[0], self.knots[-1] + 1, self.interpolated_every))


def full_scope(rows: Iterable[Row] | None = None) -> Scope:
    """All that the page shows."""
    return Scope(rows=tuple(read_rows() if rows is None else rows))


def _multiple(tokens: float, of: int) -> int:
    return max(of, round(tokens / of) * of)
