"""Parameters of a configuration as transformers counts them: the model is built without memory for its weights."""

from __future__ import annotations

from typing import Any

# What kvrsim reads by one name and transformers has under another.
_NAMES = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3_vl_text",
}
_NOT_OF_THE_SHAPE = (
    "quantization_config",
    "model_type",
    "hidden_act",
    "torch_dtype",
    "dtype",
    "architectures",
    "auto_map",
)


def parameters(config: dict[str, Any]) -> int:
    """Of the language model with its head, tied embeddings once, buffers left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    text = dict(config.get("text_config", config))
    model_type = text.get("model_type", f"{config['model_type']}_text")
    keys = {key: value for key, value in text.items() if key not in _NOT_OF_THE_SHAPE}
    keys["tie_word_embeddings"] = config.get("tie_word_embeddings", keys.get("tie_word_embeddings", False))
    shape = AutoConfig.for_model(_NAMES.get(model_type, model_type), **keys)
    with torch.device("meta"):
        if shape.model_type == "minimax_m3_vl_text":  # in no table of the Auto classes
            model: Any = MiniMaxM3VLForCausalLM(shape)
        else:
            model = AutoModelForCausalLM.from_config(shape)
    return sum(parameter.numel() for parameter in model.parameters())
