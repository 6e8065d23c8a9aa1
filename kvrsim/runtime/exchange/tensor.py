"""Tensor parallelism: every rank runs all tokens through its share of every matrix; the results are summed.

The model's own tensor-parallel plan in transformers has a style for each matrix: "colwise" splits the matrix's outputs,
"rowwise" its inputs, so that the ranks' results must be summed. The embedding and the head are split by rows of the
vocabulary (Shoeybi et al., 2019).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from kvrsim.errors import InputError
from kvrsim.runtime.exchange import Exchange
from kvrsim.runtime.geometry import Geometry, KvLayout
from kvrsim.runtime.kv_cache import Chunk, Memory
from kvrsim.runtime.model import ModelForward, light_copy
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.transport import Transport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Styles in the tensor-parallel plans of transformers.
_COLUMNS = "colwise"
_ROWS = "rowwise"
_HEAD = "colwise_gather_output"
_EMBEDDING = "embedding_rowwise"
_EXPERT_COLUMNS = "packed_colwise"
_EXPERTS = "moe_tp_experts"
_WHOLE = ("replicated_with_grad_allreduce", "replicate")
_STYLES = (_COLUMNS, _ROWS, _HEAD, _EMBEDDING, _EXPERT_COLUMNS, _EXPERTS, *_WHOLE)
_KV_PROJECTIONS = ("k_proj", "v_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's share of a model."""

    rank: int
    size: int  # number of shares

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the share's range (start, end) of `count` equal items; shares differ by at most one item."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def heads(self, count: int) -> tuple[int, int]:
        """Return the range (start, end) of the share's KV heads, of `count`; shares may have the same heads."""
        first = count * self.rank // self.size
        return first, first + max(1, count // self.size)


class ShardForward(ModelForward):
    """The forward with one rank's share of a model; its weights are views of the model's weights."""

    exchange: TensorParallel

    def __init__(self, whole: ModelForward, share: Share) -> None:
        self.share = share
        self.kv_heads = whole.model.config.num_key_value_heads
        model = light_copy(whole.model)
        self._keep_share(model)
        super().__init__(model, whole.geometry.share(share.size))

    def _keep_share(self, model: PreTrainedModel) -> None:
        """Cut every module and bare weight in the plan down to the rank's share."""
        plan: Mapping[str, str] = model.tp_plan
        for name, module in list(model.named_modules()):
            generic = re.sub(r"\d+", "*", name)  # the module's name in the plan
            if (style := plan.get(generic)) is not None:
                self._cut_module(name, module, style)
            for parameter, _ in list(module.named_parameters(recurse=False)):
                if (style := plan.get(f"{generic}.{parameter}")) is not None:
                    self._cut_experts(module, parameter, style)
            if hasattr(module, "num_key_value_groups"):
                kv_heads = max(1, self.kv_heads // self.share.size)
                module.num_key_value_groups = model.config.num_attention_heads // self.share.size // kv_heads

    def _cut_module(self, name: str, module: nn.Module, style: str) -> None:
        number = re.search(r"\.(\d+)\.", name)
        layer = None
        if number:
            layer = int(number.group(1))
        if style in (_COLUMNS, _HEAD):
            count = module.out_features
            start, end = self._columns_of(name, count)
            module.weight = self._part(module.weight, 0, start, end)
            module.out_features = end - start
            if module.bias is not None:
                module.bias = self._part(module.bias, 0, start, end)
            if style == _HEAD:
                module.register_forward_hook(lambda _, __, part: self._gather_logits(part, count))
        elif style == _EMBEDDING:
            self._cut_embedding(module)
        elif style == _ROWS:
            start, end = self.share.bounds(module.in_features)
            module.weight = self._part(module.weight, 1, start, end)
            module.in_features = end - start
            if module.bias is not None and self.share.rank > 0:
                module.bias = None  # the sum must contain the bias once
        if style in (_ROWS, _EXPERTS):
            module.register_forward_hook(lambda _, __, part: self._sum(part, layer))

    def _columns_of(self, name: str, count: int) -> tuple[int, int]:
        """Return the rank's range of `count` outputs: whole heads for K and V."""
        if not name.endswith(_KV_PROJECTIONS):
            return self.share.bounds(count)
        start, end = self.share.heads(self.kv_heads)
        return start * count // self.kv_heads, end * count // self.kv_heads

    def _cut_embedding(self, module: nn.Module) -> None:
        start, end = self.share.bounds(module.num_embeddings)
        module.weight = self._part(module.weight, 0, start, end)
        module.num_embeddings = end - start
        module.padding_idx = None
        in_share: list[Tensor] = []  # which ids the rank's share has, in the forward that is running

        def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            ids = args[0] - start
            in_share[:] = [(ids >= 0) & (ids < end - start)]
            return (ids.clamp(0, end - start - 1),)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda _, __, rows: self._sum(rows * in_share.pop().unsqueeze(-1), None))

    def _cut_experts(self, module: nn.Module, name: str, style: str) -> None:
        """Cut a weight with the matrices of all experts, [E, out, in]; rows of gate come before rows of up."""
        weight = getattr(module, name)
        if style == _ROWS:
            setattr(module, name, self._part(weight, -1, *self.share.bounds(weight.shape[-1])))
        elif style == _EXPERT_COLUMNS:
            half = weight.shape[-2] // 2
            start, end = self.share.bounds(half)
            parts = [weight.detach().narrow(-2, first + start, end - start) for first in (0, half)]
            setattr(module, name, torch.nn.Parameter(torch.cat(parts, dim=-2), requires_grad=False))

    def _part(self, weight: Tensor, dim: int, start: int, end: int) -> Tensor:
        return torch.nn.Parameter(weight.detach().narrow(dim, start, end - start), requires_grad=False)

    def _sum(self, part: Tensor, layer: int | None) -> Tensor:
        part = part.contiguous()
        self.exchange.sum_up(part, layer)
        return part

    def _gather_logits(self, part: Tensor, count: int) -> Tensor:
        """Return the logits of the whole vocabulary, gathered from all ranks."""
        boundaries = [count * rank // self.share.size for rank in range(self.share.size + 1)]
        flat = part.reshape(-1, part.shape[-1])
        whole = flat.new_empty(count, flat.shape[0])
        whole[slice(*self.share.bounds(count))] = flat.t()
        self.exchange.transport.ring_all_gather(whole, boundaries)
        return whole.t().reshape(*part.shape[:-1], count)


class TensorParallel(Exchange):
    """Every rank computes the first token; the last rank emits it."""

    def __init__(
        self, forward: ModelForward, transport: Transport, plan: RunPlan, memory: Memory | None = None
    ) -> None:
        """`forward` runs the whole model."""
        shard = ShardForward(forward, Share(rank=transport.rank, size=transport.size))
        super().__init__(shard, transport, plan, memory)
        shard.exchange = self

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Chunk:
        """Return the whole context: every rank runs all tokens."""
        return Chunk(start=0, length=plan.context_len, batch=plan.batch, room=plan.output_tokens - 1)

    @property
    def decodes(self) -> bool:
        """All ranks decode together: each one has its own heads."""
        return True

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where transformers has no tensor-parallel plan that the runtime can follow."""
        super().check(plan, geometry)
        model_type = geometry.model_type
        styles = AutoConfig.for_model(model_type).base_model_tp_plan or {}
        accepted = "a model whose attention and MLPs are split by a tensor-parallel plan of transformers"
        if not all(isinstance(layout, KvLayout) and not layout.is_latent for layout in geometry.layouts):
            raise InputError("strategy", "tp", f"{accepted}; {model_type} does not keep K and V alone")
        if styles.get("layers.*.self_attn.k_proj") != _COLUMNS:
            raise InputError("strategy", "tp", f"{accepted}; transformers has none for {model_type}")
        if unknown := sorted(set(styles.values()) - set(_STYLES)):
            raise InputError("strategy", "tp", f"{accepted}; that of {model_type} has {', '.join(unknown)}")

    def run(self, input_ids: Tensor) -> Tensor | None:
        """Run all tokens through this rank's share of the layers."""
        return self.forward(input_ids, 0, self.cache, is_last=True)

    def sum_up(self, part: Tensor, layer: int | None) -> None:
        """Replace `part`, which must be contiguous, by its sum over ranks; layer: None for the embedding."""
        if self.transport.size == 1:
            return
        self.clock.mark("wait", layer)
        if self.plan.gather == "ring":
            self.transport.ring_all_reduce(part.view(-1))
        else:
            self.transport.all_reduce(part.view(-1))
        self.clock.mark("received", layer)
