"""A configuration with a value that makes no sense is read or refused; nothing else happens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import builtin_models, config_path, read_config

CONFIGS = {name: json.loads(Path(config_path(name, "model")).read_text("utf-8")) for name in builtin_models()}
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 10**30, 0.5, float("nan"), "", "x", "1,2", "9" * 6000),
    *([], [0], [1] * 8, [None], [[]], [{}], ["full_attention"], ["sliding_attention"] * 4, {}, {"a": 1}),
]


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every object or array in a configuration with each of its keys or indices."""
    if not isinstance(content, dict | list):
        return []
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    return [(content, key) for key in keys] + [place for key in keys for place in places(content[key])]


@pytest.mark.slow  # many a structure is read from its class
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    number=st.integers(0, 10_000),
    junk=st.sampled_from(JUNK),
    gone=st.booleans(),
)
def test_a_value_that_makes_no_sense(name: str, number: int, junk: Any, gone: bool) -> None:
    config = copy.deepcopy(CONFIGS[name])
    found = places(config)
    inside, key = found[number % len(found)]
    if gone and isinstance(inside, dict):
        del inside[key]
    else:
        inside[key] = copy.deepcopy(junk)
    try:
        model = read_config(JsonObject(fields=config, where="model"), name)
    except InputError:
        return
    assert 0 < model.active_parameters <= model.num_parameters
    assert model.weight_bytes(2) > 0
    assert model.cache_bytes(100, 2) >= 0
