"""The support page says what is planned, what is refused and why, and how far parameters are from the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.errors import InputError
from kvrsim.model.load import builtin_models, config_path, load_model
from tests.kvrsim.model.model_configs import GQA, LLAMA
from validate.models.page import difference, page
from validate.models.rows import configurations, read_counts, row
from validate.models.support import PAGE

COUNTS = read_counts()


def files(folder: Path, **contents: dict[str, Any]) -> dict[str, Path]:
    for name, content in contents.items():
        (folder / f"maker--{name}_config.json").write_text(json.dumps(content))
    return configurations(folder)


def counted(numbers: dict[str, int]) -> dict[str, Any]:
    return {"transformers": "0.0", "counted": numbers, "stated": {}}


def test_files_of_quantisation_are_no_configurations(tmp_path: Path) -> None:
    (tmp_path / "maker--a_hf_quant_config.json").write_text("{}")
    assert list(files(tmp_path, a=LLAMA)) == ["maker/a"]


def test_the_page_tells_what_is_planned_and_what_is_refused(tmp_path: Path) -> None:
    paths = files(
        tmp_path, good={**LLAMA, "num_attention_heads": 8, "num_nextn_predict_layers": 1}, bad={"model_type": "rwkv"}
    )
    exact = load_model(paths["maker/good"]).num_parameters
    found = [row(name, path, counted({"maker/good": exact + 1000})) for name, path in paths.items()]
    text = page(found, "a package")
    assert "- Planned: 1 of 2." in text
    assert "equal the reference in 0 of 1; the largest difference is" in text
    assert "\n- maker/bad: model_type is rwkv; accepted: the model_type of a decoder-only model" in text
    cells = next(line for line in text.splitlines() if line.startswith("| maker/good |")).split(" | ")
    assert cells[1] == "llama"
    assert cells[7] in ("kvr-e, 8 GPUs", "tp, 8 GPUs", "pp, 8 GPUs")
    assert cells[9] == "1 |"
    assert "\n1. the layers that predict further tokens are left out" in text


def test_an_equal_count_is_told(tmp_path: Path) -> None:
    paths = files(tmp_path, a={"model_type": "qwen2", **GQA})
    found = [row("maker/a", paths["maker/a"], counted({"maker/a": load_model(paths["maker/a"]).num_parameters}))]
    assert difference(found[0]) == 0.0
    assert "equal the reference in 1 of 1; none differs" in page(found, "a package")


def test_a_model_that_is_not_planned_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**_: Any) -> None:
        raise InputError("model", "odd", "even")

    monkeypatch.setattr("kvrsim.plan", refuses)
    paths = files(tmp_path, a=LLAMA)
    found = row("maker/a", paths["maker/a"], counted({}))
    assert (found.plan, found.refused, difference(found)) == (None, "model is odd; accepted: even", None)


def test_a_model_is_planned_on_as_many_gpus_as_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = kvrsim.plan, []

    def small(**arguments: Any) -> Any:
        asked.append(arguments["gpus"])
        return plan(**arguments, memory_fraction=0.001 if arguments["gpus"] < 32 else 0.9)

    monkeypatch.setattr("kvrsim.plan", small)
    wide = {**LLAMA, "num_attention_heads": 32, "num_hidden_layers": 32}
    found = row("maker/a", files(tmp_path, a=wide)["maker/a"], counted({}))
    assert asked == [8, 16, 32]
    assert found.plan is not None
    assert found.plan.num_gpus == 32
    monkeypatch.setattr("kvrsim.plan", lambda **arguments: plan(**arguments, memory_fraction=0.001))
    assert row("maker/a", tmp_path / "maker--a_config.json", counted({})).refused == "does not fit on 32 GPUs"


@pytest.mark.parametrize("name", builtin_models())
def test_builtin_models_have_the_parameters_that_were_counted(name: str) -> None:
    """Those that are taken from the collection; their files are shorter."""
    source = json.loads(Path(config_path(name, "model")).read_text("utf-8"))["_source"]
    if source in COUNTS["counted"]:
        assert load_model(name).num_parameters == COUNTS["counted"][source]


def test_the_page_is_of_these_counts() -> None:
    """And most configurations are planned, with parameters within 1 % of the reference."""
    lines = PAGE.read_text("utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and "/" in line.split(" | ")[0]]
    assert {row[0] for row in cells} == set(COUNTS["counted"]) | set(COUNTS["stated"])
    assert sum(row[7] != "refused" for row in cells) >= 80
    off = [0.0 if row[5] == "equal" else float(row[5].rstrip("%")) for row in cells]
    assert max(map(abs, off)) <= 1.0
