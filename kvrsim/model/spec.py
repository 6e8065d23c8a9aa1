"""ModelSpec: a decoder-only transformer, layer by layer, as its Hugging Face config.json describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrsim.model.quantization import Quantization, WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """One weight matrix: a token costs 2 x in_features x out_features FLOPs."""

    name: str  # of the Hugging Face module
    in_features: int  # width of the input
    out_features: int  # width of the output
    bias: bool = False  # whether a vector of out_features is added
    weights: WeightFormat | None = None  # how they are stored, if quantised; None: in the request's dtype

    @property
    def num_parameters(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.bias else 0)

    @property
    def compute(self) -> str | None:
        """Type of the product, a key of GEMM_TYPES; None: the request's dtype."""
        return None if self.weights is None else self.weights.compute

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes of weights, scales and bias; `bytes_per_element`: of what is not quantised."""
        if self.weights is None:
            return self.num_parameters * bytes_per_element
        bias = self.out_features * bytes_per_element if self.bias else 0
        return self.weights.nbytes(self.in_features, self.out_features) + bias


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One kind of decoder layer; layers of the same kind are equal and hash alike."""

    qkv: tuple[Gemm, ...]  # projections to Q, K, V: three matrices or one fused
    output: Gemm  # projection of the attention's output
    mlp: tuple[Gemm, ...]  # the dense MLP, or ONE expert of a mixture of experts
    num_experts: int = 0  # routed experts, each like `mlp`; 0: dense
    num_experts_per_tok: int = 0  # routed experts that a token passes through; 0: dense
    router: Gemm | None = None  # scores the experts; None: dense
    shared_mlp: tuple[Gemm, ...] = ()  # what every token passes through beside its experts
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: all before it
    norm_parameters: int = 0  # weights (and biases) of the layer's norms, q and k norms and attention sinks included

    @property
    def num_parameters(self) -> int:
        """Parameters held in memory."""
        return self._summed(max(1, self.num_experts), lambda gemm: gemm.num_parameters) + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through."""
        return self._summed(max(1, self.num_experts_per_tok), lambda gemm: gemm.num_parameters) + self.norm_parameters

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes held in memory; `bytes_per_element`: of what is not quantised."""
        matrices = self._summed(max(1, self.num_experts), lambda gemm: gemm.weight_bytes(bytes_per_element))
        return matrices + self.norm_parameters * bytes_per_element

    def _summed(self, num_experts: int, of: Callable[[Gemm], int]) -> int:
        every = (*self.qkv, self.output, *self.shared_mlp, *([self.router] if self.router else []))
        return sum(map(of, every)) + num_experts * sum(map(of, self.mlp))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape of a model; field names are Hugging Face's."""

    name: str  # built-in name, or the name of the file's folder
    model_type: str  # Hugging Face architecture, such as "llama"
    num_hidden_layers: int  # decoder layers
    hidden_size: int  # width of the residual stream
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # KV heads: fewer than query heads under GQA, 1 under MQA
    head_dim: int  # width of a head; need not be hidden_size / num_attention_heads
    intermediate_size: int  # width of a dense MLP; an expert may be narrower (see LayerSpec.mlp)
    vocab_size: int  # rows of the embedding
    max_position_embeddings: int | None  # longest context of its training, tokens; None: not stated
    tie_word_embeddings: bool  # whether the head reuses the embedding's weights
    gated_mlp: bool  # whether the MLP multiplies an activated gate with a second projection
    alibi: bool  # ALiBi biases instead of rotary embeddings
    learned_positions: int = 0  # rows of a learned position embedding, instead of rotary embeddings; 0: none
    parallel_attn: bool  # attention and MLP read the same input, one residual addition a layer
    qk_norm: bool  # whether queries and keys are normalised head by head
    norms_before_attention: int  # norms over hidden_size in a layer, up to its attention
    norms_after_attention: int  # and after it
    final_norm_parameters: int  # weights (and biases) of the norm before the head
    embedding_norm_parameters: int = 0  # and of a norm after the embedding; 0: none
    lm_head: Gemm  # hidden states to logits
    layers: tuple[LayerSpec, ...]  # one a layer, first layer first
    quantization: Quantization | None = None  # of the weights of some matrices (see Gemm.weights); None: none

    # Distinct kinds of layer, in order of first appearance; and for each layer the index of its kind.
    layer_kinds: tuple[LayerSpec, ...] = field(init=False, repr=False, compare=False)
    layer_kind_index: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {kind: number for number, kind in enumerate(dict.fromkeys(self.layers))}
        object.__setattr__(self, "layer_kinds", tuple(index))
        object.__setattr__(self, "layer_kind_index", tuple(index[layer] for layer in self.layers))

    @property
    def num_parameters(self) -> int:
        """Parameters held in memory; tied embeddings count once."""
        return self._other_parameters + sum(layer.num_parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through (embedding included): fewer under a mixture of experts."""
        return self._other_parameters + sum(layer.active_parameters for layer in self.layers)

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return not self.alibi and not self.learned_positions

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer: of tokens, learned positions and a norm."""
        rows = self.vocab_size + self.learned_positions
        return rows * self.hidden_size + self.embedding_norm_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer that are not the embedding's: the final norm, and the head if not tied."""
        tied = self.vocab_size * self.hidden_size if self.tie_word_embeddings else 0
        return self.final_norm_parameters + self.lm_head.num_parameters - tied

    @property
    def _other_parameters(self) -> int:
        """Parameters outside the decoder layers."""
        return self.embedding_parameters + self.head_parameters

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes of all weights on a rank that holds the whole model; `bytes_per_element`: of what is not quantised."""
        layers = sum(layer.weight_bytes(bytes_per_element) for layer in self.layers)
        return self.embedding_bytes(bytes_per_element) + layers + self.head_bytes(bytes_per_element)

    def embedding_bytes(self, bytes_per_element: int) -> int:
        """Bytes of what comes before the first layer."""
        return self.embedding_parameters * bytes_per_element

    def head_bytes(self, bytes_per_element: int) -> int:
        """Bytes of what comes after the last layer, less a head that is the embedding."""
        head = 0 if self.tie_word_embeddings else self.lm_head.weight_bytes(bytes_per_element)
        bias = self.lm_head.out_features if self.tie_word_embeddings and self.lm_head.bias else 0
        return head + (self.final_norm_parameters + bias) * bytes_per_element

    def kv_bytes_per_token_layer(self, bytes_per_element: int) -> int:
        """Bytes of one token's keys and values in one layer; of a quantised cache, as its quantisation says."""
        elements = 2 * self.num_key_value_heads * self.head_dim
        cache_bits = None if self.quantization is None else self.quantization.kv_cache_bits
        return elements * bytes_per_element if cache_bits is None else elements * cache_bits // 8

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_hidden_layers * self.kv_bytes_per_token_layer(bytes_per_element)
