"""A quantized config.json: planned in 16 bits, and every command says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.model.load import config_path

SAID = "which are not modelled: weights and computation are taken in fp16, 16 bits"
COMMANDS = {
    "plan": ["plan", "--gpus", "2", "--ctx", "512", "--strategies", "single,kvr-e"],
    "simulate": ["simulate", "--strategy", "kvr-e", "--gpus", "2", "--ctx", "512"],
    "map": ["map", "--gpus", "1,2", "--ctx", "512", "--strategies", "tsp"],
    "capacity": [
        *("capacity", "--requests", "synthetic:poisson,rate=1,requests=40,context=512", "--slo-ttft", "2s"),
        *("--group-sizes", "1", "--replications", "2"),
    ],
}


def quantized(folder: Path, **keys: Any) -> Path:
    content = json.loads(Path(config_path("llama-3-8b", "model")).read_text()) | keys
    path = folder / "llama-quantized.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "awq, 4 bits"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {}}, "method not named"),
        ({"quantization_config": {"quant_method": "\x1b[31mred", "bits": True}}, "method not named"),
        ({"quantization_config": None}, None),
        ({}, None),
    ],
)
def test_what_the_file_says(keys: dict[str, Any], told: str | None, tmp_path: Path) -> None:
    path = quantized(tmp_path, **keys)
    model = kvrsim.load_model(path)
    assert model.quantization == told
    assert model.num_parameters == kvrsim.load_model("llama-3-8b").num_parameters
    _, notes = kvrsim.make_scenario(ctx="1k", model=path)
    assert [note for note in notes if "quantized" in note] == (
        []
        if told is None
        else [
            f"llama-quantized has quantized weights ({told}), {SAID};"
            " the checkpoint needs less memory, and may need more or less time"
        ]
    )


def test_a_quantization_config_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quantization_config: got 'fp8', accepted: an object"):
        kvrsim.load_model(quantized(tmp_path, quantization_config="fp8"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quantized(tmp_path, quantization_config={"quant_method": "fp8"})
    arguments = [*COMMANDS[command], "--model", str(path)]
    assert cli.main([*arguments, "--json"]) == 0
    assert any(SAID in note for note in json.loads(capsys.readouterr().out)["warnings"])
    assert cli.main(arguments) == 0
    assert SAID in " ".join(capsys.readouterr().out.split())
