"""Candidates are measured where they fit in memory, and buffers are shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import Candidate, Search
from planner.confirm import run as confirm_run
from planner.confirm.candidates import NO_REFERENCE, STRATEGIES, Feasible, MemoryBudget
from planner.confirm.hardware import Hardware, Mode
from tests.building import examples
from tests.planner.confirm.confirm_setup import BUSY, arguments, folder_with, said


def question(ctx: int, gpus: int = 2) -> tuple[Scenario, dict[str, Candidate]]:
    scenario, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-7b", cluster="a100-nvlink", profile="a100-eager")
    return scenario, {name: Search().candidate(scenario, get_strategy(name)) for name in STRATEGIES}


def budget_of(scenario: Scenario, num_devices: int, mode: Mode = "ranks") -> MemoryBudget:
    class OnGpus(Hardware):
        devices = num_devices  # type: ignore[assignment]

    return MemoryBudget.of(scenario, OnGpus(config="llama-7b", device="cuda"), mode)


def feasible(scenario: Scenario, candidates: dict[str, Candidate], limit_bytes: float | None = None) -> Feasible:
    budget = budget_of(scenario, scenario.cluster.num_gpus)
    return Feasible.of(candidates, replace(budget, limit_bytes=limit_bytes or budget.limit_bytes))


def test_what_does_not_fit_is_left_out_with_the_reference_and_said() -> None:
    result = feasible(*question(16384))
    assert "single" not in result.candidates  # 101 GiB under eager attention
    assert "kvr-s" in result.candidates
    assert not result.reference
    assert "single (101 GiB)" in result.notes[0]
    assert result.notes[-1] == NO_REFERENCE


def test_where_nothing_fits_the_least_is_named() -> None:
    with pytest.raises(InputError, match=r"a context that fits: .* takes .* GiB of 1.00 GiB"):
        feasible(*question(4096), 2**30)


@examples(15)
@given(ctx=st.integers(64, 20_000), limit_gib=st.floats(14, 200))
def test_a_candidate_is_measured_exactly_where_each_of_its_ranks_fits(ctx: int, limit_gib: float) -> None:
    scenario, candidates = question(ctx)
    limit_bytes = limit_gib * 2**30
    fit = [name for name, one in candidates.items() if all(rank.total <= limit_bytes for rank in one.memory)]
    if fit:
        assert list(feasible(scenario, candidates, limit_bytes).candidates) == fit


def test_confirm_leaves_out_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryBudget.needed_bytes

    def large(budget: MemoryBudget, candidate: Candidate) -> int:
        return 2**60 if candidate.strategy.name in ("single", "kvr-e") else real(budget, candidate)

    monkeypatch.setattr(MemoryBudget, "needed_bytes", large)
    few = ("--top", "1", "--repeats", "1", "--warmups", "0", "--no-virtual", "--json")
    code, found, errors = said(arguments(folder_with(tmp_path), "confirm", *few, *BUSY))
    assert code == 0, errors
    assert [one["strategy"] for one in found["candidates"]] == ["tsp", "kvr-s"]
    assert found["max_logit_error"] is None
    assert "logits" not in found["measured"]
    assert any("single (" in note and "kvr-e (" in note for note in found["warnings"])
    assert "logits are not compared" in errors


def test_run_skips_a_check_that_does_not_fit_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm_run, "reference_fits", lambda *_: False)
    words = arguments(folder_with(tmp_path), "run", "--strategy", "kvr-e", "--check", "--repeats", "1", "--json")
    code, found, errors = said(words)
    assert (code, found["max_logit_error"], len(found["samples_s"])) == (0, None, 1)
    assert NO_REFERENCE in found["warnings"]
    assert NO_REFERENCE in errors


def test_ranks_on_one_device_need_their_memory_together() -> None:
    scenario, candidates = question(4096, gpus=4)
    apart, together, virtual = budget_of(scenario, 4), budget_of(scenario, 2), budget_of(scenario, 4, "virtual")
    assert (apart.num_ranks, together.num_ranks, virtual.num_ranks) == (1, 2, 1)
    weights = scenario.model.weight_bytes(2)
    for one in candidates.values():
        alone = apart.needed_bytes(one)
        assert alone + weights < together.needed_bytes(one) <= 2 * alone
        assert weights < virtual.needed_bytes(one) <= virtual.needed_bytes(candidates["single"])
