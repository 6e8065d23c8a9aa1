"""Candidates are measured where they fit in memory, and buffers are shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.memory import memory_of
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.confirm import candidates as confirm_memory
from planner.confirm import run as confirm_run
from planner.confirm.candidates import Fitting, Named, Room, candidates_of, fitting
from planner.confirm.hardware import Hardware
from planner.plan import make_plan
from tests.building import examples
from tests.planner.confirm.confirm_setup import BUSY, arguments, folder_with, said

STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")


def question(ctx: int, gpus: int = 2) -> tuple[Scenario, list[Named]]:
    scenario, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-7b", cluster="a100-nvlink", profile="a100-eager")
    return scenario, candidates_of(scenario, make_plan(scenario, strategies=STRATEGIES), 1)


def on_gpus(scenario: Scenario, candidates: list[Named], limit_bytes: float | None = None) -> Fitting:
    room = Room.of(scenario, "cuda", scenario.cluster.num_gpus, "ranks")
    return fitting(scenario, candidates, replace(room, limit_bytes=limit_bytes or room.limit_bytes), "ranks")


def test_what_does_not_fit_is_left_out_with_the_reference_and_said() -> None:
    scenario, candidates = question(16384)
    found = on_gpus(scenario, candidates)
    assert "single" not in [one.strategy for one in found.candidates]  # 101 GiB under eager attention
    assert "kvr-s" in [one.strategy for one in found.candidates]
    assert not found.reference
    assert "single (101 GiB)" in found.notes[0]
    assert found.notes[-1] == "logits are not compared: a single process's prefill does not fit in memory"


def test_what_fits_is_all_measured_and_nothing_is_said() -> None:
    scenario, candidates = question(4096)
    assert on_gpus(scenario, candidates) == Fitting(candidates=tuple(candidates), reference=True, notes=())


def test_where_nothing_fits_the_least_is_named() -> None:
    scenario, candidates = question(4096)
    with pytest.raises(InputError, match=r"a context that fits: .* takes .* GiB of 1.00 GiB"):
        on_gpus(scenario, candidates, 2**30)


@examples(15)
@given(ctx=st.integers(64, 20_000), limit_gib=st.floats(14, 200))
def test_a_candidate_is_kept_exactly_where_each_of_its_ranks_fits(ctx: int, limit_gib: float) -> None:
    scenario, candidates = question(ctx)
    limit_bytes = limit_gib * 2**30
    fit = [
        one
        for one in candidates
        if all(
            rank.total <= limit_bytes
            for rank in memory_of(
                scenario.on_gpus(len(one.partition.chunk_lens)), get_strategy(one.run_as), one.partition
            )
        )
    ]
    if fit:
        assert list(on_gpus(scenario, candidates, limit_bytes).candidates) == fit


def test_ranks_on_one_device_need_their_memory_together() -> None:
    scenario, candidates = question(4096, gpus=4)
    apart = Room.of(scenario, "cuda", 4, "ranks")
    together = Room.of(scenario, "cuda", 2, "ranks")
    assert (apart.num_ranks, together.num_ranks) == (1, 2)
    for one in candidates:
        alone = apart.needed_bytes(scenario, one, "ranks")
        weights = scenario.model.weight_bytes(2)
        assert alone + weights < together.needed_bytes(scenario, one, "ranks") <= 2 * alone
        assert (
            weights
            < apart.needed_bytes(scenario, one, "virtual")
            <= apart.needed_bytes(scenario, next(one for one in candidates if one.run_as == "single"), "virtual")
        )


def test_confirm_leaves_out_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Room.needed_bytes

    def large(room: Room, scenario: Scenario, named: Named, mode: confirm_memory.Mode) -> int:
        return 2**60 if named.strategy in ("single", "kvr-e") else real(room, scenario, named, mode)

    monkeypatch.setattr(Room, "needed_bytes", large)
    few = ("--top", "1", "--repeats", "1", "--warmups", "0", "--no-virtual", "--json")
    code, found, errors = said(arguments(folder_with(tmp_path), "confirm", *few, *BUSY))
    assert code == 0, errors
    assert [one["strategy"] for one in found["candidates"]] == ["tsp", "kvr-s"]
    assert found["max_logit_error"] is None
    assert "logits" not in found["measured"]
    assert any("single (" in note and "kvr-e (" in note for note in found["warnings"])
    assert "logits are not compared" in errors


def test_run_skips_a_check_that_does_not_fit_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm_run, "_reference_fits", lambda *_: False)
    words = arguments(folder_with(tmp_path), "run", "--strategy", "kvr-e", "--check", "--repeats", "1", "--json")
    code, found, errors = said(words)
    assert (code, found["max_logit_error"], len(found["samples_s"])) == (0, None, 1)
    assert confirm_memory.NO_REFERENCE in found["warnings"]
    assert confirm_memory.NO_REFERENCE in errors


def test_the_reference_of_a_run_is_one_process() -> None:
    hardware = Hardware(config="llama-7b", device="cuda")
    assert confirm_run._reference_fits(question(4096)[0], hardware)
    assert not confirm_run._reference_fits(question(16384)[0], hardware)
