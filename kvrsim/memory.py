"""Bytes that a rank needs at its peak, part by part.

Weights and KV-cache are held throughout; activations, score matrix and logits at their largest moment.
Eager attention in half precision holds, at the softmax, the scores with their mask, the fp32 copy and
its half-precision result: 2 + 4 + 2 bytes per element, and the scores that the mask was added to, 2 more.
A ring that merges results kernel by kernel holds, per element of the output, the merged value, the block's, the
weighted difference and the new value in fp32, and the block's in half precision: 4 x 4 + 2 bytes; in one kernel 4 + 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.io.schema import fields_to_json
from kvrsim.kernels.cost import no_time
from kvrsim.kernels.experts import RoutedExperts
from kvrsim.model.mixers import Attention, LatentAttention, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.program import Array, Compute, Load, Program, RingPass, bytes_in_flight
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.pipeline import context_ranks, stages

EAGER_SCORE_PEAK_BYTES = 10  # per element of the score matrix of two-byte elements, as counted above
MERGE_PEAK_BYTES, FUSED_MERGE_PEAK_BYTES = 18, 6  # per element of the output, as counted above
RUNTIME_BYTES = 1_000_000_000  # CUDA context, cuBLAS workspace and NCCL buffers of one process


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak bytes of one rank, by what they are for."""

    weights: int
    kv_cache: int  # of all layers, for every token whose K and V the rank holds
    gathered: int  # of one layer: messages not yet copied into the cache, and K and V that are not kept
    activations: int  # residual stream, and Q, K, V with a ring's results or the MLP's widest tensors, one layer
    scores: int  # eager attention's score matrix in all its copies, all heads; flash has none
    logits: int
    runtime: int

    @property
    def total(self) -> int:
        """Score matrix, MLP activations and logits are not alive together: the largest counts."""
        held = self.weights + self.kv_cache + self.gathered + self.runtime
        return held + max(self.scores, self.activations, self.logits)

    def to_dict(self) -> dict[str, int]:
        """The parts and their total."""
        return fields_to_json(self) | {"total": self.total}


def memory_of(
    scenario: Scenario, strategy: Strategy, partition: Partition, program: Program | None = None
) -> tuple[RankMemory, ...]:
    """Peak memory of every GPU, rank by rank; those of a group have equal shares.

    What a rank holds is read from its program: K, V after each operation, messages and gathered pieces until they are
    in the cache, score matrices. Where a program does not say what it holds, it is taken to hold the whole context.
    """
    if strategy.pipeline is not None:
        ranks = list(_stage_memories(scenario, strategy, partition))
    else:
        if program is None:  # times only if they determine the calls of attention
            cost = no_time(scenario.traits) if len(strategy.query_blocks) == 1 else scenario.cost
            program = build_program(scenario, strategy, columns(partition.chunk_lens), cost)
        in_flight = np.array([bytes_in_flight(kind) for kind in program.layers])
        ranks = [
            _rank_memory(scenario, strategy, partition, program, rank, in_flight[:, rank])
            for rank in range(len(partition.chunk_lens))
        ]
    each_group = tuple(rank for rank in ranks for _ in range(scenario.gpus_per_rank))
    return each_group * scenario.data_groups


def fits(scenario: Scenario, memory: tuple[RankMemory, ...]) -> bool:
    """Whether every rank's peak is within the scenario's memory limit."""
    limit_bytes = scenario.memory_limit.nbytes
    return all(rank.total <= limit_bytes for rank in memory)


