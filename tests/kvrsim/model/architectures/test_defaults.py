"""Defaults of keys that a file leaves out are those of transformers."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from kvrsim.model.architectures.defaults import DEFAULTS

# transformers' names of keys that files name otherwise.
RENAMED = {"num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts"}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type)
    assert DEFAULTS[model_type] == {key: getattr(theirs, RENAMED.get(key, key)) for key in DEFAULTS[model_type]}
