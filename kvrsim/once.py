"""Values that other modules compute from a frozen object: each is computed once and kept in that object."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

_Source = TypeVar("_Source", bound="Source")
_Value = TypeVar("_Value")


class Source:
    """An object that keeps what functions decorated with `once` computed from it. Pickling leaves these values out."""

    @cached_property
    def kept(self) -> dict[Callable[..., Any], Any]:
        """The values that were computed from this object, by function. Only `once` uses it."""
        return {}


def once(compute: Callable[[_Source], _Value]) -> Callable[[_Source], _Value]:
    """Return the function that computes its value at its first call for an object, and then keeps it in the object.

    It is functools.cached_property for a value of another module. The value lives as long as the object.
    """

    @wraps(compute)
    def value_of(source: _Source) -> _Value:
        if compute not in source.kept:
            source.kept[compute] = compute(source)
        value: _Value = source.kept[compute]
        return value

    return value_of
