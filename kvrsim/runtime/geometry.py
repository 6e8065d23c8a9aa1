"""Geometry: the data that the layers of a Hugging Face model keep of each token, and the names of the model's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from kvrsim.choices import Attention
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.model.mixers import Attention as Softmax
from kvrsim.model.mixers import LatentAttention, Mixer, Recurrence

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RECURRENT_BYTES = 4  # bytes per element of a recurrent state, which is kept in fp32

# Supported scalings of rotary frequencies. The others ("dynamic", "longrope") depend on the longest position in a
# forward, so they would rotate a chunk differently from the whole context.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """K and V of each token in one layer. Latent attention keeps one head: the latent as K, the rotary key as V."""

    num_key_value_heads: int  # number of heads that are stored and sent
    head_dim: int  # width of a head of K
    v_head_dim: int  # width of a head of V
    sliding_window: int | None = None  # number of tokens that a query sees, itself included; None: all earlier tokens
    model_heads_per_kv_head: int = 1  # copies of each KV head in the K and V that the model computes
    returned_heads_per_kv_head: int = 1  # copies of each KV head that attention receives
    is_latent: bool = False

    @property
    def elements(self) -> int:
        """Elements per token and prompt."""
        return self.num_key_value_heads * (self.head_dim + self.v_head_dim)

    def first_seen(self, start: int) -> int:
        """Return the first token that a query at `start` sees; later queries need no earlier token."""
        if self.sliding_window is None:
            return 0
        return max(0, start - self.sliding_window + 1)

    def share(self, size: int) -> KvLayout:
        """Return the layout of one of `size` ranks that share the KV heads; it has at least one head."""
        return replace(self, num_key_value_heads=max(1, self.num_key_value_heads // size))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """A recurrent state of fixed size, in fp32, and the last inputs of the convolution before it."""

    recurrent: tuple[int, ...]  # shape for one prompt
    conv_channels: int  # channels of the convolution
    conv_tokens: int  # inputs that the convolution of the next token needs: kernel size - 1
    least_chunk: int = 1  # least tokens of a chunk after a state: shorter chunks change the result

    def nbytes(self, batch: int, element_bytes: int) -> int:
        """Return the bytes for `batch` prompts; `element_bytes` is the size of an input of the convolution."""
        conv = self.conv_channels * self.conv_tokens * element_bytes
        return batch * (prod(self.recurrent) * RECURRENT_BYTES + conv)


Layout = KvLayout | StateLayout | None  # None: the layer has no cache, for example only an MLP


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of an architecture's parts in transformers."""

    layers: str = "layers"  # attribute of the base model that holds the decoder layers
    norm: str = "norm"  # attribute of the base model that holds the norm after the last layer
    # Attributes of a layer that may be its mixer, each with the attribute that projects the mixer's output.
    mixers: tuple[tuple[str, str], ...] = (("self_attn", "o_proj"),)
    eager_only: str | None = None  # reason why transformers supports only "eager" attention


