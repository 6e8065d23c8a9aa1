"""OLMo 2 and 3: norms after each block, and over all heads' queries and keys."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family, llama_like
from kvrsim.model.architectures.parts import Norms, Reader, read_num_layers
from kvrsim.model.architectures.windows import Windows, period_windows
from kvrsim.model.spec import ModelSpec


def olmo2(config: JsonObject, name: str) -> ModelSpec:
    return _olmo(config, name, [None] * read_num_layers(config))


def olmo3(config: JsonObject, name: str) -> ModelSpec:
    """Three layers of four see a window only."""
    return _olmo(config, name, period_windows(config, 4096, 4))


def _olmo(config: JsonObject, name: str, windows: Windows) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    norms = Norms(count=2, before=0, qk=True, qk_of_heads=True)
    return llama_like(config, name, Family(qkv_bias=bias, output_bias=bias, norms=norms), windows)


READERS: dict[str, Reader] = {
    "olmo2": olmo2,
    "olmo3": olmo3,
}
