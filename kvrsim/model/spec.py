"""ModelSpec: a decoder-only model, layer by layer, as its Hugging Face config.json describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrsim.model.gemm import Gemm, Quantization
from kvrsim.model.mixers import Mixer, Recurrence


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One kind of decoder layer: a mixer, an MLP or both; layers of the same kind are equal and hash alike."""

    mixer: Mixer | None  # None: the layer has only an MLP
    mlp: tuple[Gemm, ...]  # the dense MLP, or ONE expert of a mixture of experts; (): only a mixer
    num_experts: int = 0  # routed experts, each like `mlp`; 0: dense
    num_experts_per_tok: int = 0  # routed experts that a token passes through; 0: dense
    router: Gemm | None = None  # matrix that scores the experts; None: dense
    shared_mlp: tuple[Gemm, ...] = ()  # shared experts, which process all tokens
    gated_mlp: bool = False  # whether the MLP multiplies an activated gate with a second projection
    norms_before_mixer: int = 1  # number of norms over hidden_size, up to the mixer
    norms_after_mixer: int = 1  # number of norms after the mixer
    other_parameters: int = 0  # weights (and biases) of norms, attention sinks, convolutions, decays

    @property
    def num_blocks(self) -> int:
        """Number of blocks that add to the residual stream: a mixer, an MLP."""
        return (self.mixer is not None) + bool(self.mlp)

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices except those of experts."""
        matrices = list(self.shared_mlp)
        if self.router is not None:
            matrices.insert(0, self.router)
        if self.mixer is not None:
            matrices[:0] = self.mixer.matrices
        return tuple(matrices)

    @property
    def num_parameters(self) -> int:
        """Parameters held in memory."""
        return self._sum_of(max(1, self.num_experts), lambda gemm: gemm.num_parameters) + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through."""
        return self._sum_of(max(1, self.num_experts_per_tok), lambda gemm: gemm.num_parameters) + self.other_parameters

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes held in memory; `bytes_per_element` applies to elements that are not quantised."""
        matrices = self._sum_of(max(1, self.num_experts), lambda gemm: gemm.weight_bytes(bytes_per_element))
        return matrices + self.other_parameters * bytes_per_element

    def _sum_of(self, num_experts: int, of: Callable[[Gemm], int]) -> int:
        return sum(map(of, self.matrices)) + num_experts * sum(map(of, self.mlp))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ModelSpec:
    """The shape of a model; field names are Hugging Face's."""

    name: str  # built-in name, or the name of the file's folder
    model_type: str  # Hugging Face architecture, such as "llama"
    num_hidden_layers: int  # decoder layers
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width of a dense MLP; an expert may be narrower (see LayerSpec.mlp)
    vocab_size: int  # rows of the embedding
    max_position_embeddings: int | None  # longest context in training, tokens; None: unknown
    tie_word_embeddings: bool  # whether the head reuses the embedding's weights
    alibi: bool  # whether ALiBi biases replace rotary embeddings
    learned_positions: int = 0  # rows of a learned position embedding, instead of rotary embeddings; 0: none
    parallel_attn: bool  # whether attention and MLP read the same input and have one residual addition
    final_norm_parameters: int  # weights (and biases) of the norm before the head
    embedding_norm_parameters: int = 0  # weights of a norm after the embedding; 0: no norm
    lm_head: Gemm  # projection of hidden states to logits
    layers: tuple[LayerSpec, ...]  # one per layer, first layer first
    quantization: Quantization | None = None  # quantisation of some matrices (see Gemm.weights); None: none
    dtype: str | None = None  # dtype of weights that are not quantised, such as "bf16"; None: not stated
    approximations: tuple[str, ...] = ()  # omitted or simplified parts of the model, one sentence each
    # Whether the layers were read from transformers' class, in tens of seconds, and not from the data of their type.
    from_class: bool = field(default=False, compare=False)

    # Distinct kinds of layer, in order of first appearance; and for each layer the index of its kind.
    layer_kinds: tuple[LayerSpec, ...] = field(init=False, repr=False, compare=False)
    layer_kind_index: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<ModelSpec: {self.name}>"

    def __post_init__(self) -> None:
        objects = {id(layer): layer for layer in self.layers}  # hashing a layer hashes all its matrices
        index = {kind: number for number, kind in enumerate(dict.fromkeys(objects.values()))}
        number = {key: index[layer] for key, layer in objects.items()}
        object.__setattr__(self, "layer_kinds", tuple(index))
        object.__setattr__(self, "layer_kind_index", tuple(number[id(layer)] for layer in self.layers))

    @property
    def num_parameters(self) -> int:
        """Parameters held in memory; tied embeddings count once."""
        return self._other_parameters + sum(layer.num_parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through (embedding included); fewer than all in a mixture of experts."""
        return self._other_parameters + sum(layer.active_parameters for layer in self.layers)

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return not self.alibi and not self.learned_positions

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer: token embeddings, learned positions and a norm."""
        rows = self.vocab_size + self.learned_positions
        return rows * self.hidden_size + self.embedding_norm_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer that are not the embedding's: the final norm, and the head if not tied."""
        parameters = self.final_norm_parameters + self.lm_head.num_parameters
        if self.tie_word_embeddings:
            parameters -= self.vocab_size * self.hidden_size
        return parameters

    @property
    def _other_parameters(self) -> int:
        """Parameters outside the decoder layers."""
        return self.embedding_parameters + self.head_parameters

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes of all weights of the model; `bytes_per_element`: of matrices that are not quantised."""
        layers = sum(self.layer_bytes(bytes_per_element))
        return self.embedding_bytes(bytes_per_element) + layers + self.head_bytes(bytes_per_element)

    @property
    def is_mixture(self) -> bool:
        """Whether some layers have routed experts."""
        return any(layer.num_experts for layer in self.layer_kinds)

    def layer_bytes(self, bytes_per_element: int) -> tuple[int, ...]:
        """Bytes of each layer's weights; `bytes_per_element` applies to elements that are not quantised."""
        kinds = [kind.weight_bytes(bytes_per_element) for kind in self.layer_kinds]
        return tuple(kinds[kind] for kind in self.layer_kind_index)

    def embedding_bytes(self, bytes_per_element: int) -> int:
        """Bytes of all weights before the first layer."""
        return self.embedding_parameters * bytes_per_element

    def head_bytes(self, bytes_per_element: int) -> int:
        """Bytes of all weights after the last layer, without a head that is the embedding."""
        nbytes = self.final_norm_parameters * bytes_per_element
        if not self.tie_word_embeddings:
            return nbytes + self.lm_head.weight_bytes(bytes_per_element)
        if self.lm_head.bias:
            nbytes += self.lm_head.out_features * bytes_per_element
        return nbytes

    @property
    def main_mixer(self) -> Mixer:
        """The most frequent kind of attention; in a model without attention, the most frequent mixer."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        attention = [mixer for mixer in mixers if not isinstance(mixer, Recurrence)]
        return Counter(attention or mixers).most_common(1)[0][0]

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the main mixer; for a recurrence, its heads."""
        return self.main_mixer.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of the main mixer: 1 if one vector per token serves all heads."""
        return self.main_mixer.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Width of a query of the main mixer."""
        return self.main_mixer.head_dim

    def cached_element_bytes(self, bytes_per_element: int) -> float:
        """Bytes of an element of the cache; a quantised cache has the bytes of its quantisation."""
        if self.quantization is None or self.quantization.kv_cache_bits is None:
            return bytes_per_element
        return self.quantization.kv_cache_bits / 8

    def cache_bytes(self, tokens: int, bytes_per_element: int) -> float:
        """Bytes of the caches and states of `tokens` tokens in all layers."""
        width = self.cached_element_bytes(bytes_per_element)
        mixers = (layer.mixer for layer in self.layers)
        return sum(float(mixer.cache_bytes(tokens, width)) for mixer in mixers if mixer is not None)

    def layer_cache_bytes(self, tokens: int, bytes_per_element: int) -> int:
        """Bytes of the cache of `tokens` tokens in the layer with the largest cache."""
        width = self.cached_element_bytes(bytes_per_element)
        mixers = [layer.mixer for layer in self.layer_kinds if layer.mixer is not None]
        return max((round(float(mixer.cache_bytes(tokens, width))) for mixer in mixers), default=0)

    def kv_bytes_per_token(self, bytes_per_element: int) -> float:
        """Bytes that one more token adds to a long cache, all layers."""
        width = self.cached_element_bytes(bytes_per_element)
        return sum(layer.mixer.token_bytes(width) for layer in self.layers if layer.mixer is not None)


def mixers_of(model: ModelSpec) -> dict[str, int]:
    """Number of layers per kind of mixer, in the order of first layers."""
    return dict(Counter(map(mixer_title, model.layers)))


def mixer_title(layer: LayerSpec) -> str:
    """Short name of a layer's mixer; for a layer without a mixer, its kind."""
    if layer.mixer is not None:
        return layer.mixer.title
    if layer.num_experts:
        return "experts alone"
    return "MLP alone"


def describe_mixers(model: ModelSpec) -> str:
    """Describe the mixers: "36 × attention in chunks of 8192; 12 × full attention"."""
    return "; ".join(f"{count} × {title}" for title, count in mixers_of(model).items())


def describe_parameters(parameters: int) -> str:
    """Format a number of parameters: "8.0 B", small models with one more digit, trillions with T."""
    if parameters >= 1e12:
        return f"{parameters / 1e12:.2f} T"
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e9:.2f} B"
