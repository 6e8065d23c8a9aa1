"""The page of model types agrees with the models that are read."""

from __future__ import annotations

import pytest

from validate.models import PAGE, page, support


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "mamba", "rwkv"])
def test_the_page_has_the_row_of_today(model_type: str) -> None:
    assert f"| {' | '.join(support(model_type).cells)} |" in PAGE.read_text("utf-8").splitlines()


def test_a_refusal_names_the_submodule() -> None:
    row = support("doge")
    assert row.model is None
    assert "self_attn.dt_proj" in row.reason
    assert "Read: 0 of 1." in page([row])
