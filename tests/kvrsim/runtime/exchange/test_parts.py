"""Shares and stages hold the planned number of weights; models without a tensor-parallel plan are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.tensor_parallel import share_of
from kvrsim.model.load import read_config
from kvrsim.runtime.exchange.pipeline import StageForward
from kvrsim.runtime.exchange.tensor import ShardForward, Share, TensorParallel
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.model import ModelForward, load_model
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS
from tests.kvrsim.runtime.runtime_workers import model_of, run_plan

WITHOUT_PLAN = ["falcon-mqa", "gpt_oss", "minimax_m2", "deepseek_v3", "qwen3_next", "nemotron_h"]


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_a_model_without_a_plan_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"strategy: got 'tp'.*{(CONFIGS | KINDS)[name]['model_type']}"):
        TensorParallel.check(run_plan("tp", 8), Geometry.of(model_of(name, "eager")))


def weight_bytes(model: Any) -> int:
    """Bytes of all weights, in fp32."""
    return 4 * sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa", "mixtral"])
def test_a_rank_holds_as_many_weights_as_planned(name: str) -> None:
    fields = (CONFIGS | KINDS)[name] | dict(vocab_size=100)
    spec, whole = read_config(JsonObject(fields=fields, where="model"), "model"), ModelForward(load_model(fields))
    shard = ShardForward(whole, Share(rank=1, size=2))
    assert weight_bytes(shard.model) == share_of(spec, 2).weight_bytes(4)
    first, last = StageForward(whole, range(0, 1)), StageForward(whole, range(1, 3))
    assert weight_bytes(first.model) == spec.layers[0].weight_bytes(4) + spec.embedding_bytes(4)
    assert weight_bytes(last.model) == sum(one.weight_bytes(4) for one in spec.layers[1:]) + spec.head_bytes(4)
