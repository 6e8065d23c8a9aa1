"""Model types as data.

kvrsim/data/types.jsonl has a line per type, its template: the sizes of its layers are expressions in the keys of a
configuration, such as num_attention_heads * head_dim. calibrate/catalogue.py writes them from transformers' classes.
`fill` evaluates them with the numbers of a config.json, without torch. kvrsim/data/remote_types.json has the types that
are read as another type with the same layers: `translate` renames their keys, `adapt` adds their own parts to the
model.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject, parse_json
from kvrsim.model.gemm import Gemm, Quantization, WeightFormat
from kvrsim.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec

_DATA = Path(__file__).parents[1] / "data"
TYPES_FILE = _DATA / "types.jsonl"
_LINE_START = '{"model_type":"'
MAX_LAYERS = 1000
MAX_WIDTH = 2**31
_NOT_SHAPES = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype", "architectures")
# Names of numbers that may be 0. Patterns here are compiled on first use, by models that are read from a file.
_MAY_BE_0 = "dense|shared|offset"
# Classes of which a template makes values
_TEMPLATE_CLASSES = (
    ModelSpec,
    LayerSpec,
    Gemm,
    Quantization,
    WeightFormat,
    Attention,
    LatentAttention,
    CompressedAttention,
    Recurrence,
    Indexer,
)
_CLASSES: dict[str, Any] = {value_class.__name__: value_class for value_class in _TEMPLATE_CLASSES}
# Parts of expressions that are evaluated
_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Name,
    ast.Load,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.USub,
)


def freeze(value: object) -> Any:
    """A value of the model as JSON: {"Gemm": {...}} without defaults; a symbol becomes its expression after "="."""
    if is_dataclass(value):
        content: dict[str, Any] = {}
        for field in fields(value):
            entry = getattr(value, field.name)
            if field.init and (field.default is MISSING or entry != field.default):
                content[field.name] = freeze(entry)
        return {type(value).__name__: content}
    if isinstance(value, (tuple, list)):
        return [freeze(entry) for entry in value]
    if hasattr(value, "expression"):  # a Symbol of calibrate/catalogue.py
        return f"={value.expression}"
    return value


def thaw(data: object, numbers: Mapping[str, int]) -> Any:
    """Compute the value from JSON, with `numbers` in its expressions. Raises ZeroDivisionError or KeyError."""
    if isinstance(data, dict):
        ((name, content),) = data.items()
        arguments = {key: thaw(value, numbers) for key, value in content.items()}
        return _CLASSES[name](**arguments)
    if isinstance(data, list):
        return tuple(thaw(entry, numbers) for entry in data)
    if isinstance(data, str) and data.startswith("="):
        return evaluate(data[1:], numbers)
    return data


def evaluate(expression: str, numbers: Mapping[str, int]) -> int:
    """Compute a whole number. Raises InputError for an expression with anything but names, numbers and arithmetic."""
    return int(eval(_code(expression), {"__builtins__": {}}, dict(numbers)))


@cache
def _code(expression: str) -> CodeType:
    accepted = "names, whole numbers, +, -, *, // and brackets"
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise InputError("expression of a model", expression, accepted) from None
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        if not is_number and not isinstance(node, _ARITHMETIC):
            raise InputError("expression of a model", expression, accepted)
    return compile(tree, "<template>", "eval")


# Keys that do not affect shapes: numbers of tokens, rates of dropout, scales, names.
_HARMLESS = (
    r"^_|_token_ids?$|_token_ind(ex|ices)$|^n_special|drop|_eps$|epsilon|initializer|init_std|^rope_|rotary|theta|dtype"
    r"|^transformers_version$|^architectures$|^auto_map$|^use_cache$|^output_|pretraining|quantization|compression"
    r"|(^|_)act(ivation)?(_|$)|_name|^name|aux|scal|topk_method|scoring|norm_topk|nextn|mtp|^ep_size$|temperature"
    r"|(embedding|residual|attention|logits?|head|key|_in|_out|ssm)_multiplier|^mlp_multipliers$|seq_len(gth)?$"
    r"|softcap|^id2label$|^label2id$|^task|^summary|^problem|return_|^n_ctx$|^chunk_size_feed|^n_group$|topk_group"
    r"|^is_decoder$|^model_type$|^is_encoder_decoder$|version$|logits?_|^cross_attention_hidden|^prefix$|bias_update"
    r"|slow_but|^finetuning|^prune|^tf_|beam|penalty|vision|audio|jitter|image|video|mrope|swiglu_limit|_clip"
    r"|^time_step_(limit|min|max|floor)|overlap|^mup_enabled$"
)
# Keys that give the number of parts of a model. A type that is read as another type may have only those keys that are
# known.
_COUNTS = (
    r"expert|layers?(_|$)(?!.*norm)|_heads?$|_rank$|conv|sparse|latent|share|window|^(num|n)_|loop|recur|_(dim|size)$"
    r"|^index_|mamba|^ssm_|lora_|linear_attn|_d_(state|conv)$|_expand$|moe_top"
)


# Widths that classes derive from others: a file that states one of them is read without it if the expression is 0.
_DERIVED_WIDTHS = (
    ("head_dim", "head_dim * num_attention_heads - hidden_size"),
    ("head_dim", "head_dim - qk_rope_head_dim"),
    ("qk_head_dim", "qk_head_dim - qk_nope_head_dim - qk_rope_head_dim"),
)


def fill(kind: Mapping[str, Any], config: JsonObject, name: str, *, own: bool = True) -> ModelSpec | None:
    """The model of a config.json by the data of its type; None if the data do not cover its structure.

    own: the data are those of the file's own type. Otherwise an unknown key that gives a number of parts raises
    InputError.
    """
    fields, shapes = _fields_of(kind, config)
    aliases = kind["aliases"]
    nulls: set[str] = set()  # keys whose value the file leaves open
    for key, value in config.fields.items():
        if value is None:
            nulls.add(aliases.get(key, key))
    nulls -= fields.keys()
    config = replace(config, fields=fields)
    for variant in kind["variants"]:
        if _not_covered(kind, variant, fields, shapes):
            continue
        model = _fill(kind["defaults"], variant, nulls, config, name)
        if model is not None:
            return model
    known = {*kind["known"], *kind.get("legacy", ())}
    for variant in kind["variants"]:
        known.update(variant["fixed"])
    unknown = sorted(key for key in shapes - known if is_size(key))
    if unknown and not own:
        accepted = f"nothing: the layers are read as those of {kind['model_type']}, which lacks it"
        raise config.error(unknown[0], accepted)
    return None


def is_size(key: str) -> bool:
    """Whether a key gives a number of parts or a width, by its name."""
    return re.search(_HARMLESS, key) is None and re.search(_COUNTS, key) is not None


def keys_at_fault(kind: Mapping[str, Any], config: JsonObject) -> list[str]:
    """Keys, as the file spells them, because of which the data of a type do not cover it; those of the nearest variant.

    Empty if no single key is at fault.
    """
    fields, shapes = _fields_of(kind, config)
    faults: list[list[str]] = []
    for variant in kind["variants"]:
        keys = _not_covered(kind, variant, fields, shapes)
        if not keys:  # a value that every file of this variant has
            values = {**kind["defaults"], **fields}
            keys = {key for key, value in variant["fixed"].items() if key in fields and values[key] != value}
        faults.append(sorted(keys))
    spelling = {kind["aliases"].get(key, key): key for key in config.fields}
    return [spelling.get(key, key) for key in min(faults, key=len, default=[])]


def _fields_of(kind: Mapping[str, Any], config: JsonObject) -> tuple[dict[str, Any], set[str]]:
    """The values of a file under the type's own keys, without null; and those keys that may affect shapes."""
    aliases = kind["aliases"]
    numbers: set[str] = set()
    for variant in kind["variants"]:
        numbers.update(variant["numbers"])
    fields = {aliases.get(key, key): value for key, value in config.fields.items() if value is not None}
    fields = {key: value for key, value in fields.items() if value not in ([], {}) or key in numbers}
    integers = {key: value for key, value in fields.items() if isinstance(value, int)}
    for key, difference in _DERIVED_WIDTHS:
        if key in kind["known"]:
            continue
        operands = set(re.findall(r"\w+", difference))
        if operands <= integers.keys() and evaluate(difference, integers) == 0:
            fields.pop(key, None)
    shapes = {key for key, value in fields.items() if value and not re.search(_HARMLESS, key)}
    return fields, shapes


