"""Annotations that declare what is accepted, in files (io/schema.py) and in arguments (kvrsim/arguments.py)."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin


class Range(NamedTuple):
    """Limits of a number; `above` is a lower limit that is itself excluded."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    def admits(self, value: float) -> bool:
        """Whether a number is within the limits."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        limits: list[str] = []
        if self.above is not None:
            limits.append(f" above {self.above:g}")
        elif self.least is not None:
            limits.append(f" of at least {self.least:g}")
        if self.most is not None:
            limits.append(f" at most {self.most:g}")
        return " and".join(limits)


class Check(NamedTuple):
    """A condition on a value, in addition to its type."""

    accepted: str  # the condition in words, for messages
    holds: Callable[[Any], bool]


class Keys(NamedTuple):
    """The only keys of a mapping."""

    names: tuple[str, ...]


class AnnotationParts:
    """The parts of an annotation."""

    def __init__(self, annotation: object) -> None:
        self.extras: tuple[Any, ...] = ()  # what Annotated adds to the type; for X | None also that of X
        if get_origin(annotation) is Annotated:
            annotation, *extras = get_args(annotation)
            self.extras = tuple(extras)
        is_union = get_origin(annotation) in (Union, UnionType)
        self.options = [annotation]
        if is_union:
            self.options = [option for option in get_args(annotation) if option is not NoneType]
        self.optional = is_union and NoneType in get_args(annotation)  # whether None is allowed
        self.base: Any = annotation  # the type; X for X | None
        if is_union and len(self.options) == 1:
            inner = AnnotationParts(self.options[0])
            self.base = inner.base
            self.extras += inner.extras
        self.origin = get_origin(self.base)
        self.args = get_args(self.base)
