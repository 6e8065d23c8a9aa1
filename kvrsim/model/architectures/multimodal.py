"""The text model of a file that describes several models: towers for images and sound beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject

_TEXT = ("text_config", "llm_config", "language_config")
_TOWERS = {"vision": ("vision_config", "visual_config"), "audio": ("audio_config",)}
# What the outer file says for the text model: transformers ties the embeddings and quantises by the outer file.
_OUTER_KEYS = ("tie_word_embeddings", "quantization_config", "compression_config")


def read_text_part(config: JsonObject, knows: Callable[[str], bool]) -> tuple[JsonObject, tuple[str, ...]]:
    """The configuration of the text model, and what of the file it leaves out; the file itself if it has one model.

    A text_config without a model_type is that of the outer file's text model, such as "llama4_text" of "llama4".
    knows: whether there is a model type of that name.
    """
    key = next((key for key in _TEXT if isinstance(config.fields.get(key), dict)), None)
    if key is None:
        return config, ()
    if config.flag("is_encoder_decoder", False):
        accepted = "false: the model of a decoder-only text model"
        raise InputError(f"{config.where}: is_encoder_decoder", "true", accepted)
    text = config.child(key)
    inherited = {name: config.fields[name] for name in _OUTER_KEYS if config.has(name)}
    outer_type = config.fields.get("model_type")
    if not text.has("model_type") and knows(f"{outer_type}_text"):
        inherited["model_type"] = f"{outer_type}_text"
    towers = [tower for tower, keys in _TOWERS.items() if any(config.has(key) for key in keys)]
    left_out = tuple(f"the {tower} tower is left out" for tower in towers)
    text = replace(text, fields={**text.fields, **inherited})
    return text, left_out or ("what is beside the text model, such as a vision tower, is left out",)
