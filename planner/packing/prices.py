"""Seconds of a packed step on each stage, from tables, for fleets that take millions of steps.

A stage's device takes the time of the matrices for all tokens of the step, and of attention for each piece. It ends no
earlier than the host has issued the step, which it may do while the stage waits for the one before. Attention is
tabulated for every number of tokens behind some prefixes, and interpolated between these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.ends import embedding, last
from kvrsim.ends import step as before_step
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import layer_ops
from planner.packing.rule import Piece
from planner.packing.steps import layers_held

_OF_PIECES = ("append", "attention")  # kinds of work that a piece has by itself
_MOST_HEADS = 256  # prompts that end in a step, up to which logits are tabulated


class StepPrice(NamedTuple):
    """What one step takes."""

    tokens: int
    waits_s: float  # on every stage, before its first layer, for the prompts that begin
    stages_s: list[float]  # of each stage's device
    head_s: float  # more on the last stage


class StepPrices:
    """Seconds of steps of up to `budget` tokens; the parameters are those of StepPrograms.

    longest: tokens of the longest context.
    """

    def __init__(self, placed: Scenario, strategy: Strategy, budget: int, longest: int) -> None:
        held = layers_held(placed, strategy)
        self.num_stages, self.budget, self.prefixes = len(held), budget, _knots(longest)
        self.request_s, self.token_s = placed.host.request_s, placed.host.token_s
        self.holds = not placed.sends_overlap  # a message holds the stage that sends it
        tables = _Tables(placed, strategy, np.arange(1, budget + 1, dtype=float))
        counts = [np.bincount([tables.kinds[index] for index in rows], minlength=len(tables.costs)) for rows in held]
        self.host_s = [tables.host_s(of_stage, len(held)) for of_stage in counts]
        rows = [tables.device_s(of_stage, first=stage == 0) for stage, of_stage in enumerate(counts)]
        self.device_s = [_with_zero(row) for row in rows]  # [stage][tokens]
        behind: dict[bytes, list[list[float]]] = {of_stage.tobytes(): [] for of_stage in counts}
        for prefix in self.prefixes:
            seconds = tables.attention_s(float(prefix))
            for of_stage in {one.tobytes(): one for one in counts}.values():
                behind[of_stage.tobytes()].append(_with_zero(tables.of_stage(seconds, of_stage)))
        self.attention_s = [behind[of_stage.tobytes()] for of_stage in counts]  # [stage][prefix][tokens]
        paths = [placed.cluster.path(stage, stage + 1) for stage in range(len(held) - 1)]
        nbytes = tables.costs[0].activation_bytes(tables.tokens)
        self.hop_s = [*(_with_zero(path.busy_s(nbytes)) for path in paths), [0.0] * (budget + 1)]
        self.latency_s = [*(path.latency_s for path in paths), 0.0]
        self.head_s = tables.head_s()
        # What a token takes at least besides attention, on the mean of the stages.
        self.least_token_s = float((np.mean(rows, axis=0) / tables.tokens).min())

    def step(self, pieces: Sequence[Piece]) -> StepPrice:
        """What a step of these pieces takes."""
        tokens = sum(piece.tokens for piece in pieces)
        begun = [piece.context for piece in pieces if piece.is_first]
        spots = [self._spot(piece.tokens, piece.prefix) for piece in pieces]
        stages_s: list[float] = []
        table, attended_s = None, 0.0
        for stage in range(self.num_stages):
            if self.attention_s[stage] is not table:
                table = self.attention_s[stage]
                attended_s = sum(_at(table, spot) for spot in spots)
            stages_s.append(self.device_s[stage][tokens] + attended_s)
        return StepPrice(
            tokens=tokens,
            waits_s=len(begun) * self.request_s + sum(begun) * self.token_s,
            stages_s=stages_s,
            head_s=self.head_s[min(sum(piece.is_last for piece in pieces), _MOST_HEADS)],
        )

    def run(self, free_s: list[float], begin_s: float, step: StepPrice) -> float:
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
        attended_s = sum(_at(table, spot) for table in self.attention_s) / self.num_stages
        return new_tokens * (self.least_token_s + attended_s / tokens)

    def _spot(self, tokens: int, prefix: int) -> tuple[int, int, float]:
        """Tokens, the prefix of the table below, and the weight of the next one."""
        low = min(bisect_right(self.prefixes, prefix) - 1, len(self.prefixes) - 2)
        return tokens, low, (prefix - self.prefixes[low]) / (self.prefixes[low + 1] - self.prefixes[low])


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How groups pack prompts."""

    prices: StepPrices
    most_held: float  # tokens that all prompts of a step may have in memory


