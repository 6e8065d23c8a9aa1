"""Exactness: a prefill on several ranks against the same model's on one, token by token and layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.exchange.base import KvPairs
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.prefill import Prefill, decode, shared_room
from kvrsim.runtime.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far a prefill on several ranks is from the same on one."""

    plan: str  # the plan's label
    logits: float  # largest difference of the last token's logits
    logits_scale: float  # largest logit, by magnitude: what `logits` is to be held against
    kv_cache: float  # largest difference in K and V, and states, of the rank that gives the first token, all layers
    same_tokens: bool  # whether the greedy continuations are equal
    num_tokens: int  # of the continuation


def compare(
    transport: Transport, model: Any, plans: Sequence[RunPlan], *, num_tokens: int = 8, seed: int = 0
) -> list[Difference]:
    """Run each plan and compare it, where its first token is, with transformers' own prefill there.

    Every rank returns the same; a strategy after which no rank can go on is compared in its first token alone.

    The references come first, so that their KV cache and the plans' are not in the device's memory together.
    """
    forward, found, references = ModelForward(model), list[Difference](), _References(model, num_tokens)
    prompts = [random_prompt(model.config.vocab_size, plan, seed).to(model.device) for plan in plans]
    for plan, ids in zip(plans, prompts, strict=True):
        if transport.rank == exchange_of(plan.strategy).giver_of(plan, transport.size):
            references.of(ids)
    room = shared_room(forward.geometry, transport, plans)
    for number, (plan, ids) in enumerate(zip(plans, prompts, strict=True)):
        prefill = Prefill(forward, transport, plan, room=room[plan.batch])
        outcome = prefill.run(ids)
        own = None if outcome.tokens is None else _difference(prefill, outcome.tokens, ids, references)
        found += [one for one in transport.exchange(own) if one is not None]
        transport.report(number + 1, len(plans), "logits compared")
    return found


def _difference(prefill: Prefill, tokens: tuple[int, ...], ids: Any, references: _References) -> Difference:
    """Of the rank that gives these first tokens, from the reference."""
    exchange, cache = prefill.exchange, prefill.cache
    assert cache is not None
    num_tokens = references.num_tokens if exchange.decodes else 1
    continued = decode(references.model, cache, ids, tokens, num_tokens)
    logits, kept, expected = references.of(ids)
    return Difference(
        plan=prefill.plan.label,
        logits=_distance(prefill.logits, logits),
        logits_scale=logits.abs().max().item(),
        kv_cache=cache_distance(cache, exchange.part_of(kept)),
        same_tokens=bool(torch.equal(continued, expected[:, :num_tokens])),
        num_tokens=num_tokens,
    )


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
