"""KVR-P's lookup with the table's scenario at hand: near the searched partition, for engines and GPUs of all kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.table_quality import random_lookups
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.notes import Note
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, STRATEGIES
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.table.build import make_table
from planner.table.lookup import best_lookup, table_execution
from planner.table.table import TableSetting, look_up, refined_lookup
from tests.building import executed

KVR_P = STRATEGIES["kvr-p"]


def at(scenario: Scenario, context_len: int) -> Scenario:
    """The scenario with another context, per rank."""
    return execution_of(replace(scenario, request=replace(scenario.request, context_len=context_len)), KVR_S).placed


# Interpolation alone is far from the search here: the host, slow links or the GPU's slow arithmetic set the pace.
FAR: list[tuple[dict[str, Any], tuple[int, ...], int]] = [
    ({"model": "mistral-7b", "cluster": "8xa100-80gb", "engine": "sglang"}, (20480, 24576), 22000),
    ({"model": "llama-3.1-8b", "cluster": "8xh20"}, (5120, 6144), 5632),
    ({"model": "llama-7b", "cluster": "8xh20", "engine": "vllm"}, (65536, 131072), 98304),
    ({"model": "mixtral-8x7b", "cluster": "8xa100-40gb", "engine": "vllm", "gpus": 2}, (19484, 23170), 20008),
]


@pytest.mark.parametrize(("options", "lengths", "context_len"), FAR, ids=lambda value: str(value)[:60])
def test_a_lookup_is_near_the_search(options: dict[str, Any], lengths: tuple[int, ...], context_len: int) -> None:
    scenario, _ = make_scenario(**({"gpus": 8, "ctx": max(lengths)} | options))
    table = make_table(scenario, (scenario.num_gpus,), lengths)
    here = at(scenario, context_len)
    lookup = refined_lookup(table, executed(here, KVR_P))
    ttft_s = Evaluator(executed(here, KVR_S)).one(lookup.partition)
    assert ttft_s <= 1.01 * search(executed(here, KVR_S)).ttft_s
    assert sum(lookup.partition) == context_len
    assert lookup.fractions == tuple(chunk / context_len for chunk in lookup.partition)
    assert lookup.is_refined
    assert best_lookup(table, scenario.num_gpus, context_len) == lookup  # the file names all of its scenario


def test_random_lookups_are_near_the_search() -> None:
    """A part of benchmarks/results/table_quality.md."""
    lookups = list(random_lookups(2, 4))
    assert len({lookup.setting for lookup in lookups}) > 1
    assert max(lookup.refined for lookup in lookups) <= 0.011  # the largest of the page is 1.01 %


def test_entries_are_not_refined() -> None:
    scenario, _ = make_scenario(ctx=8192, gpus=4)
    table = make_table(scenario, (4,), (4096, 8192))
    lookup = best_lookup(table, 4, 8192)
    assert (lookup.partition, lookup.is_refined) == (table.entries[1].partition, False)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"link_bandwidth": 1e10},
    {"link_latency": 1e-4, "topology": "chain"},
    {"cluster": "8xh20", "model": "llama-3.1-8b"},  # a profile that is scaled to another GPU
    {"cluster": "8xh100", "model": "llama-3.1-8b", "engine": "vllm", "dtype": "fp8", "batch": 2},
    {"profile": "roofline", "cached_prefix": 100, "prefix_placement": "host"},
    {"model": "mixtral-8x7b", "cluster": "8xh100", "expert_parallel": True, "expert_imbalance": 1.25},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_tables_setting_gives_its_scenario(options: dict[str, Any]) -> None:
    scenario, _ = make_scenario(**({"ctx": 8192, "gpus": 8} | options))
    setting = TableSetting.of(scenario)
    execution = table_execution(setting, 4, 4096)
    assert execution.strategy == KVR_S
    assert setting.differences(execution.placed) == []
    asked = at(scenario.on_gpus(4), 4096)
    partition = (1025, 1024, 1024, 4096 - 3073 - scenario.request.cached_prefix)
    assert Evaluator(execution).one(partition) == pytest.approx(
        Evaluator(executed(asked, KVR_S)).one(partition), rel=1e-12
    )


@pytest.mark.parametrize(
    ("change", "named"), [({"model": "own"}, "model: own"), ({"fingerprint": "0"}, "other figures")], ids=str
)
def test_a_setting_that_is_not_known_here_is_said(change: dict[str, str], named: str) -> None:
    """The partition then follows from the table alone, and a note says so."""
    scenario, _ = make_scenario(ctx=8192, gpus=4)
    table = make_table(scenario, (4,), (4096, 8192))
    table = replace(table, setting=replace(table.setting, **change))
    with pytest.raises(InputError):
        table_execution(table.setting, 4, 5000)
    lookup = best_lookup(table, 4, 5000)
    assert lookup.partition == look_up(table, 4, 5000).partition
    assert [note.code for note in lookup.warnings if isinstance(note, Note)] == ["not refined"]
    assert named in lookup.warnings[-1]
