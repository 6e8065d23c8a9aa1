"""Shard: one rank's share of every matrix, as the model's own tensor-parallel plan in transformers splits it.

The plan names a style for each matrix: "colwise" splits its outputs, "rowwise" its inputs, so that the ranks' results
must be added up. The embedding is split by rows of the vocabulary, the head likewise (Shoeybi et al., 2019).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kept.families import family_of
from kvrsim.runtime.kept.layers import KeptTokens
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.split.forward import SplitForward, light_copy, part_of

# transformers' names of the styles: what is split, and what has to follow.
_COLUMNS, _ROWS, _HEAD, _EMBEDDING = "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"
_EXPERT_COLUMNS, _EXPERTS = "packed_colwise", "moe_tp_experts"
_WHOLE = ("replicated_with_grad_allreduce", "replicate")
_STYLES = (_COLUMNS, _ROWS, _HEAD, _EMBEDDING, _EXPERT_COLUMNS, _EXPERTS, *_WHOLE)
_KV_PROJECTIONS = ("k_proj", "v_proj")


class Sums(Protocol):
    """How ranks join their parts."""

    def add_up(self, part: Any, layer: int | None) -> None:
        """Replace `part`, contiguous, by the sum over all ranks; layer: whose it is, None: the embedding's."""

    def joined(self, whole: Any, boundaries: list[int]) -> None:
        """Fill `whole`, whose rows from boundaries[rank] to boundaries[rank + 1] are this rank's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which share of a model."""

    rank: int
    size: int

    def bounds(self, count: int) -> tuple[int, int]:
        """From which to which of `count` equal things; shares differ by at most one."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size


class ShardForward(SplitForward):
    """The forward over one rank's share of a model; set `sums` before it is called, which all ranks do together."""

    def __init__(self, whole: ModelForward, place: Place, *, own: bool = False) -> None:
        """own: the share has memory of its own, so that the whole model may go.

        Raises InputError where the model has no such plan, or its heads do not divide.
        """
        check_shards(whole.model, whole.geometry.model_type, place.size)
        self.place, self.sums = place, None
        model = light_copy(whole.model)
        _Cut(self, model, own).all()
        super().__init__(whole, model, shard_geometry(whole.geometry, place.size))

    def add_up(self, part: Any, layer: int | None) -> Any:
        """The sum of the ranks' parts."""
        assert self.sums is not None
        part = part.contiguous()
        self.sums.add_up(part, layer)
        return part

    sums: Sums | None


