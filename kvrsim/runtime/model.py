"""A Hugging Face model, with random weights or those of a checkpoint, and its forward pass over one chunk."""

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
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import config_path, read_config, read_text_part
from kvrsim.runtime.attention import Attend, use_flash
from kvrsim.runtime.attention import attending as attention_by
from kvrsim.runtime.faults import is_out_of_memory
from kvrsim.runtime.geometry import DTYPES, Geometry, check_kernel, family_of
from kvrsim.runtime.kv_cache import PrefixCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_MOST_CHARACTERS = 300  # characters of a reader's error in a message


def load_model(
    config: str | Path | Mapping[str, object],
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    attention: Attention = "sdpa",
    seed: int = 0,
    checkpoint: str | None = None,
) -> PreTrainedModel:
    """Make a Hugging Face model in evaluation mode; nothing is downloaded.

    config: a built-in name, a path to a config.json or its folder, or the content of such a file. dtype: a key of
    DTYPES. seed: of random weights; they are the same on every rank of one kind of device. checkpoint: folder of the
    weights, as safetensors; None: random weights. The model generates greedily, whatever its checkpoint recommends.

    Raises InputError where the file, its architecture, its weights or the kernel cannot be used.
    """
    fields = _config_fields(config)
    check_kernel(fields["model_type"], attention)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    place = torch.device(device)
    cuda: list[int] = []
    if place.type == "cuda":
        cuda.append(torch.cuda.current_device())
    kernel = attention
    if attention == "flash":
        kernel = "sdpa"  # `use_flash` replaces it below
    settings = {"attn_implementation": kernel, "dtype": DTYPES[dtype]}
    checked_config = AutoConfig.for_model(**fields)
    if checkpoint is not None:
        model = _read_checkpoint(checkpoint, checked_config, settings)
    else:
        with torch.random.fork_rng(devices=cuda), place:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(checked_config, **settings)
    model = model.to(place).eval().requires_grad_(False)
    model.generation_config = GenerationConfig()
    if attention == "flash":
        use_flash(model)
    Geometry.of(model)  # raises InputError for unsupported models
    return model


def _read_checkpoint(folder: str, config: PreTrainedConfig, settings: Mapping[str, Any]) -> PreTrainedModel:
    """Read a model's weights; raise InputError where they cannot be read or are not those of the configuration.

    Without a bar of progress: its lock is a semaphore of the system, which a rank's process does not release.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    accepted = f"safetensors with the weights of a {config.model_type} as in config.json, or --random-weights"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True, **settings
        )
    except Exception as error:  # readers of safetensors raise errors of their own, also for unequal shapes
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:_MOST_CHARACTERS]
        raise InputError("model", folder, f"{accepted} ({reason})") from None
    if missing := sorted(report["missing_keys"]):
        raise InputError("model", folder, f"{accepted} ({len(missing)} are missing, such as {missing[0]})")
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

    def __init__(self, model: PreTrainedModel, geometry: Geometry | None = None, weights: str = "random") -> None:
        """geometry: that of a part of the model; None: that of the whole model. weights: what they are, in words."""
        self.model = model
        self.geometry = geometry or Geometry.of(model)
        self.vocab_size = int(model.config.vocab_size)
        self.weights = weights
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
