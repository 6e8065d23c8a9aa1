"""Reading a Hugging Face config.json: a short function an architecture, with transformers' defaults.

A module in one of the folders adds model types by a dictionary READERS; no list names the modules.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages

from kvrsim.errors import InputError
from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures.defaults import filled
from kvrsim.model.architectures.multimodal import read_text_part
from kvrsim.model.architectures.parts import Reader
from kvrsim.model.architectures.routed import left_out as further_tokens
from kvrsim.model.quantization_config import read_quantization
from kvrsim.model.spec import ModelSpec


def _found() -> dict[str, Reader]:
    """The readers of all modules, by model type."""
    names = [module.name for module in walk_packages(__path__, f"{__name__}.")]
    found = (getattr(import_module(name), "READERS", {}).items() for name in names)
    return {model_type: reader for readers in found for model_type, reader in readers}


_READERS = _found()


def read_config(config: JsonObject, name: str) -> ModelSpec:
    """The model that a config.json describes, of several the text model; InputError names the file and the key."""
    config, left_out = read_text_part(config, set(_READERS))
    supported = f"the model_type of a decoder-only model that kvrsim knows: {', '.join(sorted(_READERS))}"
    if not config.has("model_type"):
        raise config.error("model_type", supported)
    model_type = config.text("model_type")
    if config.flag("is_encoder_decoder", False):
        raise InputError(f"{config.where}: model_type", f"{model_type}, an encoder-decoder", supported)
    if model_type not in _READERS:
        raise config.error("model_type", supported)
    model = _READERS[model_type](filled(config, model_type), name)
    told = dict.fromkeys((*left_out, *further_tokens(config), *model.approximations))
    model = replace(model, approximations=tuple(told))
    return read_quantization(config, model)
