"""Quantised models: the `quantization_config` of a config.json, and the format of each matrix.

A method stores some matrices in fewer bits, with a scale for each group of weights. Some methods also quantise the
inputs of a product and compute the product in that type (FP8, INT8, NVFP4). Others quantise only the weights, and the
kernel converts them back to half precision (AWQ, GPTQ, MXFP4, bitsandbytes: "weight only"). Attention, norms and the
residual stream stay in half precision.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject, parse_json
from kvrsim.model.gemm import FP8, FP8_ON_REQUEST, Gemm, Quantization, WeightFormat
from kvrsim.model.mixers import with_matrices
from kvrsim.model.spec import ModelSpec


@cache
def _table() -> dict[str, Any]:
    """Read kvrsim/data/quantization.json: methods, and the names of layers and modules in checkpoints."""
    table: dict[str, Any] = parse_json((Path(__file__).parents[1] / "data" / "quantization.json").read_bytes())
    return table


_HEAD = "lm_head"
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|backbone)\.)+(?=layers\.|lm_head$)")
# Regular expressions can take very long if they repeat groups or have many repetitions; names of modules need neither.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"(?<!\\)[*+{]")
_MAX_REPETITIONS = 4
_MAX_NAMES = 100_000
_MAX_NAME_LENGTH = 500
# Keys of lists of modules that are not quantised
_SKIPPED = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "llm_int8_skip_modules",
    "skip_modules",
    "exclude",
)
_WEIGHT_ONLY = ("int4_wo", "int8_wo")  # types of products of weights with up to 4 bits, and with more
_MIXED = "MIXED_PRECISION"
_EXPERT = re.compile(r"(?<=\.experts)\.\d+\..*$")  # number and matrix of an expert, after the folder of experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """Names of modules, as in the lists of a quantization_config."""

    names: frozenset[str]  # parts of dotted names
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> Modules:
        """Match parts of dotted names with * as wildcard, or, after "re:", the start of names by a regular expression.

        Raises re.error for an invalid regular expression, or for one that repeats a group.
        """
        plain: list[str] = []
        patterns: list[re.Pattern[str]] = []
        for name in names:
            if name.startswith("re:") or "*" in name:
                patterns.append(_pattern(name))
            else:
                plain.append(in_text_model(name.strip(".")))
        return cls(names=frozenset(plain), patterns=tuple(patterns))

    def hold(self, path: str) -> bool:
        """Whether the list contains a module's dotted name or the name of a module that contains it."""
        if self.names:
            parts = path.split(".")
            for first in range(len(parts)):
                for last in range(first + 1, len(parts) + 1):
                    if ".".join(parts[first:last]) in self.names:
                        return True
        return any(pattern.match(path) for pattern in self.patterns)


def in_text_model(name: str) -> str:
    """A module's name without a checkpoint's prefix of layers, such as "model.language_model."."""
    return _BEFORE_LAYERS.sub("", name)


def _pattern(name: str) -> re.Pattern[str]:
    if not name.startswith("re:"):
        name = in_text_model(name.strip("."))
        globs = (name, f"{name}.*", f"*.{name}", f"*.{name}.*")  # the module itself, and its parts
        return re.compile("|".join(map(fnmatch.translate, globs)))
    if _REPEATED_GROUP.search(name) or len(_REPETITION.findall(name)) > _MAX_REPETITIONS:
        raise re.error("too many repetitions")
    return re.compile(name[3:])


# Published weights and engines keep these in half precision, although no file lists them: weights of an indexer's
# heads, DeepSeek-V4's compressors, and Kimi K3's projections to the latent of its experts and back.
_KEPT = Modules.named(["weights_proj", "compressor", "routed_expert_down_proj", "routed_expert_up_proj"])
_HEADS = Modules.named([_HEAD])
_EXPERTS = Modules.named(["experts"])


def quantized(
    model: ModelSpec, quantization: Quantization, format_of: Callable[[str], WeightFormat | None]
) -> ModelSpec:
    """The model with quantised weights.

    format_of: format of a matrix by its name in the checkpoint, such as "model.layers.0.mlp.up_proj"; one expert stands
    for all experts of a layer. None: the matrix is unchanged. Routers, gates of one feature, a head that is the
    embedding and _KEPT are always unchanged.
    """
    prefix = _table()["layers"].get(model.model_type, "model.layers")
    renamed: dict[str, str] = _table()["names"].get(model.model_type, {})

    @cache
    def place(name: str) -> str:
        """The name in the checkpoint of a matrix, by transformers' name."""
        for transformers_name, checkpoint_name in renamed.items():
            name = name.replace(transformers_name, checkpoint_name)
        return name

    def store(number: int, gemm: Gemm) -> Gemm:
        if gemm.out_features == 1 or _KEPT.hold(gemm.name):
            return gemm
        return replace(gemm, weights=format_of(f"{prefix}.{number}.{place(gemm.name)}"))

    layers = tuple(
        replace(with_matrices(layer, partial(store, number)), router=layer.router)
        for number, layer in enumerate(model.layers)
    )
    head_format = None
    if not model.tie_word_embeddings:
        head_format = format_of(_HEAD)
    lm_head = replace(model.lm_head, weights=head_format)
    return replace(model, layers=layers, lm_head=lm_head, quantization=quantization)


