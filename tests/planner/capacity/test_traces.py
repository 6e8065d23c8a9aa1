"""Answers for drawn traces of the shapes of public ones contradict nothing that they claim."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from tests.fuzz.fuzz_traces import ask, contradictions, drawn_traces, questions

SMALL = {"strategies": ("tp", "single"), "group_sizes": "2,4", "slo_ttft": "2s"}


@pytest.mark.parametrize("name", ["chat", "code", "cached"])
def test_answers_for_drawn_traces(name: str) -> None:
    rng = np.random.default_rng(11)
    traces = drawn_traces(rng, 600)
    question = next(questions(rng, {name: traces[name]}, 120))
    plan = ask(question | SMALL | {"model": "llama-2-7b", "cluster": "a100-nvlink"})
    assert list(contradictions(plan)) == []


def test_questions_differ() -> None:
    rng = np.random.default_rng(3)
    drawn = list(islice(questions(rng, drawn_traces(rng, 50), 40), 200))
    assert len({len(one["requests"]) for one in drawn}) > 20
    assert len({one["model"] for one in drawn}) == 6
