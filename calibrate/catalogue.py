"""The catalogue of model types: the models that transformers' classes build, as data (`python -m calibrate.catalogue`).

Each configuration goes through its class with symbols in place of numbers. The result is a template. A template is kept
if it agrees with the class for other numbers, too. A number for which it does not agree becomes fixed.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_text_part
from kvrsim.model.reader import read_class
from kvrsim.model.spec import ModelSpec
from kvrsim.model.template import _HARMLESS, TYPES_FILE, fill, freeze, template_lines, translate

SHAPES: dict[str, Any] = json.loads(TYPES_FILE.with_name("type_shapes.json").read_text("utf-8"))
# Names of numbers that determine the kinds of layers, not widths.
_STRUCTURE = re.compile("step|interval|pattern|every|freq|period|offset|_group|max_window|dense_|_dense")
_MOST_LAYERS = 20  # longer models are shortened before their class is read
_MAX_LAYERS = 13  # largest number of layers in the comparisons of a template with its class
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class Symbol(int):
    """A whole number that is a polynomial in the keys of a configuration."""

    terms: dict[tuple[str, ...], int]  # coefficients of products of keys

    def __new__(cls, value: int, terms: str | dict[tuple[str, ...], int]) -> Symbol:
        symbol = super().__new__(cls, value)
        symbol.terms = {(terms,): 1} if isinstance(terms, str) else terms
        return symbol

    def __copy__(self) -> Symbol:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Symbol:
        return self

    @property
    def expression(self) -> str:
        """The polynomial as a Python expression."""
        products = []
        for keys, count in self.terms.items():
            factors = list(keys)
            if count != 1 or not keys:
                factors.insert(0, str(count))
            products.append(" * ".join(factors))
        return " + ".join(products) or "0"

    def __add__(self, other: int) -> int:
        terms = dict(self.terms)
        for keys, count in _terms(other).items():
            terms[keys] = terms.get(keys, 0) + count
        return _polynomial(int(self) + int(other), terms)

    def __mul__(self, other: int) -> int:
        if not isinstance(other, int):
            return NotImplemented
        terms: dict[tuple[str, ...], int] = {}
        for keys, count in self.terms.items():
            for others, times in _terms(other).items():
                both = tuple(sorted((*keys, *others)))
                terms[both] = terms.get(both, 0) + count * times
        return _polynomial(int(self) * int(other), terms)

    def __floordiv__(self, other: int) -> int:
        return _quotient(self, other)

    def __rfloordiv__(self, other: int) -> int:
        return _quotient(other, self)

    def __sub__(self, other: int) -> int:
        return self + -1 * other

    def __rsub__(self, other: int) -> int:
        return -1 * self + other

    def __neg__(self) -> int:
        return -1 * self

    __radd__ = __add__
    __rmul__ = __mul__


class _Numbers(type):
    """Metaclass that makes isinstance true for all whole numbers, symbols included."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def __call__(cls, *values: Any) -> int:
        if isinstance(values[0], Symbol):
            return values[0]
        return int(*values)


class _Int(metaclass=_Numbers):
    """Replacement of `int` in the classes that are read: it keeps symbols."""


def _terms(number: int) -> dict[tuple[str, ...], int]:
    if isinstance(number, Symbol):
        return number.terms
    return {(): int(number)}


def _polynomial(value: int, terms: dict[tuple[str, ...], int]) -> int:
    terms = {keys: count for keys, count in sorted(terms.items()) if count}
    if any(terms):
        return Symbol(value, terms)
    return value


