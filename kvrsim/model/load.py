"""Load a ModelSpec by the name of a model or by the path of a config.json.

A config.json is read by the data of its model type in kvrsim/data/types.jsonl, which `make models` writes from
transformers' classes. If the data do not cover a structure, it is read from the class itself, which needs torch and
transformers.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvrsim.errors import InputError
from kvrsim.io.files import use_no_compiler_cache, write_atomically
from kvrsim.io.schema import JsonObject, parse_json
from kvrsim.model import template
from kvrsim.model.mixers import Attention
from kvrsim.model.quantization import quantized_by_name, read_quantization, suffix_of
from kvrsim.model.spec import ModelSpec
from kvrsim.model.template import MAX_LAYERS, MAX_WIDTH, freeze, keys_at_fault, model_type_data, thaw
from kvrsim.progress import OnProgress

FURTHER_TOKENS = "the layers that predict further tokens are left out: a prefill does not run them"
_TUNED = re.compile(r"(-(instruct|chat|base|hf|it|v0\.1))+$")  # suffixes of checkpoints that share a shape
_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_FROZEN = "model.json"  # file that describes a model that the user has added
_DATA = Path(__file__).parents[1] / "data"
_FFN_STEP = 256  # DeciLM rounds the width of an MLP up to a multiple of this number
_FURTHER_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_TOWERS = {"vision_config": "vision", "visual_config": "vision", "audio_config": "audio"}
# Keys of the outer file that apply to the text model, as in transformers: tied embeddings and quantisation.
_OUTER_KEYS = ("tie_word_embeddings", "quantization_config", "compression_config")
_REQUIRED = (
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "hybrid_override_pattern", "layers_block_type"),
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "mamba_num_heads", "state_size", "attention_hidden_size"),
    ("vocab_size", "padded_vocab_size"),
)


def builtin_models() -> tuple[str, ...]:
    """Names of the models that ship with kvrsim."""
    return tuple(sorted(path.stem for path in (_DATA / "models").glob("*.json")))


def own_folder() -> Path:
    """The folder of `kvrsim models add`: $KVRSIM_MODELS, else ~/.config/kvrsim/models."""
    folder = os.environ.get("KVRSIM_MODELS")
    return Path(folder) if folder else Path.home() / ".config" / "kvrsim" / "models"


def own_models() -> tuple[str, ...]:
    """Names of the models that the user has added."""
    return tuple(sorted(path.parent.name for path in own_folder().glob("*/config.json")))


def add_model(
    source: str, name: str | None, argument: str = "CONFIG|FOLDER", *, on_progress: OnProgress | None = None
) -> tuple[ModelSpec, Path]:
    """Read a config.json, its folder or a local Hugging Face id once, and store the model for all later commands.

    Later commands need neither the file nor torch. Returns the model and its folder in the user's catalogue.
    """
    snapshot = _hub_folder(source)
    path = config_path(str(snapshot or source), argument)
    if not name and snapshot:
        name = source.rpartition("/")[2]
    name = name or _name_of(path)
    if not re.fullmatch(r"[\w.][\w.-]*", name) or name in builtin_models():
        raise InputError("name", name, "letters, digits, dots and hyphens, and no built-in name")
    config = _read_config(path, argument)
    model = read_config(config, name, on_progress)
    model = replace(model, from_class=False)
    shape = freeze(replace(model, layers=model.layer_kinds))
    fields = dict(config.fields)
    folder = own_folder() / name
    content = {"model": shape, "index": model.layer_kind_index, "fields": fields}
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in (("config.json", fields), (_FROZEN, content)):
        write_atomically(folder / file, json.dumps(data).encode(), argument=argument)
    return model, folder


def _hub_folder(name: str) -> Path | None:
    """The newest snapshot of a Hugging Face id in the local cache; None if there is none."""
    if name.count("/") != 1 or Path(name).exists():
        return None
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    snapshots = home.glob(f"hub/models--{name.replace('/', '--')}/snapshots/*/config.json")
    return max((path.parent for path in snapshots), key=lambda path: path.stat().st_mtime, default=None)


def load_model(
    name_or_path: str | Path, argument: str = "model", *, on_progress: OnProgress | None = None
) -> ModelSpec:
    """Load a built-in name, a Hugging Face id of a known shape, a config.json, or a folder with a config.json.

    A built-in name wins over a folder of the same name: write ./NAME for the folder. `on_progress` is called before
    work of tens of seconds. InputError names `argument` and the key.
    """
    name = str(name_or_path)
    known = known_shape(name)
    if known is not None:
        same = load_model(known.shape, argument)
        positions = known.max_position_embeddings or same.max_position_embeddings
        model = replace(same, name=known.name, max_position_embeddings=positions)
        if known.suffix is not None:
            model = quantized_by_name(model, name.lower().rpartition("/")[0], known.suffix)
        return model
    path = config_path(name, argument)
    if name not in builtin_models():
        name = _name_of(path) or name
    config = _read_config(path, argument)
    frozen = path.with_name(_FROZEN)
    if frozen.is_file() and path.parent.parent == own_folder():
        content = JsonObject.read(frozen, argument)
        if content.fields.get("fields") == config.fields:
            return _thaw(content, name)
    return read_config(config, name, on_progress)


def _thaw(content: JsonObject, name: str) -> ModelSpec:
    """Read a model from a file that `add_model` wrote. Raises InputError if the file holds another structure now."""
    try:
        model: ModelSpec = thaw(content.fields["model"], {})
        layers = tuple(model.layers[kind] for kind in content.fields["index"])
        return replace(model, name=name, layers=layers)
    except (KeyError, ValueError, TypeError, IndexError, NameError, AttributeError, InputError) as error:
        reason = " ".join(str(error).split())
        accepted = f"a file as kvrsim models add writes it, which adds the model again ({reason})"
        raise InputError(content.where, "other content", accepted) from None


def _name_of(path: Path) -> str:
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem


class KnownShape(NamedTuple):
    """A checkpoint whose shape is in the catalogue."""

    name: str  # short name of the checkpoint
    shape: str  # built-in model of its shape
    max_position_embeddings: int | None  # the longest context, where it is another than that of the shape
    suffix: str | None  # suffix of the name that names a quantisation; None: as the built-in model


def known_shape(name: str) -> KnownShape | None:
    """The shape of a Hugging Face id or its last part, such as RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic.

    None for a built-in name, a path, or an unknown checkpoint. Suffixes such as -Instruct do not change the shape.
    """
    if name in builtin_models() or name in own_models() or name.count("/") > 1 or os.path.exists(name):
        return None
    names: dict[str, Any] = parse_json((_DATA / "model_names.json").read_bytes())
    last = name.lower().rpartition("/")[2]
    suffix = suffix_of(last)
    candidates: list[tuple[str, str | None]] = [(last, None)]
    if suffix is not None:
        candidates.append((last.removesuffix(f"-{suffix}"), suffix))
    for whole, quantised in candidates:
        base = _TUNED.sub("", whole)
        for short in dict.fromkeys((whole, base, base.removeprefix("meta-"))):
            known_name = short
            if quantised is not None:
                known_name = f"{short}-{quantised}"
            if short in names:
                positions = names[short].get("max_position_embeddings")
                return KnownShape(known_name, names[short]["shape"], positions, quantised)
            if short in builtin_models():
                return KnownShape(known_name, short, None, quantised)
    return None


def _read_config(path: Path, argument: str) -> JsonObject:
    """A config.json with the quantisation of NVIDIA's hf_quant_config.json in the same folder, if there is one."""
    config = JsonObject.read(path, argument)
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    text = config.fields.get("text_config")
    quantised = config.has("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if quantised or not path.name.endswith("config.json") or not beside.is_file():
        return config
    return replace(
        config, fields={**config.fields, "quantization_config": dict(JsonObject.read(beside, argument).fields)}
    )


def config_path(name: str, argument: str) -> Path:
    """The config.json of a built-in name, of a path to the file or of a path to its folder."""
    if name in builtin_models():
        return _DATA / "models" / f"{name}.json"
    path = Path(name)
    if name in own_models():
        path = own_folder() / name
    try:
        is_folder = path.is_dir()
        exists = bool(name.strip()) and path.exists()
        if exists and is_folder and not (path / "config.json").exists():
            raise InputError(argument, name, "a folder that holds a config.json")
    except (OSError, ValueError):  # the path is too long or forbidden
        is_folder = False
        exists = False
    if not exists:
        from difflib import get_close_matches  # imported only for names that are unknown

        last = name[:100].lower().rpartition("/")[2]
        near = get_close_matches(last, (*builtin_models(), *own_models()), n=5, cutoff=0.5)
        accepted = "a path to a config.json or its folder, or one of what `kvrsim models list` lists"
        if near:
            accepted += f", such as {', '.join(near)}"
        if name.count("/") == 1 or suffix_of(last) is not None:
            accepted += "; for a quantised checkpoint, its config.json, or a model of its shape with --dtype fp8"
        raise InputError(argument, name, accepted)
    if is_folder:
        return path / "config.json"
    return path


def checkpoint_files(name: str) -> tuple[Path, ...]:
    """The weights next to a model's config.json, as safetensors; empty where there are none. `name`: as a `--model`."""
    path = config_path(name, "model")
    if path.name != "config.json":
        return ()
    return tuple(sorted(path.parent.glob("*.safetensors")))


def read_config(config: JsonObject, name: str, on_progress: OnProgress | None = None) -> ModelSpec:
    """Read the model of a config.json, or its text model. Raises InputError naming the file and the key."""
    text, left_out = read_text_part(config)
    if not text.has("model_type"):
        raise text.error("model_type", "the model_type of a decoder-only model")
    model_type = text.text("model_type")
    if text.flag("is_encoder_decoder", False):
        accepted = "the model_type of a decoder-only model"
        raise InputError(f"{text.where}: model_type", f"{model_type}, an encoder-decoder", accepted)
    if text is config:  # a text model inside another file may leave out keys that have defaults in transformers
        for names in _REQUIRED:
            if not any(text.has(key) for key in names):
                raise text.error(names[0], "a whole number")
    _check_architecture(text)
    if model_type in ("nemotron-nas", "deci"):
        model = _pruned_llama(text, name)
    else:
        model = read_type(text, name, on_progress)
    if all(layer.mixer is None for layer in model.layers):
        raise InputError(text.where, "no layer with attention or a state", "a model whose tokens see each other")
    positions = text.first_of("max_position_embeddings", "n_positions", "seq_length")
    notes = list(left_out)
    if any(text.integer(key, 0, minimum=0) for key in _FURTHER_KEYS):
        notes.append(FURTHER_TOKENS)
    notes += model.approximations
    model = replace(
        model,
        model_type=model_type,
        dtype=_dtype_of(text) or _dtype_of(config),
        max_position_embeddings=text.integer(positions) if text.has(positions) else None,
        approximations=tuple(dict.fromkeys(notes)),
    )
    return read_quantization(text, model)


def _check_architecture(config: JsonObject) -> None:
    """Raise InputError if the file names the class of another known type than its model_type."""
    architecture = _architecture(config)
    if architecture is None:
        return
    model_type = config.text("model_type")
    known = template.targets()
    plain = template.plain_type(model_type)
    types = known.get(template.plain_type(architecture))
    if types is not None and not types & known.get(plain, {plain}):
        accepted = (
            f"a class of model_type {model_type}; this class belongs to another model_type: correct one of the keys"
        )
        raise config.error("architectures", accepted, architecture)


def _architecture(config: JsonObject) -> str | None:
    """The first class that the file names."""
    names = config.fields.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return None


def _dtype_of(config: JsonObject) -> str | None:
    """Dtype of a checkpoint's weights, from either key of transformers; None: absent or converted by engines."""
    name = config.fields.get("dtype") or config.fields.get("torch_dtype")
    if not isinstance(name, str):
        return None
    return _DTYPES.get(name)


def read_type(config: JsonObject, name: str, on_progress: OnProgress | None = None) -> ModelSpec:
    """Read the model with the data of its type, or from its class if the data do not cover it."""
    plain = template.translate(config)
    data = model_type_data(plain.text("model_type"))
    if data is not None and not plain.has("num_key_value_heads"):
        usual = data["defaults"].get("num_key_value_heads")
        heads = plain.fields.get("num_attention_heads")
        if isinstance(usual, int) and isinstance(heads, int) and heads % usual:  # no groups: one KV head per head
            plain = replace(plain, fields={**plain.fields, "num_key_value_heads": heads})
    model = None
    if data is not None:
        model = template.fill(data, plain, name, own="as" not in template.remote_type(config))
    if model is None:
        faults: list[str] = []
        if data is not None:
            faults = keys_at_fault(data, plain)
        if on_progress is not None:
            text = f"reading the class of model_type {plain.text('model_type')} with torch, which takes tens of seconds"
            on_progress(0, None, text)
        model = _from_class(plain, name, _architecture(config), faults)
    return template.adapt(config, model)


def _reader() -> Any:
    """The module that reads classes; None without torch and transformers."""
    if any(find_spec(name) is None for name in ("torch", "transformers")):
        return None
    use_no_compiler_cache()
    from kvrsim.model import reader

    return reader


def _from_class(config: JsonObject, name: str, architecture: str | None, faults: list[str]) -> ModelSpec:
    """The model read from transformers' class, for a structure that the data of its type do not cover.

    architecture: the class that the file names. faults: keys that the data do not cover. Raises InputError if
    transformers is missing or cannot read the file, and for sizes that the class does not have in a file that names
    another class.
    """
    model_type = config.text("model_type")
    place = f"{config.where}: {config.key_path}model_type"
    reader = _reader()
    if reader is None:
        accepted = "others need torch and transformers: pip install '.[hardware]' in a checkout of kvrsim"
        if faults:
            covered = f"nothing that the catalogue's data of model_type {model_type} do not cover"
            raise config.error(faults[0], f"{covered}; {accepted}")
        raise InputError(place, model_type, f"a structure of the catalogue; {accepted}")
    if model_type not in reader.CONFIG_MAPPING:
        raise InputError(
            place, model_type, "a model_type of transformers or of the catalogue: the one whose layers the model has"
        )
    unused = [key for key in reader.unknown_keys(config.fields) if template.is_size(key)]
    usual = reader.class_name(model_type)
    if unused and architecture is not None and usual is not None and architecture != usual:
        accepted = (
            f"nothing: {usual}, the class of model_type {model_type}, has no such size; the file is of {architecture}"
        )
        raise config.error(unused[0], accepted)
    layers = config.first_of("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    config.integer(layers, 1, maximum=MAX_LAYERS)
    try:
        model: ModelSpec = reader.read_class(config.fields, name)
    except reader.RefusedError as error:
        raise InputError(place, f"{model_type} ({error})", "a decoder-only model of parts that kvrsim knows") from None
    approximations = model.approximations
    if unused:
        keys = ", ".join(unused)
        approximations = (*approximations, f"not used, because model_type {model_type} has no such keys: {keys}")
    return replace(model, approximations=approximations, from_class=True)


def read_text_part(config: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    """The configuration of the text model, and notes on omitted parts; a file with one model is unchanged.

    A text_config without a model_type has the type of the outer file's text model, such as "llama4_text" for "llama4".
    """
    key = next((key for key in _TEXT if isinstance(config.fields.get(key), dict)), None)
    if key is None:
        return config, ()
    if config.flag("is_encoder_decoder", False):
        accepted = "false: the model of a decoder-only text model"
        raise InputError(f"{config.where}: is_encoder_decoder", "true", accepted)
    text = config.child(key)
    inherited = {name: config.fields[name] for name in _OUTER_KEYS if config.has(name)}
    inner_type = f"{config.fields.get('model_type')}_text"
    if not text.has("model_type") and (
        model_type_data(inner_type) or ((reader := _reader()) and inner_type in reader.CONFIG_MAPPING)
    ):
        inherited["model_type"] = inner_type
    text, further = read_text_part(replace(text, fields={**text.fields, **inherited}))
    towers = dict.fromkeys(tower for key, tower in _TOWERS.items() if config.has(key))
    left_out = dict.fromkeys((*(f"the {tower} tower is left out" for tower in towers), *further))
    return text, tuple(left_out) or ("what is beside the text model, such as a vision tower, is left out",)


def _pruned_llama(config: JsonObject, name: str) -> ModelSpec:
    """Read DeciLM: each layer is Llama's with its own widths, or has no attention or no MLP."""
    heads = config.integer("num_attention_heads", maximum=MAX_WIDTH)
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    blocks = []
    for kv_heads in config.sequence("num_key_value_heads_per_layer"):  # of DeciLM-7B; later ones have block_configs
        group = heads // max(1, int(kv_heads))
        blocks.append(config.inner({"attention": {"n_heads_in_group": group}, "ffn": {}}, ""))
    blocks = blocks or config.children("block_configs")
    if len(blocks) != config.integer("num_hidden_layers", maximum=MAX_LAYERS):
        raise config.error("block_configs", "an array with an entry per layer")
    plain = config.without("block_configs", "num_key_value_heads_per_layer", "num_key_value_heads")
    layers = []
    for block in blocks:
        attention = block.child("attention")
        mlp = block.child("ffn")
        for part in (attention, mlp):
            for key in ("sparsify", "num_sink_tokens", "replace_with_linear"):
                if part.fields.get(key):
                    raise part.error(key, "null")
        group = attention.integer("n_heads_in_group", 1, maximum=heads)
        if heads % group:
            raise attention.error("n_heads_in_group", f"a divisor of the {heads} attention heads")
        inner = mlp.integer("intermediate_size", config.integer("intermediate_size", hidden), maximum=MAX_WIDTH)
        if mlp.has("ffn_mult"):
            width = int(2 * mlp.number("ffn_mult", maximum=1000) * hidden / 3)
            inner = _FFN_STEP * math.ceil(max(1, width) / _FFN_STEP)
        widths = {"num_hidden_layers": 1, "num_key_value_heads": heads // group, "intermediate_size": inner}
        model = read_type(replace(plain, fields={**plain.fields, **widths, "model_type": "llama"}), name)
        (layer,) = model.layers
        assert isinstance(layer.mixer, Attention)
        if attention.has("window_length"):
            layer = replace(layer, mixer=replace(layer.mixer, sliding_window=attention.integer("window_length")))
        parts: list[dict[str, Any]] = []
        if attention.flag("no_op", False):
            parts.append({"mixer": None, "norms_before_mixer": 0})
        if mlp.flag("no_op", False):
            parts.append({"mlp": (), "gated_mlp": False, "norms_after_mixer": 0})
        for part_fields in parts:  # without its part, the layer has no norm before it
            layer = replace(layer, **part_fields, other_parameters=layer.other_parameters - hidden)
        layers.append(layer)
    inner = max((layer.mlp[-1].in_features for layer in layers if layer.mlp), default=hidden)
    return replace(model, num_hidden_layers=len(layers), layers=tuple(layers), intermediate_size=inner)