def _rank_memory(
    scenario: Scenario, strategy: Strategy, partition: Partition, program: Program, rank: int, in_flight: Array
) -> RankMemory:
    """`in_flight` is the bytes in flight on the rank, in a layer of each kind."""
    model, request = scenario.share, scenario.request
    width, batch, chunk = request.dtype_bytes, request.batch, partition.chunk_lens[rank]
    access = scenario.prefix_access_plan
    kept, gathered = [], []
    for ops, layer, in_flight_bytes in zip(
        [kind[rank] for kind in program.layers], model.layer_kinds, in_flight, strict=True
    ):
        whole = batch * _cache_bytes(model, layer, request.context_len, width)
        shares = access.share and not isinstance(layer.mixer, Recurrence)  # each rank keeps its share of the prefix
        prefix = batch * _cache_bytes(model, layer, request.cached_prefix, width)
        others = prefix * (1.0 - access.share) if shares else 0.0
        cached = [float(op.kv_bytes[0]) for op in ops if isinstance(op, Compute) and op.kv_bytes is not None]
        # What it loads for this layer alone is in flight.
        dropped = sum(op.nbytes.item() for op in ops if isinstance(op, Load) and not op.ahead)
        peak = max(cached, default=whole) - dropped
        gathers = strategy.gathers_kv and access.access == "pass-kv"
        kept.append(peak - others * gathers)
        gathered.append(in_flight_bytes + peak - kept[-1])
    is_last = rank == len(partition.chunk_lens) - 1
    token_bytes = max(
        _activation_elements(scenario) * width,
        _merging_bytes(model, program, rank, width, fused=scenario.traits.fused_merge),
    )
    whole_scores = batch * _score_heads(model) * chunk * request.context_len
    return RankMemory(
        weights=model.weight_bytes(width),
        kv_cache=round(sum(kept[kind] for kind in program.layer_kind_index)),
        gathered=round(max(gathered)),
        activations=max(batch * chunk * token_bytes, _expert_bytes(scenario, chunk, request.new_tokens)),
        scores=_score_bytes(program, rank, width, whole=whole_scores) if scenario.kernel == "eager" else 0,
        logits=batch * _logits_bytes(scenario, chunk, width) if is_last else 0,
        runtime=RUNTIME_BYTES,
    )


def _score_bytes(program: Program, rank: int, width: int, *, whole: int) -> int:
    """Bytes of the largest score matrix of the program; `whole` elements if the program states none."""
    ops = [op for kind in program.layers for op in kind[rank] if isinstance(op, Compute | RingPass)]
    elements = max((float(op.score_elements[0]) for op in ops if op.score_elements is not None), default=float(whole))
    return round(elements) * EAGER_SCORE_PEAK_BYTES * width // 2