def in_fp8(model: ModelSpec) -> ModelSpec:
    """The model with all products of its layers in FP8, as engines do when they quantise a loaded model."""
    return quantized(model, FP8_ON_REQUEST, lambda path: None if path == _HEAD else FP8)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """The format of some matrices; the first rule that applies to a matrix is used."""

    weights: WeightFormat | None  # None: the request's dtype
    only: Modules | None = None  # None: all linear layers
    head: bool = True  # whether the rule also applies to the head

    def holds(self, path: str) -> bool:
        return (self.only is None or self.only.hold(path)) and (self.head or not _HEADS.hold(path))


def read_quantization(config: JsonObject, model: ModelSpec) -> ModelSpec:
    """The model with quantised weights as its file defines them; unchanged without a quantization_config."""
    key = config.first_of("quantization_config", "compression_config")  # old name in compressed-tensors
    if not config.fields.get(key):
        return model
    outer = config.child(key)
    data = outer
    if isinstance(outer.fields.get("quantization"), dict):
        data = outer.child("quantization")
    method = outer.fields.get("quant_method")
    if isinstance(method, str) and method.isprintable() and method.strip():
        method = method.strip()[:40]
    elif data.has("quant_algo"):  # a file with an algorithm alone is NVIDIA ModelOpt's
        method = "modelopt"
    else:
        method = "method not named"
    short = method.lower().replace("-", "_").split("/")[-1].removesuffix("_marlin")
    methods = sorted({"compressed_tensors", *_table()["methods"]} - {"integers"})
    if short not in methods:
        raise InputError(f"{outer.where}: {outer.key_path}quant_method", method, ", ".join(methods))
    layers = _named_layers(data)
    # In an FP8 model whose experts are quantised a second time, the first list ("ignore") applies only to this step.
    skipped: tuple[str, ...] = _SKIPPED
    if layers and short == "fp8":
        skipped = _SKIPPED[1:]
    rules = _exceptions(data)
    rules += [_Rule(weights=None, only=_modules(data, key)) for key in skipped]
    rules += layers
    if config.text("expert_dtype", "").lower() == "fp4":  # DeepSeek-V4: experts computed in FP8, 8-bit exponents
        narrow = WeightFormat(compute="fp8_block", bits=4, scale_bits=8, group_inputs=32)
        rules.append(_Rule(weights=narrow, only=_EXPERTS, head=False))
    rules += _rules(short, data)
    quantization = Quantization(
        method=method,
        formats=tuple(dict.fromkeys(rule.weights for rule in rules if rule.weights is not None)),
        kv_cache_bits=_kv_cache_bits(data),
    )

    def format_of(path: str) -> WeightFormat | None:
        for rule in rules:
            if rule.holds(path):
                return rule.weights
        return None

    return quantized(model, quantization, format_of)


def suffix_of(name: str) -> str | None:
    """The suffix of a checkpoint's name that names a quantisation, such as "fp8-dynamic"; None if there is none.

    name: a Hugging Face id or its last part, in lower case.
    """
    suffixes = [suffix for entry in _table()["checkpoints"] for suffix in entry["suffixes"]]
    return max((suffix for suffix in suffixes if name.endswith(f"-{suffix}")), key=len, default=None)


def quantized_by_name(model: ModelSpec, author: str, suffix: str) -> ModelSpec:
    """The model with the quantisation that checkpoints of this author with this suffix have, and a note on it."""
    entries = [entry for entry in _table()["checkpoints"] if suffix in entry["suffixes"]]
    entry = next(entry for entry in entries if author in entry.get("authors", (author,)))
    fields = entry["config"]
    if any(layer.num_experts for layer in model.layer_kinds):
        fields = entry.get("mixtures", fields)
    config = JsonObject(fields={"quantization_config": fields}, where=f"quantization.json {suffix}")
    kept = "its config.json may keep more matrices in half precision"
    note = f"the quantisation is that of the name's suffix, {suffix}; {kept}"
    return replace(read_quantization(config, model), approximations=(*model.approximations, note))


