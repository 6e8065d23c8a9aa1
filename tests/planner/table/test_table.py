"""Lookup tables: laws of lookups, and checks of a table's file."""

from __future__ import annotations

import json
import random
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given

import kvrsim
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.scenario import Scenario
from kvrsim.units import scale
from planner.table.table import (
    MOST_FROM_SHARE,
    PartitionTable,
    QuantizationSteps,
    TableEntry,
    TableSetting,
    interpolated,
    load_table,
    look_up,
)
from tests.building import Draws, any_scenario, draws, examples
from tests.building.models import with_mixers

READER = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "read_table.py"))["partition"]


def staircase(rng: Draws) -> QuantizationSteps:
    """Random quantization steps: none or many, of any height, with and without a prefix."""
    lens = sorted(rng.sample(range(1, 5000), rng.choice([0, 1, 5, 60])))
    heights = [sorted(rng.random() * 10 ** rng.uniform(-6, 0) for _ in lens) for _ in range(2)]
    return QuantizationSteps(
        chunk_lens=tuple(lens),
        seconds=tuple(heights[0]),
        seconds_per_prefix_token=tuple(value * 1e-4 for value in heights[1]),
    )


def chunks_of(rng: Draws, num_gpus: int, tokens: int) -> tuple[int, ...]:
    """Uneven random chunks, many of a single token."""
    cuts = sorted(rng.sample(range(1, tokens), num_gpus - 1)) if rng.random() < 0.7 else list(range(1, num_gpus))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


def entry(rng: Draws, num_gpus: int, context_len: int, cached: int) -> TableEntry:
    """An entry with a random partition and unrelated levels and costs; laws must hold for it, too."""
    partition = chunks_of(rng, num_gpus, context_len - cached)
    return TableEntry(
        num_gpus=num_gpus,
        context_len=context_len,
        partition=partition,
        ttft_s=rng.random() + 1e-3,
        ttft_low_s=rng.random() + 1e-3,
        ttft_high_s=rng.random() + 1e-3,
        speedup_over_tsp=rng.random() + 0.5,
        speedup_over_even=rng.random() + 0.5,
        gap=rng.choice([0.0, rng.random()]),
        fits=rng.random() < 0.5,
        levels=tuple(chunk / sum(partition) * (1 + rng.random()) for chunk in partition),
        token_s=tuple(10 ** rng.uniform(-7, -2) for _ in partition),
    )


def a_table(rng: Draws) -> PartitionTable:
    """A random table."""
    cached = rng.choice([0, 0, 100])
    setting = replace(TableSetting.of(scenario_of()), cached_prefix=cached)
    entries = [
        entry(rng, num_gpus, cached + length, cached)
        for num_gpus in sorted(rng.sample(range(1, 10), rng.randint(1, 3)))
        for length in sorted(rng.sample(range(10, 6000), rng.randint(1, 5)))
    ]
    return PartitionTable(setting=setting, kvrsim_version="0", steps=staircase(rng), entries=tuple(entries))


@given(rng=draws())
def test_looked_up_partitions_are_partitions(rng: Draws) -> None:
    table = a_table(rng)
    num_gpus = rng.choice(table.gpu_counts)
    tokens = rng.choice([num_gpus, rng.randint(num_gpus, 20_000)])
    result = look_up(table, num_gpus, tokens + table.setting.cached_prefix)
    assert sum(result.partition) == tokens
    assert len(result.partition) == len(result.fractions) == num_gpus
    assert min(result.partition) >= 1
    assert result.fractions == tuple(chunk / tokens for chunk in result.partition)
    assert not result.is_refined


@given(rng=draws())
def test_entries_come_back_as_they_are(rng: Draws) -> None:
    table = a_table(rng)
    for one in table.entries:
        result = look_up(table, one.num_gpus, one.context_len)
        assert (result.source, result.partition, result.fractions) == ("exact", one.partition, one.fractions)
        assert result.between == (one.context_len,)
        assert not result.warnings


