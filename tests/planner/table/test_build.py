"""Building tables: equal bytes for any number of processes, searched entries, resumed work, KVR-P."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, STRATEGIES
from planner.candidates import Search
from planner.plan import make_plan
from planner.search.bound import lower_bound_s
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.table.build import draft_of, make_table
from planner.table.lookup import best_lookup
from planner.table.table import PartitionTable, look_up
from tests.building import executed

KVR = STRATEGIES["kvr-s"]


PROFILES = ("a100-eager", "a100-flash", "roofline")


def scenario_of(profile: str, **options: object) -> Scenario:
    return make_scenario(ctx=16384, gpus=8, profile=profile, **options)[0]  # type: ignore[arg-type]


def at(scenario: Scenario, num_gpus: int, context_len: int) -> Scenario:
    return replace(scenario.on_gpus(num_gpus), request=replace(scenario.request, context_len=context_len))


def ttft_s(scenario: Scenario, partition: Sequence[int]) -> float:
    return Evaluator(executed(scenario, KVR)).one(tuple(partition))


@pytest.fixture(scope="module")
def tables() -> dict[str, PartitionTable]:
    """Tables for 4k, 8k and 12k, one for each kind of profile."""
    return {name: make_table(scenario_of(name), (2, 4), (4096, 8192, 12288)) for name in PROFILES}


@pytest.mark.parametrize("profile", PROFILES)
def test_entries_are_as_good_as_a_search(tables: dict[str, PartitionTable], profile: str) -> None:
    for entry in tables[profile].entries:
        scenario = at(scenario_of(profile), entry.num_gpus, entry.context_len)
        value = search(executed(scenario, KVR))
        assert entry.ttft_s == pytest.approx(ttft_s(scenario, entry.partition), rel=1e-12)
        assert entry.ttft_s <= 1.0015 * value.ttft_s
        assert entry.ttft_low_s <= entry.ttft_s <= entry.ttft_high_s
        bound_s = value.lower_bound_s or lower_bound_s(executed(scenario, KVR), value.ttft_s)
        assert entry.ttft_s / (1 + entry.gap) == pytest.approx(bound_s, rel=1e-3)
        even = ttft_s(scenario, [entry.context_len // entry.num_gpus] * entry.num_gpus)
        assert entry.speedup_over_even == pytest.approx(even / entry.ttft_s)
        assert entry.speedup_over_tsp > 1


@pytest.mark.parametrize("profile", PROFILES)
def test_between_entries_kvr_p_is_near_kvr_s(tables: dict[str, PartitionTable], profile: str) -> None:
    for num_gpus in (2, 4):
        for context_len in (5120, 6144, 7000, 10240, 11111):
            scenario = at(scenario_of(profile), num_gpus, context_len)
            value = look_up(tables[profile], num_gpus, context_len)
            assert value.source == "interpolated"
            assert ttft_s(scenario, value.partition) <= 1.015 * search(executed(scenario, KVR)).ttft_s


def test_kvr_p_takes_its_chunks_from_the_table(tables: dict[str, PartitionTable], tmp_path: Path) -> None:
    table = tables["a100-eager"]
    path = tmp_path / "table.json"
    table.write(path)
    assert kvrsim.load_table(path) == table
    result = kvrsim.simulate(strategy="kvr-p", ctx="10k", gpus=4, table=path)
    assert result.partition == best_lookup(table, 4, 10240).partition
    assert not [note for note in result.warnings if note.startswith("kvr-p")]
    plan = kvrsim.plan(ctx="10k", gpus=4, strategies=("tsp", "kvr-p"), table=table)
    assert plan.best == plan["kvr-p"]
    assert (plan.best.partition, plan.best.ttft_s) == (result.partition, result.ttft_s)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "llama-13b"}, "model llama-7b, not llama-13b"),
        ({"link_bandwidth": 1e10}, "link"),
        ({"cached_prefix": 100}, "cached prefix 0, not 100"),
    ],
)
def test_a_table_of_another_setting_is_said(
    tables: dict[str, PartitionTable], options: dict[str, object], named: str
) -> None:
    table = tables["a100-eager"]
    scenario, _ = make_scenario(ctx=8192, gpus=4, **options)  # type: ignore[arg-type]
    notes = table.notes_for(executed(scenario, STRATEGIES["kvr-p"]))
    assert len(notes) == 1
    assert named in notes[0]
    plan = make_plan(scenario, strategies=("kvr-p",), search=Search(table=table))
    assert notes[0] in plan.warnings
    assert sum(plan.best.partition) == scenario.request.new_tokens


def test_the_documents_keys_are_the_files(tables: dict[str, PartitionTable]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "partition-table.md").read_text()
    content = tables["a100-eager"].to_dict()
    keys = {*content, *content["setting"], *content["steps"], *content["entries"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_tables_and_maps_of_too_many_entries_are_refused_at_once() -> None:
    many: dict[str, Any] = {"ctx": "1k:10k:1", "gpus": "1,2,3", "profile": "roofline"}
    for call in (kvrsim.build_table, kvrsim.map_strategies):
        with pytest.raises(kvrsim.InputError, match="at most 20000 combinations in all, not 27651") as caught:
            call(**many)
        assert caught.value.parameter == "ctx"
    with pytest.raises(kvrsim.InputError, match="got '2 x 1 x 10001 values'"):
        kvrsim.map_strategies(ctx="1k,2k", gpus=[2], link_bandwidths=range(1, 10002))


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_where_the_host_sets_the_pace_entries_are_balanced(num_gpus: int) -> None:
    """If many partitions are equally fast, the table has a balanced one, because lookups interpolate entries."""
    entry = make_table(scenario_of("a100-eager"), (num_gpus,), (1024,)).entries[0]
    draft = draft_of(executed(at(scenario_of("a100-eager"), num_gpus, 1024), KVR_S))
    assert max(abs(a - b) for a, b in zip(entry.partition, draft.balanced, strict=True)) <= 128 // num_gpus
    assert entry.ttft_s <= 1.0151 * search(executed(at(scenario_of("a100-eager"), num_gpus, 1024), KVR)).ttft_s
