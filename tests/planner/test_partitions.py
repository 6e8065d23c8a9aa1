"""Partitions that no search finds: the number of pieces of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvrsim
from kvrsim.compile import for_strategy
from kvrsim.engine import load_engine
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.search.minimise import Evaluator
from planner.search.pipeline import search_even_pieces, with_step_time


def pipeline(**asked: object) -> tuple[kvrsim.Scenario, list[int]]:
    """A long prefill on eight H100, and its pieces."""
    about = {"ctx": "128k", "gpus": 8, "model": "llama-3-70b", "cluster": "h100-nvlink"} | asked
    scenario, _ = kvrsim.make_scenario(**about)  # type: ignore[arg-type]
    strategy = get_strategy("pp")
    placed = for_strategy(scenario, strategy)
    return placed, list(partition_of(placed, strategy).chunk_lens)


def test_pieces_are_of_a_length_that_engines_run() -> None:
    """From 2048 tokens, the smallest step that engines are set to, to 16k."""
    _, pieces = pipeline()
    assert 2048 <= pieces[0] <= 16384
    assert sum(pieces) == 131072


def test_without_a_price_of_a_step_pieces_are_short() -> None:
    _, free = pipeline(engine="none")
    assert free[0] <= 512


def test_pieces_are_the_best_for_a_dear_step() -> None:
    """No power of two is better at the upper end of the step's interval, but for what the search calls equal."""
    engine = load_engine("serving")
    scenario, pieces = pipeline(engine=engine)
    dear = with_step_time(scenario, "p90")
    assert dear.host.step_s > 2 * scenario.host.step_s
    strategy = get_strategy("pp")
    evaluator = Evaluator(dear, strategy, None)
    assert search_even_pieces(scenario, strategy).partition.chunk_lens == tuple(pieces)
    best_s = evaluator.ttft_s(np.array([pieces], dtype=float))[0]
    for number in (8, 16, 32, 64, 128, 256):
        other_s = evaluator.ttft_s(np.full((1, number), 131072 / number))[0]
        assert other_s >= best_s * (1 - 0.003)


def test_a_known_step_is_not_made_dearer() -> None:
    engine = replace(load_engine("serving"), spread={})
    scenario, _ = pipeline(engine=engine)
    assert with_step_time(scenario, "p90") is scenario
    assert with_step_time(scenario, "p90").host.step_s == pytest.approx(engine.host.step_s)
