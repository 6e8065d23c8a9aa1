"""How many tokens the prompts of a packed step may have together in a group's memory."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.memory import fits, memory_of
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES, Strategy
from kvrsim.units import MAX_TOKENS
from planner.grid import largest


def most_held(placed: Scenario, strategy: Strategy, pack_tokens: int, most: int = MAX_TOKENS) -> int:
    """The most tokens whose K, V fit beside the weights and the activations of a step, up to `most`; 0: none do.

    As for one prompt of so many tokens in pieces of a step. placed: as the strategy sees it.
    """
    in_pieces = strategy if strategy.pipeline is not None else STRATEGIES["pp"]

    def is_within(tokens: int) -> bool:
        whole, rest = divmod(tokens, pack_tokens)
        cut = Partition(chunk_lens=(pack_tokens,) * whole + (rest,) * (rest > 0))
        one = replace(placed, request=replace(placed.request, context_len=tokens, cached_prefix=0, batch=1))
        return fits(one, memory_of(one, in_pieces, cut))

    return largest(is_within, most)
