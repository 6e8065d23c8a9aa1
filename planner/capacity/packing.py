"""Packed steps: prompts that share a step of a group, and what such steps take.

A step holds the rest of the prompt that the group has begun, then the next prompts of the queue, up to a token budget.
A prompt that is longer than what is left of the budget is cut; its next piece comes first in the next step. That is
the scheduling of prefills in vLLM (max_num_batched_tokens), SGLang (chunked_prefill_size) and TensorRT-LLM
(max_num_tokens) with chunked prefill.

A stage's device takes the time of the matrices for all tokens of the step, and of attention for each piece. It ends no
earlier than the host has issued the step, which it may do while the stage waits for the one before. Attention is
tabulated for every number of tokens behind some prefixes, and interpolated between these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.ends import embedding, last
from kvrsim.ends import step as before_step
from kvrsim.errors import InputError
from kvrsim.memory import fits, memory_of
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES, Step, Strategy
from kvrsim.strategies.layers import layer_ops
from kvrsim.strategies.pipeline import stages
from planner.grid import largest

ACCEPTED = "single, tp, pipelines (pp, pp-s), or these in groups (tp4+pp): each rank takes whole steps"
_PER_PIECE = ("append", "attention")  # kinds of operations that a step runs once per piece
_MOST_HEADS = 256  # most prompts that end in a step for which logits are tabulated


class Piece(NamedTuple):
    """Tokens of one prompt in a step."""

    prompt: int
    tokens: int  # tokens computed in the step
    prefix: int  # tokens before them with K and V: the cached prefix and earlier pieces
    context: int  # tokens of the whole prompt
    is_first: bool

    @property
    def is_last(self) -> bool:
        """Whether the prompt's first token comes with it."""
        return self.prefix + self.tokens == self.context


class Begun(NamedTuple):
    """A prompt with some finished pieces."""

    prompt: int
    done: int  # new tokens so far


class PackingRule:
    """Fills steps with the tokens of prompts.

    most_tokens: that all prompts of a step, with their cached prefixes, may have together in memory; a longer prompt
        runs alone.
    """

    def __init__(
        self, new_tokens: Sequence[int], cached_prefix: Sequence[int], budget: int, most_tokens: float = float("inf")
    ) -> None:
        self.new_tokens, self.cached_prefix = new_tokens, cached_prefix
        self.budget, self.most_tokens = budget, most_tokens

    def step(
        self, begun: Begun | None, peek: Callable[[], int | None], pop: Callable[[], object]
    ) -> tuple[list[Piece], Begun | None]:
        """The pieces of the next step, and the prompt that the step leaves unfinished.

        peek: the prompt that the queue gives next; None: it is empty. pop: takes it out.
        """
        pieces: list[Piece] = []
        room, in_memory = self.budget, 0
        while room:
            if begun is None:
                prompt = peek()
                if prompt is None or (pieces and in_memory + self._context(prompt) > self.most_tokens):
                    break
                pop()
                begun = Begun(prompt, 0)
            prompt, done = begun
            tokens = min(room, self.new_tokens[prompt] - done)
            piece = Piece(prompt, tokens, self.cached_prefix[prompt] + done, self._context(prompt), not done)
            pieces.append(piece)
            room -= tokens
            in_memory += piece.context
            begun = None if piece.is_last else Begun(prompt, done + tokens)
        return pieces, begun

    def _context(self, prompt: int) -> int:
        return self.new_tokens[prompt] + self.cached_prefix[prompt]


def takes_steps(strategy: Strategy) -> bool:
    """Whether each rank runs all tokens of a step through its layers, so that prompts can share steps."""
    if strategy.pipeline is not None:
        return strategy.degrees.context == 1
    return strategy.partition_rule == "whole" or strategy.group_size is None


def check_packs(scenario: Scenario, strategy: Strategy, argument: str = "strategies") -> None:
    """Raise InputError where prompts cannot share a step of the strategy or engine, or not with such prefixes."""
    if not takes_steps(strategy):
        raise InputError(argument, strategy.name, f"with `pack_tokens`, {ACCEPTED}")
    if scenario.prefix_placement.place != "all":
        raise InputError("prefix_placement", scenario.prefix_placement.place, "all with `pack_tokens`")
    if scenario.engine is not None and scenario.engine.decode_step:
        accepted = "with `pack_tokens`, an engine whose TTFT holds no decode step"
        raise InputError("engine", scenario.engine.name, accepted)


def most_tokens_in_memory(per_rank: Scenario, strategy: Strategy, pack_tokens: int, most: int) -> int:
    """Most tokens, up to `most`, whose K and V fit with the weights and activations of a step; 0 if none.

    As for one prompt of that many tokens in pieces of a step. per_rank: the scenario of one rank of the strategy.
    """
    in_pieces = strategy if strategy.pipeline is not None else STRATEGIES["pp"]

    def is_within(tokens: int) -> bool:
        whole, rest = divmod(tokens, pack_tokens)
        partition = Partition(chunk_lens=(pack_tokens,) * whole + (rest,) * (rest > 0))
        request = replace(per_rank.request, context_len=tokens, cached_prefix=0, batch=1)
        scenario = replace(per_rank, request=request)
        return fits(scenario, memory_of(scenario, in_pieces, partition))

    return largest(is_within, most)


