"""Frozen dataclasses go to JSON and come back; what does not fit is refused by file, key path and accepted values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject, NonNegative, read, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rows: tuple[int, ...]
    span: tuple[float, float]
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if list(self.rows) != sorted(self.rows):
            raise InputError("rows", self.rows, "rising whole numbers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    seconds: NonNegative
    inner: tuple[Inner, ...]
    by_name: dict[str, Inner] = field(default_factory=dict)
    rate: float | None = None
    flag: bool = False


inners = st.builds(
    Inner,
    rows=st.lists(st.integers(1, 1000), max_size=4).map(lambda rows: tuple(sorted(rows))),
    span=st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)),
    kind=st.sampled_from(["a", "b"]),
)
outers = st.builds(
    Outer,
    name=st.text("abc", min_size=1),
    seconds=st.floats(0, 1e9),
    inner=st.lists(inners, max_size=3).map(tuple),
    by_name=st.dictionaries(st.text("xyz", min_size=1), inners, max_size=2),
    rate=st.none() | st.floats(1e-9, 1e9),
    flag=st.booleans(),
)
WHOLE: dict[str, Any] = {"name": "x", "seconds": 0, "inner": [{"rows": [1, 2], "span": [1, 2.5]}]}


def parse(data: dict[str, Any]) -> Outer:
    return read(Outer, JsonObject(fields=data, where="profile x.json"))


@given(outers)
def test_what_is_written_is_read_back(value: Outer) -> None:
    assert parse(json.loads(json.dumps(to_json(value)))) == value


def test_defaults_comments_and_white_space() -> None:
    assert parse(WHOLE | {"_note": "any", "rate": None, "name": " a \n b "}) == Outer(
        name="a b", seconds=0.0, inner=(Inner(rows=(1, 2), span=(1.0, 2.5)),)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": -1}, "seconds: got '-1', accepted: a finite number of at least 0"),
        ({"seconds": True}, "seconds: got 'true'"),
        ({"seconds": float("nan")}, "seconds: got 'NaN'"),
        ({"rate": 0}, "rate: got '0', accepted: a finite number above 0"),
        ({"name": " "}, "accepted: a text"),
        ({"flag": 1}, "accepted: true or false"),
        ({"inner": {}}, "inner: got '{}', accepted: an array"),
        ({"inner": [1]}, "inner[0]: got '1', accepted: an object"),
        ({"inner": [{"rows": [1.5], "span": [1, 2]}]}, "inner[0].rows[0]: got '1.5', accepted: a whole number from 1"),
        ({"inner": [{"rows": [2, 1], "span": [1, 2]}]}, "inner[0].rows: got '[2, 1]', accepted: rising whole numbers"),
        ({"inner": [{"rows": [], "span": [1]}]}, "inner[0].span: got '[1]', accepted: an array of 2"),
        ({"inner": [{"rows": []}]}, "inner[0].span: got 'nothing', accepted: an array of 2"),
        ({"inner": [{"rows": [], "span": [1, 2], "kind": "c"}]}, "inner[0].kind: got 'c', accepted: a or b"),
        ({"by_name": {"k": {"rows": [], "span": [1, 2], "no": 1}}}, "key in by_name.k: got 'no', accepted: rows, span"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(WHOLE | change)
    assert str(caught.value).startswith("profile x.json: ")
    assert message in str(caught.value)
