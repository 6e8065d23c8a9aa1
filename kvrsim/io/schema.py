"""JSON to frozen dataclasses and back, driven by their annotations.

`read` checks JSON from any source, `to_json` and `write_json` write it. The annotation of a field states what is
accepted:

    float                    a finite number above 0
    NonNegative              a finite number of at least 0
    Annotated[float, Range(...)]
    int                      a whole number from 1 to MAX_TOKENS; Annotated[int, Range(...)] for others
    bool, str, Literal[...]  as JSON has them; texts are not empty, and runs of white space become one space
    X | None                 absent or null is None
    X | Y                    the first that fits; of several dataclasses the one that has most of the object's keys
    tuple[X, ...]            an array, as list[X] and Sequence[X]; tuple[X, Y] an array of two
    Mapping[str, X]          an object with any keys; Annotated[Mapping[str, X], Keys(...)] with these, in their order
    Annotated[X, Check(...)] an X for which a condition holds
    a frozen dataclass       an object with its fields as keys; a class method `read(data)` of its own comes first
    Any                      any JSON value

A field with a default may be absent. `__post_init__` checks conditions on several fields. It raises
InputError with a field's name or a key path that begins there; the reader adds the file and the path to the object.
Keys that begin with _ are comments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from kvrsim.errors import ABSENT, InputError
from kvrsim.io.annotations import AnnotationParts
from kvrsim.io.annotations import Check as Check
from kvrsim.io.annotations import Keys as Keys
from kvrsim.io.annotations import Range as Range
from kvrsim.io.files import read_text, write_atomically
from kvrsim.units import MAX_TOKENS

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")
MAX_FILE_BYTES = 2**24  # larger than any configuration; a file of weights given by mistake is not read whole
MAX_DEPTH = 50  # largest depth of nested arrays and objects; files of kvrsim have far fewer levels
_FIELD = re.compile(r"[.\[]")  # characters that end the name of a field in a key path
_LARGEST = ("wait_s", "peak_bytes")  # lists per GPU that are replaced by their largest value
_NUMBERS = re.compile(r"\[[-+.,0-9eE\s]+\]")  # arrays of numbers, which are written in one line


NonNegative = Annotated[float, Range(least=0.0, most=1e30)]
Share = Annotated[float, Range(least=0.0, most=1.0)]
PositiveShare = Annotated[float, Range(above=0.0, most=1.0)]
RelativeError = Annotated[float, Range(least=0.0, most=10.0)]  # share; also a standard deviation of a logarithm
Whole = Annotated[int, Range(least=0, most=MAX_TOKENS)]
_RANGES = {float: Range(above=0.0, most=1e30), int: Range(least=1, most=MAX_TOKENS)}
_REQUIRED = object()


def to_json(value: object) -> Any:
    """Plain JSON values: dataclasses become objects, tuples arrays; numpy's numbers become Python's.

    A method `to_dict()` of a dataclass comes first.
    """
    if is_dataclass(value) and not isinstance(value, type):
        to_dict = getattr(value, "to_dict", None)
        if to_dict is not None:
            return to_dict()
        return fields_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    tolist = getattr(value, "tolist", None)  # of numpy
    if tolist is not None:
        return tolist()
    return value


def fields_to_json(value: object, *names: str) -> dict[str, Any]:
    """Fields of a dataclass as plain JSON values: all fields, or the named ones in their order."""
    if not names:
        names = tuple(field.name for field in fields(value))  # type: ignore[arg-type]
    return {name: to_json(getattr(value, name)) for name in names}


def to_frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """One row per mapping, with scalar cells; see `scalars`."""
    import pandas

    return pandas.DataFrame([scalars(row) for row in rows])


def scalars(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values as scalars: nested ones by names such as "link.latency_s", a list as text with commas between.

    Waits and memory per GPU become their largest value. Lists of mappings are omitted.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            for inner, scalar in scalars(value).items():
                flat[f"{name}.{inner}"] = scalar
        elif not isinstance(value, list | tuple):
            flat[name] = value
        elif name in _LARGEST:
            flat[name] = max(value, default=None)
        elif not any(isinstance(item, Mapping) for item in value):
            flat[name] = ",".join(map(_text_of, value))
    return flat


def _text_of(value: object) -> str:
    if value is None:
        return ""
    return str(value)


def write_json(path: str | Path, value: object, *, argument: str = "output") -> None:
    """Write a dataclass or plain values as indented JSON; the file appears whole or not at all."""
    text = json.dumps(to_json(value), indent=2)
    text = _NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), text)
    write_atomically(path, f"{text}\n".encode(), argument=argument)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError where it is not JSON or is nested more than MAX_DEPTH levels deep.

    The json module fails at Python's recursion limit, and a value just below that limit cannot be compared or written
    again.
    """
    too_deep = f"more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
        if not level:
            return value
    raise ValueError(too_deep)


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonObject:
    """A JSON object that checks its values as they are read; null counts as absent."""

    fields: Mapping[str, Any]  # the object as the json module returns it
    where: str  # name of the argument and the file, for messages
    key_path: str = ""  # path of this object in the file, with a final dot; empty at the top

    @classmethod
    def read(cls, path: Path, argument: str) -> JsonObject:
        """Read a file that holds one JSON object; InputError names `argument` and the file."""
        name = " ".join(str(path).split())
        text = read_text(path, argument, what="a JSON file", most_bytes=MAX_FILE_BYTES)
        try:
            content = parse_json(text)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise InputError(argument, name, f"a file of valid JSON ({reason})") from None
        if not isinstance(content, dict):
            raise InputError(argument, name, "a file that holds a JSON object ({...})")
        return cls(fields=content, where=f"{argument} {name}")

    def error(self, key: str, accepted: str, value: object = _REQUIRED) -> InputError:
        """Error for the value of a key; `value`: the wrong part, if only a part is wrong."""
        if value is _REQUIRED:
            value = self.fields.get(key, ABSENT)
        if not isinstance(value, str) and value is not ABSENT:
            value = json.dumps(value)
        return InputError(f"{self.where}: {self.key_path}{key}", value, accepted)

    def has(self, key: str) -> bool:
        return self.fields.get(key) is not None

    def first_of(self, *keys: str) -> str:
        """The first of several spellings of a key that is present, else the first."""
        for key in keys:
            if self.has(key):
                return key
        return keys[0]

    def only(self, keys: Iterable[str]) -> None:
        """Refuse keys that are not among `keys`; keys that begin with _ are comments."""
        accepted = list(keys)
        for key, value in self.fields.items():
            if key not in accepted and value is not None and not key.startswith("_"):
                place = f"{self.where}: key"
                if self.key_path:
                    place = f"{self.where}: key in {self.key_path[:-1]}"
                raise InputError(place, key, ", ".join(accepted))

    def without(self, *keys: str) -> JsonObject:
        """The object without some of its keys."""
        return replace(self, fields={key: value for key, value in self.fields.items() if key not in keys})

    def get(self, key: str, annotation: object, default: object = _REQUIRED) -> Any:
        """Return the value of a key, checked by its annotation; without a default the key is required."""
        value = self.fields.get(key)
        if value is None and default is not _REQUIRED:
            return default
        kind = kind_of(annotation)
        if value is None:
            raise self.error(key, kind.accepted)
        return kind.read(value, key, self)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_TOKENS) -> int:
        """A whole number; without a default the key is required."""
        if default is not None and not self.has(key):
            return default
        return int(self.get(key, Annotated[int, Range(least=minimum, most=maximum)]))

    def number(self, key: str, *, allow_zero: bool = False, maximum: float = 1e30) -> float:
        """A finite positive number, required."""
        limits = Range(above=0.0, most=maximum)
        if allow_zero:
            limits = Range(least=0.0, most=maximum)
        return float(self.get(key, Annotated[float, limits]))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, default))

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and not self.has(key):
            return default
        return str(self.get(key, str))

    def sequence(self, key: str) -> list[Any]:
        """A JSON array; empty where the key is absent."""
        return list(self.get(key, tuple[Any, ...], ()))

    def numbers(self, key: str, *, allow_zero: bool = False) -> list[float]:
        """An array of finite positive numbers; empty where the key is absent."""
        if allow_zero:
            return list(self.get(key, tuple[NonNegative, ...], ()))
        return list(self.get(key, tuple[float, ...], ()))

    def children(self, key: str) -> list[JsonObject]:
        """The objects of an array; empty where the key is absent."""
        values = self.sequence(key)
        if not all(isinstance(value, dict) for value in values):
            raise self.error(key, "an array of objects ([{...}])")
        return [self.inner(value, f"{key}[{index}]") for index, value in enumerate(values)]

    def child(self, key: str) -> JsonObject:
        """Return the object under a required key."""
        value = self.fields.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object ({...})")
        return self.inner(value, key)

    def inner(self, value: Mapping[str, Any], path: str) -> JsonObject:
        """Return the object at a path inside this object."""
        return JsonObject(fields=value, where=self.where, key_path=f"{self.key_path}{path}.")