class StepCost(NamedTuple):
    """Seconds of one step, by part."""

    tokens: int
    waits_s: float  # on every stage, before its first layer, per prompt that begins
    stages_s: list[float]  # of each stage's device
    head_s: float  # additional time on the last stage


class StepCosts:
    """Seconds of steps of up to `budget` tokens on the ranks of a scenario: the stages of a pipeline, or one rank.

    per_rank: the scenario of one rank of the strategy; its request sets the clock of all steps. strategy: one that
        takes_steps. longest: tokens of the longest context.
    """

    def __init__(self, per_rank: Scenario, strategy: Strategy, budget: int, longest: int) -> None:
        kinds, count = per_rank.share.layer_kind_index, len(per_rank.share.layer_kind_index)
        layers = stages(strategy, count, per_rank.cluster.num_gpus) if strategy.pipeline else (range(count),)
        self.num_stages, self.budget, self.prefixes = len(layers), budget, _tabulated_prefixes(longest)
        self.request_s, self.token_s = per_rank.host.request_s, per_rank.host.token_s
        self.holds = not per_rank.sends_overlap  # a message holds the stage that sends it
        tables = _Tables(per_rank, strategy, np.arange(1, budget + 1, dtype=float))
        counts = [np.bincount([kinds[index] for index in rows], minlength=len(tables.costs)) for rows in layers]
        self.host_s = [tables.host_s(of_stage, self.num_stages) for of_stage in counts]
        rows = [tables.device_s(of_stage, first=stage == 0) for stage, of_stage in enumerate(counts)]
        self.device_s = [_with_zero(row) for row in rows]  # [stage][tokens]
        per_kind = [tables.attention_s(float(prefix)) for prefix in self.prefixes]
        equal: dict[bytes, list[list[float]]] = {}  # stages with the same layers share a table
        for of_stage in counts:
            if of_stage.tobytes() not in equal:
                equal[of_stage.tobytes()] = [_with_zero(tables.sum_of(each, of_stage)) for each in per_kind]
        self.attention_s = [equal[of_stage.tobytes()] for of_stage in counts]  # [stage][prefix][tokens]
        paths = [per_rank.cluster.path(stage, stage + 1) for stage in range(self.num_stages - 1)]
        nbytes = tables.costs[0].activation_bytes(tables.tokens)
        self.hop_s = [*(_with_zero(path.busy_s(nbytes)) for path in paths), [0.0] * (budget + 1)]
        self.latency_s = [*(path.latency_s for path in paths), 0.0]
        self.head_s = tables.head_s()
        # Least time of a token without attention, on the mean of the stages.
        self.least_token_s = float((np.mean(rows, axis=0) / tables.tokens).min())

    def step(self, pieces: Sequence[Piece]) -> StepCost:
        """Seconds of a step with these pieces."""
        tokens = sum(piece.tokens for piece in pieces)
        begun = [piece.context for piece in pieces if piece.is_first]
        spots = [self._spot(piece.tokens, piece.prefix) for piece in pieces]
        stages_s: list[float] = []
        table, attention_s = None, 0.0
        for stage in range(self.num_stages):
            if self.attention_s[stage] is not table:
                table = self.attention_s[stage]
                attention_s = sum(_at(table, spot) for spot in spots)
            stages_s.append(self.device_s[stage][tokens] + attention_s)
        return StepCost(
            tokens=tokens,
            waits_s=len(begun) * self.request_s + sum(begun) * self.token_s,
            stages_s=stages_s,
            head_s=self.head_s[min(sum(piece.is_last for piece in pieces), _MOST_HEADS)],
        )

    def run(self, free_s: list[float], begin_s: float, step: StepCost) -> float:
        """Take a step through all stages: `free_s`, when each of them is free, becomes that after the step.

        Returns how long the stages are busy on average.
        """
        there_s, busy_s = begin_s, 0.0
        for stage, seconds in enumerate(step.stages_s):
            issued_s = max(free_s[stage], begin_s) + step.waits_s
            begin = issued_s if issued_s > there_s else there_s
            end = max(begin + seconds, issued_s + self.host_s[stage])
            if stage == self.num_stages - 1:
                end += step.head_s
            hop_s = self.hop_s[stage][step.tokens]
            there_s = end + hop_s + self.latency_s[stage]
            free_s[stage] = end + hop_s if self.holds else end
            busy_s += end - begin
        return busy_s / self.num_stages

    def alone_s(self, new_tokens: int, cached_prefix: int) -> float:
        """TTFT of a prompt that has the group for itself, in pieces of the budget."""
        free_s = [0.0] * self.num_stages
        for done in range(0, new_tokens, self.budget):
            tokens = min(self.budget, new_tokens - done)
            piece = Piece(0, tokens, cached_prefix + done, cached_prefix + new_tokens, not done)
            self.run(free_s, free_s[0], self.step((piece,)))
        return free_s[-1]

    def least_s(self, new_tokens: int, cached_prefix: int) -> float:
        """About the least busy time of a group, on the mean of its stages, that a prompt can take."""
        tokens = min(new_tokens, self.budget)
        spot = self._spot(tokens, cached_prefix + (new_tokens - tokens) // 2)  # the middle one of its pieces
        attention_s = sum(_at(table, spot) for table in self.attention_s) / self.num_stages
        return new_tokens * (self.least_token_s + attention_s / tokens)

    def _spot(self, tokens: int, prefix: int) -> tuple[int, int, float]:
        """Return the tokens, the index of the last tabulated prefix not above, and the next one's weight."""
        low = min(bisect_right(self.prefixes, prefix) - 1, len(self.prefixes) - 2)
        return tokens, low, (prefix - self.prefixes[low]) / (self.prefixes[low + 1] - self.prefixes[low])


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How groups pack prompts."""

    costs: StepCosts
    most_tokens: float  # tokens that the prompts of a step may hold in memory


class _Tables:
    """Seconds of layers and of what is around them, for every number of tokens; arrays of shape (budget,)."""

    def __init__(self, per_rank: Scenario, strategy: Strategy, tokens: Array) -> None:
        self.per_rank, self.strategy, self.tokens, self.cost = per_rank, strategy, tokens, per_rank.cost
        self.costs = per_rank.layer_costs(self.cost)
        self.without_prefix = self._layers(0.0)
        self.before = before_step(per_rank, tokens, tokens, self.cost)

    def _layers(self, prefix: float) -> list[tuple[Op, ...]]:
        """Operations of each kind of layer behind a prefix."""
        prefixes = np.full_like(self.tokens, prefix)
        steps = [Step(costs, (self.tokens,), (prefixes,)) for costs in self.costs]
        return [tuple(layer_ops(self.strategy, step, 0)) for step in steps]

    def sum_of(self, per_kind: Sequence[Array], counts: npt.NDArray[np.intp]) -> Array:
        """The sum over the layers of a stage; `per_kind` holds the value of one layer of each kind."""
        terms = (count * seconds for count, seconds in zip(counts, per_kind, strict=True))
        return np.asarray(sum(terms, 0 * self.tokens))

    def device_s(self, counts: npt.NDArray[np.intp], *, first: bool) -> Array:
        """Seconds of a stage without attention; the first stage includes the embedding."""
        ops = [*self.before, *(embedding(self.per_rank, self.tokens, self.cost) if first else ())]
        per_kind = [self._sum(op for op in layer if not _is_per_piece(op)) for layer in self.without_prefix]
        return self._sum(ops) + self.sum_of(per_kind, counts)

    def attention_s(self, prefix: float) -> list[Array]:
        """Seconds of each kind of layer that each piece adds."""
        return [self._sum(op for op in layer if _is_per_piece(op)) for layer in self._layers(prefix)]

    def host_s(self, counts: npt.NDArray[np.intp], num_stages: int) -> float:
        """What the host needs to issue a step on a stage."""
        per_kind = [sum(map(_host_s, layer)) for layer in self.without_prefix]
        layers_s = sum(count * seconds for count, seconds in zip(counts.tolist(), per_kind, strict=True))
        before_s = sum(map(_host_s, self.before))
        return float(layers_s) + before_s + 2 * (num_stages > 1) * self.per_rank.host.message_s

    def head_s(self) -> list[float]:
        """Seconds of the head for the prompts that end in a step, by their number."""
        one = np.ones(1)
        heads = (last(self.per_rank, one, one, self.cost, prompts=number) for number in range(1, _MOST_HEADS + 1))
        return [0.0, *(float(sum(_device_s(op).item() for op in ops)) for ops in heads)]

    def _sum(self, ops: Iterable[Op]) -> Array:
        return np.asarray(sum((_device_s(op) for op in ops), 0 * self.tokens))


def _at(table: list[list[float]], spot: tuple[int, int, float]) -> float:
    tokens, low, weight = spot
    below = table[low][tokens]
    return below + weight * (table[low + 1][tokens] - below) if weight else below


def _with_zero(row: Array) -> list[float]:
    """A row indexed by tokens, starting at 0 tokens."""
    return [0.0, *row.tolist()]


def _tabulated_prefixes(longest: int) -> tuple[int, ...]:
    """None, one token, and doublings up to the longest."""
    prefixes = [0, 1, 256]
    while prefixes[-1] < longest:
        prefixes.append(2 * prefixes[-1])
    return tuple(prefixes)


def _is_per_piece(op: Op) -> bool:
    return isinstance(op, Compute) and op.kind in _PER_PIECE


def _device_s(op: Op) -> Array:
    """Seconds that an operation holds the stream of its rank."""
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def _host_s(op: Op) -> float:
    assert isinstance(op, Compute | Collective)
    return op.host_s