class _Tables:
    """Seconds of layers and of what is around them, for every number of tokens; arrays of shape (budget,)."""

    def __init__(self, placed: Scenario, strategy: Strategy, tokens: Array) -> None:
        self.placed, self.strategy, self.tokens, self.cost = placed, strategy, tokens, placed.cost
        self.kinds, self.costs = placed.share.layer_kind_index, placed.layer_costs(self.cost)
        self.alone = self._layers(0.0)
        self.before = before_step(placed, tokens, tokens, self.cost)

    def _layers(self, prefix: float) -> list[tuple[Op, ...]]:
        """Operations of each kind of layer behind a prefix."""
        prefixes = np.full_like(self.tokens, prefix)
        steps = [Step(costs, (self.tokens,), (prefixes,)) for costs in self.costs]
        return [tuple(layer_ops(self.strategy, step, 0)) for step in steps]

    def of_stage(self, each: Sequence[Array], counts: npt.NDArray[np.intp]) -> Array:
        """The sum over the layers of a stage; `each`: of a layer of each kind."""
        return np.asarray(sum((count * of_kind for count, of_kind in zip(counts, each, strict=True)), 0 * self.tokens))

    def device_s(self, counts: npt.NDArray[np.intp], *, first: bool) -> Array:
        """Of a stage, all but attention; the first one embeds."""
        ops = [*self.before, *(embedding(self.placed, self.tokens, self.cost) if first else ())]
        each = [self._sum([op for op in ops if not _of_piece(op)]) for ops in self.alone]
        return self._sum(ops) + self.of_stage(each, counts)

    def attention_s(self, prefix: float) -> list[Array]:
        """Of each kind of layer, what a piece has by itself."""
        return [self._sum([op for op in ops if _of_piece(op)]) for ops in self._layers(prefix)]

    def host_s(self, counts: npt.NDArray[np.intp], num_stages: int) -> float:
        """What the host needs to issue a step on a stage."""
        each = [sum(_host_s(op) for op in ops) for ops in self.alone]
        layers_s = sum(count * of_kind for count, of_kind in zip(counts.tolist(), each, strict=True))
        return (
            float(layers_s) + sum(_host_s(op) for op in self.before) + 2 * (num_stages > 1) * self.placed.host.message_s
        )

    def head_s(self) -> list[float]:
        """Of the prompts that end in a step, by their number."""
        one = np.ones(1)
        heads = (last(self.placed, one, one, self.cost, prompts=number) for number in range(1, _MOST_HEADS + 1))
        return [0.0, *(float(sum(_device_s(op).item() for op in ops)) for ops in heads)]

    def _sum(self, ops: Iterable[Op]) -> Array:
        return np.asarray(sum((_device_s(op) for op in ops), 0 * self.tokens))


def _at(table: list[list[float]], spot: tuple[int, int, float]) -> float:
    tokens, low, weight = spot
    below = table[low][tokens]
    return below + weight * (table[low + 1][tokens] - below) if weight else below


def _with_zero(row: Array) -> list[float]:
    """A row that is indexed by tokens, from 0."""
    return [0.0, *row.tolist()]


def _knots(longest: int) -> tuple[int, ...]:
    """Prefixes of the tables: none, one token, and doublings up to the longest."""
    known = [0, 1, 256]
    while known[-1] < longest:
        known.append(2 * known[-1])
    return tuple(known)


def _of_piece(op: Op) -> bool:
    return isinstance(op, Compute) and op.kind in _OF_PIECES


def _device_s(op: Op) -> Array:
    """How long an operation holds the stream of its rank."""
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def _host_s(op: Op) -> float:
    assert isinstance(op, Compute | Collective)
    return op.host_s
