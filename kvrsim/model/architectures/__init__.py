"""Reading a Hugging Face config.json: a short function an architecture, with transformers' defaults.

A module in one of the folders adds model types by a dictionary READERS; no list names the modules. Another package adds
one by an entry point of the group "kvrsim.architectures", whose name is the model type and whose object is a Reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.defaults import filled
from kvrsim.model.architectures.multimodal import read_text_part
from kvrsim.model.architectures.parts import Reader
from kvrsim.model.architectures.routed import left_out as further_tokens
from kvrsim.model.quantization import read_quantization
from kvrsim.model.spec import ModelSpec

ENTRY_POINTS = "kvrsim.architectures"


def _readers(model_type: str = "") -> Iterator[tuple[str, Reader]]:
    """Model types and their readers, module by module: first of those that a model type's name begins with."""
    names = [module.name for module in walk_packages(__path__, f"{__name__}.")]
    for name in sorted(names, key=lambda name: not model_type.startswith(name.rpartition(".")[2])):
        yield from getattr(import_module(name), "READERS", {}).items()


def _own_reader(model_type: str) -> Reader | None:
    """The reader of a model type in kvrsim; None: there is none."""
    return next((reader for known, reader in _readers(model_type) if known == model_type), None)


def _reader(model_type: str) -> Reader | None:
    """The reader of a model type, here or of another package; None: there is none."""
    if own := _own_reader(model_type):
        return own
    from importlib.metadata import entry_points  # only for types that kvrsim does not know

    entry = next(iter(entry_points(group=ENTRY_POINTS, name=model_type)), None)
    if entry is None:
        return None
    parameter = f"entry point {ENTRY_POINTS}: {model_type}"
    try:
        reader: Reader = entry.load()
    except (ImportError, AttributeError) as error:
        raise InputError(parameter, entry.value, f"what can be imported ({error})") from None
    if not callable(reader):
        raise InputError(parameter, entry.value, "a function of a configuration and a name")
    return reader


def read_config(config: JsonObject, name: str) -> ModelSpec:
    """The model that a config.json describes, of several the text model; InputError names the file and the key."""
    config, left_out = read_text_part(config, lambda model_type: _own_reader(model_type) is not None)
    if not config.has("model_type"):
        raise config.error("model_type", _supported())
    model_type = config.text("model_type")
    if config.flag("is_encoder_decoder", False):
        raise InputError(f"{config.where}: model_type", f"{model_type}, an encoder-decoder", _supported())
    reader = _reader(model_type)
    if reader is None:
        raise config.error("model_type", _supported())
    model = reader(filled(config, model_type), name)
    if all(layer.mixer is None for layer in model.layers):
        raise InputError(config.where, "no layer with attention or a state", "a model whose tokens see each other")
    told = dict.fromkeys((*left_out, *further_tokens(config), *model.approximations))
    model = replace(model, approximations=tuple(told))
    return read_quantization(config, model)


def _supported() -> str:
    known = ", ".join(sorted(model_type for model_type, _ in _readers()))
    return f"the model_type of a decoder-only model that kvrsim knows: {known}"