@given(rng=draws())
def test_interpolation_lies_between_its_neighbours(rng: Draws) -> None:
    table = a_table(rng)
    entries = table.of(rng.choice(table.gpu_counts))
    context_len = rng.randint(entries[0].context_len, entries[-1].context_len)
    result = look_up(table, entries[0].num_gpus, context_len)
    low, high = (next(one for one in entries if one.context_len == length) for length in (result.between * 2)[:2])
    low, high = (low, high) if len(result.between) == 2 else (low, low)
    assert low.context_len <= context_len <= high.context_len
    cached = table.setting.cached_prefix
    values = interpolated(table, entries[0].num_gpus, context_len, cached)
    for share, a, b in zip(values.shares, low.fractions, high.fractions, strict=True):
        assert min(a, b) <= share <= max(a, b)
    if result.source == "interpolated":
        for chunk, share in zip(result.partition, values.shares, strict=True):
            expected = share * values.tokens
            rounding = len(values.shares)  # ranks that get their single token from the others
            assert abs(chunk - expected) <= MOST_FROM_SHARE * expected + rounding


@given(rng=draws())
def test_extrapolation_is_flagged_and_keeps_to_the_last_shares(rng: Draws) -> None:
    table = a_table(rng)
    entries = table.of(rng.choice(table.gpu_counts))
    beyond = entries[-1].context_len + rng.choice([1, 1000, 10**6])
    result = look_up(table, entries[0].num_gpus, beyond)
    assert result.source == "extrapolated"
    assert "extrapolated" in result.warnings[0]
    assert str(entries[-1].context_len) in result.warnings[0]
    below = look_up(table, entries[0].num_gpus, entries[0].context_len - 1)
    assert below.source == "extrapolated"
    shares = interpolated(table, entries[0].num_gpus, below.context_len, table.setting.cached_prefix).shares
    assert shares == entries[0].fractions


@given(rng=draws())
def test_the_longest_chunk_of_a_level(rng: Draws) -> None:
    """The longest chunk is within the level; a chunk that is one token longer is not."""
    steps, cost, prefix = staircase(rng), 10 ** rng.uniform(-6, -2), rng.choice([0.0, 5000 * rng.random()])
    level = rng.choice([rng.uniform(-5, 10), rng.uniform(0, 50_000)])
    longest = steps.longest(level, cost, prefix)

    def needed(chunk: int) -> float:
        return chunk + steps.extra_s(chunk, prefix) / cost

    slack = 1e-9 * (1 + abs(level))
    assert longest >= 1
    assert longest == 1 or needed(longest) <= level + slack
    assert needed(longest + 1) > level - slack


@given(rng=draws())
def test_any_table_comes_back_from_its_json(rng: Draws) -> None:
    table = a_table(rng)
    content = json.loads(table.to_json())
    again = PartitionTable.read(JsonObject(fields=content, where="test"))
    assert again == table
    assert again.to_json() == table.to_json()


@given(rng=draws())
def test_a_reader_without_packages_finds_the_same(rng: Draws) -> None:
    table = a_table(rng)
    entries = table.of(rng.choice(table.gpu_counts))
    context_len = rng.randint(entries[0].context_len, entries[-1].context_len)
    read = READER(json.loads(table.to_json()), entries[0].num_gpus, context_len)
    result = look_up(table, entries[0].num_gpus, context_len)
    if result.source == "interpolated":
        values = interpolated(table, entries[0].num_gpus, context_len, table.setting.cached_prefix)
        for chunk, share in zip(values.at_steps(table.steps), values.shares, strict=True):
            limit = MOST_FROM_SHARE * share * values.tokens
            assume(abs(abs(chunk - share * values.tokens) - limit) > 2 * len(read))  # the choice may differ by rounding
    assert sum(read) == context_len - table.setting.cached_prefix
    assert tuple(read) == result.partition or result.source == "interpolated"
    assert sum(abs(a - b) for a, b in zip(read, result.partition, strict=True)) <= 2 * len(read)


def wrong_tables() -> list[tuple[str, Any]]:
    """Changes of the file's content, each with the key that the error must name."""
    return [
        ("format", lambda t: t.pop("format")),
        ("schema_version", lambda t: t.update(schema_version=2)),
        ("surprise", lambda t: t.update(surprise=1)),
        ("setting.model", lambda t: t["setting"].update(model=7)),
        ("steps.chunk_lens", lambda t: t["steps"].update(chunk_lens=[3, 2, 1])),
        ("entries", lambda t: t.update(entries=t["entries"] * 2)),
        ("entries[0].partition", lambda t: t["entries"][0]["partition"].append(1)),
        ("entries[0].partition", lambda t: t["entries"][0]["partition"].__setitem__(0, 10**6)),
        ("entries[0].fits", lambda t: t["entries"][0].pop("fits")),
    ]


