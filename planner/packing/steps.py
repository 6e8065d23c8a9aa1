"""The program of one packed step: matrices take the tokens of all its prompts, attention each prompt by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.ends import embedding, last, request
from kvrsim.ends import step as before_step
from kvrsim.program import Array, Compute, Op, Program, Recv, Send
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import layer_ops
from kvrsim.strategies.pipeline import stages
from planner.packing.rule import Piece


@dataclass(frozen=True, slots=True)
class PackedStep(Step):
    """A layer over the pieces of several prompts; `chunks` holds the sum of their tokens.

    What depends on a prompt's own tokens and prefix is the sum over the prompts, as if they ran one after another.
    """

    tokens: Array  # of each piece, shape (K,)
    prefixes: Array  # before each piece, shape (K,)

    def append_kv(self, rank: int, prefix: Array) -> Compute:
        """Each piece joins its own prompt's cache."""
        return _summed(Step.append_to(self, self.tokens, self.prefixes))

    def attention(self, rank: int, prefix: Array) -> Compute:
        """Each piece attends to its own prompt."""
        return _summed(self._attention("attention", self.tokens, self.prefixes))

    def scan(self, rank: int) -> Compute:
        """Each piece takes its own prompt's state on."""
        parts = Step(self.costs, (self.tokens,), (self.prefixes,))
        return _summed(parts.scan(0))


class StepPrograms:
    """Programs of packed steps on the ranks of a scenario, which are the stages of a pipeline, or one rank.

    scenario: as the strategy sees it; its request sets the clock of all steps. strategy: one that takes_steps.
    """

    def __init__(self, scenario: Scenario, strategy: Strategy) -> None:
        self.scenario, self.strategy, self.cost = scenario, strategy, scenario.cost
        self.kinds, self.held = scenario.share.layer_kind_index, layers_held(scenario, strategy)
        self.layer_costs = scenario.layer_costs(self.cost)

    def of(self, pieces: Sequence[Piece]) -> Program:
        """The program of a step with these pieces, at least one."""
        tokens = np.array([piece.tokens for piece in pieces], dtype=float)
        prefixes = np.array([piece.prefix for piece in pieces], dtype=float)
        total = np.array([tokens.sum()])
        mean_keys = np.array([tokens @ (prefixes + tokens)]) / total  # tokens x keys is what a mask has
        ops = self._layers(total, tokens, prefixes)
        prepared = before_step(self.scenario, total, mean_keys, self.cost)
        ways = [embedding(self.scenario, total, self.cost)] + [
            (Recv(src=rank, rendezvous=not self.scenario.sends_overlap, payload="activations"),)
            for rank in range(len(self.held) - 1)
        ]
        into = tuple((*way, *prepared) for way in ways)
        layers = tuple(tuple(op for index in rows for op in ops[self.kinds[index]]) for rows in self.held)
        out = tuple((self._send(total, rank),) if rank < len(self.held) - 1 else () for rank in range(len(self.held)))
        begun = [piece.context for piece in pieces if piece.is_first]
        ended = sum(piece.is_last for piece in pieces)
        context = np.array([max(piece.prefix + piece.tokens for piece in pieces)], dtype=float)
        head = last(self.scenario, total, context, self.cost, prompts=ended) if ended else ()
        nothing: tuple[tuple[Op, ...], ...] = ((),) * (len(self.held) - 1)
        return Program(
            strategy=self.strategy.name,
            prologue=(request(self.scenario, total, begun),) * len(self.held),
            layers=(into, layers, out),
            layer_kind_index=(0, 1, 2),
            epilogue=(*nothing, head),
            layer_numbers=tuple((None, rows[0], None) for rows in self.held),
        )

    def _layers(self, total: Array, tokens: Array, prefixes: Array) -> list[tuple[Op, ...]]:
        """The operations of each kind of layer."""
        steps = [PackedStep(costs, (total,), (prefixes[:1],), tokens, prefixes) for costs in self.layer_costs]
        return [tuple(layer_ops(self.strategy, step, 0)) for step in steps]

    def _send(self, total: Array, rank: int) -> Send:
        """The residual stream of all tokens to the next stage."""
        costs = self.layer_costs[0]
        return Send(
            dst=rank + 1,
            nbytes=costs.activation_bytes(total),
            host_s=costs.host.message_s,
            rendezvous=not costs.sends_overlap,
            payload="activations",
        )


def layers_held(scenario: Scenario, strategy: Strategy) -> tuple[range, ...]:
    """The layers of each stage; all of them on one, unless the strategy is a pipeline."""
    count = len(scenario.share.layer_kind_index)
    return stages(strategy, count, scenario.cluster.num_gpus) if strategy.pipeline else (range(count),)


def _summed(op: Compute) -> Compute:
    """One operation for those of all pieces."""
    sums = {
        name: np.array([value.sum()])
        for name in ("device_s", "kv_bytes", "score_elements")
        if (value := getattr(op, name)) is not None
    }
    return replace(op, **sums)  # type: ignore[arg-type]