def _not_covered(
    kind: Mapping[str, Any], variant: Mapping[str, Any], fields: Mapping[str, Any], shapes: set[str]
) -> set[str]:
    """Return the keys of a config.json that a variant neither reads nor knows to be harmless.

    A list or an object must be one that the variant expects, or must define the kinds of layers.
    """
    keys = {*kind["known"], *variant["fixed"], *variant["numbers"]}
    unread = {key for key in shapes & keys if isinstance(fields[key], list | dict)}
    unread -= {*variant["order"]["seen"], *variant["fixed"], *variant["numbers"]}
    legacy = {*kind.get("legacy", ())}
    return unread | {key for key in shapes - keys if key in legacy or re.search(_COUNTS, key)}


def _fill(
    defaults: Mapping[str, Any], variant: Mapping[str, Any], nulls: set[str], config: JsonObject, name: str
) -> ModelSpec | None:
    fields = config.fields
    fixed = variant["fixed"]
    derived = {key: value[1:] for key, value in defaults.items() if isinstance(value, str) and value[:1] == "="}
    absent = nulls - {*derived}
    values = {**defaults, **dict.fromkeys(absent, None), **fields}
    for key in (*fixed, "tie_word_embeddings"):
        if isinstance(defaults.get(key, False), bool) and fields.get(key) is not None:
            config.flag(key, False)
    if any(values.get(key) != value for key, value in fixed.items()):
        return None
    numbers: dict[str, int] = {}
    for key in variant["numbers"]:
        default: Any = None
        if key in derived and key not in fields:
            default = _evaluate(derived[key], numbers, config)
        elif key not in absent:
            default = defaults.get(key)
        if not isinstance(default, int):
            default = None
        if key not in fields and default is None:
            return None
        minimum = 0 if re.search(_MAY_BE_0, key) else 1
        numbers[key] = config.integer(key, default, minimum=minimum, maximum=MAX_WIDTH)
    layers = _layers(variant, config, numbers)
    if layers is None:
        return None
    without_layers = {"name": name, "num_hidden_layers": len(layers), "layers": []}
    model: ModelSpec = thaw({"ModelSpec": variant["model"] | without_layers}, numbers)
    tied = bool(fields.get("tie_word_embeddings", model.tie_word_embeddings))
    return replace(model, layers=tuple(layers), tie_word_embeddings=tied)


