"""Wrong input gives exit code 2 and one line: the option, its value, accepted values, and a similar name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.cli.main import app
from kvrsim.cli.mistakes import command_of, error_line
from kvrsim.errors import InputError
from kvrsim.runtime.faults import RankError, faults_of
from tests.building.commands import refusal


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["plan"], ("gpus", 0, "1"), "--gpus: got '0', accepted: 1"),
        (["plan"], ("link_bandwidth", 0, "1"), "--link-bandwidth: got '0', accepted: 1"),
        (["plan"], ("model a.json: hidden_size", 0, "1"), "--model a.json: hidden_size: got '0', accepted: 1"),
        (["plan"], ("slo_ttft", 0, "1"), "slo_ttft: got '0', accepted: 1"),  # an option of another command
        (["simulate"], ("strategies", 0, "1"), "--strategy: got '0', accepted: 1"),
        (["models", "show"], ("model", 0, "1"), "model: got '0', accepted: 1"),
        (["capacity"], ("objective", "cost", "with `price_per_gpu_hour`"), "with --price-per-gpu-hour"),
        (
            ["table", "build"],
            ("output", "a", "nothing without `noise`"),
            "--output: got 'a', accepted: nothing without `noise`",
        ),
    ],
)
def test_parameters_are_shown_error_line(arguments: list[str], error: tuple[str, object, str], line: str) -> None:
    command = command_of([*arguments, "--gpus", "2"], app)
    assert error_line(InputError(*error), command).endswith(line)


def test_a_mistake_that_a_rank_reports_is_shown_as_an_option() -> None:
    faults = faults_of(InputError("attention", "flash", "eager"), 1, None)
    command = command_of(["run"], app)
    line = "rank 1: --attention: got 'flash', accepted: eager"
    assert error_line(RankError(faults), command) == line
    assert str(RankError(faults)) == line.replace("--", "")
    of_all = RankError([*faults, *faults_of(InputError("attention", "flash", "eager"), 0, None)])
    assert error_line(of_all, command) == "--attention: got 'flash', accepted: eager"


def test_the_same_mistake_in_both_places(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError) as caught:
        kvrsim.plan(ctx=512, gpus=2, link_bandwidth="fast")
    assert str(caught.value).startswith("link_bandwidth: got 'fast'")
    line = refusal(capsys, "plan", "--ctx", "512", "--gpus", "2", "--link-bandwidth", "fast")
    assert line == f"kvrsim: error: --{str(caught.value).replace('link_b', 'link-b')}\n"


PLAN = ("plan", "--gpus", "2", "--ctx", "512")
SIMULATE = ("simulate", "--strategy", "kvr-e", "--gpus", "2", "--ctx", "512")

MISTAKES = [
    (("plan",), "--ctx"),
    ((*PLAN, "--json=yes"), "--json"),
    (("plan", "--gpus", "0", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "8", "--ctx", "4"), "--gpus"),
    (("plan", "--ctx", "9" * 100), "--ctx"),
    ((*PLAN, "--model", "binary.json"), "--model"),
    ((*PLAN, "--profile", "profile_nan.json"), "flops_per_s"),
    ((*PLAN, "--profile", "profile_old.json"), "schema_version"),
    ((*PLAN, "--cluster", "cluster_nan.json"), "--cluster"),
    ((*PLAN, "--link-bandwidth", "10"), "--link-bandwidth"),
    ((*PLAN, "--attention", "flash", "--profile", "a100-eager"), "--attention"),
    ((*PLAN, "--cached-prefix", "512"), "--cached-prefix"),
    ((*PLAN, "--dtype", "fp8", "--profile", "roofline"), "--dtype"),
    ((*PLAN, "--strategies", "kvr-p"), "--table"),
    ((*PLAN, "--strategies", "tp2+pp2+cp2+cp1"), "--strategies: got 'tp2+pp2+cp2+cp1'"),
    ((*PLAN, "--prefix-placement", "remote:fast"), "--prefix-placement: got 'remote:fast'"),
    ((*PLAN, "--trace", "missing/trace.json"), "--trace"),
    ((*PLAN, "--plot", "gantt.gif"), "--plot"),
    (("simulate", "--strategy", "tsp,kvr-e", "--gpus", "2", "--ctx", "512"), "--strategy"),
    ((*SIMULATE, "--partition", "256,255"), "--partition"),
    ((*SIMULATE, "--executor", "batch", "--trace", "trace.json"), "--executor"),
    (("profiles", "show"), "NAME|PATH"),
]


@pytest.fixture(autouse=True)
def _among_files_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("truncated.json").write_text('{"model_type": "llama", "hidden_size": ')
    Path("list.json").write_text("[1, 2]")
    Path("binary.json").write_bytes(bytes(range(256)))
    profile = {"schema_version": 2, "name": "x", "gpu": "x", "description": "x", "not_covered": "x"}
    rates = '{"gemm": {"flops_per_s": NaN}, "attention": {"eager": {"flops_per_s": Infinity}}}'
    Path("profile_nan.json").write_text(json.dumps(profile)[:-1] + f', "kernels": {rates}, "provenance": {{}}}}')
    Path("profile_old.json").write_text(json.dumps(profile | {"schema_version": 1}))
    cluster = {"name": "x", "gpu": "a100-80gb", "num_gpus": 8, "topology": "switch"}
    link = {"name": "x", "bandwidth_bytes_per_s": float("nan"), "latency_s": 0}
    Path("cluster_nan.json").write_text(json.dumps(cluster | {"link": link}))


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_mistakes_take_one_line(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, *arguments)
    assert named in line
    assert "accepted" in line


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root can write in spite of file modes
    assert "--trace: got 'trace.json'" in refusal(capsys, *PLAN, "--trace", "trace.json")


MEANT = {
    "plna --ctx 8k": "kvrsim plan",
    "plan --context 8k": "--ctx",
    "plan --ctx 8k --gpu 4": "--gpus",
    "plan --ctx 8k --strategy tp": "--strategies",
    "plan --ctx 8k --model llama3-8b": "llama-3-8b",
    "simulate --ctx 8k --strategy kvrs": "kvr-s",
    "plan --ctx 8k --emit trt-llm": "trtllm",
    "plan llama-3.1-80b --ctx 1k": "llama-3.1-8b",
    "plan --frobnicate": None,
    "plan --ctx 8k --model gpt-99": None,
    "plan --ctx 8k --cached-prefix 8k": None,  # a number has no similar name
}


@pytest.mark.parametrize(("line", "meant"), MEANT.items())
def test_what_was_meant(line: str, meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, *shlex.split(line))
    assert err.endswith(f"; did you mean {meant}?\n") if meant else "did you mean" not in err


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("plan",), "--ctx is missing"),
        (("simulate", "--ctx", "1k"), "--strategy is missing"),
        (("capacity", "llama-3.1-8b", "8xh100", "--slo-ttft", "1s"), "--requests is missing"),
        (("plan", "--ctx", "1k", "--strategies", "kvr-p"), "--table is missing"),
        (("models", "show"), "NAME|PATH is missing"),
        (("plan", "--ctx"), "--ctx: its value is missing"),
    ],
)
def test_what_is_not_given_is_missing(words: tuple[str, ...], missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that the user has not written is never quoted."""
    line = refusal(capsys, *words)
    assert line.startswith(f"kvrsim: error: {missing}, accepted: ")
    assert "nothing'" not in line


