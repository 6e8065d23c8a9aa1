"""A table's fingerprint: the same for the same rates, another for others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given

import kvrsim
from kvrsim.scenario import Scenario
from kvrsim.units import scale
from planner.table.table import TableSetting
from tests.building import Draws, any_scenario, draws, examples
from tests.building.models import with_mixers


def fingerprint(scenario: Scenario) -> str:
    return TableSetting.of(scenario).fingerprint


def scenario_of(**about: Any) -> Scenario:
    return kvrsim.make_scenario(**({"ctx": "4k", "gpus": 4} | about))[0]


def refitted(scenario: Scenario) -> Scenario:
    """The same rates with everything else that a profile and a cluster say written anew."""
    assert scenario.profile is not None
    profile, cluster = scenario.profile, scenario.cluster
    operations = {name: replace(fit, source="another table", mape=0.5) for name, fit in profile.operations.items()}
    return replace(
        scenario,
        profile=replace(
            profile,
            description="fitted another day",
            not_covered="nothing",
            operations=operations,
            residual=None,
            provenance={"date": "2031-01-01"},
        ),
        cluster=replace(
            cluster,
            gpu=replace(cluster.gpu, source="another page", memory_source=None, memory_bytes=1),
            link=replace(cluster.link, source="another page"),
        ),
    )


@pytest.mark.parametrize("cluster", ["a100-nvlink", "h100-nvlink", "h100-2x8-ndr400", "a100-10gbs-bus"])
def test_dates_and_citations_do_not_count(cluster: str) -> None:
    """Nor does the context, the number of GPUs, or a share of the memory."""
    scenario = scenario_of(cluster=cluster)
    assert fingerprint(refitted(scenario)) == fingerprint(scenario)
    assert TableSetting.of(scenario).differences(refitted(scenario)) == []
    other = scenario_of(cluster=cluster, ctx="9k", gpus=2, memory_fraction=0.5)
    assert fingerprint(other) == fingerprint(scenario)


def test_a_profile_from_a_file_is_the_same(tmp_path: Path) -> None:
    """Whole numbers where the file has fractions, keys in another order."""
    scenario = scenario_of()
    assert scenario.profile is not None
    content = json.loads(json.dumps(scenario.profile.to_dict()), parse_float=lambda text: _whole(float(text)))
    path = tmp_path / "same.json"
    path.write_text(json.dumps(dict(reversed(content.items()))))
    again = scenario_of(profile=path)
    assert again.profile is not None
    assert fingerprint(again) == fingerprint(scenario)


def _whole(number: float) -> float | int:
    return int(number) if number.is_integer() else number


@given(rng=draws())
@examples(20)
def test_every_rate_counts(rng: Draws) -> None:
    """Any number of the profile's kernels and host, of the model's shapes and of the links, made another one."""
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
    found = [fingerprint(one) for one in (scenario, *others)]
    assert len(set(found)) == len(found)


def test_a_datasheet_counts_where_there_is_no_profile() -> None:
    """With a profile its rates stand for the GPU."""
    for profile, counts in (("roofline", True), ("a100-eager", False)):
        scenario = scenario_of(profile=profile)
        gpu = replace(scenario.cluster.gpu, hbm_bytes_per_s=1e12)
        other = replace(scenario, cluster=replace(scenario.cluster, gpu=gpu))
        assert (fingerprint(other) != fingerprint(scenario)) == counts
