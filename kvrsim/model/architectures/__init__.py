"""Reading a Hugging Face config.json: a short function an architecture, with transformers' defaults."""

from __future__ import annotations

from collections.abc import Callable

from kvrsim.errors import InputError
from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures.bloom import bloom
from kvrsim.model.architectures.falcon import falcon, refined_web, refined_web_model
from kvrsim.model.architectures.gpt_neox import gpt_neox
from kvrsim.model.architectures.gptj import gptj
from kvrsim.model.architectures.internlm import internlm, internlm2
from kvrsim.model.architectures.llama import gemma, gemma2, gemma3_text, llama, mistral, phi3, qwen2, qwen3
from kvrsim.model.architectures.mixture import gpt_oss, mixtral, qwen2_moe, qwen3_moe
from kvrsim.model.architectures.opt import opt
from kvrsim.model.architectures.phi import phi
from kvrsim.model.quantization_config import read_quantization
from kvrsim.model.spec import ModelSpec

_READERS: dict[str, Callable[[JsonObject, str], ModelSpec]] = {
    "bloom": bloom,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "internlm": internlm,
    "internlm2": internlm2,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "RefinedWeb": refined_web,  # Falcon 40B as first published
    "RefinedWebModel": refined_web_model,  # Falcon 7B and the RefinedWeb models as first published
}


def read_config(config: JsonObject, name: str) -> ModelSpec:
    """The model that a config.json describes; InputError names the file and the key."""
    supported = f"the model_type of a decoder-only model that kvrsim knows: {', '.join(_READERS)}"
    if not config.has("model_type"):
        raise config.error("model_type", supported)
    model_type = config.text("model_type")
    if config.flag("is_encoder_decoder", False):
        raise InputError(f"{config.where}: model_type", f"{model_type}, an encoder-decoder", supported)
    if model_type not in _READERS:
        raise config.error("model_type", supported)
    return read_quantization(config, _READERS[model_type](config, name))
