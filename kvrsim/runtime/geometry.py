"""Geometry: what the runtime must know of a Hugging Face model: what its layers keep, and where its parts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from kvrsim.choices import ATTENTIONS, Attention
from kvrsim.errors import InputError
from kvrsim.runtime.kept.families import FAMILIES, Family, family_of
from kvrsim.runtime.kept.layers import Kept, KeptState, KeptTokens

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# How rotary frequencies may be scaled. The others ("dynamic", "longrope") depend on the longest position
# in a forward, so that a chunk would be rotated otherwise than the whole context.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What the layers keep of tokens, as it is stored and sent, and where the model keeps its parts."""

    model_type: str  # Hugging Face architecture
    kept: tuple[Kept, ...]  # by layer
    num_attention_heads: int  # query heads
    attention: Attention = "sdpa"  # kernel that the model was loaded with
    alibi: bool = False  # whether attention adds biases that grow with the distance
    dtype: torch.dtype = torch.float32  # of K and V
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, model: Any) -> Geometry:
        """The geometry of a Hugging Face model for causal language modelling.

        Raises InputError naming `model` where the runtime does not support the architecture.
        """
        parameter = next(model.parameters())
        return cls.of_config(model.config, _attention_of(model), dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def of_config(cls, config: Any, attention: Attention, **settings: Any) -> Geometry:
        """Of a model that is not there yet, from its Hugging Face configuration; settings: dtype and device."""
        _check_rope(config)
        return cls(
            model_type=config.model_type,
            kept=tuple(_kept_by_layer(config, attention)),
            num_attention_heads=config.num_attention_heads,
            attention=attention,
            alibi=bool(getattr(config, "alibi", False)),
            **settings,
        )

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.kept)

    @property
    def family(self) -> Family:
        """Where the architecture keeps its parts."""
        return FAMILIES[self.model_type]

    @property
    def linked_layers(self) -> tuple[int, ...]:
        """The layers of which ranks hand something on."""
        return tuple(layer for layer, kept in enumerate(self.kept) if kept is not None)

    @property
    def title(self) -> str:
        """What the layers keep, such as "3 layers: a state; 1 layer: K and V of all tokens"."""
        titles = sorted((kept.title for kept in self.kept if kept is not None), key=str)
        counts = [(title, len(list(group))) for title, group in groupby(titles)]
        return "; ".join(f"{count} layer{'s' * (count > 1)}: {title}" for title, count in counts)

    def token_bytes(self, layer: int) -> int:
        """Bytes of one prompt's token in one layer, as stored and sent; of a state 0."""
        kept = self.kept[layer]
        return kept.elements * int(self.dtype.itemsize) if isinstance(kept, KeptTokens) else 0

    @property
    def least_chunk(self) -> int:
        """Tokens that a chunk behind a prefix has at least, for the same result as in one go."""
        return max((kept.least_chunk for kept in self.kept if isinstance(kept, KeptState)), default=1)

    def layers(self, model: Any) -> Sequence[Any]:
        """The decoder layers, first layer first."""
        return list(getattr(model.base_model, self.family.layers))

    def attention_of(self, layer: Any) -> Any:
        """The module of a decoder layer by which tokens see each other; None: it has none."""
        return next((module for module, _ in self._mixers(layer)), None)

    def output_projection_of(self, layer: Any) -> Any:
        """The module that projects the attention's output, where attention ends; None: there is no attention."""
        return next((output for _, output in self._mixers(layer)), None)

    def _mixers(self, layer: Any) -> list[tuple[Any, Any]]:
        """The one mixer of the layer and its output projection, or nothing."""
        named = [(getattr(layer, mixer, None), output) for mixer, output in self.family.mixers]
        return [(module, getattr(module, output)) for module, output in named if hasattr(module, output)]


def _kept_by_layer(config: Any, attention: Attention) -> list[Kept]:
    """What transformers' own cache for this model keeps, layer by layer."""
    from transformers.cache_utils import (
        DummyLayer,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionLayer,
    )

    family = family_of(config.model_type)
    tokens = _kept_tokens(config, attention)
    found: list[Kept] = []
    for layer in DynamicCache(config=config).layers or [DynamicLayer()] * config.num_hidden_layers:
        if type(layer) is DynamicLayer:
            found.append(tokens)
        elif type(layer) is DynamicSlidingWindowLayer:
            found.append(replace(tokens, sliding_window=layer.sliding_window))
        elif type(layer) is LinearAttentionLayer and family.state is not None and layer.number_of_states == 1:
            found.append(family.state(config))
        elif type(layer) is DummyLayer:
            found.append(None)
        else:
            accepted = "K and V of all tokens or of a window, or one state: what the runtime hands on"
            raise InputError("model: cache of a layer", type(layer).__name__, accepted)
    if not any(isinstance(kept, KeptTokens) for kept in found):
        raise InputError("model: layer_types", "no attention", "a layer with attention, which counts the tokens")
    return found


def _kept_tokens(config: Any, attention: Attention) -> KeptTokens:
    """What a layer with attention to all tokens keeps."""
    heads = config.num_attention_heads
    if family_of(config.model_type).is_latent:
        widths = dict(head_dim=config.kv_lora_rank, v_head_dim=config.qk_rope_head_dim)
        return KeptTokens(num_key_value_heads=1, **widths, is_latent=True)
    kv_heads, handed, returned = heads, 1, 1
    if config.model_type != "falcon":
        kv_heads = config.num_key_value_heads
    elif config.new_decoder_architecture:
        # Falcon 40B hands over (and wants back) each KV head as often as query heads share it.
        kv_heads = config.num_kv_heads
        handed = returned = heads // kv_heads
    elif config.multi_query:
        # With one KV head for many query heads SDPA falls back to its slowest kernel; a view of as many is free.
        kv_heads, returned = 1, 1 if attention == "eager" else heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KeptTokens(
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        model_heads_per_kv_head=handed,
        returned_heads_per_kv_head=returned,
    )


def _attention_of(model: Any) -> Attention:
    """The kernel that `load_model` was asked for."""
    chosen = getattr(model, "kvrsim_attention", None) or model.config._attn_implementation
    if chosen not in ATTENTIONS:
        raise InputError("attention", chosen, "one of " + ", ".join(ATTENTIONS))
    return chosen  # type: ignore[no-any-return]


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [one for one in rope.values() if isinstance(one, dict)]
    for one in by_layer_type or [rope]:
        kind = one.get("rope_type", "default")
        if kind not in _STATIC_ROPE and not getattr(config, "alibi", False):
            accepted = f"one of {', '.join(_STATIC_ROPE)}: others rotate a chunk otherwise than the whole context"
            raise InputError("model: rope_type", kind, accepted)
