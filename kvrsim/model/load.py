"""load_model: a ModelSpec by the name of a built-in model or the path of a config.json."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.spec import ModelSpec

_BUILTIN_FOLDER = Path(__file__).parents[1] / "data" / "models"


def builtin_models() -> tuple[str, ...]:
    """Names of the models that ship with kvrsim."""
    return tuple(sorted(path.stem for path in _BUILTIN_FOLDER.glob("*.json")))


def load_model(name_or_path: str | Path, argument: str = "model") -> ModelSpec:
    """A built-in name, a config.json, or a folder that holds one; InputError names `argument` and the key.

    A built-in name wins over a folder of the same name: write ./NAME for the folder.
    """
    from kvrsim.model.architectures import read_config  # here, because it builds on the types above

    name = str(name_or_path)
    if name in builtin_models():
        return read_config(JsonObject.read(_BUILTIN_FOLDER / f"{name}.json", argument), name)
    path = config_path(name, argument)
    own_name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return read_config(_read(path, argument), own_name or name)


def _read(path: Path, argument: str) -> JsonObject:
    """A config.json with the quantisation that NVIDIA's checkpoints have in an hf_quant_config.json beside it."""
    config = JsonObject.read(path, argument)
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    told = [config.fields, config.fields.get("text_config")]
    if not path.name.endswith("config.json") or not beside.is_file():
        return config
    if any(isinstance(fields, dict) and fields.get("quantization_config") for fields in told):
        return config
    quantization = dict(JsonObject.read(beside, argument).fields)
    return replace(config, fields={**config.fields, "quantization_config": quantization})


def config_path(name: str, argument: str) -> Path:
    """The file that a user means by a built-in name, a path to a config.json or to its folder."""
    if name in builtin_models():
        return _BUILTIN_FOLDER / f"{name}.json"
    path = Path(name)
    try:
        is_folder, exists = path.is_dir(), bool(name.strip()) and path.exists()
        if exists and is_folder and not (path / "config.json").exists():
            raise InputError(argument, name, "a folder that holds a config.json")
    except (OSError, ValueError):  # a path that is too long or forbidden
        is_folder, exists = False, False
    if not exists:
        near = get_close_matches(name[:100], builtin_models(), n=5, cutoff=0.5)
        some = f", such as {', '.join(near)}" if near else ""
        accepted = f"a path to a config.json or its folder, or one of what `kvrsim models list` lists{some}"
        raise InputError(argument, name, accepted)
    return path / "config.json" if is_folder else path
