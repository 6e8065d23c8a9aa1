"""The rule for intervals, fitted to errors that a known rule made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest

from calibrate.engines.prefills import read_prefills
from calibrate.engines.shares import (
    BY_HAND,
    START,
    ErrorRows,
    calibrated_log_sd,
    context_log_sd,
    fit_rule,
    groups_of,
    interval_scores,
    scores_of,
)
from kvrsim.error_rule import ErrorRule, TtftShares, error_rule
from kvrsim.io.schema import JsonObject, read

LAYOUTS = BY_HAND | {"context": 0.05}
TRUTH = {"floor": 0.04, "engine": 0.8, "kernels, dense": 0.15, "kernels, mixture": 0.2}


def made_up(num_rows: int = 2000) -> ErrorRows:
    """Rows whose errors have the deviations of TRUTH; each is a cell of its own."""
    rng = np.random.default_rng(2)
    facts = []
    log_errors = []
    rows = []
    for index in range(num_rows):
        kind = ("dense", "mixture")[index % 2]
        share = rng.uniform(0, 0.9)
        log_sd = np.hypot(np.hypot(TRUTH["floor"], TRUTH["engine"] * share), TRUTH[f"kernels, {kind}"] * (1 - share))
        fact = TtftShares(
            engine="vllm",
            engine_share=share,
            is_mixture=kind == "mixture",
            is_sibling=False,
            is_unknown_engine=False,
            is_short=False,
        )
        facts.append(fact)
        log_errors.append(rng.normal(0, log_sd))
        row = {"source": "made up", "model_type": "m", "gpu": "g", "engine": "vllm", "cell": str(index), "kind": kind}
        row |= {"tokens": 1000, "prompt_tokens": 1000, "several_nodes": False, "is_sibling": False, "new_layouts": ()}
        rows.append(row | {"log_error": log_errors[-1], "engine_share": share})
    return ErrorRows(facts=tuple(facts), log_errors=np.array(log_errors), frame=pandas.DataFrame(rows))


def test_the_fit_finds_the_rule_that_made_the_errors() -> None:
    rows = made_up()
    rule = fit_rule([rows], LAYOUTS)
    assert rule.engine["other"] == pytest.approx(TRUTH["engine"], rel=0.1)
    assert rule.kernels == {
        "dense": pytest.approx(TRUTH["kernels, dense"], rel=0.15),
        "mixture": pytest.approx(TRUTH["kernels, mixture"], rel=0.15),
    }
    assert rule.sibling == pytest.approx(START["sibling"], rel=0.02), "no row is of a sibling: the prior"
    scores = scores_of(rows.log_errors, rows.log_sds(rule))
    assert scores.coverage == pytest.approx(0.8, abs=0.03)


def test_the_score_is_best_for_the_true_width() -> None:
    """Winkler's score of an exact 80 % interval is lower than those of narrower and wider ones."""
    log_errors = np.random.default_rng(0).normal(0, 0.2, 20_000)
    scores = [interval_scores(log_errors, np.full(20_000, factor * 0.2)).mean() for factor in (0.7, 1.0, 1.4)]
    assert scores[1] == min(scores)
    assert scores[1] == pytest.approx(0.2 * 3.51, rel=0.02)  # of a normal distribution


def test_a_few_rows_of_one_machine_do_not_outweigh_the_others() -> None:
    rows = made_up(40)
    assert rows.weights.tolist() == [1.0] * 40
    same = ErrorRows(facts=rows.facts, log_errors=rows.log_errors, frame=rows.frame.assign(cell="one"))
    assert same.weights.sum() == pytest.approx(2.0)


def test_pairs_give_the_deviation_of_a_split_context() -> None:
    rows = made_up(8)
    frame = rows.frame.assign(
        tokens=[1, 1, 2, 2, 3, 3, 4, 4], new_layouts=[(), ("context",)] * 4, log_error=[0.0, 0.1] * 4
    )
    log_sd, pairs = context_log_sd(ErrorRows(facts=rows.facts, log_errors=rows.log_errors, frame=frame))
    assert pairs == 4
    assert log_sd > 0.1, "four pairs of one source are one observation"


