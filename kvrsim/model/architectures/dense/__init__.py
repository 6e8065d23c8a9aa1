"""Dense models with softmax attention."""

from __future__ import annotations

from kvrsim.model.architectures.dense.bloom import bloom
from kvrsim.model.architectures.dense.falcon import falcon, refined_web, refined_web_model
from kvrsim.model.architectures.dense.gpt_neox import gpt_neox
from kvrsim.model.architectures.dense.gptj import gptj
from kvrsim.model.architectures.dense.internlm import internlm, internlm2
from kvrsim.model.architectures.dense.llama import gemma, gemma2, gemma3_text, llama, mistral, phi3, qwen2, qwen3
from kvrsim.model.architectures.dense.opt import opt
from kvrsim.model.architectures.dense.phi import phi
from kvrsim.model.architectures.parts import Reader

READERS: dict[str, Reader] = {
    "bloom": bloom,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "internlm": internlm,
    "internlm2": internlm2,
    "llama": llama,
    "mistral": mistral,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "RefinedWeb": refined_web,  # Falcon 40B as first published
    "RefinedWebModel": refined_web_model,  # Falcon 7B and the RefinedWeb models as first published
}
