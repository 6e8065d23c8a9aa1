"""Frozen dataclasses become JSON and are read back; an error names the file, the key path and the accepted values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.io.schema import MAX_DEPTH, JsonObject, Keys, NonNegative, parse_json, read, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rows: tuple[int, ...]
    span: tuple[float, float]
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if list(self.rows) != sorted(self.rows):
            raise InputError("rows", self.rows, "rising whole numbers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    depth: int
    kind: str = "x"


Rates = Annotated[Mapping[str, float], Keys(("p", "q"))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    seconds: NonNegative
    inner: tuple[Inner, ...]
    by_name: dict[str, Inner] = field(default_factory=dict)
    rate: float | None = None
    flag: bool = False
    either: Inner | Other | str | None = None


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
    either=st.none() | st.text("abc", min_size=1) | inners | st.builds(Other, depth=st.integers(1, 9)),
)
WHOLE: dict[str, Any] = {"name": "x", "seconds": 0, "inner": [{"rows": [1, 2], "span": [1, 2.5]}]}


def parse(data: dict[str, Any]) -> Outer:
    return read(Outer, JsonObject(fields=data, where="profile x.json"))


@given(outers)
def test_what_is_written_is_read_back(value: Outer) -> None:
    content = json.loads(json.dumps(to_json(value)))
    assert parse(content) == value


def test_a_mapping_has_certain_keys_in_their_order() -> None:
    data = JsonObject(fields={"rates": {"q": 2, "p": 1}}, where="a.json")
    assert list(data.get("rates", Rates).items()) == [("p", 1.0), ("q", 2.0)]
    with pytest.raises(InputError, match="key in rates: got 'r', accepted: p, q"):
        JsonObject(fields={"rates": {"r": 1}}, where="a.json").get("rates", Rates)


def test_defaults_comments_and_white_space() -> None:
    assert parse(WHOLE | {"_note": "any", "rate": None, "name": " a \n b "}) == Outer(
        name="a b", seconds=0.0, inner=(Inner(rows=(1, 2), span=(1.0, 2.5)),)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": -1}, "seconds: got '-1', accepted: a finite number of at least 0"),
        ({"seconds": float("nan")}, "seconds: got 'NaN'"),
        ({"rate": 0}, "rate: got '0', accepted: a finite number above 0"),
        ({"inner": {}}, "inner: got '{}', accepted: an array"),
        ({"inner": [{"rows": [1.5], "span": [1, 2]}]}, "inner[0].rows[0]: got '1.5', accepted: a whole number from 1"),
        ({"inner": [{"rows": [2, 1], "span": [1, 2]}]}, "inner[0].rows: got '[2, 1]', accepted: rising whole numbers"),
        ({"inner": [{"rows": [], "span": [1]}]}, "inner[0].span: got '[1]', accepted: an array of 2"),
        ({"inner": [{"rows": []}]}, "inner[0].span is missing, accepted: an array of 2"),
        ({"inner": [{"rows": [], "span": [1, 2], "kind": "c"}]}, "inner[0].kind: got 'c', accepted: a or b"),
        ({"by_name": {"k": {"rows": [], "span": [1, 2], "no": 1}}}, "key in by_name.k: got 'no', accepted: rows, span"),
        ({"either": 7}, "accepted: an object ({...}) or an object ({...}) or a text, or null"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(WHOLE | change)
    assert str(caught.value).startswith("profile x.json: ")
    assert message in str(caught.value)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"a": 1', "[1]", "3", "null", b"\xff\xfe\x00", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"],
    ids=["empty", "brace", "truncated", "array", "number", "null", "not-utf8", "deep", "long-number"],
)
def test_json_that_is_not_an_object_is_refused(tmp_path: Path, content: str | bytes) -> None:
    path = written(tmp_path / "a.json", content)
    with pytest.raises(InputError) as caught:
        JsonObject.read(path, "model")
    assert str(caught.value).startswith("model: got '")
    assert "\n" not in str(caught.value)


def test_json_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", Path("a\0b")):
        with pytest.raises(InputError, match=r"^model: "):
            JsonObject.read(path, "model")


def test_json_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrsim.io.schema.MAX_FILE_BYTES", 10)
    with pytest.raises(InputError, match="at most"):
        JsonObject.read(written(tmp_path / "a.json", '{"a": "0123456789"}'), "model")


def some_json(**fields: object) -> JsonObject:
    return JsonObject(fields=fields, where="model f.json")


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, -math.inf, "1", True, None, 10**400])
def test_json_number_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^model f\.json: a: got"):
        some_json(a=value).number("a")


def test_json_defaults_and_comments() -> None:
    content = some_json(_about="a comment", a=None, b=2)
    content.only(["a", "b"])
    assert content.integer("a", 7) == 7
    assert content.first_of("a", "b") == "b"
    assert content.sequence("a") == []
    with pytest.raises(InputError, match=r"got 'b', accepted: a$"):
        content.only(["a"])


@pytest.mark.parametrize("depth", [0, 1, MAX_DEPTH - 1, MAX_DEPTH, 2 * MAX_DEPTH, 100_000])
def test_json_is_read_down_to_a_depth_and_no_further(depth: int) -> None:
    text = "[" * depth + "0" + "]" * depth
    if depth < MAX_DEPTH:
        assert json.dumps(parse_json(text)) == text
    else:
        with pytest.raises(ValueError, match="levels deep"):
            parse_json(text)
