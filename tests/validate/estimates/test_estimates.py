"""Large mixtures of experts beside aiconfigurator: sides add up, the page has them, and differences have causes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from validate.estimates import __main__ as command
from validate.estimates import package
from validate.estimates.cases import FRAMEWORKS, GPUS, MODELS, OPERATIONS, TOKENS, Case, Experts, cases
from validate.estimates.causes import CAUSES, COMMON
from validate.estimates.compared import Compared, compare, row_of, table_of
from validate.estimates.matrices import REASONS, counted, own_weights, package_weights
from validate.estimates.page import ALIKE, differences, page
from validate.estimates.prediction import predict, scenario_of, ttft_s
from validate.estimates.stored import STORED, Estimates

PAGE = command.PAGE.read_text()
INSTALLED = importlib.util.find_spec("aiconfigurator_core") is not None


@pytest.fixture(scope="module")
def estimates() -> Estimates:
    return Estimates.read()


@pytest.fixture(scope="module")
def compared(estimates: Estimates) -> tuple[Compared, ...]:
    return command.all_compared(estimates)


def case_of(model: str, gpu: str, tokens: int = 4096, experts: Experts = "tensor") -> Case:
    found = {one.name: one for one in MODELS}[model], {one.title: one for one in GPUS}[gpu]
    return Case(model=found[0], gpu=found[1], experts=experts, tokens=tokens)


def test_every_case_is_stored(estimates: Estimates) -> None:
    assert len(list(cases())) == len(MODELS) * len(GPUS) * 2 * len(TOKENS) == 48
    for case in cases():
        for framework in FRAMEWORKS:
            seconds = estimates.of(case, framework)
            assert all(value is None or value > 0 for value in seconds.values())
            assert len(seconds) >= 10


def test_what_is_stored_comes_back(estimates: Estimates, tmp_path: Path) -> None:
    estimates.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == STORED.read_text()


@pytest.mark.parametrize(
    ("model", "gpu", "tokens", "experts"),
    [
        ("deepseek-v3", "H100", 4096, "tensor"),
        ("gpt-oss-120b", "B200", 32768, "tensor"),
        ("qwen3-235b-a22b", "H200", 4096, "expert"),
        ("qwen3.5-397b-a17b", "H200", 32768, "tensor"),
    ],
)
def test_the_page_has_the_predictions(
    model: str, gpu: str, tokens: int, experts: Experts, estimates: Estimates
) -> None:
    case = case_of(model, gpu, tokens, experts)
    one = compare(case, predict(case), estimates)
    place = f"| {case.model.title} | {gpu} | {tokens // 1024}k | {'sliced' if experts == 'tensor' else 'whole'} |"
    (line,) = [line for line in PAGE.splitlines() if line.startswith(place)]
    _, _, _, _, ours_ms, theirs_ms, ratio, *_ = (cell.strip() for cell in line.strip("|").split("|"))
    assert float(ours_ms) == pytest.approx(1e3 * one.ours_s, rel=0.02)
    assert float(theirs_ms) == pytest.approx(1e3 * one.theirs_s, rel=0.02)
    assert float(ratio) == pytest.approx(one.ours_s / one.theirs_s, abs=0.02)


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAGE", tmp_path / "estimates.md")
    assert command.main([]) == 0
    assert "## Matrices on one of eight GPUs" in (tmp_path / "estimates.md").read_text("utf-8")


def test_the_page_is_made_of_all_cases(compared: tuple[Compared, ...], estimates: Estimates) -> None:
    made = page(compared, counted(estimates.weights), estimates.version)
    headings = [line for line in made.splitlines() if line.startswith("#")]
    assert headings == [line for line in PAGE.splitlines() if line.startswith("#")]
    assert made.count("| whole |") == made.count("| sliced |") == 24


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("model", [one.name for one in MODELS])
@pytest.mark.parametrize("experts", ["tensor", "expert"])
def test_operations_sum_to_the_simulated_ttft(model: str, experts: Experts, tokens: int) -> None:
    case = case_of(model, "H200", tokens, experts)
    ours = predict(case)
    assert sum(ours.values()) == pytest.approx(ttft_s(scenario_of(case)), rel=1e-3)
    assert set(ours) <= set(OPERATIONS)
    assert min(ours.values()) >= 0


def test_theirs_sum_to_their_estimate(compared: tuple[Compared, ...], estimates: Estimates) -> None:
    """Where one framework has all of a profile's operations, same tables is its estimate."""
    whole = [one for one in compared if set(one.frameworks.values()) == {"sglang"}]
    assert len(whole) >= 8
    for one in whole:
        assert one.theirs_s == pytest.approx(one.whole["sglang"], rel=1e-4)