def shipped_files(folder: Path) -> dict[str, Path]:
    """The JSON files of a folder by their names without suffix."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def named_object(
    name_or_path: str | Path, argument: str, shipped: Mapping[str, Path] | Mapping[str, JsonObject], also: str = ""
) -> JsonObject:
    """Load the JSON object of a shipped name or a file. Raises InputError with `argument` and the names.

    also: what else the caller accepts, for the message.
    """
    name = str(name_or_path)
    source = shipped.get(name, Path(name))
    if isinstance(source, JsonObject):
        return source
    try:
        is_file = source.exists() and not source.is_dir()
    except (OSError, ValueError):  # a path that is too long or forbidden
        is_file = False
    if not is_file:
        accepted = "a JSON file"
        if also:
            accepted += f", {also}"
        raise InputError(argument, name, f"{accepted}, or one of {', '.join(sorted(shipped))}")
    return JsonObject.read(source, argument)


def _is_finite(number: float) -> bool:
    """Whether a float can hold the number; an integer of a file may have any number of digits."""
    return -sys.float_info.max <= number <= sys.float_info.max


def read(cls: type[T], data: JsonObject, **fixed_values: object) -> T:
    """Make an object of `cls` from the keys of a JSON object; `fixed_values` replace those of the file.

    Raises InputError that names the file and the key path, the value and what is accepted.
    """
    fields = _fields(cls)  # type: ignore[arg-type]
    data.only(fields)
    values: dict[str, Any] = dict(fixed_values)
    for name, (kind, required) in fields.items():
        if name in fixed_values:
            continue
        if data.has(name):
            values[name] = kind.read(data.fields[name], name, data)
        elif required:
            if not kind.optional:
                raise data.error(name, kind.accepted)
            values[name] = None
    try:
        return cls(**values)
    except InputError as error:
        if _FIELD.split(error.parameter, maxsplit=1)[0] not in fields:
            raise
        raise data.error(error.parameter, error.accepted, error.value) from None


@cache
def _fields(cls: type) -> dict[str, tuple[ValueKind, bool]]:
    """The kind of each field, and whether it must be given."""
    hints = get_type_hints(cls, include_extras=True)
    kinds = {}
    for field in fields(cls):
        if field.init:
            is_required = field.default is MISSING and field.default_factory is MISSING
            kinds[field.name] = (kind_of(hints[field.name]), is_required)
    return kinds


@cache
def kind_of(annotation: object) -> ValueKind:
    """The parts of an annotation, read once."""
    return ValueKind(annotation)


class ValueKind(AnnotationParts):
    """The parts of an annotation, and the reader of its values."""

    def __init__(self, annotation: object) -> None:
        super().__init__(annotation)
        self.checks = [extra for extra in self.extras if isinstance(extra, Check)]
        self.keys = next((extra.names for extra in self.extras if isinstance(extra, Keys)), None)
        default = _RANGES.get(self.base)
        self.range = next((extra for extra in self.extras if isinstance(extra, Range)), default)

    @cached_property
    def inner(self) -> list[ValueKind]:
        """Kinds of the items, or of a mapping's keys and values."""
        return [kind_of(item) for item in self.args if item is not Ellipsis]

    @property
    def accepted(self) -> str:
        """Accepted values in words, for messages."""
        if self.optional:
            return f"{self._description}, or null"
        return self._description

    @property
    def _description(self) -> str:
        if self.checks:
            return self.checks[0].accepted
        if len(self.options) > 1:
            return " or ".join(kind_of(option).accepted for option in self.options)
        if self.base is int and self.range is not None:
            return f"a whole number from {int(self.range.least or 0)} to {int(self.range.most or 0)}"
        if self.origin is Literal:
            *others, last = map(str, self.args)
            if not others:
                return last
            return f"{', '.join(others)} or {last}"
        if self.origin in (tuple, list, Sequence):
            return self._array_description
        if self.base is float:
            return f"a finite number{self.range}"
        names = {str: "a text", bool: "true or false", int: "a whole number"}
        return names.get(self.base, "an object ({...})")

    @property
    def _array_description(self) -> str:
        text = "an array"
        if self.origin is tuple and self.args[-1] is not Ellipsis:
            text += f" of {len(self.args)}"
        item = self.inner[0]
        if item.base is not Any:
            text += f", each {item.accepted}"
        return text

    def read(self, value: object, path: str, data: JsonObject) -> Any:
        """Return the checked value at a path of an object."""
        if value is None and self.optional:
            return None
        if len(self.options) > 1:
            return self._read_union(value, path, data)
        result = self._convert(value, path, data)
        if result is None or not all(check.holds(result) for check in self.checks):
            raise data.error(path, self.accepted, value)
        return result

    def _convert(self, value: object, path: str, data: JsonObject) -> Any:
        """Convert a value; None if the value is not of this kind."""
        base = self.base
        origin = self.origin
        if base is float or base is int:
            return self._number(value)
        if base is str:
            if not isinstance(value, str):
                return None
            return " ".join(value.split()) or None
        if origin in (dict, Mapping):
            if not isinstance(value, dict):
                return None
            return self._mapping(value, path, data)
        if origin in (tuple, list, Sequence):
            if not isinstance(value, list):
                return None
            return self._array(value, path, data)
        if isinstance(base, type) and is_dataclass(base):
            if not isinstance(value, dict):
                return None
            child = data.inner(value, path)
            read_object = getattr(base, "read", None)
            if read_object is not None:
                return read_object(child)
            return read(base, child)
        if base is Any:
            return value
        accepted = self.args if origin is Literal else (True, False)
        if type(value) in set(map(type, accepted)) and value in accepted:
            return value
        return None

    def _number(self, value: object) -> float | int | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            return None
        if self.range is not None and not self.range.admits(value):
            return None
        if self.base is int and value != int(value):
            return None
        number: float | int = self.base(value)
        return number

    def _array(self, values: list[Any], path: str, data: JsonObject) -> tuple[Any, ...] | list[Any] | None:
        kinds = self.inner
        if self.origin is not tuple or self.args[-1] is Ellipsis:
            first = self.inner[0]
            if first.holds_all(values):
                kinds = []
            else:
                kinds = [first] * len(values)
        elif len(kinds) != len(values):
            return None
        items = list(values)
        for index, kind in enumerate(kinds):
            items[index] = kind.read(values[index], f"{path}[{index}]", data)
        if self.origin is tuple:
            return tuple(items)
        return items

    def holds_all(self, values: Sequence[Any]) -> bool:
        """Whether all values are plainly numbers of this kind: a fast check of long tables."""
        if self.range is None or self.checks or set(map(type, values)) != {self.base}:
            return False
        return all(map(_is_finite, values)) and all(map(self.range.admits, values))

    def _mapping(self, value: dict[str, Any], path: str, data: JsonObject) -> Any:
        child = data.inner(value, path)
        names = list(value)
        if self.keys is not None:
            child.only(self.keys)
            names = [key for key in self.keys if child.has(key)]
        return {key: self.inner[1].read(value[key], key, child) for key in names}

    def _read_union(self, value: object, path: str, data: JsonObject) -> Any:
        kinds = [kind_of(option) for option in self.options]
        objects = [kind for kind in kinds if isinstance(kind.base, type) and is_dataclass(kind.base)]
        if isinstance(value, dict) and objects:
            best = max(objects, key=lambda kind: len(_fields(kind.base).keys() & value.keys()))
            return best.read(value, path, data)
        for kind in kinds:
            result = kind._convert(value, path, data)
            if result is not None:
                return result
        raise data.error(path, self.accepted, value)
