"""`kvrsim calibrate prefills`: profiles from measured prefills, the check, and a one-line error for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrsim.engine import Engine, HostRates
from tests.building.commands import answer, refusal, run, screen

ROWS = """\
model,gpu,num_gpus,strategy,context_len,batch,cached_prefix,dtype,ttft_s
llama-2-7b,H100,1,single,256,1,0,fp16,0.031
llama-2-7b,H100,1,single,1024,1,0,fp16,0.047
llama-2-7b,H100,1,single,4096,1,0,fp16,0.120
llama-2-7b,H100,1,single,4000,1,0,fp16,0.118
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with rows.csv and engine.json."""
    (tmp_path / "rows.csv").write_text(ROWS, encoding="utf-8")
    Engine(
        name="prior",
        title="made up",
        description="Made up.",
        not_covered="Everything.",
        host=HostRates(layer_s=1e-4, gather_piece_s=0.0, request_s=5e-3),
        spread={"request_s": 1.0, "layer_s": 1.0, "kernel_scale": 0.1, "model": 0.05},
    ).write(tmp_path / "engine.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECKED = ("calibrate", "prefills", "--profile", "h100-flash", "--engine", "engine.json")


def test_a_fitted_profile_plans_and_checks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = screen(capsys, *CHECKED, "rows.csv", "-o", "mine.json")
    for shown in ("request_s", "identified", "left out", "llama-2-7b 4096 single on 1 GPU", "mine.json"):
        assert shown in out
    written = json.loads((folder / "mine.json").read_text("utf-8"))
    assert written["name"] == "mine"
    assert written["engine"]["fit"]["num_rows"] == 4
    result = answer(capsys, "calibrate", "prefills", "rows.csv", "--profile", "mine.json", "--check")
    assert result["median_ape"] < 0.05
    assert written["cluster"]["name"] == "h100-nvlink"
    plan = ["plan", "--profile", "mine.json", "--model", "llama-2-7b", "--gpus", "1", "--ctx", "1k"]
    assert answer(capsys, *plan)["best"]["ttft_s"] == pytest.approx(0.047, rel=0.1)


def test_the_fit_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, *CHECKED, "rows.csv", "-o", "mine.json", "--name", "ours")
    assert (result["profile"], result["output"], result["n"]) == ("ours", "mine.json", 4)
    names = [term["name"] for term in result["terms"]]
    assert names == ["request_s", "token_s", "layer_s", "kernel_scale", "sustained_share"]
    assert set(result["terms"][0]) == {"name", "prior", "prior_log_sd", "value", "low", "high", "identified"}
    assert result["after"]["mape"] < result["before"]["mape"]
    assert set(result["rows"][0]) == {"case", "measured_s", "before_s", "after_s", "left_out_s"}


def test_the_check_as_json_has_the_agreed_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, *CHECKED, "rows.csv", "--check")
    assert set(result) == {"rows", "n", "median_ape", "mape", "coverage", "parts", "first", "warnings"}
    assert set(result["rows"][0]) == {"case", "measured_s", "predicted_s", "low_s", "high_s", "rel_error"}


def test_the_check_leaves_with_0_however_far_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.csv").write_text(ROWS.replace("0.0", "9.0"), encoding="utf-8")
    out = screen(capsys, *CHECKED, "rows.csv", "--check")
    assert "inside the interval: 0%" in out or "25% of 4 rows" in out


def test_an_output_of_a_benchmark_takes_the_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"run_name": "a", "batch_size": 1, "input_len": 1024, "output_len": 8, "prefill_latency": 0.05}
    (folder / "result.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    options = ("--model", "llama-2-7b", "--gpus", "2", "--dtype", "bf16")
    out, err = run(capsys, *CHECKED, "result.jsonl", "rows.csv", "--check", "--json", *options)
    assert json.loads(out)["rows"][0]["case"] == "llama-2-7b 1024 tp on 2 GPUs"
    assert "note: result.jsonl: times inside the engine" in err


CASES = ("calibrate", "prefills", "rows.csv", "--profile", "h100-flash", "--model", "llama-3.3-70b", "--gpus", "8")


@pytest.mark.parametrize("column", ["ttft_ms", "ttft"])
def test_milliseconds_are_recognised(folder: Path, capsys: pytest.CaptureFixture[str], column: str) -> None:
    """In a column without a unit, by the size of the values."""
    (folder / "rows.csv").write_text(f"prompt_tokens,{column}\n2048,92\n4096,190\n16384,655\n", encoding="utf-8")
    result = answer(capsys, *CASES, "--dtype", "fp8", "--check")
    assert [row["measured_s"] for row in result["rows"]] == pytest.approx([0.092, 0.190, 0.655])
    assert any(column in warning for warning in result["warnings"])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("values", [(92, 190, 655, 1480), (92e-6, 190e-6, 655e-6, 1480e-6)], ids=["ms", "ks"])
def test_times_in_another_unit_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], check: bool, values: tuple[float, ...]
) -> None:
    lengths = (2048, 4096, 16384, 32768)
    rows = [f"{length},{value}" for length, value in zip(lengths, values, strict=True)]
    (folder / "rows.csv").write_text("\n".join(["prompt_tokens,ttft_s", *rows, ""]), encoding="utf-8")
    line = refusal(capsys, *CASES, "--dtype", "fp8", *(["--check"] if check else ["-o", "mine.json"]))
    assert "--columns ttft_ms=COLUMN" in line if values[0] > 1 else "--columns ttft_s=COLUMN" in line
    assert not (folder / "mine.json").exists()


@pytest.mark.parametrize(("share", "code"), [(0.98, 2), (1.02, 0)])
def test_a_time_that_no_gpu_reaches_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], share: float, code: int
) -> None:
    """The limit by hand: 2 FLOPs per weight of llama-2-7b's layers and token, at 989.4 TFLOP/s in half precision."""
    least_s = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) * 4096 / (2 * 989.4e12)
    (folder / "rows.csv").write_text(f"context_len,ttft_s\n4096,{share * least_s}\n", encoding="utf-8")
    case = ("--model", "llama-2-7b", "--gpus", "2", "--dtype", "bf16", "--check")
    _, err = run(capsys, "calibrate", "prefills", "rows.csv", "--profile", "h100-flash", *case, code=code)
    assert ("rows.csv, line 2: TTFT: got" in err) == (code == 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("rows.csv",), "--output is missing, accepted: a file for the profile, such as mine.json; or --check"),
        (("rows.csv", "--check", "-o", "mine.json"), "--output: got 'mine.json', accepted: nothing with --check"),
        (("engine.json", "--check"), "prefills engine.json: keys: got"),
        (("rows.csv", "--check", "--profile", "roofline"), "--profile: got 'roofline', accepted: a calibration"),
        (("rows.csv", "--check", "--profile", "a100-flash"), "rows.csv, line 2: gpu: got 'H100', accepted: a100"),
        (("rows.csv", "--check", "--attention", "eager"), "attention: got 'eager', accepted: a kernel that profile"),
    ],
)
def test_a_mistake_costs_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert line in refusal(capsys, *CHECKED, *arguments)


def test_a_failed_fit_leaves_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.csv").write_text(ROWS.replace("llama-2-7b", "no-model"), encoding="utf-8")
    refusal(capsys, *CHECKED, "rows.csv", "-o", "mine.json")
    assert not (folder / "mine.json").exists()


def test_an_interrupted_fit_leaves_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("calibrate.prefills.fit.solve", interrupted)
    (folder / "mine.json").write_text("what was there", encoding="utf-8")
    out, err = run(capsys, *CHECKED, "rows.csv", "-o", "mine.json", code=130)
    assert (out, err) == ("", "kvrsim: interrupted: nothing is kept; the same command begins anew\n")
    assert (folder / "mine.json").read_text("utf-8") == "what was there"
    assert {path.name for path in folder.iterdir()} == {"rows.csv", "engine.json", "mine.json"}