def _evaluate(expression: str, numbers: Mapping[str, int], config: JsonObject) -> int:
    """The default of a number that the file leaves out; InputError for a quotient that is not whole."""
    quotient = re.fullmatch(r"\(\((\w+)\) // \((\w+)\)\)", expression)
    if quotient:
        dividend, divisor = quotient.groups()
        if numbers[dividend] % numbers[divisor]:
            raise config.error(divisor, f"a divisor of {dividend}, {numbers[dividend]}")
    return evaluate(expression, numbers)


def _layers(variant: Mapping[str, Any], config: JsonObject, numbers: Mapping[str, int]) -> list[LayerSpec] | None:
    """The layers in order; None if their kinds are unknown. Raises InputError for lists of a wrong length."""
    order = variant["order"]
    count = thaw(variant["model"]["num_hidden_layers"], numbers)
    if count is None:  # without a count, the length of a list is the number of layers
        count = len(config.sequence(order["by"][0]) or order["first"])
    for key in order["seen"]:
        if len(config.sequence(key)) not in (0, count):
            raise config.error(key, f"an array of {count}, an entry per layer")
    if count > MAX_LAYERS:
        return None
    kinds = _order(order, config.fields, numbers, count)
    if kinds is None:
        return None
    layer_of_kind = [thaw(kind, numbers) for kind in variant["kinds"]]
    for layer in layer_of_kind:
        _check(layer, config)
        for gemm in (*layer.matrices, *layer.mlp):
            if gemm.out_features * gemm.in_features == 0:
                return None
    return [layer_of_kind[kind] for kind in kinds]