def test_what_is_no_name_has_no_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.csv").write_text("arrival_s,context_tokens\n", encoding="utf-8")
    question = ("capacity", "llama-3.1-8b", "8xh100", "--slo-ttft", "1s")
    assert "did you mean" not in refusal(capsys, *question, "--requests", tmp_path / "empty.csv")


@pytest.mark.parametrize(
    "question", [{"cluster": -1}, {"cluster": {}}, {"model": 1}, {"num_gpus": "two"}, {"engine": None}]
)
def test_a_changed_question_of_a_predictor_is_named(
    tmp_path: Path, question: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ttft.json"
    build = ("predictor", "build", "llama-7b", "1xa100", "--strategy", "single", "--ctx", "1k", "-o", str(path))
    assert cli.main([*build]) == 0
    capsys.readouterr()
    content = json.loads(path.read_text())
    content["question"] |= question
    path.write_text(json.dumps(content))
    assert f"question.{next(iter(question))}" in refusal(capsys, "predictor", "lookup", path, "--ctx", "512")


def test_no_answer_with_nan_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = kvrsim.simulate(ctx="1k", gpus=2, strategy="tsp").to_dict()
    (tmp_path / "a.json").write_text(json.dumps(whole))
    (tmp_path / "b.json").write_text(json.dumps({**whole, "ttft_s": float("nan")}))
    assert "b.json: got 'NaN" in refusal(capsys, "compare", tmp_path / "a.json", tmp_path / "b.json")
