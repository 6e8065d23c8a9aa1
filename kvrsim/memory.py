"""Bytes that a rank needs at its peak, part by part.

Weights and KV-cache are held throughout; activations, score matrix and logits at their largest moment.
Eager attention in half precision holds, at the softmax, the scores with their mask, the fp32 copy and
its half-precision result: 2 + 4 + 2 bytes an element, and the scores that the mask was added to, 2 more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvrsim.model import ModelSpec
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.pipeline import stages

EAGER_SCORE_PEAK_BYTES = 10  # an element of the score matrix at two bytes an element, as counted above
RUNTIME_BYTES = 1_000_000_000  # CUDA context, cuBLAS workspace and NCCL buffers of one process


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak bytes of one rank, by what they are for."""

    weights: int
    kv_cache: int  # of all layers, every token that the rank holds K and V of
    gathered: int  # K and V in flight: received or gathered pieces before they are copied into the cache
    activations: int  # residual stream, Q, K, V and the MLP's widest tensors, one layer
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
        return asdict(self) | {"total": self.total}


def memory_of(scenario: Scenario, strategy: Strategy, partition: Partition) -> tuple[RankMemory, ...]:
    """Peak memory of every GPU, rank by rank; those of a group have equal shares."""
    if strategy.pipeline is not None:
        held = stages(scenario.share.num_hidden_layers, scenario.cluster.num_gpus)
        ranks = [_stage_memory(scenario, partition, stage, len(held)) for stage in enumerate(held)]
    else:
        ranks = [_rank_memory(scenario, strategy, partition, rank) for rank in range(len(partition.chunk_lens))]
    return tuple(rank for rank in ranks for _ in range(scenario.gpus_per_rank))


def fits(scenario: Scenario, memory: tuple[RankMemory, ...]) -> bool:
    """Whether every rank's peak is within the scenario's memory limit."""
    limit_bytes = scenario.memory_limit.nbytes
    return all(rank.total <= limit_bytes for rank in memory)


def _rank_memory(scenario: Scenario, strategy: Strategy, partition: Partition, rank: int) -> RankMemory:
    model, request = scenario.share, scenario.request
    width, batch = request.dtype_bytes, request.batch
    chunk = partition.chunk_lens[rank]
    end = request.cached_prefix + partition.boundaries[rank + 1]
    held = {"prefix": end, "all": request.context_len, "own": request.cached_prefix + chunk}[strategy.kept]
    attended = end if strategy.kept == "prefix" else request.context_len
    last = rank == len(partition.chunk_lens) - 1
    kv_token_layer = model.kv_bytes_per_token_layer(width)
    if strategy.gathers_kv:
        in_flight = request.context_len
    else:  # all before the chunk; of a ring, the piece that is worked on and the one that comes
        in_flight = end - chunk if strategy.kept == "prefix" else 2 * max(partition.chunk_lens)
    return RankMemory(
        weights=model.weight_bytes(width),
        kv_cache=batch * held * model.kv_bytes_per_token(width),
        gathered=batch * in_flight * kv_token_layer if len(partition.chunk_lens) > 1 else 0,
        activations=batch * chunk * _activation_elements(model) * width,
        scores=_scores(scenario, chunk, attended) if scenario.kernel == "eager" else 0,
        logits=batch * _logits_bytes(scenario, chunk, width) if last else 0,
        runtime=RUNTIME_BYTES,
    )


def _stage_memory(scenario: Scenario, partition: Partition, stage: tuple[int, range], num_stages: int) -> RankMemory:
    """One stage of a pipeline: its own layers, K and V of all tokens in them, a piece at a time."""
    model, request = scenario.share, scenario.request
    width, batch = request.dtype_bytes, request.batch
    rank, layers = stage
    piece, last = max(partition.chunk_lens), rank == num_stages - 1
    parameters = sum(model.layers[layer].num_parameters for layer in layers)
    if rank == 0 or (last and model.tie_word_embeddings):
        parameters += model.vocab_size * model.hidden_size
    if last:
        parameters += model.final_norm_parameters + (0 if model.tie_word_embeddings else model.lm_head.num_parameters)
    return RankMemory(
        weights=parameters * width,
        kv_cache=batch * request.context_len * len(layers) * model.kv_bytes_per_token_layer(width),
        gathered=2 * batch * piece * model.hidden_size * width if num_stages > 1 else 0,
        activations=batch * piece * _activation_elements(model) * width,
        scores=_scores(scenario, piece, request.context_len) if scenario.kernel == "eager" else 0,
        logits=batch * _logits_bytes(scenario, partition.chunk_lens[-1], width) if last else 0,
        runtime=RUNTIME_BYTES,
    )


def _activation_elements(model: ModelSpec) -> int:
    """Widest moment of a layer, elements a token: residual twice, and Q, K, V or the MLP's tensors."""
    attention = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    mlp = max(
        (sum(gemm.out_features for gemm in layer.mlp[:-1]) + layer.mlp[-1].in_features)
        * max(1, layer.num_experts_per_tok)
        for layer in model.layer_kinds
    )
    return 2 * model.hidden_size + max(attention, mlp)


def _scores(scenario: Scenario, chunk: int, attended: int) -> int:
    elements = scenario.request.batch * scenario.share.num_attention_heads * chunk * attended
    return elements * EAGER_SCORE_PEAK_BYTES * scenario.request.dtype_bytes // 2


def _logits_bytes(scenario: Scenario, chunk: int, width: int) -> int:
    """Half precision and the fp32 copy that Hugging Face returns."""
    tokens = chunk if scenario.cost.head_on_all_tokens else 1
    return tokens * scenario.model.vocab_size * (width + 4)
