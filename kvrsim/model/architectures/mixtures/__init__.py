"""Mixtures of experts with softmax attention."""

from __future__ import annotations

from kvrsim.model.architectures.mixtures.gpt_oss import gpt_oss
from kvrsim.model.architectures.mixtures.mixtral import mixtral
from kvrsim.model.architectures.mixtures.qwen import qwen2_moe, qwen3_moe
from kvrsim.model.architectures.parts import Reader

READERS: dict[str, Reader] = {
    "gpt_oss": gpt_oss,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
}
