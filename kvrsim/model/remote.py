"""Model types without code in transformers, read as a type of transformers that has the same layers.

kvrsim/data/remote_types.json translates keys. Llama models from an architecture search need more than a translation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvrsim.io.schema import JsonObject, parse_json
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.model.template import MAX_LAYERS, MAX_WIDTH

_TABLE = Path(__file__).parents[1] / "data" / "remote_types.json"
_ARRAYS = ("flags", "listed", "leading", "letters")  # rules that make an array with one entry per layer
_NOT_SHAPES = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype", "architectures")


@cache
def _remote_types() -> dict[str, Any]:
    types: dict[str, Any] = parse_json(_TABLE.read_bytes())
    return types


def _value(fields: Any, path: str) -> Any:
    """The value at a key, or at a path of keys with dots; None if absent."""
    for key in path.split("."):
        fields = fields.get(key) if isinstance(fields, dict) else None
    return fields


def remote_type(config: JsonObject) -> Mapping[str, Any]:
    """The entry of remote_types.json for a configuration; empty if the type has no entry."""
    entries = _remote_types().get(config.text("model_type"), {})
    fields = dict(config.fields)
    for entry in entries if isinstance(entries, list) else [entries]:
        values = {key: (_value(fields, key), wanted) for key, wanted in entry.get("when", {}).items()}
        if all(value == wanted or (wanted == "*" and value) for value, wanted in values.values()):
            return dict(entry)
    return {}


def translated(config: JsonObject) -> JsonObject:
    """The configuration with the keys of the type that it is read as, without keys that do not affect shapes."""
    remote = remote_type(config)
    config = replace(config, fields={**remote.get("implies", {}), **config.fields})
    fields = dict(config.fields)
    for key, value in remote.get("only", {}).items():
        if _value(fields, key) not in (None, value):
            raise config.error(key, json.dumps(value), _value(fields, key))
    for rule in _ARRAYS:
        for old, (new, *words) in remote.get(rule, {}).items():
            if (value := _value(config.fields, old)) is not None:
                fields.setdefault(new, _per_layer(config, rule, old, value, words))
    names = remote.get("names", {})
    values = {new: _value(config.fields, old) for old, new in names.items() if new is not None}
    gone = {key.partition(".")[0] for part in ("names", *_ARRAYS) for key in remote.get(part, {})}
    fields = {
        key: value for key, value in fields.items() if key not in {*gone, *remote.get("without", ()), *_NOT_SHAPES}
    }
    fields = {key: value for key, value in fields.items() if not key.startswith("_")}
    fields |= {key: value for key, value in values.items() if value is not None}
    fields |= {key: config.integer(key, maximum=MAX_WIDTH) // 2 for key in remote.get("halved", ())}
    if "as" in remote:
        fields["model_type"] = remote["as"]
        fields.pop("rope_scaling", None)
    return replace(config, fields=fields)


def _per_layer(config: JsonObject, rule: str, key: str, value: Any, words: list[Any]) -> list[Any]:
    """An array with one word per layer, made from another key of the file (see _about in remote_types.json)."""
    if rule == "letters":
        if not isinstance(value, str) or {*value} - {*words[0]}:
            raise config.error(key, f"a text of the letters {' '.join(words[0])}, one per layer", value)
        return [words[0][letter] for letter in value]
    count = config.integer("num_hidden_layers", 1, maximum=MAX_LAYERS)
    if rule == "flags":
        if not isinstance(value, list) or any(flag not in (0, 1) for flag in value):
            raise config.error(key, "an array of zeros and ones, an entry per layer", value)
        count, chosen = len(value), {number for number, flag in enumerate(value) if flag}
    elif rule == "listed":
        chosen = {number - 1 for number in value if isinstance(number, int)} if isinstance(value, list) else set()
    else:
        chosen = set(range(config.integer(key, minimum=0, maximum=MAX_LAYERS)))
    return [words[number in chosen] for number in range(count)]


def adapted(config: JsonObject, model: ModelSpec) -> ModelSpec:
    """The model with the parts that its own type adds to the transformers type that it was read as."""
    remote = remote_type(config)
    if "fused" in remote:
        kinds = {layer: _fused(layer, remote["fused"]) for layer in model.layer_kinds}
        model = replace(model, layers=tuple(kinds[layer] for layer in model.layers))
    notes = (*remote.get("notes", ()), *model.approximations)
    return replace(model, approximations=notes, alibi=remote.get("alibi", model.alibi))


def _fused(layer: LayerSpec, name: str) -> LayerSpec:
    """The layer with one matrix for Q, K and V."""
    assert isinstance(layer.mixer, Attention)
    first = layer.mixer.projections[0]
    width = sum(gemm.out_features for gemm in layer.mixer.projections)
    matrix = replace(first, name=name, out_features=width, split="qkv_heads")
    return replace(layer, mixer=replace(layer.mixer, projections=(matrix,)))


def pruned_llama(config: JsonObject, name: str, read: Callable[[JsonObject, str], ModelSpec]) -> ModelSpec:
    """Read DeciLM: each layer is Llama's with its own widths, or has no attention or no MLP."""
    heads, hidden = (config.integer(key, maximum=MAX_WIDTH) for key in ("num_attention_heads", "hidden_size"))
    key_heads = config.sequence("num_key_value_heads_per_layer")  # key of DeciLM-7B; later models have block_configs
    blocks = [
        config.inner({"attention": {"n_heads_in_group": heads // max(1, int(one))}, "ffn": {}}, "") for one in key_heads
    ]
    blocks = blocks or config.children("block_configs")
    if len(blocks) != config.integer("num_hidden_layers", maximum=MAX_LAYERS):
        raise config.error("block_configs", "an array with an entry per layer")
    plain = config.without("block_configs", "num_key_value_heads_per_layer", "model_type", "num_key_value_heads")
    layers = []
    for block in blocks:
        attention, mlp = block.child("attention"), block.child("ffn")
        for part, key in ((one, key) for one in (attention, mlp) for key in ("sparsify", "num_sink_tokens")):
            if part.has(key):
                raise part.error(key, "null")
        group = attention.integer("n_heads_in_group", 1, maximum=heads)
        if heads % group:
            raise attention.error("n_heads_in_group", f"a divisor of the {heads} attention heads")
        inner = mlp.integer("intermediate_size", config.integer("intermediate_size", hidden), maximum=MAX_WIDTH)
        if mlp.has("ffn_mult"):
            inner = 256 * -(-max(1, int(2 * mlp.number("ffn_mult", maximum=1000) * hidden / 3)) // 256)
        own = {"num_hidden_layers": 1, "num_key_value_heads": heads // group, "intermediate_size": inner}
        model = read(replace(plain, fields={**plain.fields, **own, "model_type": "llama"}), name)
        layer = model.layers[0]
        assert isinstance(layer.mixer, Attention)
        window = attention.integer("window_length") if attention.has("window_length") else None
        layer = replace(layer, mixer=replace(layer.mixer, sliding_window=window))
        for part in (attention, mlp):
            if part.flag("replace_with_linear", False):
                raise part.error("replace_with_linear", "false")
        fewer = layer.other_parameters - hidden
        if attention.flag("no_op", False):
            layer = replace(layer, mixer=None, norms_before_mixer=0, other_parameters=fewer)
        if mlp.flag("no_op", False):
            fewer = layer.other_parameters - hidden
            layer = replace(layer, mlp=(), gated_mlp=False, norms_after_mixer=0, other_parameters=fewer)
        layers.append(layer)
    inner = max((layer.mlp[-1].in_features for layer in layers if layer.mlp), default=hidden)
    return replace(model, num_hidden_layers=len(layers), layers=tuple(layers), intermediate_size=inner)
