"""Reading JSON that somebody else wrote: never deeper than what kvrsim writes itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
