"""The values' `dataclass` behaves as the standard library's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, field, fields, replace
from typing import Any, get_type_hints

import pytest

from kvrsim import values

Decorator = Callable[..., Any]


def declared(dataclass: Decorator) -> tuple[Any, Any]:
    """A positional class, and a class with keywords, defaults, hidden fields and a computed field."""

    @dataclass(frozen=True, slots=True)
    class Point:
        x: float
        y: float = 2.0

    @dataclass(frozen=True, kw_only=True)
    class Whole:
        name: str
        parts: Mapping[str, int] = field(default_factory=dict)
        note: str = field(default="none", compare=False, repr=False)
        size: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "size", len(self.parts))

    return Point, Whole


OWN, LIBRARY = declared(values.dataclass), declared(dataclasses.dataclass)


@values.dataclass(frozen=True, kw_only=True, slots=True)
class Pickled:
    """A value of the module, which pickle can name."""

    tokens: int
    rest: tuple[Pickled, ...] = ()


@values.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plain:
    """A value that is equal to itself alone."""

    x: int


@pytest.mark.parametrize("number", [0, 1])
def test_signature_fields_and_text_are_those_of_the_library(number: int) -> None:
    own, library = OWN[number], LIBRARY[number]
    assert str(inspect.signature(own)) == str(inspect.signature(library))
    assert get_type_hints(own.__init__) == get_type_hints(library.__init__)
    assert own.__match_args__ == library.__match_args__
    given = {"x": 1.0} if number == 0 else {"name": "a", "parts": {"b": 1}}
    assert repr(own(**given)) == repr(library(**given))
    assert [getattr(own(**given), one.name) for one in fields(own)] == [
        getattr(library(**given), one.name) for one in fields(library)
    ]


def test_values_are_equal_by_the_compared_fields_of_one_class() -> None:
    point, whole = OWN
    assert point(1.0) == point(1.0, 2.0) == replace(point(3.0), x=1.0) != point(1.0, 3.0)
    assert hash(point(1.0)) == hash(point(1.0, 2.0))
    assert whole(name="a", note="b") == whole(name="a") != whole(name="a", parts={"b": 1})
    assert point(1.0) != LIBRARY[0](1.0)
    assert whole(name="a").parts is not whole(name="a").parts
    assert Plain(1) != Plain(1)
    assert repr(Plain(1)).startswith("<")


def test_values_are_frozen_and_refuse_wrong_arguments() -> None:
    point, whole = OWN
    with pytest.raises(FrozenInstanceError, match="'x'"):
        point(1.0).x = 2.0
    with pytest.raises(FrozenInstanceError, match="'name'"):
        del whole(name="a").name
    for wrong in (lambda: point(), lambda: point(1.0, z=2.0), lambda: whole("a")):
        with pytest.raises(TypeError, match="__init__"):
            wrong()


def test_values_pickle_and_copy() -> None:
    one = Pickled(tokens=1, rest=(Pickled(tokens=2),))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == copy.copy(one) == one
