"""Parts of a plan that describe it: the question, the machine, bounds, ties."""

from __future__ import annotations

import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.error_rule import error_rule
from kvrsim.hardware import load_cluster
from kvrsim.io.schema import to_json
from kvrsim.kernels.profile import load_profile
from kvrsim.layout import Layout
from kvrsim.published import read_rows
from kvrsim.strategies import get_strategy
from kvrsim.units import format_seconds
from kvrsim.views.table import TIED
from planner import candidates
from tests.building.commands import answer, refusal, run, screen
from tests.building.remembered import Question, remember

CLUSTERS = ("switch", "bus", "chain")


@pytest.fixture(scope="module")
def answers() -> dict[Question, Any]:
    return {}


@pytest.fixture(autouse=True)
def _remembered(answers: dict[Question, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan as JSON, as a screen and from Python is computed once."""
    remember(answers, monkeypatch)


def cluster_file(folder: Path, **changes: Any) -> str:
    """Write the cluster a100-nvlink with changes to a file; return the path."""
    path = folder / "mine.json"
    path.write_text(json.dumps(to_json(replace(load_cluster("a100-nvlink"), name="mine", **changes))))
    return str(path)


def test_the_default_compares_all_that_could_fit() -> None:
    plan = kvrsim.plan(ctx="16k", gpus=8)
    names = {result.strategy for result in plan.strategies}
    assert {"kvr-direct", "pp", "tp2+kvr-s", "zigzag", "tsp"} <= names
    assert plan.not_compared == ("single",)
    everything = kvrsim.plan(ctx="16k", gpus=8, strategies=["all"])
    assert everything.best.strategy == plan.best.strategy


@pytest.mark.parametrize(("gpus", "method", "checked"), [(4, "auto", True), (4, "grid", False), (9, "auto", False)])
def test_the_papers_grid_checks_the_search(
    gpus: int, method: str, checked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus", str(gpus), "--ctx", "16k", "--strategies", "kvr-s", "--method", method, "--explain"]
    text = " ".join(screen(capsys, "plan", *words).split())
    check = re.search(r"by the paper's grid search: (\d+) partitions, .* \(([+-][0-9.]+)%\)", text)
    assert (check is not None) is checked
    if check is not None:
        grid = answer(capsys, "plan", *words[:-2], "grid")
        assert int(check[1]) == grid["search"]["evaluations"]
        assert abs(float(check[2])) <= 0.1


@pytest.mark.parametrize("strategies", [["kvr-s"], ["kvr-e"], ["tp2+kvr-s"]])
def test_a_chain_that_is_best_has_its_own_bound(strategies: list[str]) -> None:
    plan = kvrsim.plan(ctx="4k", gpus=4, strategies=strategies)
    bounds = plan.to_dict()["bounds"]
    assert bounds["of"] == "kvr"
    assert bounds["best"]["strategy"] == strategies[0]
    assert bounds["best"]["lower_bound_s"] <= plan.best.ttft_s
    assert bounds["best"]["gap"] == pytest.approx(plan.best.ttft_s / bounds["best"]["lower_bound_s"] - 1)


@pytest.mark.parametrize("topology", CLUSTERS)
def test_kvr_s_is_searched_only_where_it_is_asked_for(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a search the bound comes from the analytical plan."""
    methods: list[str] = []
    search = candidates.search

    def spied(*arguments: Any, **options: Any) -> Any:
        methods.append(options.get("method", "auto"))
        return search(*arguments, **options)

    monkeypatch.setattr(candidates, "search", spied)
    plan = kvrsim.plan(ctx="1k", gpus=3, strategies=["tsp"], topology=topology)
    assert methods == []
    assert (plan.search.evaluations, plan.bounds.gap) == (0, None)
    assert methods == ["analytical"]
    full = kvrsim.plan(ctx="1k", gpus=3, strategies=["kvr-s"], topology=topology)
    assert plan.bounds.lower_bound_s <= full.best.ttft_s
    assert full.search.evaluations > 1


def test_speed_ups_are_over_something_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3-70B with TSP has all weights on every GPU, which does not fit into memory."""
    arguments = ("plan", "--gpus", "8", "--ctx", "16k", "--model", "llama-3-70b", "--cluster", "h100-nvlink")
    arguments = (*arguments, "--strategies", "tsp,tp,tp2+pp")
    plan = answer(capsys, *arguments)
    rows = {row["strategy"]: row for row in plan["strategies"]}
    assert not rows["tsp"]["fits"]
    assert plan["baseline"] == "tp"
    assert rows["tp"]["speedup"] == 1.0
    assert rows["tp"]["speedup_over_tsp"] == pytest.approx(rows["tsp"]["ttft_s"] / rows["tp"]["ttft_s"])
    out = screen(capsys, *arguments)
    assert "vs TP " in out
    assert "as fast as TSP" not in out


NOTHING_FITS = ("plan", "--gpus", "2", "--ctx", "64k", "--model", "llama-3-70b", "--cluster", "h100-nvlink")


def test_where_nothing_fits_it_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """Each remedy is a list of options; the plan with these options fits."""
    plan = answer(capsys, *NOTHING_FITS, code=1)
    peaks = {row["strategy"]: max(row["peak_bytes"]) for row in plan["strategies"]}
    short = plan["shortfall"]
    assert short["strategy"] == min(peaks, key=lambda name: peaks[name])
    assert short["over_bytes"] == peaks[short["strategy"]] - plan["memory_limit_bytes"] > 0
    assert {"--gpus 4", "--dtype fp8"} <= {" ".join(one["change"].split()[:2]) for one in short["would_fit"]}
    for one in short["would_fit"]:
        again = answer(capsys, *NOTHING_FITS, *one["change"].split())
        row = next(row for row in again["strategies"] if row["strategy"] == one["strategy"])
        assert row["fits"]
        assert max(row["peak_bytes"]) <= one["peak_bytes"]
    out = " ".join(screen(capsys, *NOTHING_FITS, code=1).split())
    assert f"Nothing fits on 2 GPUs: the nearest, {short['strategy']}, needs" in out
    assert "Would fit:" in out
    assert TIED not in out


def test_more_gpus_than_a_switch_has_are_a_larger_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy's options name a cluster that exists, and the plan with them fits."""
    question = ("plan", "--model", "falcon-180b", "--cluster", "2xh20", "--ctx", "5000")
    remedies = answer(capsys, *question, code=1)["shortfall"]["would_fit"]
    larger = next(remedy for remedy in remedies if remedy["num_gpus"] > 2)
    again = answer(capsys, *question, *larger["change"].split())
    assert again["num_gpus"] == larger["num_gpus"] == 4
    assert again["strategies"][0]["fits"]


def test_the_best_of_nothing_is_an_error_that_says_what_is_missing() -> None:
    plan = kvrsim.plan(ctx="64k", gpus=2, model="llama-3-70b", cluster="h100-nvlink", strategies=["tp", "tsp"])
    with pytest.raises(kvrsim.NothingFits, match="nothing fits on 2 GPUs") as error:
        _ = plan.best
    assert error.value.shortfall is plan.shortfall
    assert pickle.loads(pickle.dumps(error.value)).shortfall == plan.shortfall
    assert plan.nearest == next(one for one in plan.strategies if one.strategy == "tp")
    assert kvrsim.plan(ctx="1k", gpus=2, strategies=["tp"]).nearest is None


def test_a_tie_goes_to_what_engines_have_with_the_fewest_stages() -> None:
    names = ["kvr-s", "pp", "tp8+pp", "tp4+pp", "tp2+pp"]
    plan = kvrsim.plan(ctx="32k", model="llama-3.1-70b", cluster="h100-2x8-ndr400", strategies=names)
    fitting = [one for one in plan.strategies if one.fits]
    assert [one.ttft_s for one in fitting] == sorted(one.ttft_s for one in fitting)
    assert [one.fits for one in plan.strategies] == sorted((one.fits for one in plan.strategies), reverse=True)
    near = [one for one in fitting if one.ttft_s <= 1.02 * fitting[0].ttft_s]
    stages = {one.strategy: len(one.layers) for one in near if one.layers is not None}
    assert stages[plan.best.strategy] == min(stages.values())
    assert plan.best.engines


def unmeasured(layout: Layout) -> set[str]:
    """The ways to divide a prefill over GPUs that the rows of a100-eager do not have."""
    return {kind for kind in ("tensor", "pipeline") if getattr(layout, kind) > 1}


@pytest.mark.parametrize("strategies", [None, ["all"], ["tsp", "kvr-e", "kvr-s"]])
def test_ties_are_the_best_ones_neighbours(strategies: list[str] | None) -> None:
    """Strategies tie with the best one if errors of speed-ups and of layouts without measurements can explain it."""
    plan = kvrsim.plan(ctx="1k", gpus=4, strategies=strategies)
    residual = load_profile("a100-eager").residual
    assert residual is not None
    speedups = (math.pi / 2) ** 0.5 * residual.cross_validated_speedup_mape
    near = set()
    for one in plan.strategies:
        apart = unmeasured(one.layout) ^ unmeasured(plan.best.layout)  # what both have cancels
        most = math.exp(1.2816 * math.hypot(speedups, *(error_rule().layouts[kind] for kind in apart)))
        if one.fits and one.ttft_s <= most * plan.best.ttft_s:
            near.add(one.strategy)
    assert set(plan.ties) == near - {plan.best.strategy}
    assert plan.to_dict()["best"]["ties"] == list(plan.ties)


SCENARIO = ("--ctx", "2k", "--cached-prefix", "512", "--batch", "2", "--gpus", "2", "--dtype", "fp16")
QUESTIONS = {
    "plan": ("plan", *SCENARIO, "--seed", "7", "--strategies", "tsp,kvr-e"),
    "simulate": ("simulate", *SCENARIO, "--seed", "7", "--strategy", "tsp"),
    "map": ("map", *SCENARIO, "--strategies", "tsp"),
}


@pytest.mark.parametrize("command", QUESTIONS)
def test_the_question_is_in_the_answer(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = answer(capsys, *QUESTIONS[command])
    question = content["question"]
    about = ("model", "profile", "num_gpus", "context_len", "batch", "cached_prefix", "dtype", "attention")
    values = [question[key] for key in about]
    assert values == ["llama-7b", "a100-eager", 2, 2048, 2, 512, "fp16", "eager"]
    assert question["seed"] == (0 if command == "map" else 7)
    assert content["version"] == kvrsim.__version__
    cluster = content["cluster"]
    assert (cluster["name"], cluster["num_gpus"], cluster["gpu"]["name"]) == ("a100-nvlink", 2, "a100-80gb")
    assert (question["cluster"]["name"], question["cluster"]["network"]) == ("a100-nvlink", None)
    assert question["cluster"]["link"].items() <= cluster["link"].items()


def test_its_cluster_is_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "clusters", "show", "h100-2x8-ndr400")
    question = ("plan", "--profile", "roofline", "--ctx", "2k", "--strategies", "tp,pp,kvr-e")
    plan = answer(capsys, *question, "--cluster", "h100-2x8-ndr400")
    assert set(plan["cluster"]) == set(shown)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(plan["cluster"]))
    again = answer(capsys, *question, "--cluster", str(path))
    assert again["best"]["ttft_s"] == plan["best"]["ttft_s"]


@pytest.mark.parametrize(
    "command", [("table", "build"), ("predictor", "build", "llama-7b", "a100-nvlink", "--strategy", "tp")]
)
def test_what_builds_a_file_says_the_question(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = answer(capsys, *command, "--ctx", "512", "--gpus", "2", "-o", tmp_path / "file.json")
    assert (content["question"]["num_gpus"], content["version"]) == (2, kvrsim.__version__)
    assert content["cluster"]["gpu"]["name"] == content["question"]["cluster"]["gpu"] == "a100-80gb"


def test_more_gpus_than_a_named_switch_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cluster_file(tmp_path, num_gpus=4)
    error = refusal(capsys, "plan", "--ctx", "1k", "--cluster", path, "--gpus", "5")
    assert "--gpus: got '5', accepted: at most 4" in error
    assert "mine" in error


@pytest.mark.parametrize("topology", ["bus", "chain"])
def test_more_gpus_where_there_is_room_for_them_cost_a_note(topology: str, tmp_path: Path) -> None:
    path = cluster_file(tmp_path, num_gpus=4, topology=topology)
    scenario, notes = kvrsim.make_scenario(ctx="1k", cluster=path, gpus=6)
    assert scenario.num_gpus == 6
    assert f"mine has 4 GPUs; 6 are simulated on a longer {topology}" in notes


LONG = ("plan", "llama-3.1-70b", "8xh100", "--ctx", "64k", "--strategies", "tp,pp-s,kvr-s,tsp")


def test_the_first_screen_says_what_to_run_what_to_promise_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    plan = answer(capsys, *LONG)
    out = screen(capsys, *LONG)
    run = out.splitlines()[0]
    promise = next(line for line in out.splitlines() if line.startswith("Expect "))
    cause = next(line for line in out.splitlines() if "% of the critical path" in line)
    best = plan["best"]
    assert run.startswith(f"Run {best['strategy']} ({get_strategy(best['strategy']).title}) on 8 GPUs")
    assert format_seconds(plan["promise"]["expected_s"]) in promise
    assert format_seconds(plan["promise"]["high_s"]) in promise
    assert (plan["promise"]["expected_s"], plan["promise"]["high_s"]) == (best["ttft_s"], best["ttft_high_s"])
    assert cause.lower().startswith(f"{plan['limits'][0]['operation']} limit")
    assert "2 strategies do not fit (the fastest, kvr-s, would need" in out
    assert "lower bound" not in out
    assert len(re.findall(r"^(?:tp|pp)\S* ", out, re.MULTILINE)) <= 5
    explained = screen(capsys, *LONG, "--explain")
    assert "memory:" in explained
    assert "bound" not in " ".join(line for line in explained.splitlines() if "kvr-s" in line)


def test_a_target_that_load_misses_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--gpus", "2", "--ctx", "2k", "--strategies", "tp,tsp", "--slo", "10s")
    idle = answer(capsys, *arguments)["promise"]
    assert (idle["meets"], idle["at_rate"]) == (True, None)
    busy = answer(capsys, *arguments, "--rate", 2 * idle["most_rate_per_s"], code=1)["promise"]
    assert busy["meets"] is False
    assert busy["at_rate"]["high_s"] is None or busy["at_rate"]["high_s"] > 10
    assert busy["at_rate"]["percentile"] == 90


def test_noise_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """A target between the quiet TTFT's upper end and the noise's percentile is missed."""
    question = ("plan", "--gpus", "4", "--ctx", "8k", "--strategies", "kvr-s,tsp")
    quiet = answer(capsys, *question)["promise"]["high_s"]
    noise = ("--noise", "paper", "--samples", "40")
    noisy = answer(capsys, *question, *noise)
    best = next(one for one in noisy["strategies"] if one["strategy"] == noisy["best"]["strategy"])
    assert noisy["promise"]["expected_s"] == best["under_noise"]["mean_s"]
    assert noisy["promise"]["under_noise"]["expected_s"] <= best["under_noise"]["p95_s"]
    assert quiet < noisy["promise"]["under_noise"]["high_s"]
    target = f"{(quiet + noisy['promise']['under_noise']['high_s']) / 2}s"
    assert answer(capsys, *question, "--slo", target)["promise"]["meets"] is True
    assert answer(capsys, *question, *noise, "--slo", target, code=1)["promise"]["meets"] is False


def test_a_slow_gpu_is_compared_with_the_even_machine(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("plan", "--gpus", "4", "--ctx", "8k", "--strategies", "kvr-s,tsp")
    even = {one["strategy"]: one for one in answer(capsys, *question)["strategies"]}
    slow = answer(capsys, *question, "--noise", "slow-gpu:2x1.3")["strategies"]
    for one in slow:
        assert one["under_noise"]["mean_increase"] == pytest.approx(one["ttft_s"] / even[one["strategy"]]["ttft_s"] - 1)
        assert one["under_noise"]["mean_increase"] > 0.05


def test_emit_launches_what_the_engine_has_and_says_what_it_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "llama-3.1-8b", "4xh100", "--ctx", "8k", "--strategies", "kvr-s,tp", "--emit", "vllm")
    launch = answer(capsys, *arguments)
    assert (launch["engine"], launch["strategy"]) == ("vllm", "tp")
    assert launch["plan"]["best"]["strategy"] == "tp"  # the plan promises the strategy that is launched
    out, _ = run(capsys, *arguments)
    assert out.startswith("vllm serve")
    assert "Run tp " in out
    assert "vllm lacks the fastest, kvr-s " in " ".join(out.split())
    nothing = ("plan", "llama-3.1-8b", "4xh100", "--ctx", "8k", "--strategies", "kvr-s", "--emit", "vllm")
    assert "vllm launches none of the compared strategies" in " ".join(screen(capsys, *nothing, code=1).split())


def test_emit_refuses_a_context_without_positions_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.plan.search_all", None)
    line = refusal(capsys, "plan", "llama-3.1-70b", "8xh100", "--ctx", "1M", "--emit", "sglang")
    assert "--ctx: got '1048576', accepted: at most 131072 tokens" in line


FOR_ENGINES = ("plan", "llama-3.1-8b", "8xh100", "--ctx", "16k")


@pytest.mark.parametrize("engine", ["vllm", "sglang@0.5.9", "trtllm"])
def test_with_an_engine_the_best_is_what_this_engine_launches(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = engine.partition("@")[0]
    plan = answer(capsys, *FOR_ENGINES, "--engine", engine)
    fitting = [one for one in plan["strategies"] if one["fits"]]
    launched = [one for one in fitting if name in one["engines"]]
    assert plan["best"]["strategy"] in {one["strategy"] for one in launched}
    assert plan["best"]["ttft_s"] <= 1.02 * min(one["ttft_s"] for one in launched)
    assert plan["fastest"]["ttft_s"] == min(one["ttft_s"] for one in fitting)
    assert plan["deployable"]["strategy"] == plan["best"]["strategy"]
    launch = answer(capsys, *FOR_ENGINES, "--engine", engine, "--emit", name)
    assert (launch["engine"], launch["strategy"]) == (name, plan["best"]["strategy"])


def test_without_an_engine_the_best_is_the_fastest_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    plan = answer(capsys, "plan", "--gpus", "4", "--ctx", "4k")
    fitting = [one for one in plan["strategies"] if one["fits"]]
    assert plan["best"]["ttft_s"] <= 1.02 * min(one["ttft_s"] for one in fitting)
    launched = {one["strategy"]: one for one in fitting if one["engines"]}
    assert plan["deployable"]["engines"] == list(launched[plan["deployable"]["strategy"]]["engines"])
    assert plan["deployable"]["ttft_s"] <= 1.02 * min(one["ttft_s"] for one in launched.values())
    alone = answer(capsys, "plan", "--gpus", "4", "--ctx", "4k", "--strategies", "kvr-s,tsp")
    assert alone["deployable"] is None


def test_a_launch_on_another_engine_than_the_one_of_the_times_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--emit", "--only-deployable"):
        line = refusal(capsys, *FOR_ENGINES, "--engine", "sglang@0.5.9", option, "vllm")
        assert f"{option}: got 'vllm', accepted: sglang, whose times --engine sglang@0.5.9 gives" in line


def test_speed_ups_with_an_engine_are_over_something_that_engines_have() -> None:
    plan = kvrsim.plan(model="llama-3.1-8b", cluster="4xh100", ctx="4k", strategies=["tsp", "tp", "kvr-s"])
    assert plan.baseline == "tp"
    assert kvrsim.plan(model="llama-3.1-8b", cluster="4xh100", ctx="4k", strategies=["tsp", "kvr-s"]).baseline == "tsp"


SCREENS = (
    ("plan", "--gpus", "8", "--ctx", "16k"),
    ("plan", "llama-3.3-70b", "2x8xh100", "--dtype", "fp8", "--ctx", "32k", "--engine", "vllm"),
    ("plan", "llama-3.1-70b", "2x8xh100", "--ctx", "32k"),
)


@pytest.mark.parametrize("question", SCREENS, ids=" ".join)
def test_the_first_screen_explains_each_name_and_each_mark(
    question: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = answer(capsys, *question)
    whole = screen(capsys, *question)
    out = " ".join(whole.split())
    best = plan["best"]
    assert f"{best['strategy']} ({get_strategy(best['strategy']).title})" in out
    rows = re.findall(r"^(\S+)( ≈)?( \*)? .*? [\d.]+ m?s +[\d.]+–", whole, re.MULTILINE)
    assert 2 <= len(rows) <= 7
    names = {name for name, _, _ in rows}
    fitting = {one["strategy"] for one in plan["strategies"] if one["fits"]}
    assert names >= {"kvr-s", plan["baseline"]} & fitting
    for name in names:
        first_words = " ".join(get_strategy(name).title.split()[:3])
        assert re.search(rf"^{re.escape(name)} .*{re.escape(first_words)}", whole, re.MULTILINE)
    tied = {name for name, mark, _ in rows if mark}
    assert tied == set(best["ties"]) & names
    assert (f"ties with {best['strategy']}:" in out) is bool(tied)
    if plan["question"]["engine"] == "vllm":
        by_name = {one["strategy"]: one for one in plan["strategies"]}
        lacking = {name for name in names if "vllm" not in by_name[name]["engines"]}
        assert lacking <= {plan["fastest"]["strategy"], "kvr-s"}
        assert f"vllm lacks the fastest, {plan['fastest']['strategy']} " in out
    if plan["profile"] == "a100-eager":
        assert f"Engines today with {plan['deployable']['strategy']}, " in out
    elif not by_strategy(plan, best["strategy"])["engines"]:
        assert f"the fastest that engines launch is {plan['deployable']['strategy']} (" in out


def test_the_papers_question_leads_with_kv_runahead_and_what_the_paper_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One TTFT of kvr-s, whoever is asked; its chunks, its bound and its search; the paper's TTFTs of its table."""
    question = ("--gpus", "8", "--ctx", "16k")
    plan = answer(capsys, "plan", *question)
    kvr = by_strategy(plan, "kvr-s")
    alone = by_strategy(answer(capsys, "plan", *question, "--strategies", "kvr-s"), "kvr-s")
    simulated = answer(capsys, "simulate", *question, "--strategy", "kvr-s")
    for other in (alone, simulated):
        assert other["ttft_s"] == pytest.approx(kvr["ttft_s"], rel=1e-12)
        assert other["partition"] == kvr["partition"]
    assert kvr["searched"]
    assert kvr["lower_bound_s"] == plan["bounds"]["lower_bound_s"] <= kvr["ttft_s"]
    printed = {
        row.strategy: row.ttft_s
        for row in read_rows()
        if row.case.startswith("llama-7b 16384") and "8 GPUs" in row.case
    }
    assert len(printed) == 2
    assert {name: by_strategy(plan, name)["paper_ttft_s"] for name in ("tsp", "kvr-s", "kvr-e")} == printed | {
        "kvr-e": None
    }
    out = " ".join(screen(capsys, "plan", *question).split())
    chunks = ", ".join(map(str, kvr["partition"]))
    assert out.startswith(f"KV-Runahead (kvr-s) on 8 GPUs: {chunks} tokens; first token after")
    assert f"The paper measured {format_seconds(printed['kvr-s'])} and {format_seconds(printed['tsp'])}." in out
    assert f"below {format_seconds(kvr['lower_bound_s'])} in this model (proven)" in out
    assert f"tried {kvr['evaluations']} partitions" in out


@pytest.mark.parametrize("options", ["--link-bandwidth 10GB/s", "--batch 2", "--noise paper --samples 10", "--ctx 10k"])
def test_what_the_paper_measured_stands_only_beside_its_own_question(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = answer(capsys, "plan", "--gpus", "4", "--ctx", "4k", "--strategies", "kvr-s,tsp", *options.split())
    assert {one["paper_ttft_s"] for one in plan["strategies"]} == {None}


def test_a_plan_is_written_as_json_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    question = ("plan", "--gpus", "2", "--ctx", "1k", "--strategies", "kvr-e,tsp")
    path = Path("my plan.json")
    out, _ = run(capsys, *question, "-o", str(path))
    assert f"kvrsim confirm '{path}' --profile mine.json" in out
    assert json.loads(path.read_text()) == answer(capsys, *question)


def by_strategy(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry of a strategy."""
    return next(one for one in plan["strategies"] if one["strategy"] == name)


def test_sizes_that_differ_are_printed_with_digits_that_differ() -> None:
    from kvrsim.cli.commands.plan import _gib

    assert _gib(72.2 * 2**30, 71.7 * 2**30) == "72.2 of 71.7 GiB"
    needed, limit = _gib(71.72 * 2**30, 71.71 * 2**30).removesuffix(" GiB").split(" of ")
    assert needed > limit


def test_one_gpu_is_run_on_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    out = screen(capsys, "plan", "--gpus", "2", "--ctx", "1k", "--strategies", "single")
    assert re.match(r"Run single \([^)]+\) on 1 GPU\.", out)


def test_bounds_are_null_where_kv_runahead_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """128 experts do not divide over 256 GPUs, and one GPU's memory does not hold them all."""
    arguments = ("plan", "qwen3-30b-a3b", "32x8xl40s", "--ctx", "4k", "--strategies", "tp8+pp")
    bounds = answer(capsys, *arguments)["bounds"]
    assert {bounds[name] for name in ("ttft_star_s", "ttft_no_comm_s", "lower_bound_s", "gap")} == {None}
