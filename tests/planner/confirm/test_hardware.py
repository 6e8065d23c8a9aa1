"""Candidates are measured if they fit in the memory of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy, usual_names
from planner.candidates import Candidate, Search
from planner.confirm.hardware import Hardware, MemoryBudget, Mode
from tests.building import examples
from tests.planner.confirm.confirm_setup import BUSY, arguments, folder_with, said


def question(ctx: int, gpus: int = 2) -> tuple[Scenario, dict[str, Candidate]]:
    scenario, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-7b", cluster="a100-nvlink", profile="a100-eager")
    return scenario, {
        name: Search().candidate(execution_of(scenario, get_strategy(name))) for name in usual_names("paper")
    }


def budget_of(scenario: Scenario, num_devices: int, mode: Mode = "ranks") -> MemoryBudget:
    class OnGpus(Hardware):
        devices = num_devices  # type: ignore[assignment]

    return MemoryBudget.of(scenario, OnGpus(config="llama-7b", device="cuda"), mode)


def test_where_nothing_fits_the_error_names_what_to_change() -> None:
    scenario, candidates = question(4096)
    budget = budget_of(scenario, 2)
    budget.check(candidates)
    with pytest.raises(InputError, match=r"model: got 'llama-7b', accepted: a model that fits in the 1.00 GiB"):
        replace(budget, limit_bytes=2**30).check(candidates)
    scenario, candidates = question(200_000)
    with pytest.raises(InputError, match=r"ctx: got '200000', accepted: a context that fits in the .* takes .* GiB"):
        replace(budget, limit_bytes=2**35).check(candidates)


@examples(15)
@given(ctx=st.integers(64, 20_000), limit_gib=st.floats(14, 200))
def test_a_candidate_is_measured_exactly_where_each_of_its_ranks_fits(ctx: int, limit_gib: float) -> None:
    scenario, candidates = question(ctx)
    budget = replace(budget_of(scenario, 2), limit_bytes=limit_gib * 2**30)
    fits = {}
    for name, one in candidates.items():
        fits[name] = budget.needed_bytes(one) <= budget.limit_bytes
        assert fits[name] == all(rank.total <= budget.limit_bytes for rank in one.memory)
    assert budget.fits_reference(scenario) == fits["single"]


def test_confirm_leaves_out_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryBudget.needed_bytes

    def large(budget: MemoryBudget, candidate: Candidate) -> int:
        return 2**60 if candidate.strategy.name in ("single", "kvr-e") else real(budget, candidate)

    monkeypatch.setattr(MemoryBudget, "needed_bytes", large)
    few = ("--top", "1", "--repeats", "1", "--warmups", "0", "--no-virtual", "--json")
    code, result, errors = said(arguments(folder_with(tmp_path), "confirm", *few, *BUSY))
    assert code == 0, errors
    assert [one["strategy"] for one in result["candidates"]] == ["tsp", "kvr-s"]
    assert result["max_logit_error"] is None
    assert any("single (" in note and "kvr-e (" in note for note in result["warnings"])
    assert "logits are not compared" in errors


def test_ranks_on_one_device_need_their_memory_together() -> None:
    scenario, candidates = question(4096, gpus=4)
    apart, together, virtual = budget_of(scenario, 4), budget_of(scenario, 2), budget_of(scenario, 4, "virtual")
    assert (apart.num_ranks, together.num_ranks, virtual.num_ranks) == (1, 2, 1)
    weights = scenario.model.weight_bytes(2)
    for one in candidates.values():
        alone = apart.needed_bytes(one)
        assert alone + weights < together.needed_bytes(one) <= 2 * alone
        assert weights < virtual.needed_bytes(one) <= virtual.needed_bytes(candidates["single"])
