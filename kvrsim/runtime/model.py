"""A Hugging Face model with random weights, and its forward pass over one chunk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from kvrsim.choices import ATTENTIONS, Attention
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures import read_config
from kvrsim.model.architectures.multimodal import read_text_part
from kvrsim.model.load import config_path
from kvrsim.runtime.attention import attending as attention_by
from kvrsim.runtime.attention import use_flash
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.geometry import DTYPES, Geometry
from kvrsim.runtime.kept.families import FAMILIES, check_kernel, family_of

_BLOCK = 2**16  # weights that share a checksum
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a weight


def load_model(
    config: str | Path | Mapping[str, object],
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    attention: Attention = "sdpa",
    seed: int = 0,
    init_std: float | None = None,
) -> Any:
    """A Hugging Face model with random weights, in evaluation mode; nothing is downloaded.

    `config` is a built-in name, a path to a config.json or its folder, or what such a file holds. The same
    seed gives the same weights on every rank of one kind of device. `init_std` is the spread of the weights
    (None: the config's), which tests raise so that the first token depends on the whole context.

    Raises InputError where the file, its architecture or the kernel cannot be used.
    """
    if attention not in ATTENTIONS:
        raise InputError("attention", attention, "one of " + ", ".join(ATTENTIONS))
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, "one of " + ", ".join(DTYPES))
    fields = _fields(config)
    check_kernel(fields["model_type"], attention)
    model = _build(fields, DTYPES[dtype], device, attention, seed, init_std)
    if attention == "flash":
        use_flash(model)
    Geometry.of(model)  # refuses what the runtime cannot run
    return model


def geometry_of(config: str | Path | Mapping[str, object], attention: Attention) -> Geometry:
    """What a model's layers keep, from its configuration alone, as `load_model` takes it."""
    from transformers import AutoConfig

    return Geometry.of_config(AutoConfig.for_model(**_known(_fields(config))), attention)


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in ("architectures", "torch_dtype", "dtype")}


def _fields(config: str | Path | Mapping[str, object]) -> dict[str, Any]:
    """The keys of the config.json, of its text model where it has several, those that are comments left out.

    Checked as the simulator checks them.
    """
    source = JsonObject(fields=config, where="model") if isinstance(config, Mapping) else None
    if source is None:
        source = JsonObject.read(config_path(str(config), "model"), "model")
    text, _ = read_text_part(source, FAMILIES.__contains__)
    family_of(str(text.fields.get("model_type", "nothing")))
    if read_config(source, "model").quantization is not None:
        key = source.first_of("quantization_config", "compression_config")
        raise source.error(key, "nothing: the runtime runs models that are not quantised")
    return {key: value for key, value in text.fields.items() if not key.startswith("_")}


def _build(
    fields: dict[str, Any],
    dtype: torch.dtype,
    device: str | torch.device,
    attention: Attention,
    seed: int,
    init_std: float | None,
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = _known(fields)
    if init_std is not None:
        fields["initializer_range"] = init_std
    config = AutoConfig.for_model(**fields)
    kernel = "sdpa" if attention == "flash" else attention
    place = torch.device(device)
    cuda = [torch.cuda.current_device()] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), place:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=dtype)
    return model.to(place).eval().requires_grad_(False)


class Attending(Protocol):
    """Tokens that need not follow each other, and their attention."""

    @property
    def positions(self) -> Any:
        """Of the tokens, shape [c]."""

    def attend(self, query: Any, scale: float | None) -> Any:
        """The layer's attention, [B, H, c, D], of queries [B, H, c, D]."""


class Forward(Protocol):
    """What a rank computes."""

    geometry: Geometry
    whole_geometry: Geometry  # of the model of which it may be a part

    def __call__(
        self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool, attending: Attending | None = None
    ) -> Any:
        """Run the tokens [B, c] that stand at `start`; returns the last one's logits [B, vocabulary] if `is_last`.

        attending: where the tokens stand instead, and what attends to K and V in place of the model.
        """

    def digest(self) -> str:
        """What tells this forward from others, the same on every rank."""


class ModelForward:
    """The forward of a Hugging Face model, unchanged; only the last rank computes logits, of the last token."""

    def __init__(self, model: Any, geometry: Geometry | None = None) -> None:
        """geometry: of a part of a model; None: the model's own."""
        self.model, self.geometry = model, geometry or Geometry.of(model)
        self.whole_geometry = self.geometry
        self._digest: str | None = None  # once asked for: it reads all weights

    def __call__(
        self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool, attending: Attending | None = None
    ) -> Any:
        if attending is None:
            return self._run(self.inputs(ids, start, cache), is_last=is_last)
        inputs = dict(input_ids=ids, position_ids=attending.positions.unsqueeze(0), past_key_values=cache)
        with attention_by(self.model, attending.attend):
            return self._run(inputs | {"use_cache": True}, is_last=is_last)

    def _run(self, inputs: dict[str, Any], *, is_last: bool) -> Any:
        with torch.inference_mode():
            if is_last:
                return self.model(**inputs, logits_to_keep=1).logits[:, -1]
            self.model.base_model(**inputs)
        return None

    def inputs(self, ids: Any, start: int, cache: PrefixCache) -> dict[str, Any]:
        """What the model takes for tokens that stand at `start`: ids [B, c], or hidden states [B, c, hidden_size]."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
        name = "input_ids" if ids.dim() == 2 else "inputs_embeds"
        inputs: dict[str, Any] = {name: ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        visible_len = cache.visible_len
        if self.geometry.alibi or (start == 0 and visible_len > ids.shape[1]):
            # ALiBi's biases are as long as the mask. And under TSP, transformers would let the first rank off: from
            # position 0 on, without a mask, it takes what follows the chunk for room that is not filled yet.
            inputs["attention_mask"] = torch.ones(ids.shape[0], visible_len, dtype=torch.long, device=ids.device)
        return inputs

    def digest(self) -> str:
        """Of the configuration and of every weight."""
        if self._digest is None:
            found = hashlib.sha256(self.model.config.to_json_string().encode())
            for name, parameter in self.model.named_parameters():
                found.update(f"{name} {tuple(parameter.shape)} {_checksums(parameter.detach())}".encode())
            self._digest = found.hexdigest()[:16]
        return self._digest


def _checksums(weights: Any) -> list[int]:
    """Sums of the bits of every _BLOCK weights as whole numbers: exact, in any order of summation, on any device."""
    bits = weights.flatten().view(_BITS[weights.element_size()])
    whole = bits.numel() // _BLOCK * _BLOCK
    blocks = bits[:whole].view(-1, _BLOCK).sum(1, dtype=torch.int64)
    return [*blocks.tolist(), int(bits[whole:].sum(dtype=torch.int64))]


class SleepForward:
    """Sleeps instead of computing, with real messages: for more ranks than there are cores or GPUs."""

    def __init__(self, geometry: Geometry, layer_s: Callable[[int, int], tuple[float, float]]) -> None:
        """`layer_s(chunk, prefix)`: seconds of one layer before its K and V are exchanged, and after."""
        self.geometry, self.whole_geometry, self.layer_s = geometry, geometry, layer_s

    def __call__(
        self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool, attending: Attending | None = None
    ) -> Any:
        before_s, after_s = self.layer_s(ids.shape[1], cache.visible_len - ids.shape[1])
        for layer in range(self.geometry.num_hidden_layers):
            time.sleep(before_s)
            cache.tell(layer, "update")
            if cache.exchange is not None:
                cache.exchange(layer)
            cache.tell(layer, "updated")
            time.sleep(after_s)

    def digest(self) -> str:
        """All that sleep are alike."""
        return "sleeps"