def _modules(data: JsonObject, key: str, names: Sequence[Any] | None = None) -> Modules:
    """The modules of a list of names: the file's list at this key, or `names`."""
    if names is None:
        names = data.sequence(key)
    try:
        if len(names) <= _MAX_NAMES and all(_is_name(name) for name in names):
            return Modules.named(names)
    except re.error:
        pass
    raise data.error(key, "an array of names of modules; after re: a regular expression")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_NAME_LENGTH


def _kv_cache_bits(data: JsonObject) -> int | None:
    """Bits of a quantised KV cache; None if the cache is not quantised."""
    if isinstance(data.fields.get("kv_cache_scheme"), dict):
        return data.child("kv_cache_scheme").integer("num_bits", 8, minimum=2, maximum=16)
    algorithm = data.text(data.first_of("kv_cache_quant_algo", "kv_cache_scheme"), "none").upper()
    return {"FP8": 8, "INT8": 8, "NVFP4": 4}.get(algorithm)


# Rules


def _children(data: JsonObject, key: str) -> dict[str, JsonObject]:
    """The objects inside the object at a key, by name; an absent or null object is empty."""
    outer = _child(data, key)
    return {name: _child(outer, name) for name in outer.fields}


def _child(data: JsonObject, key: str) -> JsonObject:
    """The object at a key; an absent or null object is empty."""
    if data.has(key):
        return data.child(key)
    return data.inner({}, key)


def _exceptions(data: JsonObject) -> list[_Rule]:
    """Modules with a format of their own: by patterns (GPTQModel's `dynamic`) or names (AutoRound's `extra_config`)."""
    rules = []
    for key in ("dynamic", "extra_config"):
        for name, entry in _children(data, key).items():
            is_name = key == "extra_config" and not re.search(r"[*+\\^$]", name)
            pattern = name
            if not is_name:
                pattern = f"re:{name.removeprefix('+:').removeprefix('-:')}"
            weights = None
            is_quantised = not name.startswith("-:") and entry.fields.get("bits") != 16
            if is_quantised:
                merged = replace(data, fields={**data.fields, **entry.fields}, key_path=f"{data.key_path}{key}.")
                weights = _format(_table()["methods"]["integers"], merged)
            rules.append(_Rule(weights=weights, only=_modules(data, f"{key}.{name}", [pattern])))
    return rules


def _named_layers(data: JsonObject) -> list[_Rule]:
    """Formats of modules in quantized_layers (mixed precision); all experts have the format of their folder."""
    if data.text("quant_algo", "none").upper() != _MIXED:
        return []
    formats: dict[str, WeightFormat | None] = {}  # format by distinct entry: modules have few of them
    groups: dict[tuple[int, WeightFormat], list[str]] = {}  # names by depth and format
    for name, entry in _children(data, "quantized_layers").items():
        text = repr(entry.fields)
        if text not in formats:
            formats[text] = _format(_table()["methods"]["modelopt"], entry, optional=True)
        weights = formats[text]
        if weights is not None:
            place = _EXPERT.sub("", in_text_model(name))
            groups.setdefault((place.count("."), weights), []).append(place)
    ordered = sorted(groups.items(), key=lambda group: -group[0][0])  # inner modules come first
    return [_Rule(weights=weights, only=Modules.named(names)) for (_, weights), names in ordered]


def _group_rules(data: JsonObject) -> list[_Rule]:
    """The formats of the groups of compressed-tensors, each with its modules."""
    rules = []
    for group in _children(data, "config_groups").values():
        if not group.has("weights"):
            continue
        targets = group.sequence("targets") or ["Linear"]
        modules = None
        if "Linear" not in targets:  # Linear: all modules and the head
            modules = _modules(group, "targets")
        rules.append(_Rule(weights=_of_group(group), only=modules))
    return rules


def _rules(method: str, data: JsonObject) -> list[_Rule]:
    """The formats of a method, each with the modules that have it."""
    entry = _table()["methods"].get(method, {})
    if isinstance(entry, str):
        return _rules(entry, data)
    algorithm = data.text("quant_algo", "none")
    names_algorithm = algorithm.lower() in entry.get("formats", ()) or algorithm.upper() == _MIXED
    is_grouped = data.has("config_groups") and not names_algorithm
    if method == "compressed_tensors" or (method == "modelopt" and is_grouped):
        return _group_rules(data)
    rules = []
    if method == "quark":
        if data.fields.get("layer_type_quant_config"):
            raise data.error("layer_type_quant_config", "nothing: formats by names of layers")
        for name, layer in _children(data, "layer_quant_config").items():
            modules = _modules(data, f"layer_quant_config.{name}", [name])
            rules.append(_Rule(weights=_format(entry, layer), only=modules, head=False))
        data = data.child("global_quant_config")
    weights = _format(entry, data, optional=method == "modelopt")
    only = Modules.named(entry["only"]) if "only" in entry else None
    head = "head" in entry and data.flag(entry["head"], False)
    return [*rules, _Rule(weights=weights, only=only, head=head)]


