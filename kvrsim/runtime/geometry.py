"""Geometry: what the runtime must know of a Hugging Face model; and a model with random weights to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvrsim.choices import ATTENTIONS, Attention
from kvrsim.errors import InputError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# How rotary frequencies may be scaled. The others ("dynamic", "longrope") depend on the longest position
# in a forward, so that a chunk would be rotated otherwise than the whole context.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Where an architecture keeps its parts."""

    layers: str  # the decoder layers, an attribute of the base model
    attention: str  # the attention module, an attribute of a layer
    output_projection: str  # the projection of the attention's output, an attribute of the attention


_LLAMA_LIKE = Family(
    layers="layers",
    attention="self_attn",
    output_projection="o_proj",
)
_FALCON = Family(
    layers="h",
    attention="self_attention",
    output_projection="dense",
)
FAMILIES = {
    "falcon": _FALCON,
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The shape of K and V as they are stored and sent, and where the model keeps its parts."""

    model_type: str  # Hugging Face architecture
    num_hidden_layers: int  # decoder layers
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # KV heads that are stored and sent
    head_dim: int  # width of a head
    model_heads_per_kv_head: int = 1  # heads in which the model hands over each KV head: Falcon 40B repeats it
    returned_heads_per_kv_head: int = 1  # heads in which attention gets each KV head back
    attention: Attention = "sdpa"  # kernel that the model was loaded with
    dtype: torch.dtype = torch.float32  # of K and V
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sliding_window: int | None = None  # tokens that a query sees in the narrowest layer; None: all before it

    @classmethod
    def of(cls, model: Any) -> Geometry:
        """The geometry of a Hugging Face model for causal language modelling.

        Raises InputError naming `model` where the runtime does not support the architecture.
        """
        config = model.config
        family_of(config.model_type)
        _check_rope(config)
        heads = config.num_attention_heads
        kv_heads, handed, returned = heads, 1, 1
        attention = _attention_of(model)
        if config.model_type != "falcon":
            kv_heads = config.num_key_value_heads
        elif config.new_decoder_architecture:
            # Falcon 40B hands over (and wants back) each KV head as often as query heads share it.
            kv_heads = config.num_kv_heads
            handed = returned = heads // kv_heads
        elif config.multi_query:
            # With one KV head for many query heads SDPA falls back to its slowest kernel; a view of as many is free.
            kv_heads, returned = 1, 1 if attention == "eager" else heads
        parameter = next(model.parameters())
        return cls(
            model_type=config.model_type,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            model_heads_per_kv_head=handed,
            returned_heads_per_kv_head=returned,
            attention=attention,
            dtype=parameter.dtype,
            device=parameter.device,
            sliding_window=_window(config),
        )

    @property
    def family(self) -> Family:
        """Where the architecture keeps its parts."""
        return FAMILIES[self.model_type]

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of one token's K and V in one layer, as stored and sent."""
        return 2 * self.num_key_value_heads * self.head_dim * int(self.dtype.itemsize)

    def layers(self, model: Any) -> Sequence[Any]:
        """The decoder layers, first layer first."""
        return list(getattr(model.base_model, self.family.layers))

    def attention_of(self, layer: Any) -> Any:
        """The attention module of a decoder layer."""
        return getattr(layer, self.family.attention)

    def output_projection_of(self, layer: Any) -> Any:
        """The module that projects the attention's output: attention ends where it begins."""
        return getattr(self.attention_of(layer), self.family.output_projection)

    def check_context(self, context_len: int, argument: str = "ctx") -> None:
        """Raise InputError where a sliding window would hide part of the context."""
        if self.sliding_window is not None and self.sliding_window < context_len:
            accepted = f"at most {self.sliding_window} tokens, the sliding window: the runtime sends whole KV caches"
            raise InputError(argument, context_len, accepted)


def family_of(model_type: str, argument: str = "model") -> Family:
    """Where the architecture keeps its parts; raises InputError where the runtime does not know it."""
    if model_type not in FAMILIES:
        accepted = f"an architecture that the runtime supports: {', '.join(FAMILIES)}"
        raise InputError(f"{argument}: model_type", model_type, accepted)
    return FAMILIES[model_type]


def _attention_of(model: Any) -> Attention:
    """The kernel that `load_model` was asked for."""
    chosen = getattr(model, "kvrsim_attention", None) or model.config._attn_implementation
    if chosen not in ATTENTIONS:
        raise InputError("attention", chosen, "one of " + ", ".join(ATTENTIONS))
    return chosen  # type: ignore[no-any-return]


def _window(config: Any) -> int | None:
    """The narrowest sliding window in effect."""
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)
    return int(window) if kinds is None or "sliding_attention" in kinds else None


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _STATIC_ROPE and not getattr(config, "alibi", False):
        accepted = f"one of {', '.join(_STATIC_ROPE)}: others rotate a chunk otherwise than the whole context"
        raise InputError("model: rope_type", kind, accepted)
