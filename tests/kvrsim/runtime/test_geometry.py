"""Models with random weights: equal on all ranks; configurations that the runtime does not support are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrsim.errors import InputError
from kvrsim.runtime.geometry import Geometry, KvLayout, StateLayout
from kvrsim.runtime.model import load_model
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS
from tests.kvrsim.runtime.runtime_workers import model_of


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = model_of("qwen3"), model_of("qwen3")
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("keys", "kernel", "named"),
    [
        ({"model_type": "deepseek_v4"}, "sdpa", "model_type: got 'deepseek_v4', accepted: an architecture"),
        (KINDS["gpt_oss"], "sdpa", "eager for gpt_oss: each head's softmax has a sink"),
        (KINDS["gemma2"], "flash", "eager for gemma2: it caps the scores"),
        (CONFIGS["llama-mha"] | {"hidden_size": "wide"}, "sdpa", "hidden_size"),
        (CONFIGS["falcon-alibi"], "flash", "flash"),
        (CONFIGS["llama-mha"] | {"quantization_config": {"quant_method": "fp8"}}, "sdpa", "not quantised"),

        (CONFIGS["llama-mha"] | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "sdpa", "dynamic"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_name(keys: dict[str, Any], kernel: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        load_model(keys, "fp32", "cpu", kernel)  # type: ignore[arg-type]


def test_padding_is_refused_where_the_kernel_takes_no_mask() -> None:
    for name in ("llama-mha", "falcon-mqa"):
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(InputError, match="padding"):
            model_of(name, "flash")(input_ids=torch.zeros_like(mask), attention_mask=mask)


def test_of_a_file_with_several_models_the_text_model_is_run() -> None:
    outer: dict[str, Any] = {"model_type": "qwen3_5", "text_config": KINDS["qwen3_5"], "vision_config": {"depth": 2}}
    model = load_model(outer)
    assert model.config.model_type == "qwen3_5_text"
    assert [type(layout) for layout in Geometry.of(model).layouts] == [StateLayout, KvLayout, StateLayout]
