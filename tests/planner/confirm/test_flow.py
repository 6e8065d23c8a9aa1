"""From a plan to the hardware: the commands of the tutorial, on two CPU ranks with a small model."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.kvrsim.runtime.runtime_models import CONFIGS
from tests.kvrsim.runtime.runtime_workers import model_of
from tests.planner.confirm.confirm_setup import BUSY, folder_with, generated, made_up_profile, said
from tests.test_docs import commands

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorial" / "from-plan-to-hardware.md"
QUICK = ("--repeats", "1", "--warmups", "0", "--device", "cpu", "--no-virtual", *BUSY)


def test_the_commands_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in the page's order; a made-up profile stands for the calibration, which takes minutes."""
    monkeypatch.chdir(tmp_path)
    calibrate, *others = [command.arguments for command in commands(PAGE)]
    assert calibrate[:2] == ("calibrate", "all")
    made_up_profile().write(tmp_path / calibrate[calibrate.index("-o") + 1])
    texts = {}
    for words in others:
        quick = QUICK if words[0] == "confirm" else ()
        code, texts[words], errors = said([*words, *quick])
        assert code == 0, errors
    plan, confirm, confirmed, compare = others
    assert [words[0] for words in others] == ["plan", "confirm", "plan", "compare"]
    saved = json.loads((tmp_path / "plan.json").read_text())
    measured = json.loads((tmp_path / "confirmed.json").read_text())
    partitions = {one["strategy"]: one["partition"] for one in saved["strategies"]}
    names = [one["strategy"] for one in measured["candidates"]]
    assert {"kvr-s", "tsp", "single"} <= set(names)
    for one in measured["candidates"]:
        assert one["partition"] == partitions[one["strategy"]]
        assert one["planned_ttft_s"] == pytest.approx(one["predicted_ttft_s"]), "the same profile, the same chunks"
    assert measured["saved_plan"] == {"file": "plan.json", "profile": "made-up", "best": saved["best"]["strategy"]}
    assert measured["best_was_best"] == (True if saved["best"]["strategy"] in names else None)
    fastest = measured["best_measured"]["strategy"]
    assert f"{fastest} was the fastest" in " ".join(texts[confirm].split()) or measured["best_was_best"]
    assert "  measured  " in texts[confirmed]
    assert "kvrsim confirm plan.json" in texts[plan]
    assert "confirmed is the fastest" in texts[compare] or "plan is the fastest" in texts[compare]


@pytest.mark.slow
def test_from_a_calibration_to_the_second_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate this machine, plan, confirm the plan's own chunks with a checkpoint, and decode from the last rank.

    The plan's chunks are measured although the profile would choose others.
    """
    monkeypatch.chdir(tmp_path)
    # Every point the least number of times, however slow the machine is.
    monkeypatch.setattr("calibrate.measure.campaign.within_budget", lambda bench, budget_s: list(bench.points()))
    monkeypatch.setattr("calibrate.measure.campaign.monotonic", partial(next, count(step=60.0)))
    monkeypatch.setitem(CONFIGS, "wide", CONFIGS["llama-mha"] | {"head_dim": 128})  # all-reduces of four sizes
    model_of("wide", seed=7).save_pretrained("checkpoint")
    model = ("--model", "checkpoint")
    few = ("--device", "cpu", "--ranks", "2", "--attention", "eager")
    code, text, errors = said(["calibrate", "all", *model, "--ctx", "512", *few, "-o", "here.json"])
    assert code == 0, errors
    assert "--profile here.json --ctx" in " ".join(text.split()), "the next command"
    question = (*model, "--profile", "here.json", "--gpus", "2", "--ctx", "96")
    code, text, errors = said(["plan", *question, "--strategies", "kvr-s,kvr-b,tsp", "-o", "plan.json"])
    assert code == 0, errors
    assert "kvrsim confirm --plan plan.json --model checkpoint --profile here.json" in " ".join(text.split())
    plan = json.loads(Path("plan.json").read_text())
    for one in plan["strategies"]:
        if one["strategy"] == "kvr-b":
            one["partition"] = [60, 36]
    Path("plan.json").write_text(json.dumps(plan))
    words = ("confirm", "--plan", "plan.json", *model, "--profile", "here.json", *QUICK, "--json")
    code, result, errors = said(words)
    assert code == 0, errors
    measured = {one["strategy"]: one["partition"] for one in result["candidates"]}
    assert measured["kvr-b"] == [60, 36]
    assert plan["best"]["strategy"] in measured
    assert isinstance(result["best_was_best"], bool)
    assert result["max_logit_error"] <= 1e-5
    assert result["conditions"]["weights"].startswith("of the checkpoint")
    decode = ("--strategy", "kvr-b", "--partition", "60,36", "--output-tokens", "16", "--check", "--seed", "3")
    code, result, errors = said(["run", *question, *decode, *QUICK[:6], "--json"])
    assert code == 0, errors
    assert result["tokens"] == generated(Path("checkpoint"), ctx=96, seed=3, tokens=16)
    assert result["tokens_equal"] is True


MISTAKES = [
    (("confirm", "other.json"), "--plan: got 'other.json', accepted: a plan that kvrsim plan -o FILE wrote"),
    (("confirm", "profile.json"), "--plan: got 'profile.json', accepted: a plan that kvrsim plan -o FILE wrote"),
    (("confirm", "absent.json"), "--plan: got 'absent.json', accepted: "),
    (("confirm", "--plan", "model.json"), "--plan: got 'model.json', accepted: a plan"),
    (("confirm", "plan.json"), "--model: got 'model', accepted: the path of the plan's model"),
    (("confirm", "plan.json", "--gpus", "3"), "--gpus: got '3', accepted: 2, as in plan.json"),
    (("confirm", "plan.json", "--ctx", "1k"), "--ctx: got '1024', accepted: 96, as in plan.json"),
    (("confirm",), "--ctx is missing"),
    (("plan", "--ctx", "96", "--gpus", "2", "--strategies", "tsp", "--confirmed", "plan.json"), "--confirmed: got"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, its model and its profile, and a foreign JSON file."""
    folder = folder_with(tmp_path_factory.mktemp("flow"))
    question = ("--model", str(folder / "model.json"), "--profile", str(folder / "profile.json"), "--gpus", "2")
    words = ("plan", *question, "--ctx", "96", "--strategies", "kvr-e,tsp", "-o", str(folder / "plan.json"))
    assert said(words)[0] == 0
    (folder / "other.json").write_text('{"a": 1}')
    return folder


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes_take_one_line(
    words: tuple[str, ...], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, text, errors = said([*words, "--profile", "profile.json"])
    assert (code, text) == (2, "")
    (line,) = errors.splitlines()
    assert message in line
