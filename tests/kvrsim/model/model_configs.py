"""Small configurations of each architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 101,
}
GQA = {**SMALL, "num_key_value_heads": 2}
MOE = {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
FALCON = {key: SMALL[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
FALCON |= {"model_type": "falcon", "num_hidden_layers": 3}
LLAMA = {"model_type": "llama", **SMALL}
GPTJ = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 8, "vocab_size": 101, "n_positions": 128}
BLOOM = {"model_type": "bloom", "vocab_size": 101}
OPT = {"model_type": "opt", **SMALL, "ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64}


def load(folder: Path, config: object) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)
