"""A model with quantised weights: which matrix has which format, by the names of modules in its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import with_matrices
from kvrsim.model.quantization import FP8, FP8_ON_REQUEST, Quantization, WeightFormat
from kvrsim.model.spec import ModelSpec

# Where a Hugging Face checkpoint has its layers, and in a layer its attention and its MLP.
_LLAMA = ("model.layers", "self_attn", "mlp")
_PLACES = {
    "bloom": ("transformer.h", "self_attention", "mlp"),
    "falcon": ("transformer.h", "self_attention", "mlp"),
    "RefinedWeb": ("transformer.h", "self_attention", "mlp"),
    "RefinedWebModel": ("transformer.h", "self_attention", "mlp"),
    "gptj": ("transformer.h", "attn", "mlp"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "opt": ("model.decoder.layers", "self_attn", ""),
    "internlm2": ("model.layers", "attention", "feed_forward"),
    "mixtral": ("model.layers", "self_attn", "block_sparse_moe"),
}
_HEAD = "lm_head"
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|backbone)\.)+(?=layers\.|lm_head$)")
_REPEATED_GROUP = re.compile(r"\)[*+{]")  # what makes a search take exponentially long; names of modules need none


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """Names of modules, as lists in a quantization_config have them."""

    names: frozenset[str]  # parts of dotted names
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> Modules:
        """Parts of dotted names, with * for anything; after "re:" a regular expression of the whole name's beginning.

        Raises re.error for one that is none, or that repeats a group.
        """
        plain = [name for name in names if not name.startswith("re:") and "*" not in name]
        others = [name for name in names if name.startswith("re:") or "*" in name]
        return cls(
            names=frozenset(in_text_model(name.strip(".")) for name in plain),
            patterns=tuple(map(_pattern, others)),
        )

    def hold(self, path: str) -> bool:
        """Whether a module's dotted name is among them, or inside of one of them."""
        parts = path.split(".")
        runs = ((first, last) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))
        if any(".".join(parts[first:last]) in self.names for first, last in runs):
            return True
        return any(pattern.match(path) for pattern in self.patterns)


def in_text_model(name: str) -> str:
    """A module's name without what a checkpoint puts before its layers, such as "model.language_model."."""
    return _BEFORE_LAYERS.sub("", name)


def _pattern(name: str) -> re.Pattern[str]:
    if name.startswith("re:"):
        if _REPEATED_GROUP.search(name):
            raise re.error("a repeated group")
        return re.compile(name[3:])
    some = ".*".join(re.escape(part) for part in re.split(r"\*+", in_text_model(name.strip("."))))
    return re.compile(rf"(?:.*\.)?{some}(?:\..*)?$")


# In half precision in published weights and in engines, though no list of a file leaves them out: weights of an
# indexer's heads, DeepSeek-V4's compressors, Kimi K3's projections to the latent of its experts and back.
_KEPT = Modules.named(["weights_proj", "compressor", "routed_expert_down_proj", "routed_expert_up_proj"])


def quantized(
    model: ModelSpec, quantization: Quantization, format_of: Callable[[str], WeightFormat | None]
) -> ModelSpec:
    """The same with quantised weights.

    format_of: of a matrix, by its name in the checkpoint, such as "model.layers.0.mlp.up_proj"; one expert stands for
    all of a layer. None: it stays as it is. Routers, gates of one feature, a head that is the embedding and _KEPT
    always do.
    """
    prefix, attention, mlp = _PLACES.get(model.model_type, _LLAMA)

    def stored(place: str) -> Callable[[Gemm], Gemm]:
        """A name with a dot is a path in the layer; any other one is in the layer's part that `place` names."""

        def of(gemm: Gemm) -> Gemm:
            if gemm.out_features == 1 or _KEPT.hold(gemm.name):
                return gemm
            path = f"{here}.{gemm.name}" if "." in gemm.name else f"{here}.{place}{gemm.name}"
            return replace(gemm, weights=format_of(path))

        return of

    layers = []
    for number, layer in enumerate(model.layers):
        here = f"{prefix}.{number}"
        inside = f"{mlp}." if mlp else ""
        mixer = layer.mixer
        layers.append(
            replace(
                layer,
                mixer=None if mixer is None else with_matrices(mixer, stored(f"{attention}.")),
                mlp=tuple(map(stored(f"{inside}experts.0." if layer.num_experts else inside), layer.mlp)),
                shared_mlp=tuple(map(stored(f"{inside}shared_expert."), layer.shared_mlp)),
            )
        )
    head = None if model.tie_word_embeddings else format_of(_HEAD)
    lm_head = replace(model.lm_head, weights=head)
    return replace(model, layers=tuple(layers), lm_head=lm_head, quantization=quantization)


def in_fp8(model: ModelSpec) -> ModelSpec:
    """The same with all products of its layers in FP8, as engines quantise a model while they load it."""
    return quantized(model, FP8_ON_REQUEST, lambda path: None if path == _HEAD else FP8)
