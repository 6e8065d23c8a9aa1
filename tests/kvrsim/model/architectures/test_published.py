"""Configurations of published models, as NVIDIA's aiconfigurator collects them; skipped where it is not installed."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from calibrate.reference import counted_parameters
from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec
from validate.models.rows import read_counts

FOUND = find_spec("aiconfigurator_core")
FOLDERS = [Path(place) / "model_configs" for place in (FOUND.submodule_search_locations or ())] if FOUND else []
FILES = sorted(
    path
    for folder in FOLDERS
    for path in folder.glob("*_config.json")
    if not path.name.endswith("_hf_quant_config.json")
)
pytestmark = pytest.mark.skipif(not FILES, reason="aiconfigurator-core is not installed")
STATED = read_counts()["stated"]  # with its source, of models that transformers does not have


@cache
def loaded(path: Path) -> ModelSpec:
    return load_model(path)


def name_of(path: Path) -> str:
    return path.name.removesuffix("_config.json")


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_parameters_are_those_that_transformers_counts(path: Path) -> None:
    model = loaded(path)
    counted = counted_parameters(json.loads(path.read_text("utf-8")))
    if counted is None:
        stated = STATED[name_of(path).replace("--", "/")]["parameters"]
        assert model.num_parameters == pytest.approx(stated, rel=0.01)
    else:
        assert model.num_parameters == counted


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_published_model_is_read(path: Path) -> None:
    """Experts, active parameters and what is quantised agree with the name of the file."""
    model, name = loaded(path), name_of(path)
    assert 0 < model.active_parameters <= model.num_parameters
    for stated in re.findall(r"-A(\d+)B", name):  # with or without the embedding, as the makers count
        assert model.active_parameters / 1e9 == pytest.approx(int(stated), rel=0.07, abs=0.6)
    narrow = any(word in name for word in ("FP8", "NVFP4", "gpt-oss", "DeepSeek", "Kimi", "MiniMax-M2", "MiMo-V2"))
    assert (model.quantization is not None) == narrow
    if model.quantization is None:
        return
    assert model.quantization.formats
    stored = Counter[int | None]()
    for layer in model.layers:
        for gemm in (*layer.matrices, *layer.mlp * max(1, layer.num_experts)):
            stored[None if gemm.weights is None else gemm.weights.bits] += gemm.num_weights
    most = stored.most_common(1)[0][0]
    accepted = (4,) if "NVFP4" in name else (8,) if "FP8" in name else (4, 8)
    assert most in accepted, stored
