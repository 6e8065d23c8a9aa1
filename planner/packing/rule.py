"""Which waiting prompts share a step: first those begun, then the next of the queue, up to a token budget.

A prompt that is longer than what is left of the budget is cut; its next piece comes first in the next step. That is
the scheduling of prefills in vLLM (max_num_batched_tokens), SGLang (chunked_prefill_size) and TensorRT-LLM
(max_num_tokens) with chunked prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvrsim.errors import InputError
from kvrsim.kernels.prefix import ON_EVERY_RANK
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy


class Piece(NamedTuple):
    """Tokens of one prompt in a step."""

    prompt: int
    tokens: int  # that the step computes
    prefix: int  # tokens before them whose K, V are there: the cached prefix and earlier pieces
    context: int  # tokens of the whole prompt
    is_first: bool

    @property
    def is_last(self) -> bool:
        """Whether the prompt's first token comes with it."""
        return self.prefix + self.tokens == self.context


class Begun(NamedTuple):
    """A prompt of which some pieces have run."""

    prompt: int
    done: int  # new tokens so far


class PackingRule:
    """Fills steps with the tokens of prompts.

    most_held: tokens, cached ones included, that all prompts of a step may have together in memory; a longer prompt
        runs alone.
    """

    def __init__(
        self, new_tokens: Sequence[int], cached_prefix: Sequence[int], budget: int, most_held: float = float("inf")
    ) -> None:
        self.new_tokens, self.cached_prefix = new_tokens, cached_prefix
        self.budget, self.most_held = budget, most_held

    def step(
        self, begun: Begun | None, peek: Callable[[], int | None], pop: Callable[[], object]
    ) -> tuple[list[Piece], Begun | None]:
        """The pieces of the next step, and the prompt that it leaves begun.

        peek: the prompt that the queue gives next; None: it is empty. pop: takes it out.
        """
        pieces: list[Piece] = []
        room, held = self.budget, 0
        while room:
            if begun is None:
                prompt = peek()
                if prompt is None or (pieces and held + self._held(prompt) > self.most_held):
                    break
                pop()
                begun = Begun(prompt, 0)
            prompt, done = begun
            tokens = min(room, self.new_tokens[prompt] - done)
            piece = Piece(prompt, tokens, self.cached_prefix[prompt] + done, self._held(prompt), not done)
            pieces.append(piece)
            room -= tokens
            held += piece.context
            begun = None if piece.is_last else Begun(prompt, done + tokens)
        return pieces, begun

    def _held(self, prompt: int) -> int:
        return self.new_tokens[prompt] + self.cached_prefix[prompt]


ACCEPTED = "single, tp, pipelines (pp, pp-s), or these in groups (tp4+pp): each rank takes whole steps"


def takes_steps(strategy: Strategy) -> bool:
    """Whether each rank runs all tokens of a step through its layers, so that prompts can share steps."""
    if strategy.pipeline is not None:
        return (strategy.context_size or 1) == 1
    return strategy.partition_rule == "whole" or strategy.group_size is None


def check_packs(scenario: Scenario, strategy: Strategy, argument: str = "strategy") -> None:
    """InputError where prompts cannot share a step of the strategy or engine, or with such prefixes."""
    if not takes_steps(strategy):
        raise InputError(argument, strategy.name, f"with `pack_tokens`, {ACCEPTED}")
    if scenario.prefix_placement != ON_EVERY_RANK:
        raise InputError("prefix_placement", scenario.prefix_placement.place, "all with `pack_tokens`")
    if scenario.engine is not None and scenario.engine.decode_step:
        accepted = "with `pack_tokens`, an engine whose TTFT holds no decode step"
        raise InputError("engine", scenario.engine.name, accepted)
