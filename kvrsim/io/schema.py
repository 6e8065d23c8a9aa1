"""Frozen dataclasses to JSON and back, driven by their annotations: `read` and `to_json`.

A field's annotation says what is accepted:

    float                    a finite number above 0
    NonNegative              a finite number of at least 0
    Annotated[float, Limits(...)]
    int                      a whole number from 1 to MAX_TOKENS; Annotated[int, Limits(...)] for others
    bool, str, Literal[...]  as JSON has them; texts are not empty, and runs of white space become one space
    X | None                 absent or null is None
    tuple[X, ...]            an array; tuple[X, Y] an array of two
    dict[str, X]             an object with any keys
    a frozen dataclass       an object with its fields as keys; a class method `read(data)` of its own comes first

A field with a default may be absent. What one field alone cannot tell, `__post_init__` checks; it raises
InputError with the field's name, to which `read` adds the file and the key path. Keys that begin with _ are comments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvrsim.errors import InputError
from kvrsim.io.json_text import JsonObject
from kvrsim.units import MAX_TOKENS

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a number may be; `above` excludes its own value."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    def hold(self, value: float) -> bool:
        """Whether a value lies within."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        low = f" of at least {self.least:g}" if self.least is not None else ""
        low = f" above {self.above:g}" if self.above is not None else low
        high = "" if self.most is None else f" at most {self.most:g}"
        return low + (" and" + high if low and high else high)


_FLOAT = Limits(above=0.0, most=1e30)
_INT = Limits(least=1, most=MAX_TOKENS)
NonNegative = Annotated[float, Limits(least=0.0, most=1e30)]
Share = Annotated[float, Limits(least=0.0, most=1.0)]
LogSd = Annotated[float, Limits(least=0.0, most=10.0)]  # a standard deviation of the logarithm
Whole = Annotated[int, Limits(least=0, most=MAX_TOKENS)]


def to_json(value: Any) -> Any:
    """Plain JSON values: dataclasses become objects, tuples arrays; numpy's numbers become Python's."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def read(cls: type[T], data: JsonObject) -> T:
    """An object of `cls` from the keys of a JSON object.

    Raises InputError that names the file and the key path, the value and what is accepted.
    """
    known = _fields(cls)
    data.only(known)
    values = {}
    for name, (annotation, required) in known.items():
        if data.has(name):
            values[name] = _value(annotation, data.fields[name], name, data)
        elif required:
            if not _is_optional(annotation):
                raise data.error(name, describe(annotation))
            values[name] = None
    try:
        return cls(**values)
    except InputError as error:
        if error.parameter not in known:
            raise
        raise data.error(error.parameter, error.accepted) from None


_KNOWN: dict[type, dict[str, tuple[Any, bool]]] = {}


def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Annotation of each field, and whether it must be given; worked out once a class."""
    if cls not in _KNOWN:
        hints = get_type_hints(cls, include_extras=True)
        _KNOWN[cls] = {field.name: (hints[field.name], not _has_default(field)) for field in fields(cls) if field.init}
    return _KNOWN[cls]


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def _without_none(annotation: Any) -> Any:
    (kept,) = (one for one in get_args(annotation) if one is not NoneType)
    return kept


def describe(annotation: Any) -> str:
    """What an annotation accepts, for messages."""
    if _is_optional(annotation):
        return f"{describe(_without_none(annotation))}, or null"
    base, limits = _limits(annotation)
    if base is float:
        return f"a finite number{limits}"
    if base is int:
        return f"a whole number from {limits.least:g} to {limits.most:g}"
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(str(one) for one in get_args(annotation))
    if origin is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            return f"an array, each {describe(inner[0])}"
        return f"an array of {len(inner)}, each {describe(inner[0])}"
    return {str: "a text", bool: "true or false"}.get(annotation, "an object ({...})")


def _limits(annotation: Any) -> tuple[Any, Limits]:
    """The type under an annotation, and the limits of a number."""
    base, limits = annotation, None
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        limits = next((extra for extra in extras if isinstance(extra, Limits)), None)
    return base, limits or (_INT if base is int else _FLOAT)


def _value(annotation: Any, value: object, path: str, data: JsonObject) -> Any:
    """A value checked against an annotation; `path` is its place in `data`, for messages."""
    if _is_optional(annotation):
        return None if value is None else _value(_without_none(annotation), value, path, data)
    base, limits = _limits(annotation)
    if base is float or base is int:
        return _number(base, limits, annotation, value, path, data)
    origin = get_origin(base)
    if origin is tuple:
        return _array(base, value, path, data)
    if origin is dict and isinstance(value, dict):
        inner = get_args(base)[1]
        return {key: _value(inner, item, f"{path}.{key}", data) for key, item in value.items()}
    if isinstance(base, type) and is_dataclass(base) and isinstance(value, dict):
        child = JsonObject(fields=value, where=data.where, key_path=f"{data.key_path}{path}.")
        own = getattr(base, "read", None)
        return own(child) if own is not None else read(base, child)
    if base is bool and isinstance(value, bool):
        return value
    if base is str and isinstance(value, str) and value.strip():
        return " ".join(value.split())
    if origin is Literal and value in get_args(base):
        return value
    raise _error(data, path, value, describe(annotation))


def _number(base: type, limits: Limits, annotation: Any, value: object, path: str, data: JsonObject) -> float | int:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    whole = base is int and isinstance(value, float)
    if not usable or whole or not math.isfinite(value) or not limits.hold(value):  # type: ignore[arg-type]
        raise _error(data, path, value, describe(annotation))
    return value if base is int else float(value)  # type: ignore[return-value,arg-type]


def _array(base: Any, value: object, path: str, data: JsonObject) -> tuple[Any, ...]:
    inner = get_args(base)
    if not isinstance(value, list) or (inner[-1] is not Ellipsis and len(inner) != len(value)):
        raise _error(data, path, value, describe(base))
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    return tuple(
        _value(kind, item, f"{path}[{index}]", data)
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _error(data: JsonObject, path: str, value: object, accepted: str) -> InputError:
    """As JsonObject.error, for a place deeper than a key of it."""
    return JsonObject(fields={path: value}, where=data.where, key_path=data.key_path).error(path, accepted)
