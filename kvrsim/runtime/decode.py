"""Decoding: the tokens after the first one, from the KV cache that the prefill has left on its ranks.

The paper's KV cache has two purposes: each rank needs it for its chunk, and the last rank, which then has the K and V
of all tokens, goes on to decode from it. The new tokens' K and V are written behind those of the prompt, in place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrsim.runtime.exchange import Exchange
from kvrsim.runtime.plan import Difference, GeneratedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decode(exchange: Exchange) -> GeneratedTokens | None:
    """Generate the plan's tokens after a prefill, each the one with the largest logit.

    The first token is that of the prefill. All ranks that decode return the same tokens; the others return None.
    """
    if not exchange.decodes:
        return None
    assert exchange.cache is not None
    assert exchange.logits is not None
    plan = exchange.plan
    cache = exchange.cache.for_decoding()
    token = exchange.logits.argmax(-1, keepdim=True)
    columns = [token.flatten().tolist()]
    step_s = []
    for position in range(plan.context_len, plan.context_len + plan.output_tokens - 1):
        began_s = time.monotonic()
        logits = exchange.forward(token, position, cache, is_last=True)
        token = logits.argmax(-1, keepdim=True)
        columns.append(token.flatten().tolist())  # waits for the device
        cache.advance()
        step_s.append(time.monotonic() - began_s)
    return GeneratedTokens(tokens=tuple(zip(*columns, strict=True)), step_s=tuple(step_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Greedy generation by transformers alone, in one process."""

    logits: Tensor  # logits of the prompt's last token, [B, vocabulary]
    tokens: Tensor  # generated tokens, [B, N]
    later_logits: tuple[Tensor, ...] = ()  # logits of the tokens after the first, each [B, vocabulary], in host memory


def reference_of(model: PreTrainedModel, ids: Tensor, output_tokens: int = 1) -> Reference:
    """Generate tokens after prompts [B, C] with transformers alone; end-of-sequence tokens do not end it.

    A single token needs no KV cache.
    """
    with torch.inference_mode():
        if output_tokens == 1:
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
            return Reference(logits=logits, tokens=logits.argmax(-1, keepdim=True))
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # without it, tokens equal to the padding token would be masked
            do_sample=False,
            max_new_tokens=output_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    first, *later = generated.logits
    tokens = generated.sequences[:, ids.shape[1] :]
    return Reference(logits=first, tokens=tokens, later_logits=tuple(logits.cpu() for logits in later))


def difference(exchange: Exchange, decoding: GeneratedTokens, reference: Reference) -> Difference:
    """Compare a prefill's logits and the generated tokens with those of one process, on a rank that has them."""
    assert exchange.logits is not None
    logits = reference.logits
    distance = (exchange.logits.float() - logits.float()).abs().max().item()
    scale = logits.abs().max().item()
    tokens = torch.tensor(decoding.tokens)
    expected = reference.tokens.cpu()
    unequal = (tokens != expected).nonzero()
    if not len(unequal):
        return Difference(logits=distance, logits_scale=scale)
    prompt, number = unequal[unequal[:, 1].argmin()].tolist()
    row = (logits.cpu(), *reference.later_logits)[number][prompt].float()
    margin = row[expected[prompt, number]] - row[tokens[prompt, number]]
    return Difference(logits=distance, logits_scale=scale, first_unequal=number, margin=margin.item())