def test_tables_are_those_of_the_recipes() -> None:
    h200 = case_of("deepseek-v3", "H200")
    found = {name: table_of(h200, name) for name in ("projections", "attention", "experts", "all_reduce", "clock")}
    assert found == dict(projections="trtllm", attention="trtllm", experts="sglang", all_reduce="sglang", clock=None)
    assert table_of(case_of("qwen3-235b-a22b", "H100"), "experts") == "trtllm"
    assert table_of(case_of("qwen3-235b-a22b", "H100"), "attention") == "sglang"
    assert table_of(case_of("qwen3-235b-a22b", "B200", experts="expert"), "experts") == "trtllm"


def test_an_unknown_operation_of_the_package_is_not_dropped() -> None:
    assert row_of("moe_pre_dispatch") == "all_reduce"
    with pytest.raises(KeyError, match="no row for"):
        row_of("another_gemm")


def test_every_difference_has_a_cause_and_every_cause_a_difference(compared: tuple[Compared, ...]) -> None:
    """With some room, so that a small change of the predictions asks for no new words."""
    common = set()
    for model in MODELS:
        group = [one for one in compared if one.case.model == model]
        causes = set(CAUSES[model.name])
        assert set(differences(group, ALIKE + 0.04)) - set(COMMON) <= causes, model.name
        assert causes <= set(differences(group, ALIKE - 0.04)), model.name
        common |= set(differences(group))
    assert set(COMMON) <= common


def test_a_difference_is_found(compared: tuple[Compared, ...]) -> None:
    one = next(one for one in compared if one.case == case_of("qwen3-235b-a22b", "H100"))
    assert "all_reduce" not in differences([one])
    ours: Mapping[str, float] = {**one.ours, "all_reduce": 1.2 * one.theirs["all_reduce"]}
    assert differences([replace(one, ours=ours)])["all_reduce"] == [pytest.approx(1.2)]


@pytest.mark.parametrize("operation", ["projections", "output", "all_reduce", "scan", "attention"])
def test_the_same_operations_agree(operation: str, compared: tuple[Compared, ...]) -> None:
    """At 4096 tokens, in the median over models and GPUs; attention where no constant is added to a short call."""
    tokens = 32768 if operation == "attention" else 4096
    ones = [one for one in compared if one.case.experts == "tensor" and one.case.tokens == tokens]
    ratios = sorted(ratio for one in ones if (ratio := one.ratio(operation)) is not None)
    assert 0.9 <= ratios[len(ratios) // 2] <= 1.1


def test_experts_that_lie_whole_are_those_of_the_busiest_gpu() -> None:
    """An eighth of the experts, with more rows than an eighth; the same sums, and all else as before."""
    sliced, whole = (predict(case_of("qwen3-235b-a22b", "H200", 32768, experts)) for experts in ("tensor", "expert"))
    for name in ("projections", "attention", "router", "all_reduce", "norms"):
        assert whole[name] == pytest.approx(sliced[name])
    assert whole["experts"] != pytest.approx(sliced["experts"], rel=0.05)


@pytest.mark.skipif(INSTALLED, reason="aiconfigurator-core is installed")
def test_without_the_package_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--package"]) == 2
    assert "aiconfigurator-core is not installed" in capsys.readouterr().err


@pytest.mark.skipif(not INSTALLED, reason="needs aiconfigurator-core")
@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-v3"])
def test_the_package_estimates_what_is_stored(model: str, estimates: Estimates) -> None:
    case = case_of(model, "H100")
    assert package.installed_version() == estimates.version
    found = package.estimate(case, "sglang")
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(
        estimates.of(case, "sglang"), rel=1e-4
    )


def test_every_matrix_is_counted_once_with_the_width_of_a_gpu(estimates: Estimates) -> None:
    models = counted(estimates.weights)
    assert {one.model for one in models if not one.is_equal} == set(REASONS)
    assert len(models) >= 18


def test_weights_that_differ_do_so_by_the_reason(estimates: Estimates) -> None:
    """DeepSeek-V3: three dense MLPs for experts; Llama 4: shared experts as wide as one routed expert."""
    ours, theirs = own_weights("deepseek-v3"), estimates.weights["deepseek-v3"]
    dense, shared, router = 3 * 7168 * 18432 // 8, 3 * 7168 * 2048 // 8, 7168 * 256
    assert ours.products - theirs[0] == 3 * (dense - shared - router)
    assert theirs[1] - ours.experts == 3 * 8 * shared
    ours, theirs = own_weights("llama-4-scout"), estimates.weights["llama-4-scout"]
    assert ours.products - theirs[0] == ours.experts == theirs[1]


@pytest.mark.skipif(not INSTALLED, reason="needs aiconfigurator-core")
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-35b-a3b"])
def test_the_package_counts_the_weights_that_are_stored(model: str, estimates: Estimates) -> None:
    assert package_weights(model) == estimates.weights[model]


def test_a_case_without_an_operation_has_no_whole_estimate(estimates: Estimates) -> None:
    case = case_of("gpt-oss-120b", "H200")
    one = compare(case, {"clock": 0.0}, estimates)
    assert set(one.whole) == {"sglang"}
    assert estimates.of(case, "trtllm")["context_moe"] is None
