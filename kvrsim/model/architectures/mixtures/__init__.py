"""Mixtures of experts with softmax attention."""

from __future__ import annotations

from kvrsim.model.architectures.mixtures.gemma4 import gemma4_text
from kvrsim.model.architectures.mixtures.glm4_moe import glm4_moe
from kvrsim.model.architectures.mixtures.gpt_oss import gpt_oss
from kvrsim.model.architectures.mixtures.llama4 import llama4_text
from kvrsim.model.architectures.mixtures.mimo import mimo_v2_flash
from kvrsim.model.architectures.mixtures.minimax_m2 import minimax_m2
from kvrsim.model.architectures.mixtures.mixtral import mixtral
from kvrsim.model.architectures.mixtures.qwen import qwen2_moe, qwen3_moe
from kvrsim.model.architectures.mixtures.step3p7 import step3p7
from kvrsim.model.architectures.parts import Reader

READERS: dict[str, Reader] = {
    "gemma4_text": gemma4_text,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4_text,
    "mimo_v2_flash": mimo_v2_flash,
    "minimax_m2": minimax_m2,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
    "step3p7": step3p7,
    "step3p7_text": step3p7,
}
