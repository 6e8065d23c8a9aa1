"""In how many pieces a pipeline takes the context: more fill the stages sooner, fewer waste less on each."""

from __future__ import annotations

import numpy as np

from kvrsim.partition import Partition
from planner.evaluate import Evaluator

_GAIN = 0.002  # of TTFT, less than which twice the pieces are not worth it
_MOST_A_STAGE = 64  # pieces; with so many, filling and emptying the stages takes less than 1.6 % of TTFT


def best_pieces(evaluator: Evaluator) -> Partition:
    """Even pieces, 1, 2, 4, ... of them, as long as TTFT falls.

    It has one minimum: S stages take (S + M - 1) x (work / M + the fixed cost of a piece) for M pieces.
    """
    scenario = evaluator.scenario
    tokens = scenario.request.new_tokens
    best, best_s, number = Partition.even(tokens, 1), float("inf"), 1
    while number <= min(tokens, _MOST_A_STAGE * scenario.cluster.num_gpus):
        partition = Partition.even(tokens, number)
        ttft_s = float(evaluator.ttft_s(np.array([partition.chunk_lens], dtype=float))[0])
        if ttft_s > best_s * (1 - _GAIN):
            break
        best, best_s, number = partition, ttft_s, 2 * number
    return best
