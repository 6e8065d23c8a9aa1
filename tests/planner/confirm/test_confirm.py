"""`kvrsim confirm` and `kvrsim run` with real ranks and a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.plan import RUN_STRATEGIES
from kvrsim.strategies import usual_names
from planner.confirm.confirm import strategies_here
from planner.confirm.hardware import Hardware
from tests.building.commands import page_data
from tests.kvrsim.runtime.runtime_models import KINDS
from tests.kvrsim.runtime.runtime_workers import model_of
from tests.planner.confirm.confirm_setup import BUSY, arguments, folder_with, generated, said

ROOT = Path(__file__).parents[3]
SHORT = ("--repeats", "2", "--warmups", "0", "--json")
CONTRACT = {"strategy", "partition", "predicted_ttft_s", "measured_ttft_s", "measured_iqr_s", "rel_error"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("confirm"))


@pytest.fixture(scope="module")
def confirmed(folder: Path) -> tuple[dict[str, Any], str]:
    files = ("--plot", str(folder / "pair.svg"), "--trace", str(folder / "trace.json"))
    code, result, errors = said(arguments(folder, "confirm", "--top", "2", "--no-virtual", *SHORT, *BUSY, *files))
    assert code == 0, errors
    return result, errors


def test_every_candidate_is_predicted_and_measured(confirmed: tuple[dict[str, Any], str]) -> None:
    result, _ = confirmed
    assert [one["strategy"] for one in result["candidates"]] == ["single", "tsp", "kvr-e", "kvr-s", "kvr-s #2"]
    assert {"candidates", "regret", "max_logit_error", "ok"} <= set(result)
    for one in result["candidates"]:
        assert set(one) >= CONTRACT
        assert sum(one["partition"]) == 96
        assert one["rel_error"] == pytest.approx(one["predicted_ttft_s"] / one["measured_ttft_s"] - 1)
        assert len(one["samples_s"]) == 2
    best_s = min(one["measured_ttft_s"] for one in result["candidates"])
    (chosen,) = (one for one in result["candidates"] if one["chosen"])
    assert result["regret"] == pytest.approx(chosen["measured_ttft_s"] / best_s - 1)
    assert chosen["predicted_ttft_s"] == min(one["predicted_ttft_s"] for one in result["candidates"])
    assert result["max_logit_error"] <= 1e-5
    assert result["ok"] is True
    assert result["reasons"] == []


def test_a_target_that_is_not_met_is_the_exit_code_and_the_reason(folder: Path) -> None:
    link = ("--link-bandwidth", "200MB/s", "--link-latency", "100us")
    few = ("--top", "1", "--repeats", "1", "--warmups", "0", "--no-virtual", "--max-error", "0", "--json")
    code, result, _ = said(arguments(folder, "confirm", *few, *link))
    assert code == 1
    assert result["ok"] is False
    assert any("predictions are off by" in reason for reason in result["reasons"])
    assert result["conditions"]["transport"] == "emulated 1.6 Gbit/s, 100 us"
    assert [one["strategy"] for one in result["candidates"]] == ["single", "tsp", "kvr-e", "kvr-s"]


def test_too_few_devices_make_virtual_ranks_and_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    words = arguments(folder, "confirm", "--top", "1", "--repeats", "2", "--warmups", "0", *BUSY, gpus="3")
    code, text, errors = said(words)
    assert code == 0
    assert "3 ranks on 1 core: virtual ranks" in errors
    assert "all-gather of tsp modelled" in " ".join(text.split())
    assert "virtual, one after another on one device" in " ".join(text.split())


def test_from_python_one_gpu_has_one_candidate(folder: Path) -> None:
    result = kvrsim.confirm(
        ctx=64, gpus=1, model=folder / "model.json", profile=folder / "profile.json", hardware={"repeats": 1}
    )
    assert [(one.strategy, one.partition) for one in result.candidates] == [("single", (64,))]
    assert result.regret == 0
    assert isinstance(result.choice.timing.timeline, Timeline)
    assert list(result.to_frame()["strategy"]) == ["single"]
    result.write_plot(folder / "page.html")
    for html in ((folder / "page.html").read_text(), result._repr_html_()):
        assert f"{result.choice.rel_error:+.1%}" in html


def test_run_measures_one_strategy_of_a_checkpoint_and_checks_it(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    model_of("llama-gqa", seed=7).save_pretrained(checkpoint)
    words = arguments(folder, "run", "--strategy", "kvr-s", "--partition", "60,36", "--check", *SHORT)
    words += ["--model", str(checkpoint), "--output-tokens", "6", "--seed", "2", "--side-traffic", "64KiB"]
    code, result, errors = said([*words, "--trace", str(folder / "run.json"), "--plot", str(folder / "run.html")])
    assert code == 0, errors
    assert result["tokens"] == generated(checkpoint, ctx=96, seed=2, tokens=6)
    assert result["tokens_equal"] is True
    assert result["reasons"] == []
    assert result["ttft_s"] == result["measured_ttft_s"]
    assert result["tpot_s"] > 0
    assert result["conditions"]["weights"].startswith("of the checkpoint, 1 file of ")
    assert result["conditions"]["side traffic"].startswith("messages of 64.0 KiB in both directions")
    assert (result["strategy"], result["partition"]) == ("kvr-s", [60, 36])
    assert result["max_logit_error"] <= 1e-5 * result["largest_logit"]
    assert result["predicted_ttft_s"] > 0
    assert [rank["sent_bytes"] for rank in result["per_rank"]] == [3 * 60 * 2 * 2 * 16 * 4, 0]
    (timeline,) = page_data((folder / "run.html").read_text())["timelines"]
    assert (timeline["ranks"], {kind["basis"] for kind in timeline["kinds"]}) == (2, {"measured"})
    assert json.loads((folder / "run.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_under_torchrun_one_rank_speaks(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "kvrsim.cli.main", *arguments(folder, "run", "--strategy", "kvr-e", *SHORT)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["partition"] == [48, 48]


MISTAKES = [
    (("run", "--strategy", "kvr-e", "--partition", "50,40"), "--partition", "sum to 96 tokens, not 90"),
    (("run", "--strategy", "kvr-e", "--partition", "90,3,3"), "--partition", "2 chunk lengths, one per GPU"),
    (("run", "--strategy", "kvr-p"), "--partition", "a partition: run does not read the table of kvr-p"),
    (("run", "--strategy", "ring", "--output-tokens", "3"), "--output-tokens", "its own tokens; others decode: single"),
    (("run", "--strategy", "kvr-e", "--output-tokens", "0"), "--output-tokens", "0"),
    (("run", "--strategy", "kvr-e", "--host-memory"), "--host-memory", "GPUs: on a CPU all messages"),
    (("run", "--strategy", "single", "--side-traffic", "1MiB"), "--side-traffic", "at least 2 ranks"),
    (("run", "--strategy", "single,tsp"), "--strategy", "what the runtime runs: single, tsp"),
    (("run", "--strategy", "tp2+kvr-s"), "--strategy", "planned and simulated only"),
    (("confirm", "--repeats", "0"), "--repeats", "0"),
    (("confirm", "--attention", "sdpa"), "--attention", "eager"),
    (("confirm", "--backend", "nccl"), "--backend", "gloo"),
    (("confirm", "--max-regret", "few"), "--max-regret", "3% or 0.03"),
    (("confirm", "--search", "--output", "table.json", "--minutes", "0"), "--minutes", "above 0"),
    (("confirm", "--search", "--output", "table.json", "--gpus", "1"), "--gpus", "at least 2"),
    (("confirm", "--profile", "a100-eager"), "--profile", "a100-80gb', accepted: a profile of this machine"),
    (("run", "--strategy", "kvr-e", "--profile", "a100-eager", "--dtype", "fp16"), "--profile", "or --other-machine"),
    (("run", "--strategy", "kvr-e", "--model", "llama-3.1-405b"), "--model", "such as tiny-llama"),
    (("confirm", "--strategies", "ring,kvr-p"), "--strategies", "what the runtime runs without a table: single"),
    (("confirm", "--strategies", "ring", "--virtual"), "--strategies", "what one device can replay in turn: single"),
]


@pytest.mark.parametrize(("words", "named", "accepted"), MISTAKES, ids=[" ".join(words) for words, *_ in MISTAKES])
def test_mistakes_take_one_line(
    words: tuple[str, ...], named: str, accepted: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command, *more = words
    code, text, errors = said([*arguments(folder, command), *more])
    assert (code, text) == (2, "")
    line = errors.strip().splitlines()[-1]
    assert named in line
    assert accepted in line
    assert "Traceback" not in errors


def test_named_strategies_are_measured_beside_their_predictions(folder: Path) -> None:
    names = ["striped", "kvr-b", "tp", "pp-s"]
    few = ("--strategies", ",".join(names), "--repeats", "1", "--warmups", "0", "--no-virtual", *BUSY, "--json")
    code, result, errors = said(arguments(folder, "confirm", *few))
    assert code == 0, errors
    assert [one["strategy"] for one in result["candidates"]] == names
    assert all(one["predicted_ttft_s"] > 0 and one["measured_ttft_s"] > 0 for one in result["candidates"])
    assert result["max_logit_error"] <= 1e-5
    assert sum(result["candidates"][-1]["layers"]) == 3
    assert result["orders"]["significant"] == 0  # one sample cannot be significant


def test_a_rank_that_fails_is_a_reason_too(folder: Path) -> None:
    few = ("--top", "1", "--repeats", "1", "--warmups", "0", "--no-virtual", "--timeout", "1us", "--json")
    code, result, errors = said(arguments(folder, "confirm", *few))
    assert code == 1
    assert (result["ok"], result["candidates"]) == (False, [])
    assert "rank" in result["reasons"][0]
    assert "Traceback" not in errors


def test_all_stands_for_what_the_machine_and_the_model_allow(folder: Path, tmp_path: Path) -> None:
    scenario, _ = make_scenario(ctx=96, gpus=2, model=folder / "model.json", profile=folder / "profile.json")
    hardware = Hardware(config=str(folder / "model.json"))
    assert set(strategies_here(scenario, ["all"], "ranks", hardware)[0]) == set(RUN_STRATEGIES) - {"kvr-p"}
    names, notes = strategies_here(scenario, ["all"], "virtual", hardware)
    assert set(names) == {*usual_names("paper"), "kvr-b"}
    assert any("tp, " in note and "can replay" in note for note in notes)
    assert strategies_here(scenario, ["ring", "all"], "ranks", hardware)[0][0] == "ring"
    (tmp_path / "states.json").write_text(json.dumps(KINDS["qwen3_next"]))
    scenario, _ = make_scenario(ctx=96, gpus=2, model=tmp_path / "states.json", dtype="fp16")
    names, notes = strategies_here(scenario, ["all"], "ranks", Hardware(config=str(tmp_path / "states.json")))
    assert set(names) == {*usual_names("paper"), "kvr-b", "kvr-direct"}
    assert any("not measured: tp (accepted" in note for note in notes)
    assert any("ring" in note and "its layers keep states" in note for note in notes)


def test_without_a_profile_it_is_refused(folder: Path) -> None:
    blocks = ("--strategy", "kvr-b", "--partition", "48,48")
    for command, more in (("confirm", ()), ("run", ("--strategy", "kvr-s")), ("run", blocks)):
        words = [command, "--gpus", "2", "--ctx", "96", "--model", str(folder / "model.json"), *more]
        code, _, errors = said(words)
        assert code == 2
        assert "kvrsim calibrate all makes one" in errors