def _quotient(number: int, by: int) -> int:
    terms = _terms(number)
    value = int(number) // int(by)
    if not isinstance(by, Symbol) and all(count % by == 0 for count in terms.values()):
        return _polynomial(value, {keys: count // by for keys, count in terms.items()})
    if terms == _terms(by):
        return 1
    return Symbol(value, f"(({_expression(number)}) // ({_expression(by)}))")


def _expression(number: int) -> str:
    if isinstance(number, Symbol):
        return number.expression
    return str(number)


class Kind:
    """The templates of one model type."""

    def __init__(self, model_type: str) -> None:
        self.cls = CONFIG_MAPPING[model_type]
        self.defaults: dict[str, Any] = {}
        for field in fields(self.cls):
            if field.init and not isinstance(field.default, (list, dict)):
                self.defaults[field.name] = None if field.default is MISSING else field.default
        aliases: dict[str, str] = {}  # other names of keys; in some classes the replaced name is a field itself
        for key, name in getattr(self.cls, "attribute_map", {}).items():
            if name in self.defaults:
                aliases[key] = name
            elif key in self.defaults:
                aliases[name] = key
        setting_names = sorted(name for name in self.defaults if not re.search(_HARMLESS, name))
        # Widths that are not fields: head_dim if the class reads it, intermediate_size if the class derives it.
        derived = {*vars(self.cls())}
        self.defaults |= dict.fromkeys(({"head_dim"} & {*_legacy(self.cls)}) - derived)
        self.defaults |= dict.fromkeys(({"intermediate_size"} & derived) - {*self.defaults})
        others = [field.name for field in fields(self.cls) if field.name not in self.defaults]
        self.data: dict[str, Any] = {
            "model_type": model_type,
            "transformers": transformers.__version__,
            "aliases": aliases,
            "legacy": _legacy(self.cls),
            "known": [*setting_names, *others],
            "defaults": {},
            "variants": [],
        }

    def own_names(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {self.data["aliases"].get(key, key): value for key, value in config.items() if key != "model_type"}

    def numbers(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Whole numbers of the configuration with defaults filled in."""
        numbers = {}
        for key, value in self.own_names(vars(self.cls.from_dict(dict(config)))).items():
            if type(value) is int and value >= 0 and key in self.defaults and not re.search(_HARMLESS, key):
                numbers[key] = value
        return numbers

    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        return read_class({"model_type": self.data["model_type"], **config}, "")

    def fill(self, config: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> ModelSpec | None:
        """The model of a configuration by this type's data, or by `data`; None: the templates do not cover it."""
        source = JsonObject(fields={"model_type": self.data["model_type"], **config}, where="catalogue")
        try:
            return fill(data or self.data, source, "")
        except (ZeroDivisionError, InputError):
            return None

    def shorten(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration with at most 20 layers, which the class reads faster."""
        numbers = self.numbers(config)
        config = self.own_names(config)
        for key in _LAYERS:
            count = numbers.get(key, 0)
            if count > _MOST_LAYERS:
                lists = {name: value[:_MOST_LAYERS] for name, value in config.items() if _has_length(value, count)}
                return {**config, **lists, key: _MOST_LAYERS}
        return config

    def add(self, config: Mapping[str, Any]) -> str:
        """Add a variant made from this configuration unless one covers it; return a description of the change."""
        config = self.own_names(config)
        if self.data["variants"] and self.fill(config) == self.read(config):
            return "covered"
        numbers = self.numbers(config)
        symbols = {key: Symbol(value, key) for key, value in numbers.items()}
        reads: set[str] = set()
        with (
            patch.object(self.cls, "__getattribute__", _recorder(self.cls.__getattribute__, reads)),
            patch.object(import_module(self.cls.__module__), "int", _Int, create=True),
            patch.object(_modeling(self.cls), "int", _Int, create=True),
        ):
            spec = self.read({**config, **symbols})
        self._derived_defaults(config, numbers)
        model = freeze(replace(spec, layers=()))["ModelSpec"]
        model.pop("layers")
        model.pop("name")
        variant: dict[str, Any] = {"fixed": self._fixed_values(config, reads, numbers), "model": model}
        variant["kinds"] = list(map(freeze, spec.layer_kinds))
        variant["order"] = self._order(config, spec, numbers)
        for key in variant["order"]["seen"]:
            variant["fixed"].pop(key, None)
        if variant["order"]["by"] and not isinstance(model["num_hidden_layers"], str):
            model["num_hidden_layers"] = None  # None: as many layers as the list has
        leading = [key for key in variant["order"]["first"] if isinstance(key, str)]
        variant["numbers"] = []
        for key in sorted({*_keys_of(variant), *leading}):
            self._require(key, variant["numbers"])
        for key in variant["numbers"]:
            self.data["defaults"].setdefault(key, self.defaults[key])
        self.data["variants"].append(variant)
        return self._prove(config, variant, [key for key in numbers if key in reads or key in variant["numbers"]])

    def _require(self, key: str, order: list[str]) -> None:
        """Append the key of a number after the keys from which its default follows."""
        default = self.data["defaults"].get(key)
        for other in sorted(_keys_of(default)):
            self._require(other, order)
        if key not in order:
            order.append(key)

    def _derived_defaults(self, config: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
        """Store expressions for numbers that the class derives from others where a file omits them."""
        given = dict(config)
        for key, value in numbers.items():
            given.pop(key, None)
            if isinstance(self.defaults[key], int):
                given[key] = Symbol(value, key)
        with patch.object(import_module(self.cls.__module__), "int", _Int, create=True):
            values = vars(self.cls.from_dict(given))
        for key in numbers:
            if not isinstance(self.defaults[key], int) and isinstance(values.get(key), Symbol):
                self.data["defaults"][key] = freeze(values[key])

    def _fixed_values(self, config: Mapping[str, Any], reads: set[str], numbers: Mapping[str, int]) -> dict[str, Any]:
        """Fields that a file must share with this variant: all that the class reads except numbers and layer lists."""
        values = vars(self.cls.from_dict(dict(config)))
        fixed = {}
        absent = {key for key, value in self.defaults.items() if value is None}
        for key in sorted((reads & set(self.defaults)) | absent | (set(config) - set(self.defaults))):
            value = config.get(key, self.defaults.get(key))
            if key in numbers or re.search(_HARMLESS, key) or key == "tie_word_embeddings" or len(str(value)) > 500:
                continue
            of_layers = isinstance(values.get(key), list) and len(values[key]) == values.get("num_hidden_layers")
            discarded = type(value) is int and values.get(key, value) is None  # the class drops an unused window
            if of_layers or discarded or value in ([], {}, ""):
                continue
            if isinstance(value, (bool, str, float, int, list, dict)) or value is None:
                fixed[key] = value
                self.data["defaults"].setdefault(key, self.defaults.get(key))
        return fixed

    def _order(self, config: Mapping[str, Any], spec: ModelSpec, numbers: Mapping[str, int]) -> dict[str, Any]:
        count = len(spec.layers)
        kinds = spec.layer_kind_index
        values: dict[str, list[str]] = {}
        every: list[dict[str, Any]] = []  # lists with one entry per layer: those of the class, then those of the file
        for source in (vars(self.cls.from_dict(dict(config))), dict(config)):
            lists = {}
            for key, value in self.own_names(source).items():
                if _has_length(value, count) and all(isinstance(entry, (str, int)) for entry in value):
                    lists[key] = value
                    values[key] = sorted({*values.get(key, ()), *map(str, value)})
            every.append(lists)
        by: list[str] = []
        table: dict[str, int] = {}
        varied = [key for key, value in every[0].items() if len({*map(str, value)}) > 1]
        choices: list[list[str]] = []
        if varied and len(set(kinds)) > 1:
            choices = [*([key] for key in varied), varied]
        for names in choices:
            pairs: list[tuple[str, int]] = []
            for lists in every:
                if {*names} <= {*lists}:
                    pairs += zip(_rows(lists, names), kinds, strict=True)
            table = dict(pairs)
            if all(table[key] == kind for key, kind in pairs):
                by = names
                break
        first: list[Any]
        first, cycle = _periodic(kinds)
        leading = [key for key in numbers if re.search("dense|max_window", key) and numbers[key] == len(first)]
        if first and len(set(first)) == 1 and leading and cycle:
            first = [first[0], leading[0]]
        if any(every[1]) and len(set(kinds)) > 1:
            first = list(kinds)
            cycle = []
        if not by:
            table = {}
        return {"seen": values, "by": by, "kinds": table, "first": first, "cycle": cycle}

    def _prove(self, config: Mapping[str, Any], variant: dict[str, Any], numbers: list[str]) -> str:
        """Compare the variant with the class for other numbers; fix the numbers for which they disagree."""
        free = self._free(config, variant, numbers)
        order = variant["order"]
        values = vars(self.cls.from_dict(dict(config)))
        if order["by"] and (free is None or ({*numbers} & {*_LAYERS}) - free):
            # no rule gives the kinds of more layers: files must list them
            order["first"] = [order["kinds"][key] for key in _rows(values, order["by"])]
            order["cycle"] = []
            config = {**config, **{key: values[key] for key in order["by"]}}
            free = self._free(config, variant, numbers)
        if free is None:
            free = self._follows(config, variant, [key for key in numbers if key not in _apart(numbers)])
        if free is None:
            alone = [key for key in numbers if self._follows(config, variant, [key]) is not None]
            free = self._follows(config, variant, alone) or set()
        return self._fix(config, variant, numbers, free)

    def _free(self, config: Mapping[str, Any], variant: dict[str, Any], numbers: list[str]) -> set[str] | None:
        """The numbers that may change: all, or all except numbers of the structure that may not change alone."""
        free = self._follows(config, variant, numbers)
        if free is None:
            fixed = [key for key in _apart(numbers) if self._follows(config, variant, [key]) is None]
            free = self._follows(config, variant, [key for key in numbers if key not in fixed])
        return free

    def _fix(self, config: Mapping[str, Any], variant: dict[str, Any], numbers: list[str], free: set[str]) -> str:
        passed_on = ("max_position_embeddings", "vocab_size")  # no width depends on these
        usual = self.numbers(config)
        fixed = {key for key in numbers if key not in free and key not in passed_on}
        if any(usual[key] > _MAX_LAYERS for key in fixed - _keys_of(variant)):  # the number may be the index of a layer
            fixed |= {key for key in numbers if key in _LAYERS}
        for key in fixed:
            if usual[key] or not config.get(key, self.defaults[key]):  # the class keeps the value
                variant["fixed"][key] = usual[key]
                self.data["defaults"].setdefault(key, self.defaults[key])
        if len(fixed) > len(free):
            self.data["variants"].remove(variant)
            return f"no template follows {', '.join(sorted(fixed))}"
        return f"free: {len(free)}; fixed: {', '.join(sorted(fixed))}"

    def _follows(self, config: Mapping[str, Any], variant: dict[str, Any], keys: list[str]) -> set[str] | None:
        """The keys whose numbers changed while template and class agreed; None: they disagreed for some numbers."""
        draw = random.Random(0)
        in_expressions = _keys_of(variant)
        # Keys that are in no expression may still determine the kinds of layers, such as the first layer with experts.
        structure = {key for key in keys if _STRUCTURE.search(key) or key not in (*in_expressions, *_LAYERS)}
        usual = self.numbers(config)
        changed = set[str]()
        passed = 0
        fixed = {key: usual[key] for key in usual if key not in keys and key in self.defaults}
        for key in fixed:
            self.data["defaults"].setdefault(key, self.defaults[key])
        changing = {**variant, "fixed": variant["fixed"] | fixed}
        others = [other for other in self.data["variants"] if other is not variant]
        proven = {**self.data, "variants": [*others, changing]}
        layers = ""  # key of the number of layers
        count = len(config.get("".join(variant["order"]["by"][:1]), ()))
        for key in reversed(_LAYERS):
            if key in usual:
                layers = key
                count = usual[key]
        lists = [name for name, value in config.items() if _has_length(value, count)]
        derived = {key for key in keys if str(self.data["defaults"].get(key)).startswith("=")}
        for numbers in _numbers({key: usual[key] for key in keys}, structure, changed, draw):
            if derived and passed % 3 == 1:  # omit numbers that the class derives
                numbers = {key: value for key, value in numbers.items() if key not in derived}
            other: dict[str, Any] = fixed | numbers
            if layers in keys or not layers:
                count = draw.randint(8, _MAX_LAYERS)
                other |= {name: (config[name] * count)[:count] for name in lists}
                if layers:
                    other[layers] = count
            try:
                spec = self.read({**config, **other})
            except Exception:  # the class does not accept these numbers
                continue
            if self.fill({**config, **other}, proven) != spec:
                return None
            passed += 1
            changed |= {key for key in keys if other.get(key, usual[key]) != usual[key]}
            if passed > 1 and len(changed) == len(keys):
                break
        return changed


def _numbers(
    usual: Mapping[str, int], structure: Set[str], changed: Set[str], draw: random.Random
) -> Iterator[dict[str, int]]:
    """Yield numbers to try: first all numbers times random factors, then each unchanged number times two.

    Together with the doubled number, another one is halved or doubled, because a class may refuse the first change.
    """
    for attempt in range(24):
        choices = ((2,), (1,) * 9 + (2,), (1, 2), (1,) * 9 + (3,), (1, 1, 2, 3), (1, 1, 1, 2))[attempt % 6]
        numbers = {key: value * draw.choice(choices) for key, value in usual.items()}
        yield numbers | {key: draw.choice((1, 2, 3, 5)) for key in usual if key in structure}
    for key, other, factor in product(usual, usual, (0.5, 2)):
        if key not in changed:
            yield {**usual, key: 2 * usual[key]} | {other: int(usual[other] * factor)}


def _apart(numbers: Iterable[str]) -> list[str]:
    """Numbers that determine the kinds of layers."""
    return [key for key in numbers if _STRUCTURE.search(key) or key in _LAYERS]


def _modeling(cls: type) -> ModuleType:
    return import_module(cls.__module__.replace("configuration_", "modeling_"))


def _legacy(cls: type[Any]) -> list[str]:
    """Keys that a class reads in addition to its fields, such as keys of older files."""
    keys = re.findall(r"kwargs\.(?:pop|get)\(\"(\w+)\"", inspect.getsource(cls))
    keys += re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", inspect.getsource(_modeling(cls)))
    return sorted({*keys} - {field.name for field in fields(cls)})


def _recorder(original: Callable[[object, str], object], reads: set[str]) -> Callable[[object, str], object]:
    def read(self: object, name: str) -> object:
        reads.add(name)
        return original(self, name)

    return read


def _keys_of(data: object) -> set[str]:
    """Keys in the expressions of a variant or of a default."""
    expressions = re.findall(r'"=([^"]*)"', json.dumps(data))
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(expressions)))


def _has_length(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _rows(lists: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """For each layer its entries in these lists, joined to one text: a key of a variant's kinds."""
    return ["|".join(map(str, row)) for row in zip(*(lists[name] for name in names), strict=True)]


def _periodic(kinds: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The shortest start and cycle that reproduce the kinds of all layers, with at least two cycles."""
    sizes = []
    for size in range(1, len(kinds) // 2 + 1):
        sizes += [(start, size) for start in range(len(kinds) - 2 * size + 1)]
    for start, size in sorted(sizes, key=sum):
        if kinds[start + size :] == kinds[start:-size]:
            return list(kinds[:start]), list(kinds[start : start + size])
    return list(kinds), []


def required_values(model_type: str) -> dict[str, Any]:
    """Values that a class needs but its default configuration lacks; they are those of a published model."""
    return dict(SHAPES["types"].get(model_type, [{}])[0])


def configurations(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Configurations in a folder, by transformers' name of the model type."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        text, _ = read_text_part(JsonObject.read(path, "model"))
        plain = translate(text)
        by_type.setdefault(plain.text("model_type"), []).append(dict(plain.fields))
    return by_type


def main() -> None:
    """Write all lines of kvrsim/data/types.jsonl, or those of the types named on the command line."""
    transformers.logging.set_verbosity_error()
    lines = dict(template_lines())
    files = configurations(TYPES_FILE.parent / "models")
    types = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *files, *SHAPES["types"]})
    for name in sys.argv[1:] or types:
        if name not in CONFIG_MAPPING:
            continue  # type by hand
        try:
            if CONFIG_MAPPING[name]().get_text_config(decoder=True).model_type != name:
                continue  # type of a model with several parts: files have the type of the text part
            kind = Kind(name)
            usual = required_values(name)
        except Exception as error:  # no usable defaults, or classes of another type
            print(f"{name}: {type(error).__name__} {error}", flush=True)
            continue
        switches = [usual | switch for switch in SHAPES["switches"] if {*switch} <= {*kind.defaults}]
        shapes = [usual | shape for shape in SHAPES["types"].get(name, [])[1:]]
        for config in (usual, *files.get(name, []), *shapes, *switches):
            try:
                short = kind.shorten(config)
                print(f"{name}: {kind.add(short)}", flush=True)
                if short != kind.own_names(config) and kind.fill(config) is None:
                    print(f"{name}: {kind.add(config)}", flush=True)
            except Exception as error:  # any exception of transformers for a value that the type does not allow
                print(f"{name}: {type(error).__name__} {error}", flush=True)
        if kind.data["variants"]:
            lines[name] = json.dumps(kind.data, separators=(",", ":"))
            text = "".join(f"{lines[name]}\n" for name in sorted(lines))
            write_atomically(TYPES_FILE, text.encode(), argument="types")


if __name__ == "__main__":
    main()