def _check(kind: LayerSpec, config: JsonObject) -> None:
    """Raise InputError for inconsistent numbers."""
    mixer = kind.mixer
    if mixer is not None and mixer.num_attention_heads % mixer.num_key_value_heads:
        if isinstance(mixer, Recurrence):
            key = config.first_of("linear_num_key_heads", "n_groups")
        else:
            key = config.first_of("num_key_value_heads", "num_kv_heads")
        raise config.error(key, f"a divisor of the {mixer.num_attention_heads} heads")
    if kind.num_experts_per_tok > kind.num_experts:
        key = config.first_of("num_experts_per_tok", "top_k_experts", "moe_top_k")
        raise config.error(key, f"a whole number from 1 to {kind.num_experts}")


def _order(
    order: Mapping[str, Any], fields: Mapping[str, Any], numbers: Mapping[str, int], count: int
) -> list[int] | None:
    """The kind of each layer, from lists in the configuration or a repeating sequence; None if unknown."""
    lists: dict[str, list[str]] = {}
    for key, known_words in order["seen"].items():
        if isinstance(fields.get(key), list):
            lists[key] = list(map(str, fields[key]))
            if set(lists[key]) - set(known_words):
                return None
    if order["by"] and {*order["by"]} <= {*lists}:
        columns = [lists[key] for key in order["by"]]
        rows = ["|".join(words) for words in zip(*columns, strict=True)]
        if not set(rows) <= set(order["kinds"]):
            return None
        kinds: list[int] = [order["kinds"][row] for row in rows]
        return kinds
    if {*order["by"]} & {*lists}:
        return None
    first: list[Any] = order["first"]  # kinds of the first layers
    cycle: list[int] = order["cycle"]  # kinds of the layers after them, repeated
    if first and isinstance(first[-1], str):  # [kind, key]: the key gives the number of first layers of this kind
        first = [first[0]] * numbers[first[-1]]
    if cycle:
        repeats = -(-count // len(cycle))
        return (first + cycle * repeats)[:count]
    if len(first) == count:
        return first
    return None


# Types that are read as another type


@cache
def model_type_data(model_type: str) -> dict[str, Any] | None:
    """The template of a model type; None if the type has none."""
    line = template_lines().get(model_type)
    if line is None:
        return None
    data: dict[str, Any] = parse_json(line)
    return data


@cache
def template_lines() -> dict[str, str]:
    """The line of JSON of each type with a template; a line begins with the name of its type."""
    lines = {}
    for line in TYPES_FILE.read_text("utf-8").splitlines():
        name, _, _ = line.removeprefix(_LINE_START).partition('"')
        lines[name] = line
    return lines


@cache
def _remote_types() -> dict[str, Any]:
    types: dict[str, Any] = parse_json((_DATA / "remote_types.json").read_bytes())
    return types


@cache
def targets() -> dict[str, set[str]]:
    """The types whose data may describe each known type: itself, and those that it is read as; all as plain names."""
    remote = {name: entry for name, entry in _remote_types().items() if not name.startswith("_")}
    result = {plain_type(name): {plain_type(name)} for name in (*template_lines(), *remote)}
    for name, entries in remote.items():
        for entry in _as_list(entries):
            if "as" in entry:
                result[plain_type(name)].add(plain_type(entry["as"]))
    return result


def _as_list(entries: object) -> list[Any]:
    """The entries of a type in remote_types.json: one, or a list of them with conditions."""
    if isinstance(entries, list):
        return entries
    return [entries]


def plain_type(name: str) -> str:
    """The letters and digits of a type or of the name of its class, without its ending, such as ForCausalLM."""
    base = re.sub(r"(ForCausalLM|ForConditionalGeneration|ForTextGeneration|LMHeadModel|Model)+$", "", name)
    return re.sub(r"[^a-z0-9]+", "", base.lower().removesuffix("_text"))


def _value(fields: Any, path: str) -> Any:
    """The value at a key, or at a path of keys with dots; None if absent."""
    for key in path.split("."):
        if not isinstance(fields, dict):
            return None
        fields = fields.get(key)
    return fields


def remote_type(config: JsonObject) -> Mapping[str, Any]:
    """The entry of remote_types.json for a configuration; empty if the type has no entry."""
    entries = _remote_types().get(config.text("model_type"), [])
    fields = dict(config.fields)
    for entry in _as_list(entries):
        if all(_meets(_value(fields, key), accepted) for key, accepted in entry.get("when", {}).items()):
            return dict(entry)
    return {}


def _meets(value: object, accepted: object) -> bool:
    """Whether a value is the accepted one; "*" accepts all values that are not empty."""
    return bool(value == accepted or (accepted == "*" and value))


def translate(config: JsonObject) -> JsonObject:
    """The configuration with the keys of the type that it is read as, without keys that do not affect shapes."""
    remote = remote_type(config)
    fields = {**remote.get("implies", {}), **config.fields}
    for key in remote.get("uniform", ()):
        if isinstance(fields.get(key), list) and len({*map(str, fields[key])}) == 1:
            fields[key] = fields[key][0]
    config = replace(config, fields=fields)
    for key, value in remote.get("only", {}).items():
        if _value(fields, key) not in (None, value):
            raise config.error(key, json.dumps(value), _value(fields, key))
    names = remote.get("names", {})
    arrays = remote.get("arrays", {})
    values = {new: _value(fields, old) for old, new in names.items() if new is not None}
    for old, (new, words) in arrays.items():
        value = _value(fields, old)
        if value is not None:
            values[new] = fields.get(new) or _per_layer(config, old, value, words)
    values = {key: value for key, value in values.items() if value is not None}
    values |= {key: config.integer(key, maximum=MAX_WIDTH) // 2 for key in remote.get("halved", ())}
    removed = {*_NOT_SHAPES, *remote.get("without", ())}
    removed.update(key.partition(".")[0] for key in (*names, *arrays))
    if "as" in remote:
        removed.add("rope_scaling")
        values["model_type"] = remote["as"]
    fields = {key: value for key, value in fields.items() if key not in removed and not key.startswith("_")}
    return replace(config, fields=fields | values)


def _per_layer(config: JsonObject, key: str, value: Any, words: Any) -> list[Any]:
    """An array with a word per layer, made from another key of the file (see _about in remote_types.json)."""
    if isinstance(words, dict):
        if not isinstance(value, str | list) or not {*map(str, value)} <= {*words}:
            raise config.error(key, f"a sequence of {' '.join(words)}, an entry per layer", value)
        return [words[str(letter)] for letter in value]
    count = config.integer("num_hidden_layers", 1, maximum=MAX_LAYERS)
    numbers: Sequence[int]  # layers with the second word, counted from 1
    if isinstance(value, list):
        numbers = value
    else:
        num_first = config.integer(key, minimum=0, maximum=MAX_LAYERS)
        numbers = range(1, num_first + 1)
    return [words[number in numbers] for number in range(1, count + 1)]


def adapt(config: JsonObject, model: ModelSpec) -> ModelSpec:
    """The model with the parts that its own type adds to the type that it was read as."""
    remote = remote_type(config)
    if "fused" in remote:
        kinds = {layer: _fuse(layer, remote["fused"]) for layer in model.layer_kinds}
        model = replace(model, layers=tuple(kinds[layer] for layer in model.layers))
    notes = (*remote.get("notes", ()), *model.approximations)
    return replace(model, approximations=notes, alibi=remote.get("alibi", model.alibi))


def _fuse(layer: LayerSpec, name: str) -> LayerSpec:
    """The layer with one matrix for Q, K and V."""
    assert isinstance(layer.mixer, Attention)
    width = sum(gemm.out_features for gemm in layer.mixer.projections)
    matrix = replace(layer.mixer.projections[0], name=name, out_features=width, split="qkv_heads")
    return replace(layer, mixer=replace(layer.mixer, projections=(matrix,)))
