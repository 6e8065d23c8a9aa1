"""Strategies that gather the K and V of all chunks on every rank: TSP, zigzag and interleave.

Every rank keeps the K and V of the whole context: serving engines hold a copy of the cache on each context rank
(SGLang #18233, vLLM #46358).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvrsim.program import Array, Compute, Op
from kvrsim.strategies.base import OWN_TOKENS, RealRun, Step, Strategy, StrategyWords


def tsp_layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, gather all K and V, attend to the whole context with a mask, and compute the MLP."""
    yield step.qkv(rank)
    yield step.all_gather_kv(rank)
    yield step.assemble_kv(rank)
    yield step.attention(rank, prefix=others(step, rank))
    yield step.output_mlp(rank)


def others(step: Step, rank: int) -> Array:
    """Number of keys in attention over the gathered context, without the chunk's own keys."""
    return step.costs.mixer.gathered_prefix(step.chunks[rank], step.starts[rank], step.chunks[-1] + step.starts[-1])


TSP = Strategy(
    name="tsp",
    title="K and V gathered, even chunks",
    source="KV-Runahead, Fig. 4 (its baseline)",
    partition_rule="even",
    layer=tsp_layer,
    passes_state=True,
    gathers_kv=True,
    carries_prefix=True,
    words=StrategyWords(
        each_rank="an even chunk of the context; attends to the gathered K and V of all ranks",
        communication="all-gather of K and V in each layer",
        holds="K and V of all tokens, all weights",
    ),
    family="all-gathers",
    colour=("#df8f03", "#d89a04"),
    baseline_rank=0,
    usual_in=frozenset({"fleets", "fleets on a bus", "maps", "paper"}),
    is_replayable=True,
    real_run=RealRun(
        "tsp",
        "chain.GatherExchange",
        payload="all-gather",
        cache="every rank holds the K and V of all tokens; the last one decodes",
    ),
)


def zigzag_layer(step: Step, rank: int) -> Iterator[Op]:
    """Project both pieces, gather all K and V, attend from each piece to all tokens up to its end, compute the MLP."""
    yield from _gather_in_order(step, rank)
    early, late = pieces(step, rank)
    yield step.attention_to("early attention", *early)
    yield step.attention_to("late attention", *late)
    yield step.output_mlp(rank)


def _gather_in_order(step: Step, rank: int) -> Iterator[Op]:
    """Project, gather all K and V, and copy them into the order of the context, if the profile counts such copies."""
    yield step.qkv(rank)
    yield step.all_gather_kv(rank)
    yield step.assemble_kv(rank)
    mixer = step.costs.layer.mixer
    if step.costs.packs and mixer is not None:
        joined_s = step.costs.all_to_all_pack_s(step.lengths.sum(axis=0), round(mixer.token_bytes(1)))
        yield Compute(name="join", device_s=joined_s, kind="append")


def pieces(step: Step, rank: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(tokens, start) of a rank's early piece and of its late piece."""
    (early, early_start), (late, late_start) = step.halves
    return (early[rank], early_start[rank]), (late[rank], late_start[rank])


ZIGZAG = Strategy(
    name="zigzag",
    title="K and V gathered, early and late pieces",
    source="The Llama 3 Herd of Models, 2024 (arXiv:2407.21783), section 3.3.2; as SGLang and vLLM balance prefills",
    partition_rule="even",
    layer=zigzag_layer,
    gathers_kv=True,
    carries_prefix=True,
    words=StrategyWords(
        each_rank="an early and a late piece; attends to the gathered K and V of all ranks",
        communication="all-gather of K and V in each layer",
        holds="K and V of all tokens, all weights but slices of routed experts",
    ),
    family="all-gathers",
    colour=("#c7771c", "#9b6417"),
    usual_in=frozenset({"hybrids", "fleets", "maps"}),
    real_run=RealRun("zigzag", "own_attention.Zigzag", payload="all-gather", cache=OWN_TOKENS, decodes=False),
)


def interleave_layer(step: Step, rank: int) -> Iterator[Op]:
    """Project every N-th token, gather all K and V, attend from each token to all tokens before it, compute the MLP.

    On average, the tokens of each rank see as many keys as all tokens of the context. So each rank has an equal share
    of the work, also where a token's work depends on its position, as scoring in sparse attention does.
    """
    yield from _gather_in_order(step, rank)
    yield step.attention_share(rank)
    yield step.output_mlp(rank)


INTERLEAVE = replace(
    ZIGZAG,
    name="interleave",
    title="K and V gathered, every N-th token",
    source="SGLang 0.5.23, --cp-strategy interleave (sglang/srt/layers/cp/interleave.py)",
    layer=interleave_layer,
    words=StrategyWords(
        each_rank="every p-th token; attends to the gathered K and V of all ranks",
        communication="all-gather of K and V in each layer",
        holds="K and V of all tokens, all weights but slices of routed experts",
    ),
    colour=("#795b11", "#fc905d"),
    usual_in=frozenset(),
    real_run=None,
)
