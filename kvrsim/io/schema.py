"""Frozen dataclasses to JSON and back, driven by their annotations: `read` and `to_json`.

A field's annotation says what is accepted:

    float                    a finite number above 0
    NonNegative              a finite number of at least 0
    Annotated[float, Limits(...)]
    int                      a whole number from 1 to MAX_TOKENS; Annotated[int, Limits(...)] for others
    bool, str, Literal[...]  as JSON has them; texts are not empty, and runs of white space become one space
    X | None                 absent or null is None
    tuple[X, ...]            an array; tuple[X, Y] an array of two
    Mapping[str, X]          an object with any keys; Annotated[Mapping[str, X], Keys(...)] with these, in their order
    Annotated[X, Check(...)] an X of which something more holds
    a frozen dataclass       an object with its fields as keys; a class method `read(data)` of its own comes first

A field with a default may be absent. What one field alone cannot tell, `__post_init__` checks; it raises
InputError with the field's name or a key path from it, to which `read` adds the file and the path before it.
Keys that begin with _ are comments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvrsim.errors import InputError
from kvrsim.io.json_text import JsonObject
from kvrsim.units import MAX_TOKENS

T = TypeVar("T")
_FIELD = re.compile(r"[.\[]")  # what ends the field in a key path
_Reader = Callable[[Any, str, JsonObject], Any]  # of a value, its place in an object, and the object


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


@dataclass(frozen=True, slots=True)
class Check:
    """What holds of a value besides its type."""

    accepted: str  # for messages
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Keys:
    """The only keys of a mapping."""

    names: tuple[str, ...]


_FLOAT = Limits(above=0.0, most=1e30)
_INT = Limits(least=1, most=MAX_TOKENS)
NonNegative = Annotated[float, Limits(least=0.0, most=1e30)]
Share = Annotated[float, Limits(least=0.0, most=1.0)]
PositiveShare = Annotated[float, Limits(above=0.0, most=1.0)]
RelativeError = Annotated[float, Limits(least=0.0, most=10.0)]  # also a standard deviation of a logarithm
Whole = Annotated[int, Limits(least=0, most=MAX_TOKENS)]


def to_json(value: Any) -> Any:
    """Plain JSON values: dataclasses become objects, tuples arrays; numpy's numbers become Python's.

    A method `to_dict()` of a dataclass comes first.
    """
    if is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "to_dict", None)
        return fields_to_json(value) if own is None else own()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def fields_to_json(value: Any, *names: str) -> dict[str, Any]:
    """The fields of a dataclass as plain JSON values: all, or these in this order."""
    chosen = names or tuple(field.name for field in fields(value))
    return {name: to_json(getattr(value, name)) for name in chosen}


def read(cls: type[T], data: JsonObject, **given: Any) -> T:
    """An object of `cls` from the keys of a JSON object; `given` fields replace those of the file.

    Raises InputError that names the file and the key path, the value and what is accepted.
    """
    known = _fields(cls)  # type: ignore[arg-type]
    data.only(known)
    values = given
    for name, (annotation, required) in known.items():
        if name in given:
            continue
        if data.has(name):
            values[name] = _reader(annotation)(data.fields[name], name, data)
        elif required:
            if not _is_optional(annotation):
                raise data.error(name, describe(annotation))
            values[name] = None
    try:
        return cls(**values)
    except InputError as error:
        if _FIELD.split(error.parameter, maxsplit=1)[0] not in known:
            raise
        raise _error(data, error.parameter, error.value, error.accepted) from None


@cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Annotation of each field, and whether it must be given."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: (hints[field.name], not _has_default(field)) for field in fields(cls) if field.init}


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
    base, extras = _unwrapped(annotation)
    for extra in extras:
        if isinstance(extra, Check):
            return extra.accepted
    limits = _limits(base, extras)
    if base is float:
        return f"a finite number{limits}"
    if base is int:
        return f"a whole number from {int(limits.least or 0)} to {int(limits.most or 0)}"
    origin = get_origin(base)
    if origin is Literal:
        *others, last = map(str, get_args(base))
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        inner = get_args(base)
        if inner[-1] is Ellipsis:
            return f"an array, each {describe(inner[0])}"
        return f"an array of {len(inner)}, each {describe(inner[0])}"
    return {str: "a text", bool: "true or false"}.get(base, "an object ({...})")


def _unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type under an annotation, and what Annotated adds to it."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    base, *extras = get_args(annotation)
    return base, tuple(extras)


def _limits(base: Any, extras: tuple[Any, ...]) -> Limits:
    limits = (extra for extra in extras if isinstance(extra, Limits))
    return next(limits, _INT if base is int else _FLOAT)


@cache
def _reader(annotation: Any) -> _Reader:
    """What reads a value of an annotation, worked out once."""
    if _is_optional(annotation):
        inner = _reader(_without_none(annotation))
        return lambda value, path, data: None if value is None else inner(value, path, data)
    base, extras = _unwrapped(annotation)
    convert = _converter(base, extras)
    checks = [extra.holds for extra in extras if isinstance(extra, Check)]

    def checked(value: Any, path: str, data: JsonObject) -> Any:
        found = convert(value, path, data)
        if found is None or not all(holds(found) for holds in checks):
            raise _error(data, path, value, describe(annotation))
        return found

    return checked


def _converter(base: Any, extras: tuple[Any, ...]) -> _Reader:
    """What reads a value of a type; None from it: the value is not of that type."""
    origin = get_origin(base)
    if base is float or base is int:
        limits = _limits(base, extras)
        return lambda value, path, data: _number(value, base, limits)
    if origin is tuple:
        return _tuple_reader(get_args(base))
    if origin in (dict, Mapping):
        keys = next((extra.names for extra in extras if isinstance(extra, Keys)), None)
        return _mapping_reader(get_args(base)[1], keys)
    if isinstance(base, type) and is_dataclass(base):
        return _object_reader(base)
    if base is str:
        return lambda value, path, data: " ".join(value.split()) or None if isinstance(value, str) else None
    kinds = {type(one) for one in get_args(base)} if origin is Literal else {base}
    accepted = get_args(base) if origin is Literal else (True, False)
    return lambda value, path, data: value if type(value) in kinds and value in accepted else None


def _number(value: Any, base: type, limits: Limits) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not limits.hold(value):
        return None
    if not math.isfinite(value) or (base is int and value != int(value)):
        return None
    return int(value) if base is int else float(value)


def _numbers(values: list[Any], base: type, limits: Limits) -> tuple[float | int, ...] | None:
    """All of them at once, as long tables need; None where one of them needs a closer look."""
    if {type(value) for value in values} - {base} or not (base is int or all(map(math.isfinite, values))):
        return None
    return tuple(values) if not values or (limits.hold(min(values)) and limits.hold(max(values))) else None


def _tuple_reader(kinds: tuple[Any, ...]) -> _Reader:
    many = kinds[-1] is Ellipsis
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]
    base, extras = _unwrapped(kinds[0])
    limits = _limits(base, extras) if many and base in (int, float) else None

    def read_tuple(value: Any, path: str, data: JsonObject) -> tuple[Any, ...] | None:
        if not isinstance(value, list) or (not many and len(readers) != len(value)):
            return None
        if limits is not None and (found := _numbers(value, base, limits)) is not None:
            return found
        each = readers * len(value) if many else readers
        return tuple(
            reader(item, f"{path}[{index}]", data) for index, (reader, item) in enumerate(zip(each, value, strict=True))
        )

    return read_tuple


def _mapping_reader(value_type: Any, keys: tuple[str, ...] | None) -> _Reader:
    reader = _reader(value_type)

    def read_mapping(value: Any, path: str, data: JsonObject) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        child = _child(value, path, data)
        if keys is None:
            return {key: reader(item, key, child) for key, item in value.items()}
        child.only(keys)
        return {key: reader(value[key], key, child) for key in keys if child.has(key)}

    return read_mapping


def _object_reader(cls: type) -> _Reader:
    own = getattr(cls, "read", None)

    def read_object(value: Any, path: str, data: JsonObject) -> Any:
        if not isinstance(value, dict):
            return None
        child = _child(value, path, data)
        return read(cls, child) if own is None else own(child)

    return read_object


def _child(value: dict[str, Any], path: str, data: JsonObject) -> JsonObject:
    return JsonObject(fields=value, where=data.where, key_path=f"{data.key_path}{path}.")


def _error(data: JsonObject, path: str, value: object, accepted: str) -> InputError:
    """As JsonObject.error, for a place deeper than a key of it."""
    return JsonObject(fields={path: value}, where=data.where, key_path=data.key_path).error(path, accepted)
