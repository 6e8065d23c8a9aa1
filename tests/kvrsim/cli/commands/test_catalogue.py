"""`kvrsim strategies` and `kvrsim models`: lists and pages, as text and as JSON."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvrsim.builder import make_scenario
from kvrsim.cli.commands.catalogue import about
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.model.load import load_model
from kvrsim.runtime.plan import RUN_STRATEGIES
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.deploy_engines import engines_with
from tests.building.commands import answer, screen
from tests.kvrsim.model.model_configs import GQA

ROOT = Path(__file__).parents[4]


def test_all_are_listed_as_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "strategies", "list")["strategies"]
    assert [one["name"] for one in result][: len(STRATEGIES)] == list(STRATEGIES)
    for one in result[: len(STRATEGIES)]:
        assert one == answer(capsys, "strategies", "show", one["name"])
        assert all(one[key] for key in ("title", "each_rank", "communication", "holds", "source"))
        page, _, anchor = one["docs"].partition("#")
        assert (
            f"\n## {anchor.capitalize()}\n" in (ROOT / page).read_text("utf-8") if anchor else (ROOT / page).is_file()
        )
        assert one["runs_here"] == (one["name"] in RUN_STRATEGIES)
    table = screen(capsys, "strategies", "list")
    assert all(f"\n{name} " in table for name in STRATEGIES)


@pytest.mark.parametrize("name", [*STRATEGIES, "tp2+zigzag", "tp2+kvr-s", "tp2+pp2+cp2"])
def test_engines_are_those_of_a_plan(name: str) -> None:
    """The listed engines are those that run the strategy with latent attention, sparse attention or GQA and experts."""
    if name != "single":
        result: set[str] = set()
        for model in ("deepseek-v3", "deepseek-v3.2", "qwen3-235b-a22b"):
            scenario, _ = make_scenario(model=model, cluster="h100-nvlink", gpus="8", ctx="8k")
            with suppress(InputError):  # a strategy that the model does not allow
                result |= set(engines_with(execution_of(scenario, get_strategy(name))))
        assert set(about(name)["engines"]) == result


def test_a_hybrid_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = " ".join(screen(capsys, "strategies", "show", "tp8+kvr-s").split())
    assert "a rank is 8 GPUs that split every matrix; a chunk whose length is searched" in text
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\nfrom kvrsim.strategies import KVR_S\nS = replace(KVR_S, name='mine')"
    )
    result = answer(capsys, "strategies", "show", f"{path}:S")
    assert (result["name"], result["runs_here"], result["engines"], result["docs"]) == ("mine", False, [], None)


# `kvrsim models` shows the properties of a model, as text and as JSON.


def test_a_model_has_the_fields_of_its_configuration_and_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    model = answer(capsys, "models", "show", "qwen3-8b")
    assert (model["hidden_size"], model["num_attention_heads"], model["head_dim"]) == (4096, 32, 128)
    assert model["lm_head"]["weights"] is None
    assert model["layer_kind_index"] == [0] * 36
    (kind,) = model["layer_kinds"]
    assert (kind["num_layers"], kind["gated_mlp"], kind["other_parameters"]) == (36, True, 2 * 4096 + 2 * 128)
    mixer = kind["mixer"]
    assert (mixer["kind"], mixer["title"], mixer["qk_norm"]) == ("Attention", "full attention", True)
    assert [gemm["name"] for gemm in mixer["projections"]] == [f"self_attn.{one}_proj" for one in "qkv"]
    assert [gemm["name"] for gemm in mixer["output"]] == ["self_attn.o_proj"]


def test_kinds_of_layers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = answer(capsys, "models", "show", "gpt-oss-20b")
    assert model["mixers"] == [
        {"mixer": "window of 128", "num_layers": 12},
        {"mixer": "full attention", "num_layers": 12},
    ]
    assert [kind["mixer"]["sliding_window"] for kind in model["layer_kinds"]] == [128, None]


def test_what_is_approximated_is_told(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's page, its JSON and every plan name the approximation."""
    path = tmp_path / "seeing.json"
    text = {"model_type": "qwen3_vl_text", **GQA}
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 2}}))
    assert load_model(path).model_type == "qwen3_vl_text"
    assert answer(capsys, "models", "show", str(path))["approximations"] == ["the vision tower is left out"]
    assert "the vision tower is left out" in screen(capsys, "models", "show", str(path))
    plan = answer(capsys, "plan", "--gpus", "2", "--ctx", "512", "--strategies", "kvr-e", "--model", path)
    assert "seeing: the vision tower is left out" in plan["warnings"]