def shard_geometry(geometry: Geometry, size: int) -> Geometry:
    """What one of `size` ranks keeps: its share of the KV heads, one at least."""

    def share(kept: Any) -> Any:
        assert isinstance(kept, KeptTokens)
        return replace(kept, num_key_value_heads=max(1, kept.num_key_value_heads // size))

    heads = geometry.num_attention_heads // size
    return replace(geometry, kept=tuple(map(share, geometry.kept)), num_attention_heads=heads)


def check_plan(model_type: str) -> None:
    """Raise InputError where transformers has no tensor-parallel plan for the architecture that can be followed."""
    from transformers import AutoConfig

    plan, family = AutoConfig.for_model(model_type).base_model_tp_plan or {}, family_of(model_type)
    accepted = "a model whose attention and MLPs are split by a tensor-parallel plan of transformers"
    if family.is_latent or family.state is not None:
        raise InputError("strategy", "tp", f"{accepted}; {model_type} keeps something else than K and V")
    if plan.get("layers.*.self_attn.k_proj") != _COLUMNS:
        raise InputError("strategy", "tp", f"{accepted}; transformers has none for {model_type}")
    if unknown := sorted(set(plan.values()) - set(_STYLES)):
        raise InputError("strategy", "tp", f"{accepted}; that of {model_type} asks for {', '.join(unknown)}")


def check_shards(model: Any, model_type: str, size: int) -> None:
    """Raise InputError where the architecture has no plan, or the heads do not divide."""
    check_plan(model_type)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise InputError("gpus", size, f"a number that divides {heads} heads and {kv_heads} KV heads under tp")


class _Cut:
    """Cuts the modules of a copy of a model down to a share."""

    def __init__(self, forward: ShardForward, model: Any, own: bool) -> None:
        self.forward, self.model, self.own, self.place = forward, model, own, forward.place
        self.plan: Mapping[str, str] = model.tp_plan
        self.kv_heads: int = model.config.num_key_value_heads

    def all(self) -> None:
        """Every module and bare weight that the plan names."""
        for name, module in list(self.model.named_modules()):
            style = self.plan.get(_generic(name))
            if style is not None:
                self._module(name, module, style)
            for parameter, _ in list(module.named_parameters(recurse=False)):
                full = f"{name}.{parameter}"
                if (style := self.plan.get(_generic(full))) is not None:
                    self._bare(module, parameter, style)
            if hasattr(module, "num_key_value_groups"):
                kv_heads = max(1, self.kv_heads // self.place.size)
                module.num_key_value_groups = self.model.config.num_attention_heads // self.place.size // kv_heads

    def _module(self, name: str, module: Any, style: str) -> None:
        layer = _layer_of(name)
        if style == _COLUMNS:
            self._columns(module, self._columns_of(name, module))
        elif style == _ROWS:
            bounds = self.place.bounds(module.in_features)
            module.weight = self._part(module.weight, 1, bounds)
            module.in_features = bounds[1] - bounds[0]
            if module.bias is not None and self.place.rank > 0:
                module.bias = None  # once in the sum
            module.register_forward_hook(_summing(self.forward, layer))
        elif style == _HEAD:
            count = module.out_features
            self._columns(module, self.place.bounds(count))
            module.register_forward_hook(_joining(self.forward, count))
        elif style == _EMBEDDING:
            self._embedding(module)
        elif style == _EXPERTS:
            module.register_forward_hook(_summing(self.forward, layer))

    def _columns_of(self, name: str, module: Any) -> tuple[int, int]:
        """Outputs of this rank. A KV head lies on several ranks where there are more ranks than KV heads."""
        size = self.place.size
        if name.rsplit(".", 1)[-1] not in _KV_PROJECTIONS or self.kv_heads >= size:
            return self.place.bounds(module.out_features)
        head, width = self.place.rank * self.kv_heads // size, module.out_features // self.kv_heads
        return head * width, (head + 1) * width

    def _columns(self, module: Any, bounds: tuple[int, int]) -> None:
        module.weight = self._part(module.weight, 0, bounds)
        module.out_features = bounds[1] - bounds[0]
        if module.bias is not None:
            module.bias = self._part(module.bias, 0, bounds)

    def _embedding(self, module: Any) -> None:
        start, end = self.place.bounds(module.num_embeddings)
        module.weight = self._part(module.weight, 0, (start, end))
        module.num_embeddings, module.padding_idx = end - start, None
        known: list[Any] = []

        def before(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            ids = args[0] - start
            known[:] = [(ids >= 0) & (ids < end - start)]
            return (ids.clamp(0, end - start - 1),)

        def after(_: Any, __: Any, found: Any) -> Any:
            return self.forward.add_up(found * known.pop().unsqueeze(-1), None)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _bare(self, module: Any, name: str, style: str) -> None:
        """All experts' matrices in one weight, [E, out, in]; gate and up lie one after another."""
        weight = getattr(module, name)
        if style == _ROWS:
            setattr(module, name, self._part(weight, weight.dim() - 1, self.place.bounds(weight.shape[-1])))
        elif style == _EXPERT_COLUMNS:
            half = weight.shape[-2] // 2
            start, end = self.place.bounds(half)
            parts = [weight.detach().narrow(-2, first + start, end - start) for first in (0, half)]
            setattr(module, name, torch.nn.Parameter(torch.cat(parts, dim=-2), requires_grad=False))

    def _part(self, weight: Any, dim: int, bounds: tuple[int, int]) -> Any:
        return part_of(weight, dim, *bounds, own=self.own)


def _generic(name: str) -> str:
    """As the plan names it: numbers of layers as stars."""
    return re.sub(r"\d+", "*", name)


def _layer_of(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _summing(forward: ShardForward, layer: int | None) -> Callable[..., Any]:
    def hook(_: Any, __: Any, part: Any) -> Any:
        return forward.add_up(part, layer)

    return hook


def _joining(forward: ShardForward, count: int) -> Callable[..., Any]:
    """The logits of all ranks' rows of the vocabulary."""
    size = forward.place.size
    boundaries = [count * rank // size for rank in range(size + 1)]

    def hook(_: Any, __: Any, part: Any) -> Any:
        assert forward.sums is not None
        start, end = forward.place.bounds(count)
        flat = part.reshape(-1, part.shape[-1])
        whole = flat.new_empty(count, flat.shape[0])
        whole[start:end] = flat.t()
        forward.sums.joined(whole, boundaries)
        return whole.t().reshape(*part.shape[:-1], count)

    return hook
