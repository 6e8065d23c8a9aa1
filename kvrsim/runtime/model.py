"""A Hugging Face model with random weights, and its forward pass over one chunk."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvrsim.choices import Attention
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import config_path, read_config, read_text_part
from kvrsim.runtime.attention import Attend, use_flash
from kvrsim.runtime.attention import attending as attention_by
from kvrsim.runtime.geometry import DTYPES, Geometry, check_kernel, family_of
from kvrsim.runtime.kv_cache import PrefixCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    config: str | Path | Mapping[str, object],
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    attention: Attention = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """Make a Hugging Face model with random weights, in evaluation mode; nothing is downloaded.

    config: a built-in name, a path to a config.json or its folder, or the content of such a file. dtype: a key of
    DTYPES. The same seed gives the same weights on every rank of one kind of device.

    Raises InputError where the file, its architecture or the kernel cannot be used.
    """
    fields = _config_fields(config)
    check_kernel(fields["model_type"], attention)
    from transformers import AutoConfig, AutoModelForCausalLM

    place = torch.device(device)
    cuda: list[int] = []
    if place.type == "cuda":
        cuda.append(torch.cuda.current_device())
    kernel = attention
    if attention == "flash":
        kernel = "sdpa"  # `use_flash` replaces it below
    with torch.random.fork_rng(devices=cuda), place:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**fields), attn_implementation=kernel, dtype=DTYPES[dtype]
        )
    model = model.to(place).eval().requires_grad_(False)
    if attention == "flash":
        use_flash(model)
    Geometry.of(model)  # raises InputError for unsupported models
    return model


def geometry_of(config: str | Path | Mapping[str, object], attention: Attention) -> Geometry:
    """Return the geometry of a model from its configuration only; `config`: as in `load_model`."""
    from transformers import AutoConfig

    return Geometry.of_config(AutoConfig.for_model(**_config_fields(config)), attention)


def _config_fields(config: str | Path | Mapping[str, object]) -> dict[str, Any]:
    """Return the keys of a config.json, or of its text model if it has several models, checked as in the simulator."""
    if isinstance(config, Mapping):
        source = JsonObject(fields=config, where="model")
    else:
        source = JsonObject.read(config_path(str(config), "model"), "model")
    text, _ = read_text_part(source)
    family_of(str(text.fields.get("model_type", "nothing")))
    if read_config(source, "model").quantization is not None:
        key = source.first_of("quantization_config", "compression_config")
        raise source.error(key, "nothing: the runtime runs models that are not quantised")
    unused = ("architectures", "torch_dtype", "dtype")
    fields = {}
    for key, value in text.fields.items():
        if not key.startswith("_") and key not in unused:
            fields[key] = value
    return fields


class ModelForward:
    """The unchanged forward of a Hugging Face model; only the last rank computes logits, for the last token.

    It is called with tokens [B, c], or hidden states [B, c, hidden_size], that begin at position `start`. It returns
    the logits of the last token [B, vocabulary] if `is_last`, else hidden states. positions: positions of the tokens,
    [c]; None: consecutive from `start`. attend: function that replaces the model's attention.
    """

    def __init__(self, model: PreTrainedModel, geometry: Geometry | None = None) -> None:
        """geometry: that of a part of the model; None: that of the whole model."""
        self.model = model
        self.geometry = geometry or Geometry.of(model)
        self.vocab_size = int(model.config.vocab_size)
        self.digest = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]  # digest of the config

    def __call__(
        self,
        ids: Tensor,
        start: int,
        cache: PrefixCache,
        *,
        is_last: bool,
        positions: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        inputs = self.inputs(ids, start, cache)
        if positions is not None:
            inputs["position_ids"] = positions.unsqueeze(0)
        attention: AbstractContextManager[None] = nullcontext()
        if attend is not None:
            attention = attention_by(self.model, attend)
        with attention, torch.inference_mode():
            if is_last:
                return self.model(**inputs, logits_to_keep=1).logits[:, -1]
            return self.model.base_model(**inputs).last_hidden_state

    def inputs(self, ids: Tensor, start: int, cache: PrefixCache) -> dict[str, Any]:
        """Return the model's arguments for tokens from `start` on: ids [B, c], or hidden states [B, c, hidden_size]."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
        name = "inputs_embeds"
        if ids.dim() == 2:
            name = "input_ids"
        inputs: dict[str, Any] = {name: ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        visible_len = cache.visible_len
        if self.geometry.alibi or (start == 0 and visible_len > ids.shape[1]):
            # ALiBi's biases are as long as the mask. Under TSP the first rank must also compute the masked half: at
            # position 0, without a mask, transformers assumes that memory after the chunk is not filled yet.
            inputs["attention_mask"] = torch.ones(ids.shape[0], visible_len, dtype=torch.long, device=ids.device)
        return inputs


def light_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the modules of a model, but not its weights and buffers, so that parts can be removed from the copy."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)
