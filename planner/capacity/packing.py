"""Packed steps: prompts that share a step of a group, and the duration of such steps.

A step holds the rest of the prompt that the group has begun, then the next prompts of the queue, up to a token budget.
A prompt that is longer than the remaining budget is cut; its next piece comes first in the next step. vLLM
(max_num_batched_tokens), SGLang (chunked_prefill_size) and TensorRT-LLM (max_num_tokens) schedule chunked prefills in
this way.

A stage's device takes the time of the matrices for all tokens of the step, and of attention for each piece. The stage
ends no earlier than the host has issued the step; the host may issue while the stage waits for the previous stage. The
time of attention is tabulated for every number of tokens after some prefixes, and interpolated between these prefixes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.memory import fits, memory_of
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES, Step, Strategy
from kvrsim.strategies.layers import before_step, embedding, last, layer_ops
from kvrsim.strategies.pipeline import stages
from planner.grid import largest

ACCEPTED = "single, tp, pipelines (pp, pp-s), or these in groups (tp4+pp): each rank takes whole steps"
_PER_PIECE = ("append", "attention")  # kinds of operations that a step runs once per piece
_MOST_HEADS = 256  # largest number of prompts ending in one step for which the time of logits is tabulated


class Piece(NamedTuple):
    """Tokens of one prompt in a step."""

    prompt: int
    tokens: int  # tokens computed in the step
    prefix: int  # tokens of the prompt before this piece: the cached prefix and earlier pieces
    context: int  # length of the whole prompt
    is_first: bool

    @property
    def is_last(self) -> bool:
        """Whether the piece is the last one of its prompt, so that the first token follows."""
        return self.prefix + self.tokens == self.context


class PartialPrompt(NamedTuple):
    """A prompt of which some pieces are computed."""

    prompt: int
    done: int  # new tokens computed so far


class PackingRule:
    """Fills steps with the tokens of prompts.

    most_tokens: largest total context of the prompts of a step, cached prefixes included; a longer prompt runs alone.
    """

    def __init__(
        self, new_tokens: Sequence[int], cached_prefix: Sequence[int], budget: int, most_tokens: float = float("inf")
    ) -> None:
        self.new_tokens = new_tokens
        self.cached_prefix = cached_prefix
        self.budget = budget
        self.most_tokens = most_tokens

    def step(self, begun: PartialPrompt | None, queue: deque[int]) -> tuple[list[Piece], PartialPrompt | None]:
        """Take prompts from the queue; return the pieces of the next step, and the prompt that it leaves unfinished."""
        pieces: list[Piece] = []
        room = self.budget
        in_memory = 0
        while room:
            if begun is None:
                if not queue or (pieces and in_memory + self._context(queue[0]) > self.most_tokens):
                    break
                begun = PartialPrompt(queue.popleft(), 0)
            prompt, done = begun
            tokens = min(room, self.new_tokens[prompt] - done)
            piece = Piece(prompt, tokens, self.cached_prefix[prompt] + done, self._context(prompt), not done)
            pieces.append(piece)
            room -= tokens
            in_memory += piece.context
            begun = None
            if not piece.is_last:
                begun = PartialPrompt(prompt, done + tokens)
        return pieces, begun

    def _context(self, prompt: int) -> int:
        return self.new_tokens[prompt] + self.cached_prefix[prompt]


def takes_steps(strategy: Strategy) -> bool:
    """Whether each rank runs all tokens of a step through its layers, so that prompts can share steps."""
    if strategy.pipeline is not None:
        return strategy.degrees.context == 1
    return strategy.partition_rule == "whole" or strategy.group_size is None


class Packing:
    """Durations of steps of up to `budget` tokens on the ranks of a scenario (the stages of a pipeline, or one rank).

    execution: its request determines the clock frequency of all steps; `takes_steps` is true for its strategy.
    longest: tokens of the longest context. Raises InputError where prompts cannot share a step because of the placement
    of prefixes, or because the engine's TTFT includes a decode step.
    """

    def __init__(self, execution: Execution, budget: int, longest: int) -> None:
        _check_packs(execution)
        kinds = execution.placed.share.layer_kind_index
        cluster = execution.cluster
        layers = _layers_of_stages(execution)
        self.strategy = execution.strategy.name
        self.budget = budget
        self.num_stages = len(layers)
        self.most_tokens = _most_tokens_in_memory(execution, budget, max(longest, budget))
        self.request_s = execution.placed.host.request_s
        self.token_s = execution.placed.host.token_s
        self.holds = not execution.placed.sends_overlap  # whether a stage is busy until its message has arrived
        tokens = np.arange(1, budget + 1, dtype=float)
        cost = execution.placed.cost
        costs = execution.placed.layer_costs(cost)

        def layer(prefix: float) -> list[list[Op]]:
            """Operations of each kind of layer after a prefix."""
            operations = []
            for kind_costs in costs:
                step = Step(kind_costs, (tokens,), (np.full_like(tokens, prefix),))
                operations.append(list(layer_ops(execution.strategy, step, 0)))
            return operations

        def device_s(ops: Iterable[Op]) -> Array:
            return sum(map(_device_s, ops), 0 * tokens)

        before = before_step(execution.placed, tokens, tokens, cost)
        first = embedding(execution.placed, tokens, cost)
        plain = layer(0.0)
        per_kind = [device_s(op for op in ops if not _is_per_piece(op)) for ops in plain]
        self.layers: list[list[int]] = []  # number of layers: [stage][kind of layer]
        without_attention = []
        begin: Sequence[Op] = (*before, *first)  # the embedding is on the first stage
        for numbers in layers:
            counts = np.bincount([kinds[number] for number in numbers], minlength=len(costs)).tolist()
            seconds = device_s(begin)
            for count, kind_s in zip(counts, per_kind, strict=True):
                seconds = seconds + count * kind_s
            self.layers.append(counts)
            without_attention.append(seconds)
            begin = before
        self.device_s = [_with_zero(row) for row in without_attention]  # seconds without attention: [stage][tokens]
        # Least device time of a token without attention, mean over the stages.
        self.least_token_s = float((np.mean(without_attention, axis=0) / tokens).min())
        self.prefixes = _tabulated_prefixes(longest)
        behind = []
        for prefix in self.prefixes:
            behind.append([_with_zero(device_s(filter(_is_per_piece, ops))) for ops in layer(float(prefix))])
        self.attention_s = list(zip(*behind, strict=True))  # seconds of attention: [kind of layer][prefix][tokens]
        issue_s = sum(map(_host_s, before))
        if self.num_stages > 1:  # the host issues a receive and a send
            issue_s += 2 * execution.placed.host.message_s
        layer_s = [sum(map(_host_s, ops)) for ops in plain]
        self.host_s = [issue_s + _total(counts, layer_s) for counts in self.layers]  # seconds to issue a step, by stage
        paths = [cluster.path(stage, stage + 1) for stage in range(self.num_stages - 1)]
        nbytes = costs[0].activation_bytes(tokens)
        self.hop_s = [*(_with_zero(path.busy_s(nbytes)) for path in paths), [0.0] * (budget + 1)]
        self.latency_s = [*(path.latency_s for path in paths), 0.0]
        self.head_s = _head_s(execution.placed)

    def run(self, free_s: list[float], begin_s: float, pieces: Sequence[Piece]) -> float:
        """Run a step through all stages. `free_s`, the time at which each stage is free, is updated.

        Returns the mean busy time of the stages, seconds.
        """
        tokens = sum(piece.tokens for piece in pieces)
        begun = [piece.context for piece in pieces if piece.is_first]
        waits_s = len(begun) * self.request_s + sum(begun) * self.token_s  # delay of every stage before its first layer
        spots = [self._spot(piece.tokens, piece.prefix) for piece in pieces]
        attention_s = [sum(_at(table, spot) for spot in spots) for table in self.attention_s]
        there_s = begin_s
        busy_s = 0.0
        for stage, layers in enumerate(self.layers):
            issued_s = max(free_s[stage], begin_s) + waits_s
            begin = max(issued_s, there_s)
            end = begin + self.device_s[stage][tokens] + _total(layers, attention_s)
            end = max(end, issued_s + self.host_s[stage])
            if stage == self.num_stages - 1:
                end += self.head_s[min(sum(piece.is_last for piece in pieces), _MOST_HEADS)]
            hop_s = self.hop_s[stage][tokens]
            there_s = end + hop_s + self.latency_s[stage]
            free_s[stage] = end
            if self.holds:
                free_s[stage] += hop_s
            busy_s += end - begin
        return busy_s / self.num_stages

    def alone_s(self, new_tokens: int, cached_prefix: int) -> float:
        """TTFT of a prompt alone on the group, in pieces of the budget."""
        free_s = [0.0] * self.num_stages
        for done in range(0, new_tokens, self.budget):
            tokens = min(self.budget, new_tokens - done)
            piece = Piece(0, tokens, cached_prefix + done, cached_prefix + new_tokens, not done)
            self.run(free_s, free_s[0], (piece,))
        return free_s[-1]

    def least_s(self, new_tokens: int, cached_prefix: int) -> float:
        """Approximate least time for which a prompt keeps a group busy (mean over the stages)."""
        tokens = min(new_tokens, self.budget)
        spot = self._spot(tokens, cached_prefix + (new_tokens - tokens) // 2)  # the middle piece of the prompt
        layer_s = [_at(table, spot) for table in self.attention_s]
        attention_s = sum(_total(layers, layer_s) for layers in self.layers) / self.num_stages
        return new_tokens * (self.least_token_s + attention_s / tokens)

    def _spot(self, tokens: int, prefix: int) -> tuple[int, int, float]:
        """Return the tokens, the index of the tabulated prefix at or below `prefix`, and the weight of the next one."""
        low = min(bisect_right(self.prefixes, prefix) - 1, len(self.prefixes) - 2)
        return tokens, low, (prefix - self.prefixes[low]) / (self.prefixes[low + 1] - self.prefixes[low])


def _layers_of_stages(execution: Execution) -> Sequence[Sequence[int]]:
    """The numbers of the layers of each stage; without a pipeline, one stage has all."""
    num_layers = len(execution.placed.share.layer_kind_index)
    if execution.strategy.pipeline is None:
        return (range(num_layers),)
    return stages(execution.strategy, num_layers, execution.cluster.num_gpus)


def _check_packs(execution: Execution) -> None:
    placement = execution.placed.prefix_placement.place
    if placement != "all":
        raise InputError("prefix_placement", placement, "all with `pack_tokens`")
    engine = execution.placed.engine
    if engine is not None and engine.decode_step:
        accepted = "with `pack_tokens`, an engine whose TTFT holds no decode step"
        raise InputError("engine", engine.name, accepted)


def _head_s(placed: PlacedScenario) -> list[float]:
    """Seconds of the logits, by number of prompts that end in the step."""
    head_s = [0.0]
    token = np.ones(1)
    for number in range(1, _MOST_HEADS + 1):
        head = last(placed, token, token, placed.cost, prompts=number)
        head_s.append(sum(_device_s(op).item() for op in head))
    return head_s


def _most_tokens_in_memory(execution: Execution, budget: int, most: int) -> int:
    """Most tokens, up to `most`, whose K and V fit with the weights and activations of a step; 0 if none.

    The memory is that of a single prompt with all these tokens, in pieces of a step.
    """
    in_pieces = execution
    if execution.strategy.pipeline is None:
        in_pieces = execution.by(STRATEGIES["pp"])

    def is_within(tokens: int) -> bool:
        whole, rest = divmod(tokens, budget)
        partition = Partition(chunk_lens=(budget,) * whole + (rest,) * (rest > 0))
        request = replace(execution.request, context_len=tokens, cached_prefix=0, batch=1)
        asked = in_pieces.with_request(request)
        return fits(asked.placed, memory_of(asked, partition))

    return largest(is_within, most)


def _at(table: Sequence[Sequence[float]], spot: tuple[int, int, float]) -> float:
    tokens, low, weight = spot
    below = table[low][tokens]
    if not weight:
        return below
    return below + weight * (table[low + 1][tokens] - below)


def _total(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of all layers of a stage, from the seconds of one layer of each kind."""
    return sum(count * layer_s for count, layer_s in zip(counts, seconds, strict=True))


def _with_zero(row: Array) -> list[float]:
    """The values of a row (for 1, 2, ... tokens) with a zero before them, so that tokens are the index."""
    return [0.0, *row.tolist()]


def _tabulated_prefixes(longest: int) -> tuple[int, ...]:
    """Prefixes for which attention is tabulated: 0, 1 and 256 tokens, then doubled until the longest is covered."""
    prefixes = [0, 1, 256]
    while prefixes[-1] < longest:
        prefixes.append(2 * prefixes[-1])
    return tuple(prefixes)


def _is_per_piece(op: Op) -> bool:
    return isinstance(op, Compute) and op.kind in _PER_PIECE


def _device_s(op: Op) -> Array:
    """Seconds for which an operation keeps its rank's stream busy."""
    if isinstance(op, Compute):
        return op.device_s
    assert isinstance(op, Collective)
    return op.seconds


def _host_s(op: Op) -> float:
    assert isinstance(op, Compute | Collective)
    return op.host_s
