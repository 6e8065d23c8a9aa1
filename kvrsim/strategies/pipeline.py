"""Pipeline parallelism in chunks: stages of layers, through which the context goes piece by piece.

A stage is one rank, or several context ranks that split each piece. Each context rank has an early and a late part of
every piece, as in `zigzag`; together they gather the piece's K and V. Each rank keeps all K and V of its stage, because
later pieces attend to them: engines hold a whole copy of the cache on every context rank (SGLang #18233, vLLM #46358).
Activations go to the same context rank of the next stage. Ranks are numbered stage by stage, so that ranks that gather
are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from kvrsim.layout import Degrees
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from kvrsim.strategies.base import RealRun, Strategy, StrategyWords
from kvrsim.strategies.layers import SINGLE


def even_layers(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """Number of layers of each rank; if they do not divide, the first ranks have one more."""
    share, rest = divmod(num_layers, num_ranks)
    return tuple(share + (rank < rest) for rank in range(num_ranks))


def stages(strategy: Strategy, num_layers: int, num_ranks: int) -> tuple[range, ...]:
    """Layer numbers of each stage of a pipeline."""
    num_stages = num_ranks // context_ranks(strategy)
    counts = strategy.stage_layers or even_layers(num_layers, num_stages)
    ends = tuple(accumulate(counts, initial=0))
    assert (len(counts), ends[-1]) == (num_stages, num_layers), "stages of another model or number of ranks"
    return tuple(range(first, end) for first, end in pairwise(ends))


def context_ranks(strategy: Strategy) -> int:
    """Number of ranks per stage of a pipeline; 1 without a pipeline."""
    if not strategy.is_pipeline:
        return 1
    return strategy.degrees.context or 1


def tokens_of(strategy: Strategy, partition: Sequence[int], rank: int) -> int:
    """Tokens of a rank: its chunk or, in a pipeline, its share of all pieces."""
    if not strategy.is_pipeline:
        return partition[rank]
    context = context_ranks(strategy)
    return int(shares(np.array(partition, dtype=float), context)[rank % context].sum())


def shares(pieces: Array, ranks: int) -> list[Array]:
    """Tokens of each context rank of a stage, one array like `pieces` per rank; the first ranks have the remainder."""
    share = np.floor(pieces / ranks)
    return [share + (rank < pieces - ranks * share) for rank in range(ranks)]


def refuses(model: ModelSpec, stages: int) -> str | None:
    """Refuse more stages than layers."""
    if stages <= model.num_hidden_layers:
        return None
    return f"at most {model.num_hidden_layers} stages, one per layer"


PIPELINE = Strategy(
    name="pp",
    title="pipeline of layers, even pieces",
    source="Qin et al., Mooncake, 2024 (arXiv:2407.00079), section 5.1, with chunks as in Sarathi (arXiv:2308.16369)",
    partition_rule="pieces",
    layer=SINGLE.layer,
    degrees=Degrees(pipeline=None, pieces="even"),
    refuses=refuses,
    words=StrategyWords(
        each_rank="1 / p of the layers; the context in even pieces, one after another",
        communication="activations of a piece to the next stage",
        holds="K and V of all tokens and the weights, of its layers",
    ),
    family="pipelines",
    colour=("#86ab72", "#a5e9a3"),
    usual_in=frozenset({"hybrids", "fleets", "maps"}),
    real_run=RealRun(
        "pp",
        "pipeline.Pipeline",
        payload="activations",
        cache="each rank holds the K and V of its own layers",
        decodes=False,
    ),
)
PIPELINE_SEARCHED = replace(
    PIPELINE,
    name="pp-s",
    title="pipeline of layers, searched pieces",
    source=f"{PIPELINE.source}; pieces of equal time as in SGLang (dynamic chunking, 2025)",
    partition_rule="searched-pieces",
    degrees=Degrees(pipeline=None, pieces="searched"),
    words=StrategyWords(
        each_rank="layers and pieces that are searched; the pieces one after another",
        communication="activations of a piece to the next stage",
        holds="K and V of all tokens and the weights, of its layers",
        docs="docs/explanation/search.md#pipelines",
    ),
    colour=("#679e6f", "#bde66e"),
    usual_in=frozenset({"hybrids"}),
)
