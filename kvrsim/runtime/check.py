"""Exactness: a prefill on several ranks against the same model's on one, token by token and layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange.base import KvPairs
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.prefill import Prefill, decode, shared_room
from kvrsim.runtime.ranks.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far a prefill on several ranks is from the same on one."""

    plan: str  # the plan's label
    logits: float  # largest difference of the last token's logits
    logits_scale: float  # largest logit, by magnitude: what `logits` is to be held against
    kv_cache: float  # largest difference in the last rank's K and V, and states, all layers
    same_tokens: bool  # whether the greedy continuations are equal
    num_tokens: int  # of the continuation


def compare(
    transport: Transport, model: Any, plans: Sequence[RunPlan], *, num_tokens: int = 8, seed: int = 0
) -> list[Difference] | None:
    """Run each plan and compare it, on the last rank, with transformers' own prefill there; None on the others.

    The references come first, so that their KV cache and the plans' are not in the device's memory together.
    """
    forward, found, references = ModelForward(model), [], _References(model, num_tokens)
    prompts = [random_prompt(model.config.vocab_size, plan, seed).to(model.device) for plan in plans]
    if transport.rank == transport.size - 1:
        for ids in prompts:
            references.of(ids)
    room = shared_room(forward.geometry, transport, plans)
    for number, (plan, ids) in enumerate(zip(plans, prompts, strict=True)):
        prefill = Prefill(forward, transport, plan, room=room[plan.batch])
        outcome = prefill.run(ids)
        if outcome.tokens is not None:
            assert prefill.cache is not None
            exchange, logits, cache, expected = prefill.exchange, *references.of(ids)
            count = num_tokens if exchange.decodes else 1
            continued = decode(model, prefill.cache, ids, outcome.tokens, count)
            found.append(
                Difference(
                    plan=plan.label,
                    logits=_distance(prefill.logits, logits),
                    logits_scale=logits.abs().max().item(),
                    kv_cache=cache_distance(prefill.cache, exchange.part_of(cache)),
                    same_tokens=bool(torch.equal(continued, expected[:, :count])),
                    num_tokens=count,
                )
            )
        transport.barrier()
        transport.report(number + 1, len(plans), "logits compared")
    return found if transport.rank == transport.size - 1 else None


class _References:
    """What transformers computes by itself, once for each prompt; its KV caches are kept in the host's memory."""

    def __init__(self, model: Any, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.known: dict[tuple[int, ...], tuple[Any, KvPairs, Any]] = {}

    def of(self, ids: Any) -> tuple[Any, KvPairs, Any]:
        """Last logits, K and V of every layer, and the greedy continuation [B, num_tokens]."""
        key = tuple(ids.shape)
        if key not in self.known:
            from transformers import DynamicCache

            cache = DynamicCache(config=self.model.config)
            with torch.inference_mode():
                logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            kept = [_kept_by(layer) for layer in cache.layers]
            del cache
            self.known[key] = logits[:, -1], kept, self._continued(ids, logits[:, -1])
        return self.known[key]

    def _continued(self, ids: Any, logits: Any) -> Any:
        if self.num_tokens == 1:
            return logits.argmax(-1, keepdim=True)
        mask = torch.ones_like(ids)
        lengths: dict[str, Any] = dict(max_new_tokens=self.num_tokens, min_new_tokens=self.num_tokens)
        return self.model.generate(ids, attention_mask=mask, do_sample=False, **lengths)[:, ids.shape[1] :]


def _kept_by(layer: Any) -> tuple[Any, Any] | None:
    """What a layer of transformers' cache holds, in the host's memory: K and V, its states, or nothing."""
    if hasattr(layer, "recurrent_states"):
        return layer.recurrent_states[0].cpu(), layer.conv_states[0].cpu()
    return (layer.keys.cpu(), layer.values.cpu()) if layer.keys is not None else None


def cache_distance(ours: PrefixCache, theirs: KvPairs) -> float:
    """The largest difference of K, V and states in any layer, in what both hold of a window and a convolution."""
    found = [0.0]
    for own, other in zip(ours.parts(), theirs, strict=True):
        for a, b in zip(own or (), other or (), strict=True):
            # K and V end with the last token; a convolution's inputs, in the last dimension, too.
            axis = a.dim() - (1 if a.dim() == 3 else 2)
            common = min(a.shape[axis], b.shape[axis])
            a, b = (part.narrow(axis, part.shape[axis] - common, common) for part in (a, b))
            found.append(_distance(a, b.to(a.device)))
    return float(torch.tensor(found).max())  # which lets "not a number" through, unlike max()


def _distance(ours: Any, theirs: Any) -> float:
    return float((ours.float() - theirs.float()).abs().max().item())