# Formats


def _format(entry: Mapping[str, Any], data: JsonObject, *, optional: bool = False) -> WeightFormat | None:
    """The format that an entry of the table defines for the keys of a file.

    Raises InputError for a value that is not in the table; returns None instead if `optional`.
    """
    for key in entry.get("at", ()):
        if isinstance(data.fields.get(key), dict):
            data = data.child(key)
    for key, value in entry.get("exact", {}).items():
        if data.integer(key, value) != value:
            raise data.error(key, str(value))
    if data.sequence(entry.get("blocks", "")):
        return _block_format(data, entry["blocks"])
    if "by" in entry:
        formats = entry["formats"]
        places = [_place(data, path) for path in entry["by"]]
        inner, key = next((place for place in places if place[0].has(place[1])), places[0])
        value = entry.get("else")
        if inner.has(key):
            value = inner.fields.get(key)
        choice = formats.get(str(value).lower(), formats.get("*"))
        if choice is None and not optional:
            raise inner.error(key, ", ".join(formats))
        if isinstance(choice, str):  # the name of a value with the same format
            choice = formats[choice]
        if choice is None:
            return None
        return _format(choice, data)
    bits = _number(entry["bits"], data, minimum=2, maximum=8)
    group = _number(entry.get("group_inputs"), data, minimum=-1)
    if not group or group < 0:  # one scale for all inputs
        group = None
    compute = entry["compute"]
    if compute == "weight_only":
        compute = _WEIGHT_ONLY[bits > 4]
    scale = entry["scale_bits"]
    if isinstance(scale, str):  # bits of the scale, as text: a zero point of the weights' bits is added
        scale = int(scale) + bits
    return WeightFormat(
        compute=compute, bits=bits, scale_bits=scale, group_outputs=entry.get("group_outputs", 1), group_inputs=group
    )


def _place(data: JsonObject, path: str) -> tuple[JsonObject, str]:
    """The object and the key that a path with dots leads to; an absent object has no keys."""
    *outer, key = path.split(".")
    for name in outer:
        inside = data.fields.get(name)
        if not isinstance(inside, dict):
            inside = {}
        data = data.inner(inside, name)
    return data, key


def _number(entry: Any, data: JsonObject, **limits: int) -> Any:
    """A number from the table, or from the first of its keys that the file has; -1 means all."""
    if not isinstance(entry, list):
        return entry
    *keys, default = entry
    return data.integer(data.first_of(*keys), default, **limits)


def _block_format(data: JsonObject, key: str) -> WeightFormat:
    sizes = data.sequence(key)
    if len(sizes) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise data.error(key, "an array of two whole numbers above 0")
    return WeightFormat(compute="fp8_block", bits=8, scale_bits=32, group_outputs=sizes[0], group_inputs=sizes[1])


def _of_group(group: JsonObject) -> WeightFormat:
    """The format of a group of compressed-tensors, by its weights and the inputs of its products."""
    data = group.child("weights")
    bits = data.integer("num_bits", 8, minimum=2, maximum=8)
    strategy = data.text("strategy", "")
    floats = data.text("type", "int") == "float"
    inputs = "float16"
    if group.has("input_activations"):
        data_in = group.child("input_activations")
        inputs = f"{data_in.text('type', 'int')}{data_in.integer('num_bits', 8, minimum=2, maximum=16)}"
    if strategy == "block" and floats and bits == 8:
        return _block_format(data, "block_structure")
    size = max(0, data.integer("group_size", -1, minimum=-1)) or None
    if floats and bits == 4 and size == 32:  # MXFP4: an 8-bit exponent per 32 weights
        return WeightFormat(compute="mxfp4_wo", bits=4, scale_bits=8, group_inputs=32)
    if floats and bits == 4:
        compute = {"float4": "nvfp4", "float8": "fp8"}.get(inputs, "int4_wo")
        return WeightFormat(compute=compute, bits=4, scale_bits=8, group_inputs=size or 16)
    return WeightFormat(
        compute={"float8": "fp8", "int8": "int8"}.get(inputs, _WEIGHT_ONLY[bits > 4]),
        bits=bits,
        scale_bits=16 if data.flag("symmetric", True) else 16 + bits,
        group_outputs=None if strategy == "tensor" else 1,
        group_inputs=size,
    )