@pytest.mark.parametrize(("key", "spoil"), wrong_tables(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_file_names_its_key(key: str, spoil: Any, tmp_path: Path) -> None:
    content = json.loads(a_table(random.Random(5)).to_json())
    spoil(content)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        load_table(path)
    assert key in caught.value.parameter + str(caught.value.value) * (key == "surprise")
    assert str(path) in caught.value.parameter


def fingerprint(scenario: Scenario) -> str:
    return TableSetting.of(scenario).fingerprint


def scenario_of(**about: Any) -> Scenario:
    return kvrsim.make_scenario(**({"ctx": "4k", "gpus": 4} | about))[0]


def refitted(scenario: Scenario) -> Scenario:
    """The scenario with the same rates and new descriptions, dates, sources and errors."""
    assert scenario.profile is not None
    profile, cluster = scenario.profile, scenario.cluster
    operations = {name: replace(fit, source="another table", mape=0.5) for name, fit in profile.operations.items()}
    about = {"description": "fitted another day", "not_covered": "nothing", "provenance": {"date": "2031-01-01"}}
    gpu = replace(cluster.gpu, source="another page", memory_source=None, memory_bytes=1)
    return replace(
        scenario,
        profile=replace(profile, operations=operations, residual=None, **about),
        cluster=replace(cluster, gpu=gpu, link=replace(cluster.link, source="another page")),
    )


@pytest.mark.parametrize("cluster", ["a100-nvlink", "h100-nvlink", "h100-2x8-ndr400", "a100-10gbs-bus"])
def test_dates_and_citations_do_not_count(cluster: str) -> None:
    """The fingerprint ignores dates, sources, the context, the number of GPUs and the share of the memory."""
    scenario = scenario_of(cluster=cluster)
    assert fingerprint(refitted(scenario)) == fingerprint(scenario)
    assert TableSetting.of(scenario).differences(refitted(scenario)) == []
    other = scenario_of(cluster=cluster, ctx="9k", gpus=2, memory_fraction=0.5)
    assert fingerprint(other) == fingerprint(scenario)


@given(rng=draws())
@examples(20)
def test_every_rate_counts(rng: Draws) -> None:
    """Each change of a rate, of a shape of the model or of the batch changes the fingerprint."""
    scenario = any_scenario(rng, num_gpus=(2, 4))
    assume(scenario.profile is not None)
    assert scenario.profile is not None
    kernels, host = scenario.profile.kernels, scenario.profile.host
    elementwise = replace(kernels.elementwise, norm=kernels.elementwise.norm * 1.0000001)
    others = [
        replace(scenario, profile=replace(scenario.profile, host=replace(host, layer_s=host.layer_s + 1e-9))),
        replace(scenario, profile=replace(scenario.profile, kernels=replace(kernels, elementwise=elementwise))),
        replace(scenario, cluster=replace(scenario.cluster, link=scale(scenario.cluster.link, 1 / 1.001))),
        replace(scenario, request=replace(scenario.request, batch=scenario.request.batch + 1)),
        replace(scenario, model=replace(scenario.model, hidden_size=scenario.model.hidden_size + 1)),
        replace(scenario, model=with_mixers(scenario.model, qk_norm=not scenario.model.layers[0].mixer.qk_norm)),
    ]
    result = [fingerprint(one) for one in (scenario, *others)]
    assert len(set(result)) == len(result)


def test_a_datasheet_counts_where_there_is_no_profile() -> None:
    """The datasheet is part of the fingerprint only without a profile."""
    for profile, counts in (("roofline", True), ("a100-eager", False)):
        scenario = scenario_of(profile=profile)
        gpu = replace(scenario.cluster.gpu, hbm_bytes_per_s=1e12)
        other = replace(scenario, cluster=replace(scenario.cluster, gpu=gpu))
        assert (fingerprint(other) != fingerprint(scenario)) == counts
