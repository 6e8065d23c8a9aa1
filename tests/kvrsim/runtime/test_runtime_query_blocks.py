"""Attention to K in query blocks is the same attention, of fewer scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kept.buffers import buffers_of, kv_room
from kvrsim.runtime.kept.query_blocks import in_query_blocks
from kvrsim.runtime.model import ModelForward
from tests.kvrsim.runtime.runtime_workers import CONTEXT_LEN, in_blocks, model_of

CHUNKS = ((0, 9), (9, 16), (16, 17), (17, CONTEXT_LEN))
MODELS = ("llama-mha", "llama-gqa", "llama-mqa", "falcon-mqa", "falcon-grouped", "falcon-mqa-alibi", "gemma3", "gemma2")


class Scores(TorchDispatchMode):
    """Counts the elements of what the softmax and torch's fused kernels are given: queries times keys."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "softmax" in name:
            self.elements += args[0].numel()
        elif "scaled_dot_product" in name:
            self.elements += args[0].shape[1] * args[0].shape[2] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


def run_chunks(model: Any, blocks: int) -> tuple[torch.Tensor, int]:
    """Last logits of one prompt that is computed chunk by chunk, and the scores on the way."""
    geometry, forward = Geometry.of(model), ModelForward(model)
    ids = torch.randint(0, 101, (1, CONTEXT_LEN), generator=torch.Generator().manual_seed(0))
    room, counted, logits = kv_room(geometry, CONTEXT_LEN, 1), Scores(), None
    for start, end in CHUNKS:
        sizes: dict[str, Any] = dict(prefix_len=start, chunk_len=end - start, total_len=CONTEXT_LEN, visible_len=end)
        buffers = buffers_of(geometry, **sizes, room=room)
        cache = PrefixCache(buffers, query_blocks=(blocks,) * geometry.num_hidden_layers)
        with counted:
            logits = forward(ids[:, start:end], start, cache, is_last=end == CONTEXT_LEN)
    assert logits is not None
    return logits, counted.elements


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_give_the_same_logits_from_fewer_scores(name: str, kernel: str) -> None:
    if (name == "gemma2" and kernel != "eager") or ("alibi" in name and kernel == "flash"):
        pytest.skip("transformers or torch have no such kernel")
    model = model_of(name, kernel)
    whole, all_scores = run_chunks(model, 1)
    for blocks in (3, 64):
        logits, scores = run_chunks(model, blocks)
        torch.testing.assert_close(logits, whole, atol=1e-5 * whole.abs().max().item(), rtol=0)
        assert scores < all_scores or kernel == "flash"


def test_one_block_is_k_itself() -> None:
    keys = torch.ones(1, 2, 5, 4)
    assert in_query_blocks(keys, 1) is keys
    repeated = in_query_blocks(keys, 2)[:, :, None].expand(1, 2, 3, 5, 4).reshape(1, 6, 5, 4).transpose(2, 3)
    assert repeated.blocks == 2


def test_what_softmaxes_more_than_scores_is_refused() -> None:
    """Not silently computed otherwise: gpt_oss has a sink beside the scores of a head."""
    plan = in_blocks(2, 3)[0]
    with pytest.raises(InputError, match="query_blocks"):
        exchange_of("kvr").check(plan, Geometry.of(model_of("gpt_oss", "eager")))
    scores = torch.ones(1, 1, 4, 2) @ in_query_blocks(torch.ones(1, 1, 4, 2), 2).transpose(2, 3)
    with pytest.raises(NotImplementedError, match="cat"):
        torch.cat([scores, torch.ones(1, 1, 4, 1)], dim=-1)