_LLAMA_LIKE = (
    *("deepseek_v2", "deepseek_v3", "gemma", "gemma3_text", "glm4_moe", "kimi_linear", "llama", "minimax_m2"),
    *("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
_GATED_DELTA = Family(mixers=(("self_attn", "o_proj"), ("linear_attn", "out_proj")))
FAMILIES = {
    **dict.fromkeys(_LLAMA_LIKE, Family()),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _GATED_DELTA),
    "falcon": Family(layers="h", norm="ln_f", mixers=(("self_attention", "dense"),)),
    "gemma2": Family(eager_only="it caps the scores of its attention"),
    "gpt_oss": Family(eager_only="each head's softmax has a sink"),
    "nemotron_h": Family(norm="norm_f", mixers=(("mixer", "o_proj"), ("mixer", "out_proj"))),
}


def family_of(model_type: str) -> Family:
    """Return the family of an architecture; raise InputError if the runtime does not support the architecture."""
    if model_type not in FAMILIES:
        accepted = f"an architecture that the runtime supports: {', '.join(sorted(FAMILIES))}"
        raise InputError("model: model_type", model_type, accepted)
    return FAMILIES[model_type]


def check_kernel(model_type: str, attention: str) -> None:
    """Raise InputError if the runtime does not support the architecture, or this attention kernel for it."""
    reason = family_of(model_type).eager_only
    if reason is not None and attention != "eager":
        raise InputError("attention", attention, f"eager for {model_type}: {reason}, which other kernels leave out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The caches of all layers, as stored and sent, and the places of the model's parts."""

    model_type: str  # Hugging Face architecture
    layouts: tuple[Layout, ...]  # layout of each layer
    attention: Attention = "sdpa"  # attention kernel of the loaded model
    alibi: bool = False  # whether attention adds biases that grow with the distance
    dtype: torch.dtype = torch.float32  # dtype of K and V
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, model: PreTrainedModel) -> Geometry:
        """Read a Hugging Face model for causal language modelling.

        Raises InputError naming `model` where the runtime does not support the architecture.
        """
        attention = getattr(model, "kvrsim_attention", None) or model.config._attn_implementation
        parameter = next(model.parameters())
        geometry = cls.of_config(model.config, attention)
        return replace(geometry, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def of_config(cls, config: PreTrainedConfig, attention: Attention) -> Geometry:
        """Read a Hugging Face configuration, which says neither dtype nor device: they are fp32 and the CPU."""
        _check_rope(config)
        spec = read_config(JsonObject(fields=config.to_dict(), where="model"), "model")
        return cls(
            model_type=config.model_type,
            layouts=tuple(_layout(layer.mixer, config, attention) for layer in spec.layers),
            attention=attention,
            alibi=bool(getattr(config, "alibi", False)),
        )

    def share(self, size: int) -> Geometry:
        """Return the geometry of one of `size` ranks that share the KV heads."""
        layouts: list[Layout] = []
        for layout in self.layouts:
            if isinstance(layout, KvLayout):
                layouts.append(layout.share(size))
            else:
                layouts.append(layout)
        return replace(self, layouts=tuple(layouts))

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layouts)

    @property
    def family(self) -> Family:
        """The architecture's family."""
        return FAMILIES[self.model_type]

    @property
    def linked_layers(self) -> tuple[int, ...]:
        """Layers whose K and V or states travel between ranks."""
        return tuple(layer for layer, layout in enumerate(self.layouts) if layout is not None)

    @property
    def least_chunk(self) -> int:
        """Least number of tokens of a chunk behind a prefix: shorter chunks change the result."""
        least = 1
        for layout in self.layouts:
            if isinstance(layout, StateLayout):
                least = max(least, layout.least_chunk)
        return least

    def why_no_own_attention(self) -> str | None:
        """Return why the runtime cannot compute attention to K and V instead of the model; None if it can."""
        if self.alibi:
            return "its attention adds biases (ALiBi)"
        if any(isinstance(layout, KvLayout) and layout.is_latent for layout in self.layouts):
            return "its layers keep latents"
        return self.family.eager_only

    def layers(self, model: PreTrainedModel) -> Sequence[nn.Module]:
        """Return the decoder layers, first layer first."""
        return list(getattr(model.base_model, self.family.layers))

    def mixer_of(self, layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the module of a decoder layer that mixes tokens, and the module that projects its output.

        Both are None for a layer without a mixer.
        """
        for mixer_name, output_name in self.family.mixers:
            mixer = getattr(layer, mixer_name, None)
            if hasattr(mixer, output_name):
                return mixer, getattr(mixer, output_name)
        return None, None


def _layout(mixer: Mixer | None, config: PreTrainedConfig, attention: Attention) -> Layout:
    """Return the layout of a layer with this mixer."""
    if mixer is None:
        return None
    if isinstance(mixer, Recurrence):
        head_shape = (mixer.key_head_dim, mixer.value_head_dim)
        least_chunk = 1
        if mixer.kind == "mamba2":
            head_shape = (mixer.value_head_dim, mixer.key_head_dim)
            least_chunk = 2  # for a single token after a state, transformers computes Mamba-2 without time_step_min
        return StateLayout(
            recurrent=(mixer.num_value_heads, *head_shape),
            conv_channels=mixer.conv_channels,
            conv_tokens=mixer.conv_kernel - 1,
            least_chunk=least_chunk,
        )
    if isinstance(mixer, LatentAttention):
        return KvLayout(
            num_key_value_heads=1, head_dim=mixer.kv_lora_rank, v_head_dim=mixer.qk_rope_head_dim, is_latent=True
        )
    assert isinstance(mixer, Softmax)
    kv_heads = mixer.num_key_value_heads
    repeats = 1
    returned = 1
    if config.model_type == "falcon" and config.new_decoder_architecture:
        # Falcon 40B repeats each KV head for every query head that shares it, and expects repeated heads.
        repeats = mixer.num_attention_heads // kv_heads
        returned = repeats
    elif config.model_type == "falcon" and kv_heads == 1 and attention != "eager":
        # SDPA is slowest with one KV head for many query heads. Repeating that head as a view takes no time or memory.
        returned = mixer.num_attention_heads
    return KvLayout(
        num_key_value_heads=kv_heads,
        head_dim=mixer.head_dim,
        v_head_dim=mixer.v_head_dim,
        sliding_window=mixer.sliding_window,
        model_heads_per_kv_head=repeats,
        returned_heads_per_kv_head=returned,
    )


def _check_rope(config: PreTrainedConfig) -> None:
    """Raise InputError for rotary embeddings that depend on the length of the context; ALiBi has none."""
    if getattr(config, "alibi", False):
        return
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    for parameters in by_layer_type or [rope]:
        kind = parameters.get("rope_type", "default")
        if kind not in _STATIC_ROPE:
            accepted = f"one of {', '.join(_STATIC_ROPE)}: others rotate a chunk differently from the whole context"
            raise InputError("model: rope_type", kind, accepted)
