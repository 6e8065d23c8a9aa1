"""StageForward: the forward of one stage of a pipeline, which has some of a model's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kept.layers import KeptTokens
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.split.forward import SplitForward, light_copy


class StageForward(SplitForward):
    """The layers of one stage; only the first has the embedding, only the last the final norm and the head.

    Its layers count from 0, in the model, its geometry and its cache.
    """

    def __init__(self, whole: ModelForward, layers: range) -> None:
        """layers: the whole model's that it has; the others' weights go when the whole model goes.

        Raises InputError for a stage without a layer that keeps K and V, by which transformers counts the tokens.
        """
        self.layers, count = layers, whole.geometry.num_hidden_layers
        self.is_first, self.is_final = layers.start == 0, layers.stop == count
        model = light_copy(whole.model)
        _cut(model, whole.geometry, layers, is_first=self.is_first, is_final=self.is_final)
        kept = whole.geometry.kept[layers.start : layers.stop]
        if not any(isinstance(one, KeptTokens) for one in kept):
            shown = f"layers {layers.start} to {layers.stop - 1}"
            raise InputError("layers", shown, "a layer with attention in every stage, which counts the tokens")
        super().__init__(whole, model, replace(whole.geometry, kept=kept))

    def piece(self, given: Any, start: int, cache: PrefixCache, *, is_last: bool) -> Any:
        """A piece of the context that stands at `start`: its token ids [B, c] or hidden states [B, c, hidden_size].

        Returns hidden states for the next stage; of the final stage the last logits [B, vocabulary] of the last piece,
        else None.
        """
        inputs = self.inputs(given, start, cache)
        with torch.inference_mode():
            if self.is_final and is_last:
                return self.model(**inputs, logits_to_keep=1).logits[:, -1]
            found = self.model.base_model(**inputs).last_hidden_state
        return None if self.is_final else found


def _cut(model: Any, geometry: Geometry, layers: range, *, is_first: bool, is_final: bool) -> None:
    base, config, family, count = model.base_model, model.config, geometry.family, geometry.num_hidden_layers
    kept = getattr(base, family.layers)[layers.start : layers.stop]
    setattr(base, family.layers, kept)
    for module in kept.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= layers.start
    config.num_hidden_layers = len(layers)
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == count:
            setattr(config, key, value[layers.start : layers.stop])
    if not is_final:
        setattr(base, family.norm, torch.nn.Identity())
        model.set_output_embeddings(torch.nn.Identity())
    if not is_first:
        model.set_input_embeddings(torch.nn.Identity())
