"""Bytes that a rank needs at its peak, part by part.

Weights and KV cache count throughout; of activations, score matrix and logits, only the largest counts.
At the softmax, eager attention in half precision holds four values per element: the scores before the mask, the masked
scores, their copy in fp32 and the result in half precision, 2 + 2 + 4 + 2 bytes.
A ring that merges results kernel by kernel holds, per element of the output, four values in fp32 (merged value, block's
value, weighted difference, new value) and the block's value in half precision: 4 x 4 + 2 bytes; in one kernel 4 + 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from kvrsim.compile import build_program, columns, programs_so_far, steps_of
from kvrsim.execution import Execution
from kvrsim.io.schema import fields_to_json
from kvrsim.kernels.cost import CostModel, no_time
from kvrsim.kernels.experts import RoutedExperts
from kvrsim.model.mixers import Attention, LatentAttention, Recurrence
from kvrsim.model.spec import LayerSpec
from kvrsim.once import once
from kvrsim.program import Array, Compute, Load, Op, Program, RingPass, bytes_in_flight
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import has_prefill, layer_ops
from kvrsim.strategies.pipeline import context_ranks

EAGER_SCORE_PEAK_BYTES = 10  # bytes per element of a score matrix in half precision, as counted above
# bytes per element of the output, as counted above
MERGE_PEAK_BYTES = 18
FUSED_MERGE_PEAK_BYTES = 6
RUNTIME_BYTES = 1_000_000_000  # CUDA context, cuBLAS workspace and NCCL buffers of one process


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak bytes of one rank, by purpose."""

    weights: int
    kv_cache: int  # K and V of all layers, for every token that the rank stores
    gathered: int  # one layer's messages not yet copied into the cache, and its K and V that are not kept
    activations: int  # residual stream, and one layer's Q, K, V with a ring's results or its widest MLP tensors
    scores: int  # eager attention's score matrix in all its copies, all heads; flash has none
    logits: int
    runtime: int

    @property
    def total(self) -> int:
        """Bytes at the peak. Score matrix, activations and logits are not held together: only the largest counts."""
        lasting = self.weights + self.kv_cache + self.gathered + self.runtime
        return lasting + max(self.scores, self.activations, self.logits)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes held at the peak, by name of the part; of scores, activations and logits only the largest."""
        moments = {"scores": self.scores, "activations": self.activations, "logits": self.logits}
        largest = max(moments, key=lambda name: moments[name])
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "KV in flight": self.gathered}
        return parts | {largest: moments[largest], "runtime": self.runtime}

    def to_dict(self) -> dict[str, int]:
        """The parts and their total."""
        return fields_to_json(self) | {"total": self.total}


def memory_of(execution: Execution, partition: Partition) -> tuple[RankMemory, ...]:
    """Peak memory of every GPU, rank by rank; the GPUs of a group have equal shares. The execution keeps it.

    A rank's program states what the rank holds: K and V after each operation, score matrices, and messages and gathered
    pieces until they are in the cache. Where a program states no bytes, the rank is assumed to hold the whole context.
    """
    memories = _memories(execution)
    if partition not in memories:
        memories[partition] = _memory_of(execution, partition)
    return memories[partition]


@once
def _memories(execution: Execution) -> dict[Partition, tuple[RankMemory, ...]]:
    """The memory of all GPUs for each partition that was asked for."""
    return {}


def _memory_of(execution: Execution, partition: Partition) -> tuple[RankMemory, ...]:
    parts = _Parts(execution)
    if execution.strategy.is_pipeline:
        ranks = list(parts.stages(partition))
    else:
        program = _program_of_bytes(execution, partition)
        ranks = list(parts.ranks(partition, program.layers, range(program.num_ranks)))
    each_group = tuple(rank for rank in ranks for _ in range(execution.placed.gpus_per_rank))
    return each_group * execution.placed.data_groups


@once
def largest_of_even_chunks(execution: Execution) -> list[RankMemory]:
    """Peak memory of ranks with even chunks, among them the rank that needs the most, and the one with most KV-cache.

    Chunks differ by a token at most, and a rank needs more or less than the rank before it throughout all ranks with
    equal chunks. So only the first and the last of these, and the rank in the middle, are computed, without the
    operations of the others: the time does not increase with the number of ranks. The strategy is not a pipeline.
    """
    assert not execution.strategy.is_pipeline, "stages of a pipeline have different layers"
    num_ranks = execution.cluster.num_gpus
    partition = Partition.even(execution.request.new_tokens, num_ranks)
    num_long = sum(tokens > partition.chunk_lens[-1] for tokens in partition.chunk_lens)
    ranks = sorted({0, max(0, num_long - 1), num_long, num_ranks // 2, num_ranks - 1})
    layers = [
        _LayerOnDemand(execution.strategy, step)
        for step in steps_of(execution, columns(partition.chunk_lens), _cost_for_memory(execution))
    ]
    alike = [0 if rank < num_long else num_long for rank in range(num_ranks)]
    return list(_Parts(execution).ranks(partition, layers, ranks, alike))


class _LayerOnDemand(Sequence[tuple[Op, ...]]):
    """The operations of each rank in a kind of layer, made when they are read."""

    def __init__(self, strategy: Strategy, step: Step) -> None:
        self.of_rank = cache(lambda rank: tuple(layer_ops(strategy, step, rank)))
        self.num_ranks = len(step.chunks)

    def __len__(self) -> int:
        return self.num_ranks

    def __getitem__(self, rank: Any) -> Any:
        return self.of_rank(rank)


def _program_of_bytes(execution: Execution, partition: Partition) -> Program:
    """The program of a partition; memory needs no times, which a runtime's dtype may not have on the scenario's GPU."""
    programs = programs_so_far(execution)
    if partition in programs:
        return programs[partition]
    return build_program(execution, columns(partition.chunk_lens), _cost_for_memory(execution))


def _cost_for_memory(execution: Execution) -> CostModel:
    """A cost model without times, except where the number of attention calls depends on them."""
    if len(execution.strategy.query_blocks) == 1:
        return no_time(execution.placed.traits)
    return execution.placed.cost


def fits(scenario: Scenario, memory: tuple[RankMemory, ...]) -> bool:
    """Whether every rank's peak is within the scenario's memory limit."""
    limit_bytes = scenario.memory_limit.nbytes
    return all(rank.total <= limit_bytes for rank in memory)


def bytes_of_layers(execution: Execution) -> tuple[float, ...]:
    """Bytes of the weights and the KV-cache of each layer; with the embedding in the first and the head in the last."""
    parts = _Parts(execution)
    model = parts.model
    width = parts.width
    caches = [parts.cache(kind, parts.request.context_len) for kind in model.layer_kinds]
    layers = [
        weights + caches[kind] for weights, kind in zip(model.layer_bytes(width), model.layer_kind_index, strict=True)
    ]
    layers[0] += model.embedding_bytes(width)
    layers[-1] += model.head_bytes(width)
    if model.tie_word_embeddings:
        layers[-1] += model.vocab_size * model.hidden_size * width
    return tuple(layers)


class _Parts:
    """Bytes that a GPU holds for one batch, part by part."""

    def __init__(self, execution: Execution) -> None:
        scenario = execution.placed
        self.execution = execution
        self.scenario = scenario
        self.model = scenario.share
        self.request = scenario.request
        self.batch = scenario.request.batch
        self.width = scenario.request.dtype_bytes
        layout = scenario.expert_placement.layout
        # Experts that are spread, or shared by several ranks, process tokens of other ranks.
        self._has_other_tokens = layout.expert_parallel > 1 or layout.exchange != "none"
        mixers = [layer.mixer for layer in self.model.layer_kinds if layer.mixer is not None]
        self._score_heads = max((mixer.num_attention_heads for mixer in mixers), default=0)
        self._weights = self.model.weight_bytes(self.width)
        self._kind_index = self.model.layer_kind_index if has_prefill(scenario) else ()
        # Most elements per token in a layer: the residual stream twice, and the tensors of the mixer or the MLP.
        self._elements = 2 * self.model.hidden_size + max(map(self._layer_elements, self.model.layer_kinds))

    def ranks(
        self,
        partition: Partition,
        layers: Sequence[Sequence[Sequence[Op]]],
        ranks: Sequence[int],
        alike: Sequence[int] | None = None,
    ) -> Iterator[RankMemory]:
        """Memory of some ranks; layers: operations by kind of layer and rank. alike: see bytes_in_flight."""
        in_flight = np.array([bytes_in_flight(kind, ranks, alike) for kind in layers])
        for index, rank in enumerate(ranks):
            yield self._rank(partition, [kind[rank] for kind in layers], rank, in_flight[:, index])

    def _rank(self, partition: Partition, kinds: Sequence[Sequence[Op]], rank: int, in_flight: Array) -> RankMemory:
        """Memory of a rank; `kinds`, `in_flight`: its operations and its bytes in flight, for each kind of layer."""
        model = self.model
        request = self.request
        chunk = partition.chunk_lens[rank]
        access = self.scenario.prefix_access_plan
        caches = []
        gathered = []
        for kind, layer, in_flight_bytes in zip(kinds, model.layer_kinds, in_flight, strict=True):
            shares = access.share and not isinstance(layer.mixer, Recurrence)  # ranks keep only a share of the prefix
            others = self.cache(layer, request.cached_prefix) * (1.0 - access.share) if shares else 0.0
            cached = [float(op.kv_bytes[0]) for op in kind if isinstance(op, Compute) and op.kv_bytes is not None]
            # Bytes that are loaded for only this layer count as in flight.
            dropped = sum(op.nbytes.item() for op in kind if isinstance(op, Load) and not op.ahead)
            peak = max(cached, default=self.cache(layer, request.context_len)) - dropped
            gathers = self.execution.strategy.gathers_kv and access.access == "pass-kv"
            caches.append(peak - others * gathers)
            gathered.append(in_flight_bytes + peak - caches[-1])
        ops = [op for kind in kinds for op in kind if isinstance(op, Compute | RingPass)]
        scores = [float(op.score_elements[0]) for op in ops if op.score_elements is not None]
        merges = any(isinstance(op, RingPass) for op in ops)
        token_bytes = max(self._elements * self.width, self._merging() if merges else 0)
        is_last = rank == len(partition.chunk_lens) - 1
        return RankMemory(
            weights=self._weights,
            kv_cache=round(sum(caches[kind] for kind in self._kind_index)),
            gathered=round(max(gathered)),
            activations=max(self.batch * chunk * token_bytes, self._experts(chunk, request.new_tokens)),
            scores=self._scores(max(scores, default=self._all_scores(chunk))),
            logits=self._logits(chunk) if is_last else 0,
            runtime=RUNTIME_BYTES,
        )

    def stages(self, partition: Partition) -> Iterator[RankMemory]:
        """Memory of the ranks of a pipeline.

        A rank holds its stage's layers, the K and V of all tokens in them, and its share of one piece at a time. The
        context ranks of a stage gather the K and V of a piece and compute attention in two parts. The last rank
        holds the logits.
        """
        model = self.model
        context = context_ranks(self.execution.strategy)
        longest = max(partition.chunk_lens)
        piece = -(-longest // context)
        layer_bytes = model.layer_bytes(self.width)
        kinds = model.layer_kind_index
        each = [self.cache(kind, self.request.context_len) for kind in model.layer_kinds]
        cached = [each[kind] for kind in kinds]
        gathered = [self.cache(kind, longest) if context > 1 else 0.0 for kind in model.layer_kinds]
        tensors = self.batch * piece * self._elements * self.width
        scores = self._scores(self._all_scores(piece if context == 1 else -(-piece // 2)))
        experts = self._experts(piece, longest)
        for layers in self.execution.stages:
            begins = layers[0] == 0
            ends = layers[-1] == model.num_hidden_layers - 1
            own = slice(layers.start, layers.stop)
            weights = sum(layer_bytes[own]) + begins * model.embedding_bytes(self.width)
            weights += ends * model.head_bytes(self.width)
            if ends and not begins and model.tie_word_embeddings:
                weights += model.vocab_size * model.hidden_size * self.width
            messages = 0.0 if begins and ends else 2.0 * self.batch * piece * model.hidden_size * self.width
            last = RankMemory(
                weights=weights,
                kv_cache=round(sum(cached[own])),
                gathered=round(messages + max(gathered[kind] for kind in set(kinds[own]))),
                activations=max(tensors, experts),
                scores=scores,
                logits=self._logits(partition.chunk_lens[-1] // context) if ends else 0,
                runtime=RUNTIME_BYTES,
            )
            others = [replace(last, logits=0)] * (context - 1) if last.logits else [last] * (context - 1)
            yield from (*others, last)

    def cache(self, layer: LayerSpec, tokens: int) -> float:
        """Bytes of the cache and the state of `tokens` tokens of each sequence in a layer."""
        if layer.mixer is None:
            return 0.0
        return self.batch * float(layer.mixer.cache_bytes(tokens, self.model.cached_element_bytes(self.width)))

    def _all_scores(self, chunk: int) -> int:
        """Elements of the scores of `chunk` queries against the whole context, in the layer with the most heads."""
        return self.batch * self._score_heads * chunk * self.request.context_len

    def _scores(self, elements: float) -> int:
        """Bytes of an eager score matrix in all its copies; fused kernels have none."""
        return round(elements) * EAGER_SCORE_PEAK_BYTES * self.width // 2 if self.scenario.kernel == "eager" else 0

    def _logits(self, chunk: int) -> int:
        """Bytes of logits in half precision and of the fp32 copy that Hugging Face returns."""
        tokens = chunk if self.scenario.traits.head_on_all_tokens else 1
        return self.batch * tokens * self.scenario.model.vocab_size * (self.width + 4)

    def _merging(self) -> int:
        """Bytes per token of a ring's merge of results."""
        merged = FUSED_MERGE_PEAK_BYTES if self.scenario.traits.fused_merge else MERGE_PEAK_BYTES
        return max(
            (2 * self.model.hidden_size + _mixer_elements(layer)) * self.width
            + merged * mixer.num_attention_heads * mixer.v_head_dim
            for layer in self.model.layer_kinds
            if isinstance(mixer := layer.mixer, Attention | LatentAttention)
        )

    def _experts(self, chunk: int, together: int) -> int:
        """Bytes of the rows for the busiest GPU's experts, and of two copies of the chunk's residual stream.

        Where ranks gather tokens for their experts, the stage's tokens are added. together: tokens of a sequence on all
        ranks.
        """
        if not self._has_other_tokens:
            return 0
        tokens = np.array([float(chunk)])
        every = np.array([float(together)])
        num_tokens: float = 2 * chunk
        if self.scenario.gather is not None:
            num_tokens += together * self.scenario.data_load
        cost = no_time(self.scenario.traits)
        row_elements = []  # by kind of layer with experts
        for layer in self.model.layer_kinds:
            if layer.num_experts:
                experts = RoutedExperts(layer, cost, self.scenario.expert_placement)
                rows = float(experts.call(tokens, every).rows(self.batch)[0])
                row_elements.append(rows * _mlp_widths(layer))
        return round(max(row_elements) * self.width) + round(
            num_tokens * self.batch * self.model.hidden_size * self.width
        )

    def _layer_elements(self, layer: LayerSpec) -> int:
        """Elements of the mixer's or the MLP's tensors, for all experts that a token of the rank passes through."""
        apart = not layer.mlp or (self._has_other_tokens and layer.num_experts)
        return max(_mixer_elements(layer), 0 if apart else _mlp_widths(layer) * max(1, layer.num_experts_per_tok))


def _mlp_widths(layer: LayerSpec) -> int:
    """Elements per token of the tensors between the matrices of the MLP or of one expert."""
    return sum(gemm.out_features for gemm in layer.mlp[:-1]) + layer.mlp[-1].in_features


def _mixer_elements(layer: LayerSpec) -> int:
    """Elements of Q, K, V and the output per token; with latent attention, K and V of all heads count."""
    mixer = layer.mixer
    if mixer is None:
        return 0
    if isinstance(mixer, Recurrence):
        return sum(gemm.out_features for gemm in mixer.projections) + mixer.num_value_heads * mixer.value_head_dim
    kv_heads = mixer.num_attention_heads if isinstance(mixer, LatentAttention) else mixer.num_key_value_heads
    return (mixer.num_attention_heads + kv_heads) * (mixer.head_dim + mixer.v_head_dim)
