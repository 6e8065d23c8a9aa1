"""Parts of a model, put together again in one process, give what the model gives, and hold what is planned."""

from __future__ import annotations

import threading
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.tensor_parallel import share_of
from kvrsim.model.load import read_config
from kvrsim.runtime.exchange.pipeline import StageForward
from kvrsim.runtime.exchange.tensor import ShardForward, Share, check_plan
from kvrsim.runtime.geometry import Geometry, KvLayout
from kvrsim.runtime.kv_cache import Chunk, PrefixCache, allocate_chunk, make_buffers
from kvrsim.runtime.model import ModelForward, load_model
from tests.kvrsim.runtime.chunked import prompt
from tests.kvrsim.runtime.runtime_models import CONFIGS, EAGER_ONLY, KINDS
from tests.kvrsim.runtime.runtime_workers import model_of

IDS = prompt()
CONTEXT_LEN = IDS.shape[1]
BATCH = IDS.shape[0]
WITH_PLAN = ["qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"]
WITHOUT_PLAN = ["falcon-mqa", "gpt_oss", "minimax_m2", "deepseek_v3", "qwen3_next", "nemotron_h"]
IN_STAGES = [name for name in CONFIGS | KINDS if not name.startswith(("kimi", "nemotron", "qwen3_next", "qwen3_5"))]


def kernel_of(name: str) -> str:
    return "eager" if name in EAGER_ONLY else "sdpa"


def close(found: Any, model: Any) -> None:
    with torch.inference_mode():
        expected = model(input_ids=IDS, use_cache=False, logits_to_keep=1).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def caches(geometry: Geometry, pieces: tuple[int, ...]) -> list[PrefixCache]:
    memory = allocate_chunk(geometry, Chunk(start=0, length=CONTEXT_LEN, batch=BATCH))
    chunks = [
        Chunk(start=start, length=end - start, batch=BATCH, total_len=CONTEXT_LEN, visible_len=end)
        for start, end in pairwise(accumulate(pieces, initial=0))
    ]
    return [PrefixCache(make_buffers(geometry, chunk, memory)) for chunk in chunks]


class InThreads:
    """Threads that add up their parts, one for each rank."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.parts = threading.Barrier(num_ranks, timeout=300), [torch.empty(0)] * num_ranks

    def of(self, rank: int) -> InThreads.Rank:
        return InThreads.Rank(self, rank)

    class Rank:
        def __init__(self, all_of_them: InThreads, rank: int) -> None:
            self.all, self.rank, self.layers = all_of_them, rank, list[int | None]()

        def sum_up(self, part: Any, layer: int | None) -> None:
            self.layers.append(layer)
            part.copy_(sum(self.shown(part)))

        def gather_rows(self, whole: Any, boundaries: list[int]) -> None:
            for other, (start, end) in zip(self.shown(whole), pairwise(boundaries), strict=True):
                whole[start:end] = other[start:end]

        def shown(self, part: Any) -> list[Any]:
            self.all.parts[self.rank] = part.clone()
            self.all.barrier.wait()
            found = list(self.all.parts)
            self.all.barrier.wait()
            return found


def in_shards(model: Any, num_ranks: int) -> tuple[list[Any], list[list[int | None]]]:
    """Every rank's logits, and the layers whose parts it added up."""
    together, found = InThreads(num_ranks), [torch.empty(0)] * num_ranks
    forwards = [ShardForward(ModelForward(model), Share(rank=rank, size=num_ranks)) for rank in range(num_ranks)]
    sums = [together.of(rank) for rank in range(num_ranks)]

    def run(rank: int) -> None:
        forward = forwards[rank]
        forward.sums = sums[rank]
        (cache,) = caches(forward.geometry, (CONTEXT_LEN,))
        found[rank] = forward(IDS, 0, cache, is_last=True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, [one.layers for one in sums]


@pytest.mark.parametrize("name", WITH_PLAN)
def test_shards_together_give_the_models_logits(name: str) -> None:
    model = model_of(name, kernel_of(name))
    for logits in in_shards(model, 2)[0]:
        close(logits, model)


def test_ranks_add_up_twice_a_layer_and_once_for_the_embedding() -> None:
    _, layers = in_shards(model_of("llama-gqa"), 2)
    assert layers == [[None, 0, 0, 1, 1, 2, 2]] * 2


@pytest.mark.parametrize(("heads", "kv_heads", "num_ranks"), [(6, 3, 3), (6, 1, 3), (4, 2, 4)])
def test_kv_heads_lie_on_several_ranks_where_they_are_fewer(heads: int, kv_heads: int, num_ranks: int) -> None:
    fields = CONFIGS["llama-gqa"] | dict(hidden_size=48, num_attention_heads=heads, num_key_value_heads=kv_heads)
    model = load_model(fields, seed=1, init_std=0.2)
    found, _ = in_shards(model, num_ranks)
    close(found[-1], model)
    geometry = ShardForward(ModelForward(model), Share(rank=1, size=num_ranks)).geometry
    assert {kept.num_key_value_heads for kept in geometry.layouts if isinstance(kept, KvLayout)} == {
        max(1, kv_heads // num_ranks)
    }


@pytest.mark.parametrize("name", IN_STAGES)
def test_stages_one_after_another_give_the_models_logits(name: str) -> None:
    model, pieces = model_of(name, kernel_of(name)), (9, 1, CONTEXT_LEN - 10)
    whole, count = ModelForward(model), model.config.num_hidden_layers
    stages = [StageForward(whole, range(0, 1)), StageForward(whole, range(1, count))]
    kept = [caches(stage.geometry, pieces) for stage in stages]
    for number, (start, end) in enumerate(pairwise(accumulate(pieces, initial=0))):
        given, is_last = IDS[:, start:end], number == len(pieces) - 1
        for stage, views in zip(stages, kept, strict=True):
            given = stage.piece(given, start, views[number], is_last=is_last)
    close(given, model)
    assert whole.model.config.num_hidden_layers == count
    close(whole(IDS, 0, caches(whole.geometry, (CONTEXT_LEN,))[0], is_last=True), model)


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_a_model_without_a_plan_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"strategy: got 'tp'.*{(CONFIGS | KINDS)[name]['model_type']}"):
        check_plan((CONFIGS | KINDS)[name]["model_type"])


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match=r"gpus: got '3'.*4 heads and 2 KV heads"):
        ShardForward(ModelForward(model_of("llama-gqa")), Share(rank=0, size=3))


def test_a_stage_without_attention_is_refused() -> None:
    with pytest.raises(InputError, match="layers: got 'layers 0 to 0'"):
        StageForward(ModelForward(model_of("qwen3_next", "eager")), range(0, 1))


def weight_bytes(model: Any) -> int:
    """Of its own memory: a view counts as what it is a view of."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa", "mixtral"])
def test_a_rank_holds_as_many_weights_as_planned(name: str) -> None:
    fields = (CONFIGS | KINDS)[name] | dict(vocab_size=100)
    spec, whole = read_config(JsonObject(fields=fields, where="model"), "model"), ModelForward(load_model(fields))
    shard = ShardForward(whole, Share(rank=1, size=2), own=True)
    assert weight_bytes(shard.model) == share_of(spec, 2).weight_bytes(4)
    first, last = StageForward(whole, range(0, 1)), StageForward(whole, range(1, 3))
    assert weight_bytes(first.model) == spec.layers[0].weight_bytes(4) + spec.embedding_bytes(4)
    assert weight_bytes(last.model) == sum(one.weight_bytes(4) for one in spec.layers[1:]) + spec.head_bytes(4)
