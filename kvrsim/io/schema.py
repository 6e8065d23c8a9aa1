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

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvrsim.errors import InputError
from kvrsim.io.files import read_text
from kvrsim.units import MAX_TOKENS

MAX_FILE_BYTES = 2**24  # a configuration is never larger; weights given by mistake are not read whole
MAX_DEPTH = 50  # arrays and objects inside each other; nothing that kvrsim reads comes near


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError where it is none, or is more than MAX_DEPTH levels deep.

    The json module gives up at Python's recursion limit, and what it has read just below of that limit cannot be
    compared or written again.
    """
    too_deep = f"more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(too_deep)


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonObject:
    """A JSON object whose values are checked as they are read; null counts as absent."""

    fields: Mapping[str, object]  # the object as the json module gives it
    where: str  # the argument and the file, for messages
    key_path: str = ""  # of this object inside the file, with a final dot; empty at the top

    @classmethod
    def read(cls, path: Path, argument: str) -> JsonObject:
        """Read a file that holds one JSON object; InputError names `argument` and the file."""
        shown = " ".join(str(path).split())
        text = read_text(path, argument, what="a JSON file", most_bytes=MAX_FILE_BYTES)
        try:
            fields = parse_json(text)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise InputError(argument, shown, f"a file of valid JSON ({reason})") from None
        if not isinstance(fields, dict):
            raise InputError(argument, shown, "a file that holds a JSON object ({...})")
        return cls(fields=fields, where=f"{argument} {shown}")

    def error(self, key: str, accepted: str) -> InputError:
        """The error to raise for a key whose value is not what is accepted."""
        value = self.fields.get(key, "nothing")
        shown = value if isinstance(value, str) else json.dumps(value)
        return InputError(f"{self.where}: {self.key_path}{key}", shown, accepted)

    def has(self, key: str) -> bool:
        return self.fields.get(key) is not None

    def first_of(self, *keys: str) -> str:
        """The first of several spellings of a key that is present, else the first."""
        return next((key for key in keys if self.has(key)), keys[0])

    def only(self, keys: Iterable[str]) -> None:
        """Refuse a key that is not among `keys`; keys that begin with _ are comments."""
        known = list(keys)
        for key in self.fields:
            if key not in known and not key.startswith("_"):
                place = f"{self.where}: key in {self.key_path[:-1]}" if self.key_path else f"{self.where}: key"
                raise InputError(place, key, ", ".join(known))

    def without(self, *keys: str) -> JsonObject:
        """The same object less some of its keys."""
        return replace(self, fields={key: value for key, value in self.fields.items() if key not in keys})

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_TOKENS) -> int:
        """A whole number; without a default the key is required."""
        value = self.fields.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(key, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, *, allow_zero: bool = False, maximum: float = 1e30) -> float:
        """A finite positive number, required."""
        value = self.fields.get(key)
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        if not usable or not (0 < value <= maximum or (allow_zero and value == 0)):  # type: ignore[operator]
            least = "of at least 0" if allow_zero else "above 0"
            raise self.error(key, f"a finite number {least} and at most {maximum:g}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.fields.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, "a text")
        return " ".join(value.split())

    def sequence(self, key: str) -> list[object]:
        """A JSON array; empty where the key is absent."""
        value = self.fields.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(key, "an array ([...])")
        return value

    def numbers(self, key: str, *, allow_zero: bool = False) -> list[float]:
        """An array of finite positive numbers; empty where the key is absent."""
        values = self.sequence(key)
        for value in values:
            usable = isinstance(value, int | float) and not isinstance(value, bool)
            if not usable or not (0 < value <= 1e30 or (allow_zero and value == 0)):  # type: ignore[operator]
                raise self.error(key, f"an array of finite numbers {'of at least 0' if allow_zero else 'above 0'}")
        return [float(value) for value in values]  # type: ignore[arg-type]

    def children(self, key: str) -> list[JsonObject]:
        """The objects of an array; empty where the key is absent."""
        values = self.sequence(key)
        for value in values:
            if not isinstance(value, dict):
                raise self.error(key, "an array of objects ([{...}])")
        return [
            JsonObject(fields=value, where=self.where, key_path=f"{self.key_path}{key}[{index}].")  # type: ignore[arg-type]
            for index, value in enumerate(values)
        ]

    def child(self, key: str) -> JsonObject:
        """The object under a key, required."""
        value = self.fields.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object ({...})")
        return JsonObject(fields=value, where=self.where, key_path=f"{self.key_path}{key}.")


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
