"""Dense models with softmax attention."""

from __future__ import annotations

from kvrsim.model.architectures.dense.bloom import bloom
from kvrsim.model.architectures.dense.cohere import cohere, cohere2
from kvrsim.model.architectures.dense.falcon import falcon, refined_web, refined_web_model
from kvrsim.model.architectures.dense.gemma import gemma, gemma2, gemma3_text
from kvrsim.model.architectures.dense.glm import glm, glm4
from kvrsim.model.architectures.dense.gpt2 import gpt2
from kvrsim.model.architectures.dense.gpt_neox import gpt_neox
from kvrsim.model.architectures.dense.gptj import gptj
from kvrsim.model.architectures.dense.internlm import internlm, internlm2
from kvrsim.model.architectures.dense.llama import llama, mistral, phi3, qwen2, qwen3
from kvrsim.model.architectures.dense.nemotron_nas import nemotron_nas
from kvrsim.model.architectures.dense.olmo import olmo2, olmo3
from kvrsim.model.architectures.dense.opt import opt
from kvrsim.model.architectures.dense.phi import phi
from kvrsim.model.architectures.parts import Reader

READERS: dict[str, Reader] = {
    "bloom": bloom,
    "cohere": cohere,
    "cohere2": cohere2,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "glm": glm,
    "glm4": glm4,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "internlm": internlm,
    "internlm2": internlm2,
    "llama": llama,
    "mimo": qwen2,
    "mistral": mistral,
    "nemotron-nas": nemotron_nas,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen2_vl_text": qwen2,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3,
    "RefinedWeb": refined_web,  # Falcon 40B as first published
    "RefinedWebModel": refined_web_model,  # Falcon 7B and the RefinedWeb models as first published
}