def test_a_calibration_leaves_what_differs_between_rows_of_a_machine() -> None:
    """A factor that all rows of a machine share goes; their scatter stays."""
    rows = made_up(400)
    rng = np.random.default_rng(5)
    scatter = rng.normal(0, 0.05, 400)
    for common in (0.0, 0.3):
        log_errors = common + scatter
        frame = rows.frame.assign(cell=np.arange(400) // 10, kind="dense", log_error=log_errors)
        machines = ErrorRows(facts=rows.facts, log_errors=log_errors, frame=frame)
        log_sd, number = calibrated_log_sd(machines, error_rule())
        assert number == 400
        assert log_sd == pytest.approx(0.055, abs=0.012)


def test_the_shipped_rule_states_its_scores() -> None:
    """The rule ships with the scores of prefills left out: 76 to 86 % inside, at least 70 % of each kind."""
    rule = error_rule()
    assert 0.76 <= rule.scores["all"].coverage <= 0.86
    for kind in ("dense", "mixture", "several nodes", "long"):
        assert rule.scores[kind].coverage >= 0.7, kind
    assert rule.scores["dense, long, one node"].coverage >= 0.8
    assert rule.scores["all"].interval_score < 1.3
    assert set(groups_of(made_up(4))) >= set(rule.scores)
    assert "/work" not in str(rule.provenance)


def test_a_rule_is_written_and_read_whole(tmp_path: Path) -> None:
    rule = error_rule()
    rule.write(tmp_path / "rule.json")
    assert read(ErrorRule, JsonObject.read(tmp_path / "rule.json", "error rule")) == rule


def test_the_page_states_the_shipped_values() -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "intervals.md"
    text = page.read_text("utf-8")
    rule = error_rule()
    values = [rule.floor, rule.unknown_engine, *rule.kernels.values(), rule.sibling, rule.short]
    values += [rule.layouts[kind] for kind in ("context", "tensor", "nodes", "pipeline")]
    for value in values:
        assert f"| {value:g} |" in text
    assert f"| {rule.engine['other']:g} (SGLang {rule.engine['sglang']:g}) |" in text
    assert f"standard deviation of {rule.calibrated:g}" in text
    assert f"fitted to {rule.scores['all'].num_rows} published prefills" in text
    assert f"{rule.scores['all'].coverage:.0%}".replace("%", " %") in text


HEADER = "source,engine,engine_version,model,gpu,n_gpus,nodes,strategy,dtype,context,cached,batch,metric,value,note"
PREFILLS = {
    "vLLM,0.19.0,llama-3.1-8b,H100-SXM-80GB,1,1,single,bf16,9000,0,1,ttft_s,0.3,": ("vllm", "pp1", 1),
    "Meta internal,x,llama-3-405b,H100-96GB,16,2,tp8+cp2 (ring pass-KV; zigzag),fp8,8192,0,1,ttft_s,1,": None,
    "HF,x,llama-3.1-8b,A800-80GB,8,1,ulysses,bf16,32768,0,1,ttft_s,0.5,": ("serving", "ulysses", 8),
    "HF,x,llama-3.1-8b,A800-80GB,8,1,ulysses,bf16,32768,0,1,per_layer_s,0.5,": None,
    "HF,x,llama-3.1-8b,A800-80GB,8,1,ulysses,bf16,32768,0,1,ttft_s,0.5,WEAK": None,
    "HF,x,llama-3.1-8b,Abacus,8,1,ulysses,bf16,32768,0,1,ttft_s,0.5,": None,
    "vLLM,x,qwen3.6-27b,RTX 3090,2,1,tp2,int4,8192,0,1,ttft_s,4,NVLink bridge": ("vllm", "tp2", 2),
}


@pytest.mark.parametrize("row", PREFILLS)
def test_prefills_of_other_sources_are_simulated_as_they_ran(row: str, tmp_path: Path) -> None:
    """Rows that kvrsim cannot simulate, or that their source doubts, are left out."""
    (tmp_path / "rows.csv").write_text(f"{HEADER}\nsource,{row}\n")
    prefills = read_prefills(tmp_path / "rows.csv")
    expected = PREFILLS[row]
    assert [(one.engine, one.strategy, one.scenario.num_gpus) for one in prefills] == [expected] * (
        expected is not None
    )
    for prefill in prefills:
        assert prefill.predicted_s > 0
        assert prefill.execution.placed.has_scaled_kernels is ("3090" in row)
