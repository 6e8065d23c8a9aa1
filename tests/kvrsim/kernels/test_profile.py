"""Profiles: a written profile can be read, and an error names the key path of the wrong value."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.hardware import AllReduceRates, MeasuredAllReduce
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import MeasuredSizes
from kvrsim.kernels.gemm import MeasuredShape, Tile
from kvrsim.kernels.profile import (
    OPERATION_KINDS,
    SCHEMA_VERSION,
    CalibrationProfile,
    Clock,
    LinkCoverage,
    Residual,
    builtin_profiles,
    load_profile,
)
from tests.building import (
    Draws,
    any_blocked,
    any_cluster,
    any_gather_rates,
    any_gpu,
    any_operation,
    any_profile,
    draws,
    examples,
)

CLOCK = Clock(sustained_share=0.875, time_constant_s=0.1)
ALL_REDUCE = AllReduceRates(
    measured=(MeasuredAllReduce(num_gpus=2, latency_s=4e-6, nbytes=(512, 2**20), bytes_per_s=(1e9, 1e11)),)
)


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """The JSON of a profile in which every key is present."""
    rng = random.Random(0)
    gpu = any_gpu(rng)
    profile = any_profile(rng, gpu)
    tiles = tuple(Tile(rows=rows, cols=64, flops_share=0.5, start_s=1e-6) for rows in (64, 256))
    shape = MeasuredShape(in_features=64, out_features=128, rows=(1, 50), seconds=(1e-5, 1e-3))
    bandwidth = profile.links.bandwidth_bytes_per_s
    gemm = dict(tiles=tiles, measured=(shape, shape))
    gemm |= {"head_bytes_per_s": 1e9}
    sizes = MeasuredSizes(sizes=(64.0, 512.0), factors=(2.0, 1.0))
    attention = dict(profile.kernels.attention) | {"sdpa": replace(any_blocked(rng, gpu), measured=sizes)}
    attention["eager"] = replace(attention["eager"], measured=sizes)
    rates = replace(profile.kernels.gemm, **gemm)
    full = replace(
        profile,
        not_covered="nothing was measured",
        kernels=replace(profile.kernels, gemm=rates, gemm_types={"fp8": rates}, attention=attention, clock=CLOCK),
        links=replace(
            profile.links, short_bytes_per_s=bandwidth, gather=any_gather_rates(rng, bandwidth), all_reduce=ALL_REDUCE
        ),
        operations={
            kind: replace(any_operation(rng), interpolated_log_sd=0.1, systematic_log_sd=0.1)
            for kind in OPERATION_KINDS
        },
        residual=Residual(
            **dict.fromkeys(Residual.__slots__, 0.1)
            | {
                "num_rows": 3,
                "layouts": ("context",),
                "links": (LinkCoverage(bytes_per_s=1e9, coverage=0.3, num_rows=3),),
            }
        ),
        provenance={"source": "drawn at random"},
        run_to_run_log_sd=0.1,
        cluster=any_cluster(rng, 4, topologies=("nodes",)),
    )
    return json.loads(json.dumps(full.to_dict()))  # type: ignore[no-any-return]


def read(fields: dict[str, Any]) -> CalibrationProfile:
    return CalibrationProfile.read(JsonObject(fields=fields, where="profile test.json"))


def changed(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The fields with another value at a dotted path; the value Ellipsis removes the key."""
    new = copy.deepcopy(fields)
    *outer, last = path.replace("[", ".").replace("]", "").split(".")
    place: Any = new
    for key in outer:
        place = place[int(key) if isinstance(place, list) else key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return new


def paths(fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in fields.items():
        yield prefix + key
        parts = enumerate(value) if isinstance(value, list) else ()
        inner = {f"{prefix}{key}[{index}].": part for index, part in parts} | {f"{prefix}{key}.": value}
        for place, part in inner.items():
            if isinstance(part, dict):
                yield from paths(part, place)


@pytest.mark.parametrize("name", builtin_profiles())
def test_shipped_profiles_come_back(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert profile.name == name
    profile.write(tmp_path / "copy.json")
    assert load_profile(tmp_path / "copy.json") == profile
    assert json.loads((tmp_path / "copy.json").read_text())["schema_version"] == SCHEMA_VERSION


@given(rng=draws())
@examples(50)
def test_any_profile_comes_back(rng: Draws) -> None:
    profile = any_profile(rng, any_gpu(rng))
    fields = json.loads(json.dumps(profile.to_dict()))
    fields["not_covered"] = "nothing was measured"
    assert json.loads(json.dumps(read(fields).to_dict())) == fields


@pytest.mark.parametrize("value", [None, ...])
def test_optional_keys_may_be_absent(value: Any, fields: dict[str, Any]) -> None:
    bare = changed(changed(fields, "operations", {}), "kernels.attention.eager", ...)
    gemm = ("kernels.gemm.tiles", "kernels.gemm.measured")
    for path in (*gemm, "links.gather", "links.all_reduce", "kernels.clock", "cluster", "host.request_s"):
        bare = changed(bare, path, value)
    profile = read(bare)
    assert (profile.cluster, profile.kernels.clock, profile.links.all_reduce, profile.links.gather) == (None,) * 4
    assert (profile.host.request_s, profile.kernels.gemm.tiles) == (0, ())
    assert ("eager" in profile.attention_kernels, profile.operations) == (False, {})


def test_no_value_may_be_of_another_type(fields: dict[str, Any]) -> None:
    for path in paths(fields):
        for value in ([["deep"]], {"x": []}):
            with pytest.raises(InputError) as caught:
                read(changed(fields, path, value))
                pytest.fail(f"{path} may be {value}")
            message = str(caught.value)
            assert path in message or (path in message.replace("key in ", "") and "'x'" in message), message


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("schema_version", [0, 1, 3, "2", 2.5, True]),
        ("kernels.attention.eager.measured.sizes", [[], [1], [2, 1, 3], [0, 1], [1, "2"], None, 7]),
        ("kernels.attention.eager.measured.factors", [[8.01, 1], [-1, 1], ["1", 1]]),
        ("valid.context_len", [[], [1], [1, 2, 3], [2, 1], [0, 5], [1.5, 2], ["1", "2"], None, [True, 2]]),
        ("cluster.topology", ["ring", 7, None]),
    ],
)
def test_bad_values_are_named(path: str, values: list[Any], fields: dict[str, Any]) -> None:
    for value in values:
        with pytest.raises(InputError) as caught:
            read(changed(fields, path, value))
            pytest.fail(f"{path} may be {value!r}")
        assert caught.value.parameter.startswith(f"profile test.json: {path}")


CLOCKS = st.builds(
    Clock,
    sustained_share=st.floats(min_value=0.05, max_value=1.0),
    time_constant_s=st.floats(min_value=1e-4, max_value=10),
)
WORK = st.lists(st.floats(min_value=0.0, max_value=1e4), min_size=1, max_size=8)


@given(clock=CLOCKS, work=WORK)
def test_the_integral_of_the_rate_is_the_work(clock: Clock, work: list[float]) -> None:
    busy = np.array(work)
    seconds = clock.loaded_s(busy)
    share, tau = clock.sustained_share, clock.time_constant_s
    done = share * seconds - (1 - share) * tau * np.expm1(-seconds / tau)
    assert done == pytest.approx(busy, rel=1e-9, abs=1e-15)


@given(clock=CLOCKS, work=WORK)
def test_more_work_takes_longer_and_none_beats_the_burst(clock: Clock, work: list[float]) -> None:
    busy = np.sort(np.array(work))
    seconds = clock.loaded_s(busy)
    assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
    assert (seconds >= busy * (1 - 1e-12)).all()
    assert (seconds <= busy / clock.sustained_share * (1 + 1e-9)).all()