def _stage_memories(scenario: Scenario, strategy: Strategy, partition: Partition) -> Iterator[RankMemory]:
    """The ranks of a pipeline: a stage's layers, K and V of all tokens in them, the rank's share of a piece at a time.

    The context ranks of a stage gather the K and V of a piece, and attend in two parts; the last one has the logits.
    """
    model, request, context = scenario.share, scenario.request, context_ranks(strategy)
    width, batch, longest = request.dtype_bytes, request.batch, max(partition.chunk_lens)
    piece = -(-longest // context)
    layer_bytes, kinds = model.layer_bytes(width), model.layer_kind_index
    kv_bytes = [_cache_bytes(model, kind, request.context_len, width) for kind in model.layer_kinds]
    gathered = [_cache_bytes(model, kind, longest, width) if context > 1 else 0.0 for kind in model.layer_kinds]
    tensors = batch * piece * _activation_elements(scenario) * width
    score_rows = piece if context == 1 else -(-piece // 2)
    head = model.head_bytes(width), batch * _logits_bytes(scenario, partition.chunk_lens[-1] // context, width)
    held = stages(strategy, model.num_hidden_layers, scenario.cluster.num_gpus)
    experts = _expert_bytes(scenario, piece, longest)
    for layers in held:
        begins, ends = layers[0] == 0, layers[-1] == model.num_hidden_layers - 1
        weights = sum(layer_bytes[layer] for layer in layers) + begins * model.embedding_bytes(width) + ends * head[0]
        if ends and not begins and model.tie_word_embeddings:
            weights += model.vocab_size * model.hidden_size * width
        messages = 0.0 if begins and ends else 2.0 * batch * piece * model.hidden_size * width
        last = RankMemory(
            weights=weights,
            kv_cache=round(batch * sum(kv_bytes[kinds[layer]] for layer in layers)),
            gathered=round(messages + batch * max(gathered[kinds[layer]] for layer in layers)),
            activations=max(tensors, experts),
            scores=_scores(scenario, score_rows, request.context_len) if scenario.kernel == "eager" else 0,
            logits=head[1] if ends else 0,
            runtime=RUNTIME_BYTES,
        )
        yield from (*[replace(last, logits=0)] * (context - 1), last)


def _cache_bytes(model: ModelSpec, layer: LayerSpec, tokens: int, width: int) -> float:
    """Cache and state of that many tokens in a layer, of one sequence."""
    return 0.0 if layer.mixer is None else float(layer.mixer.cache_bytes(tokens, model.cached_element_bytes(width)))


def _activation_elements(scenario: Scenario) -> int:
    """Elements per token at the widest moment of a layer: residual twice, and the tensors of the mixer or the MLP.

    Experts that are spread, or that several ranks share, have other tokens than the rank's (see _expert_bytes).
    """
    model, spread = scenario.share, _has_other_tokens(scenario)
    return 2 * model.hidden_size + max(
        max(_mixer_elements(layer), 0 if spread and layer.num_experts else _mlp_elements(layer))
        for layer in model.layer_kinds
    )


def _has_other_tokens(scenario: Scenario) -> bool:
    layout = scenario.expert_placement.layout
    return layout.expert_parallel > 1 or layout.exchange != "none"


def _expert_bytes(scenario: Scenario, chunk: int, together: int) -> int:
    """What the busiest GPU holds of its experts' rows, and the chunk's residual stream twice.

    Where ranks gather tokens for their experts, those of the stage, too. together: tokens of a sequence on all ranks.
    """
    if not _has_other_tokens(scenario):
        return 0
    batch, width = scenario.request.batch, scenario.request.dtype_bytes
    tokens, every = np.array([float(chunk)]), np.array([float(together)])
    gathered = together * scenario.data_load if scenario.gather is not None else 0.0
    cost, placement = no_time(scenario.traits), scenario.expert_placement
    rows = [
        float(RoutedExperts(layer, cost, placement).rows(tokens, batch, every)[0]) * _mlp_widths(layer)
        for layer in scenario.share.layer_kinds
        if layer.num_experts
    ]
    held = 2 * chunk + gathered
    return round(max(rows) * width) + round(held * batch * scenario.share.hidden_size * width)


def _mlp_elements(layer: LayerSpec) -> int:
    """Elements of the MLP's tensors, for all experts that a token passes through."""
    if not layer.mlp:
        return 0
    return _mlp_widths(layer) * max(1, layer.num_experts_per_tok)


def _mlp_widths(layer: LayerSpec) -> int:
    """Features of the tensors between the matrices of the MLP or of one expert."""
    return sum(gemm.out_features for gemm in layer.mlp[:-1]) + layer.mlp[-1].in_features


def _mixer_elements(layer: LayerSpec) -> int:
    """Elements of Q, K, V and the output; with latents, of the keys and values of all heads."""
    mixer = layer.mixer
    if mixer is None:
        return 0
    if isinstance(mixer, Recurrence):
        return sum(gemm.out_features for gemm in mixer.projections) + mixer.num_value_heads * mixer.value_head_dim
    kv_heads = mixer.num_attention_heads if isinstance(mixer, LatentAttention) else mixer.num_key_value_heads
    return (mixer.num_attention_heads + kv_heads) * (mixer.head_dim + mixer.v_head_dim)


def _score_heads(model: ModelSpec) -> int:
    """Most heads that make scores in a layer."""
    return max((mixer.num_attention_heads for layer in model.layer_kinds if (mixer := layer.mixer)), default=0)


def _merging_bytes(model: ModelSpec, program: Program, rank: int, width: int, *, fused: bool) -> int:
    """Bytes per token of a ring's merge of results, in one kernel if `fused`; 0 without a ring."""
    if not any(isinstance(op, RingPass) for kind in program.layers for op in kind[rank]):
        return 0
    merged = FUSED_MERGE_PEAK_BYTES if fused else MERGE_PEAK_BYTES
    return max(
        (2 * model.hidden_size + _mixer_elements(layer)) * width + merged * mixer.num_attention_heads * mixer.v_head_dim
        for layer in model.layer_kinds
        if isinstance(mixer := layer.mixer, Attention | LatentAttention)
    )


def _scores(scenario: Scenario, chunk: int, attended: int) -> int:
    elements = scenario.request.batch * _score_heads(scenario.share) * chunk * attended
    return elements * EAGER_SCORE_PEAK_BYTES * scenario.request.dtype_bytes // 2


def _logits_bytes(scenario: Scenario, chunk: int, width: int) -> int:
    """Bytes of logits in half precision and of the fp32 copy that Hugging Face returns."""
    tokens = chunk if scenario.traits.head_on_all_tokens else 1
    return tokens * scenario.model.vocab_size * (width + 4)
