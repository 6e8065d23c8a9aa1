"""Durations of an engine's steps, and the memory that its caches may take.

A step computes up to `budget` tokens: one of every sequence that decodes, then pieces of prompts. Its time is that of
the matrices for all tokens, of attention for each piece and each cache, and of the logits. The time of the matrices is
tabulated by tokens. That of a piece's attention is tabulated for every number of tokens after some prefixes, and
interpolated between these. A step that only decodes (planner/decode.py) replays a graph of its kernels, so that
launches cost no extra time; its time is linear in the tokens of the caches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.interp import cell
from kvrsim.memory import memory_of
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Partition
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import before_step, embedding, last, layer_ops
from planner.capacity.workload import Lengths
from planner.decode import step_s

ACCEPTED = "single or tp: each rank takes whole steps"
BUDGET = 8192  # tokens of a step by default: vLLM's max_num_batched_tokens on GPUs of 70 GiB or more, and SGLang's
MOST_SEQUENCES = 256  # most sequences that a group has begun: vLLM's max_num_seqs
Piece = tuple[int, int]  # tokens of a prompt in a step, and tokens of the prompt before them, cached or computed
_PER_PIECE = ("append", "attention")  # kinds of operations that a step runs once per piece


def takes_steps(strategy: Strategy) -> bool:
    """Whether each rank runs all tokens of a step through its layers, so that sequences can share steps."""
    if strategy.is_pipeline:
        return False
    return strategy.partition_rule == "whole" or strategy.group_size is None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Durations of the steps of a group, and the memory for its caches.

    The clock of steps with pieces of prompts is that of the request of the execution from which they were tabulated.
    """

    strategy: str
    budget: int  # most tokens of a step
    most_sequences: int  # most sequences that have begun and not ended
    room_bytes: float  # bytes of a GPU for caches
    request_s: float  # seconds from the arrival of a request until it can be in a step
    token_s: float  # the same, additionally for each token of the prompt
    host_s: float  # seconds in which the host issues a step with pieces of prompts
    tokens_s: list[float]  # seconds of a step with pieces, without attention and logits, by number of tokens
    head_s: list[float]  # seconds of the logits, by number of sequences that have one
    decode_s: list[float]  # seconds of a step without prompts, extrapolated to empty caches, by number of sequences
    key_s: list[float]  # seconds per token in the caches, by number of sequences that decode
    prefixes: tuple[int, ...]  # prefixes for which attention is tabulated
    attention_s: list[list[float]]  # seconds of a piece's attention in all layers: [prefix][tokens]

    @classmethod
    def of(cls, execution: Execution, budget: int, longest: int, cached: int | None = None) -> StepTimes:
        """Tabulate the times; longest: tokens of the longest sequence.

        cached: tokens in the cache of a usual sequence that decodes, around which steps are linear in the tokens of the
        caches, although windows and chosen keys limit how many tokens attention reads; None: a quarter of the longest.
        Raises InputError if the engine's TTFT includes a decode step: the record then has no time of a step without it.
        """
        placed = execution.placed
        if placed.engine is not None and placed.engine.decode_step:
            accepted = "an engine whose TTFT holds no decode step, for steps that requests share"
            raise InputError("engine", placed.engine.name, accepted)
        cost = placed.cost
        costs = placed.layer_costs(cost)
        counts = np.bincount(list(placed.share.layer_kind_index), minlength=len(costs)).tolist()
        tokens = np.arange(1, budget + 1, dtype=float)

        def layers(prefix: float) -> list[tuple[int, Op]]:
            """Operations of a layer of each kind after a prefix, each with the number of such layers."""
            operations: list[tuple[int, Op]] = []
            for count, kind_costs in zip(counts, costs, strict=True):
                step = Step(kind_costs, (tokens,), (np.full_like(tokens, prefix),))
                operations += [(count, op) for op in layer_ops(execution.strategy, step, 0)]
            return operations

        before = (*before_step(placed, tokens, tokens, cost), *embedding(placed, tokens, cost))
        first = layers(0.0)
        matrices_s = sum((count * _device_s(op) for count, op in first if not _is_per_piece(op)), 0 * tokens)
        attention_s = []
        prefixes = _tabulated_prefixes(longest)
        for prefix in prefixes:
            pieces = (count * _device_s(op) for count, op in layers(float(prefix)) if _is_per_piece(op))
            attention_s.append(_with_zero(sum(pieces, 0 * tokens)))
        most = min(MOST_SEQUENCES, budget)
        decode_s, key_s = _decode_steps(execution, most, cached or max(1, longest // 4))
        return cls(
            strategy=execution.strategy.name,
            budget=budget,
            most_sequences=most,
            room_bytes=_room_bytes(execution, budget),
            request_s=placed.host.request_s,
            token_s=placed.host.token_s,
            host_s=sum(map(_host_s, before)) + sum(count * _host_s(op) for count, op in first),
            tokens_s=_with_zero(sum(map(_device_s, before), matrices_s)),
            head_s=_head_s(execution, most),
            decode_s=decode_s,
            key_s=key_s,
            prefixes=prefixes,
            attention_s=attention_s,
        )

    def mixed_s(self, pieces: Iterable[Piece], ending: int, decoding: int, keys: int) -> float:
        """Seconds of a step with pieces of prompts, of which `ending` prompts end.

        decoding: sequences that decode in the step. keys: tokens of their caches together.
        """
        seconds = self.key_s[decoding] * keys + self.head_s[min(decoding + ending, self.most_sequences)]
        in_step = decoding
        for tokens, prefix in pieces:
            in_step += tokens
            seconds += self._attention_s(tokens, prefix)
        return max(self.tokens_s[in_step] + seconds, self.host_s)

    def decoding_s(self, steps: int, decoding: int, keys: int) -> float:
        """Seconds of successive steps that only decode; keys: tokens of the caches in the first of them."""
        key_s = self.key_s[decoding]
        return steps * (self.decode_s[decoding] + key_s * (keys + decoding * (steps - 1) / 2))

    def steps_in(self, seconds: float, decoding: int, keys: int) -> int:
        """The fewest successive decode steps that take at least this long; at least one.

        n steps take first_s n + half_s n², as in `decoding_s`; the root is written so that it holds for small half_s.
        """
        half_s = self.key_s[decoding] * decoding / 2
        first_s = self.decode_s[decoding] + self.key_s[decoding] * keys - half_s
        if half_s:
            root = math.sqrt(first_s * first_s + 4 * half_s * seconds)
            steps = 2 * seconds / (first_s + root)
        else:
            steps = seconds / first_s
        return max(1, math.ceil(steps - 1e-9))

    def alone_s(self, new_tokens: Lengths, cached_prefix: Lengths) -> Array:
        """TTFT of each prompt alone on the group, in pieces of the budget."""
        tokens_s = np.array(self.tokens_s)
        attention_s = np.array(self.attention_s)
        seconds = self.request_s + self.token_s * (new_tokens + cached_prefix) + self.head_s[1]
        for done in range(0, int(new_tokens.max(initial=0)), self.budget):
            tokens = np.clip(new_tokens - done, 0, self.budget)
            low, share = cell(cached_prefix + done, self.prefixes)
            below_s = attention_s[low, tokens]
            piece_s = tokens_s[tokens] + below_s + share * (attention_s[low + 1, tokens] - below_s)
            seconds = seconds + np.where(tokens > 0, np.maximum(piece_s, self.host_s), 0.0)
        return np.asarray(seconds)

    def least_s(self, new_tokens: Lengths, cached_prefix: Lengths, decode_steps: Lengths) -> Array:
        """Approximate least time for which each request keeps a group busy, in steps that other requests share.

        The tokens of its prompt share full steps, and those of its output the steps of as many sequences as fit.
        """
        attention_s = np.array(self.attention_s)
        tokens = np.minimum(new_tokens, self.budget)
        low, _ = cell(cached_prefix + (new_tokens - tokens) // 2, self.prefixes)
        pieces = new_tokens / np.maximum(1, tokens)
        keys = new_tokens + cached_prefix + decode_steps / 2
        most = self.most_sequences
        decode_s = decode_steps * (self.decode_s[most] / most + self.key_s[most] * keys)
        return np.asarray(new_tokens * self.tokens_s[-1] / self.budget + pieces * attention_s[low, tokens] + decode_s)

    def _attention_s(self, tokens: int, prefix: int) -> float:
        low = 0
        if prefix:
            low = min(bisect_right(self.prefixes, prefix) - 1, len(self.prefixes) - 2)
        below_s = self.attention_s[low][tokens]
        if prefix == self.prefixes[low]:
            return below_s
        above_s = self.attention_s[low + 1][tokens]
        share = (prefix - self.prefixes[low]) / (self.prefixes[low + 1] - self.prefixes[low])
        return below_s + share * (above_s - below_s)


def usual_cache(context_len: Lengths, output_tokens: Lengths) -> int:
    """Tokens in the cache of a usual sequence that decodes: the mean over all decode steps, rounded to a power of two.

    Rounded, so that growing traffic has the same tables. 1 if no request decodes.
    """
    steps = int(output_tokens.sum())
    if not steps:
        return 1
    tokens = float((output_tokens * (context_len + output_tokens / 2)).sum())
    return 1 << round(math.log2(tokens / steps))


def _decode_steps(execution: Execution, most: int, cached: int) -> tuple[list[float], list[float]]:
    """Seconds of a decode step, extrapolated to empty caches, and per token in the caches, for 0 to `most` sequences.

    Both come from steps of sequences with half and with twice the usual number of cached tokens.
    """
    numbers = [1 << power for power in range(most.bit_length())]
    if numbers[-1] < most:
        numbers.append(most)
    few = max(cached // 2, 1)
    many = max(2 * cached, 2)
    empty_s: list[float] = []
    key_s: list[float] = []
    for number in numbers:
        few_s = step_s(execution.placed, number, few)
        slope_s = (step_s(execution.placed, number, many) - few_s) / (number * (many - few))
        key_s.append(slope_s)
        empty_s.append(few_s - number * few * slope_s)
    sequences = np.arange(most + 1)
    return np.interp(sequences, numbers, empty_s).tolist(), np.interp(sequences, numbers, key_s).tolist()


def _room_bytes(execution: Execution, budget: int) -> float:
    """Bytes that a GPU has for caches beside a step of `budget` tokens; negative if the step does not fit."""
    request = replace(execution.request, context_len=budget, cached_prefix=0, batch=1)
    asked = execution.with_request(request)
    ranks = memory_of(asked, Partition.even(budget, 1))
    return min(execution.placed.memory_limit.nbytes - rank.total + rank.kv_cache for rank in ranks)


def _head_s(execution: Execution, most: int) -> list[float]:
    """Seconds of the logits, by number of sequences."""
    token = np.ones(1)
    head_s = [0.0]
    for number in range(1, most + 1):
        head = last(execution.placed, token, token, execution.placed.cost, prompts=number)
        head_s.append(sum(_device_s(op).item() for op in head))
    return head_s


def _tabulated_prefixes(longest: int) -> tuple[int, ...]:
    """Prefixes for which attention is tabulated: 0, 1 and 256 tokens, then doubled until the longest is covered."""
    prefixes = [0, 1, 256]
    while prefixes[-1] < longest:
        prefixes.append(2 * prefixes[-1])
    return tuple(prefixes)


def _with_zero(row: Array) -> list[float]:
    """The values of a row (for 1, 2, ... tokens) with a zero before them, so that tokens are the index."""
    return [0.0, *row.tolist()]


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
