"""What transformers says of a model's configuration: its parameters, counted without memory, and its defaults.

`python -m calibrate.reference` writes the defaults that kvrsim reads: kvrsim/data/config_defaults.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from kvrsim.io.files import write_atomically
from kvrsim.model.architectures.defaults import DEFAULTS

# Models whose files name a type that transformers does not have, by the type of the same layers that it has.
_SAME_LAYERS = {
    "deepseek_ref": "deepseek_v4",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minimax_m3": "minimax_m3_vl_text",
}
# Types that transformers has inside of a file of several models alone.
_ALWAYS_SEVERAL = ("minimax_m3_vl", "qwen3_vl", "qwen3_vl_moe", "step3p7")
# Modules beside the text model.
_OTHER_MODULES = ("vision", "visual", "audio", "projector", "patch_merge")
_ABOUT = "Defaults of transformers' configuration classes, and second names of keys: python -m calibrate.reference"
_TYPES = (
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3_text", "gemma4_text"),
    *("glm", "glm4", "glm4_moe", "glm_moe_dsa", "gpt2", "kimi_linear", "llama4_text", "mimo_v2_flash", "minimax_m2"),
    *("minimax_m3_vl_text", "nemotron_h", "olmo2", "olmo3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("qwen3_vl_moe_text", "qwen3_vl_text"),
)
_NOT_SHAPES = (
    "token",
    "dropout",
    "pdrop",
    "output",
    "use_cache",
    "initializer",
    "summary",
    "pretraining",
    "scale_",
    "mtp",
    "nextn",
)


def counted_parameters(fields: Mapping[str, Any]) -> int | None:
    """Parameters of the text model of a config.json; None: transformers has no such model."""
    shapes = parameter_shapes(fields)
    return None if shapes is None else sum(map(prod, shapes.values()))


def parameter_shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the text model's parameters by name, on the meta device; None: transformers has no such model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    left_out = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype")
    plain = {key: value for key, value in fields.items() if key not in left_out and not key.startswith("_")}
    plain["model_type"] = _SAME_LAYERS.get(plain["model_type"], plain["model_type"])
    text = plain.get("text_config")
    if isinstance(text, dict):
        plain["text_config"] = {key: value for key, value in text.items() if key not in left_out}
    outer = plain["model_type"].removesuffix("_text")
    several = isinstance(text, dict) or outer in _ALWAYS_SEVERAL
    if several and not isinstance(text, dict):
        plain = {"model_type": outer, "text_config": plain}
    try:
        config = AutoConfig.for_model(**plain)
    except ValueError:
        return None
    factory = AutoModelForImageTextToText if several else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    named = model.named_parameters()
    return {name: tuple(each.shape) for name, each in named if not any(part in name for part in _OTHER_MODULES)}


def transformers_version() -> str:
    """Of the installed package."""
    from transformers import __version__

    return str(__version__)


def class_defaults(model_type: str) -> dict[str, Any]:
    """Of a configuration class: its keys that are whole numbers or flags, and pairs of names for one key."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = [vars(one) for one in kind.__mro__ if one.__module__.startswith("transformers.models.")]
    keys = {
        name: value
        for name, value in sorted({**{key: value for one in reversed(own) for key, value in one.items()}}.items())
        if isinstance(value, int) and not name.startswith("_") and not any(part in name for part in _NOT_SHAPES)
    }
    if model_type.removesuffix("_text") in _ALWAYS_SEVERAL:  # the outer file's class says it for both
        keys["tie_word_embeddings"] = CONFIG_MAPPING[model_type.removesuffix("_text")].tie_word_embeddings
    return {"keys": keys, "names": sorted(getattr(kind, "attribute_map", {}).items())}


def main() -> None:
    """Rewrite the defaults."""
    lines = [f' "_about": {json.dumps(_ABOUT)}']
    lines += [f" {json.dumps(name)}: {json.dumps(class_defaults(name))}" for name in _TYPES]
    write_atomically(DEFAULTS, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), argument="defaults")
    print(f"{DEFAULTS.name}: {len(_TYPES)} types")


if __name__ == "__main__":
    main()
