"""Profiles: what is written can be read, and a bad value is refused by its key path."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.profile import (
    SCHEMA_VERSION,
    CalibrationProfile,
    Residual,
    builtin_profiles,
    load_profile,
    read_profile,
)
from kvrsim.units import JsonObject


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """The JSON of a profile with every key."""
    return json.loads(json.dumps(load_profile("a100-eager").to_dict()))  # type: ignore[no-any-return]


def read(fields: dict[str, Any]) -> CalibrationProfile:
    return read_profile(JsonObject(fields=fields, where="--profile test.json"))


def changed(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The same with another value at a dotted path; ... takes the key away."""
    new = copy.deepcopy(fields)
    *outer, last = path.split(".")
    place = new
    for key in outer:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return new


def paths(fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in fields.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


@pytest.mark.parametrize("name", builtin_profiles())
def test_shipped_profiles_come_back(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert profile.name == name
    profile.write(tmp_path / "copy.json")
    assert load_profile(tmp_path / "copy.json") == profile
    assert json.loads((tmp_path / "copy.json").read_text())["schema_version"] == SCHEMA_VERSION


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_any_profile_comes_back(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    profile = make.profile(rng, make.gpu(rng))
    fields = json.loads(json.dumps(profile.to_dict()))
    fields["not_covered"] = "nothing was measured"
    assert json.loads(json.dumps(read(fields).to_dict())) == fields


def test_residual_may_be_absent(fields: dict[str, Any]) -> None:
    for value in (None, ...):
        assert read(changed(fields, "residual", value)).residual is None
    assert isinstance(read(fields).residual, Residual)


def test_writing_names_the_argument(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(fields).write(tmp_path / "missing" / "profile.json")
    assert caught.value.argument == "--output"


def test_comments_are_allowed(fields: dict[str, Any]) -> None:
    commented = changed(changed(fields, "_about", "a comment"), "kernels._source", ["anything"])
    assert read(commented) == read(fields)


def test_every_required_key_is_missed_by_its_path(fields: dict[str, Any]) -> None:
    optional = {"residual", "kernels.fused", "kernels.head_on_all_tokens", "kernels.attention_flops_per_s.eager"}
    for path in paths(fields):
        if path in optional or path.startswith("provenance."):
            continue
        with pytest.raises(InputError) as caught:
            read(changed(fields, path, ...))
            pytest.fail(f"{path} is not missed")
        assert caught.value.argument == f"--profile test.json: {path}"


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
        ("schema_version", [0, 2, "1", 1.0, True]),
        ("name", ["", "  ", 7]),
        ("gpu", [""]),
        *(
            (f"kernels.{key}", [0, -1, "fast", True, float("nan"), float("inf"), 1e31])
            for key in ("gemm_flops_per_s", "hbm_bytes_per_s")
        ),
        ("kernels.attention_flops_per_s.eager", [0, -1, None, "x", float("nan")]),
        ("kernels.attention_flops_per_s", [{}, 7, None]),
        ("kernels.score_bytes", [-1, None, "x", float("nan")]),
        ("kernels.fused", [0, 1, "no"]),
        ("kernels.head_on_all_tokens", ["yes", 1]),
        *((f"kernels.copies.{key}", [-1, None, True]) for key in ("keep", "append", "gather")),
        *((f"host.{key}", [-1e-9, None, True, float("inf")]) for key in ("layer_s", "gather_piece_s")),
        ("links.link", ["", None]),
        ("links.bandwidth_bytes_per_s", [0, -1, None, "10GB/s"]),
        ("links.latency_s", [-1e-9, None, "5us"]),
        *((f"links.{key}", ["async", "", None, 1]) for key in ("sends", "sends_over_bus")),
        *(
            (f"valid.{key}", [[], [1], [1, 2, 3], [2, 1], [0, 5], [-1, 5], [1.5, 2], ["1", "2"], None, [True, 2]])
            for key in ("context_len", "num_gpus", "hidden_size", "head_dim")
        ),
        ("valid.dtypes", [[], None, "fp16", ["fp13"], [16]]),
        *(
            (f"residual.{key}", [-0.1, 11, None, "5 %"])
            for key in ("mape", "median_ape", "cross_validated_mape", "p90_ape")
        ),
        ("residual.num_rows", [0, -1, 1.5, None]),
        ("provenance", [None, 7, "paper"]),
        ("provenance.source", [7, "", ["paper"]]),
    ],
)
def test_bad_values_are_named(path: str, values: list[Any], fields: dict[str, Any]) -> None:
    for value in values:
        with pytest.raises(InputError) as caught:
            read(changed(fields, path, value))
            pytest.fail(f"{path} may be {value!r}")
        assert caught.value.argument.startswith(f"--profile test.json: {path}")


@pytest.mark.parametrize("path", ["speed", "kernels.speed", "kernels.copies.x", "links.loss", "valid.x", "host.x"])
def test_unknown_keys_are_named(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        read(changed(fields, path, 1))
    assert caught.value.value == path.split(".")[-1]
    if "." in path:
        assert caught.value.argument.endswith(path.rsplit(".", 1)[0])


@pytest.mark.parametrize("content", ["", "[]", "7", "{", '{"schema_version": 1}', "null"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load_profile(path)
    assert caught.value.argument.startswith("--profile")


@pytest.mark.parametrize("name", ["", "a100", "missing.json", pytest.param("x" * 5000, id="long"), "."])
def test_names_that_are_no_profile(name: str) -> None:
    with pytest.raises(InputError) as caught:
        load_profile(name)
    assert caught.value.argument.startswith("--profile")
