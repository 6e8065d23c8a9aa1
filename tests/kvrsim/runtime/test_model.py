"""Weights of models: random ones, and those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tqdm.auto import tqdm

from kvrsim.errors import InputError
from kvrsim.model.load import checkpoint_files
from kvrsim.runtime.model import load_model
from kvrsim.runtime.plan import ModelChoice
from tests.kvrsim.runtime.runtime_models import CONFIGS
from tests.kvrsim.runtime.runtime_workers import model_of


def saved(folder: Path, name: str = "llama-gqa", seed: int = 5) -> Path:
    """Save a model with random weights as a checkpoint."""
    model_of(name, seed=seed).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama-gqa", "falcon-grouped"])
def test_a_checkpoints_weights_are_read(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name)
    assert checkpoint_files(str(tmp_path)) == checkpoint_files(str(tmp_path / "config.json")) != ()
    read = load_model(tmp_path, checkpoint=str(tmp_path)).state_dict()
    expected = model_of(name, seed=5).state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[key], expected[key]) for key in expected)


def test_a_configuration_alone_has_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama-gqa"]))
    assert checkpoint_files(str(path)) == ()
    assert checkpoint_files("tiny-llama") == ()
    assert ModelChoice(config=str(path), dtype="fp32", attention="sdpa", seed=3).weights == "random, seed 3"


def test_reading_weights_makes_no_semaphore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of progress takes one; a rank ends without releasing it, and Python would warn on the user's terminal."""
    saved(tmp_path)
    for cls in tqdm.__mro__:
        if "_lock" in vars(cls):
            monkeypatch.delattr(cls, "_lock")
    load_model(tmp_path, checkpoint=str(tmp_path))
    assert not hasattr(tqdm, "_lock")


def test_generation_is_greedy_whatever_the_checkpoint_recommends(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "repetition_penalty": 2.0}))
    config = load_model(tmp_path, checkpoint=str(tmp_path)).generation_config
    assert not config.do_sample
    assert config.repetition_penalty in (None, 1.0)
    assert config.eos_token_id is None


@pytest.mark.parametrize("fault", ["missing", "shape", "broken"])
def test_weights_that_are_not_the_models_are_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    [path] = checkpoint_files(str(tmp_path))
    weights = load_file(path)
    if fault == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif fault == "shape":
        weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, path, metadata={"format": "pt"})
    if fault == "broken":
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"safetensors with the weights of a llama as in config\.json") as error:
        load_model(tmp_path, checkpoint=str(tmp_path))
    assert error.value.parameter == "model"
    assert "\n" not in str(error.value)
    if fault == "missing":
        assert "1 are missing, such as model.layers.1.mlp.up_proj.weight" in str(error.value)
