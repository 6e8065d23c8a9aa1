"""The campaign of statements: a small part finds nothing false, and each check finds a false statement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from validate.statements import campaign
from validate.statements.arithmetic import sizes_of
from validate.statements.campaign import FAMILIES, KINDS, outcome_of
from validate.statements.claims import command_of, with_change
from validate.statements.plans import PlannedCase

QUESTION = {"model": "llama-3.1-8b", "cluster": "4xh100", "ctx": "8k"}
Falsify = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def case() -> PlannedCase:
    return PlannedCase.ask(QUESTION, np.random.default_rng(1))


def test_a_part_of_the_campaign_finds_nothing_false(case: PlannedCase) -> None:
    checks = FAMILIES["plans"].checks
    claims = [claim for check in checks.values() for claim in check(case)]
    assert [claim for claim in claims if not claim.holds] == []
    assert {"fits", "best", "bound", "extrapolated"} <= {claim.kind for claim in claims}


@pytest.mark.parametrize("cluster", [{"cluster": "2xh20"}, {"cluster": "h20-nvlink", "gpus": "2"}])
def test_remedies_fit_on_a_cluster_of_a_size_and_on_a_part_of_a_cluster(cluster: dict[str, str]) -> None:
    question = {"model": "falcon-180b", "ctx": "4k"} | cluster
    misfit = PlannedCase.ask(question, np.random.default_rng(1))
    claims = list(KINDS["nothing fits"].checks["nothing fits"](misfit))
    assert [claim for claim in claims if not claim.holds] == []
    assert any(claim.said.startswith("would fit") for claim in claims)


def _slower_best(said: dict[str, Any]) -> None:
    said["strategies"][0] = said["strategies"][0] | {"ttft_s": said["strategies"][0]["ttft_s"] * 0.9}


def _no_memory(said: dict[str, Any]) -> None:
    for place, entry in enumerate(said["strategies"]):
        said["strategies"][place] = entry | {"peak_bytes": [1_000_000 for _ in entry["peak_bytes"]]}


def _high_bound(said: dict[str, Any]) -> None:
    said["bounds"] = said["bounds"] | {"lower_bound_s": 2 * said["bounds"]["lower_bound_s"]}


def _far_tie(said: dict[str, Any]) -> None:
    slowest = max(said["strategies"], key=lambda entry: entry["ttft_s"])
    said["best"] = said["best"] | {"ties": [slowest["strategy"]]}
    said["strategies"] = [
        entry | {"ttft_low_s": 0.99 * entry["ttft_s"], "ttft_high_s": 1.01 * entry["ttft_s"]}
        for entry in said["strategies"]
    ]


def _no_notes(said: dict[str, Any]) -> None:
    said["question"] = said["question"] | {"context_len": 10**8}


FALSE: dict[str, Falsify] = {
    "fits": _no_memory,
    "best": _slower_best,
    "bound": _high_bound,
    "tie": _far_tie,
    "extrapolated": _no_notes,
}


@pytest.mark.parametrize("kind", FALSE)
def test_a_false_statement_is_found(case: PlannedCase, kind: str) -> None:
    changed = PlannedCase(options=case.options, plan=case.plan, rng=np.random.default_rng(1))
    said = dict(case.said)
    said["strategies"] = list(said["strategies"])
    FALSE[kind](said)
    vars(changed)["said"] = said  # in place of the cached answer
    assert any(not claim.holds for claim in KINDS[kind].checks[kind](changed))


def test_an_interrupted_campaign_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "part.partial"
    kinds, asked = ["extrapolated"], list[int]()

    def ask(name: str, number: int, seed: int, wanted: list[str]) -> campaign.QuestionOutcome:
        asked.append(number)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return campaign.QuestionOutcome(
            family=name, number=number, command="kvrsim plan", statements=dict.fromkeys(wanted, 1), false=()
        )

    monkeypatch.setattr(campaign, "outcome_of", ask)
    with pytest.raises(KeyboardInterrupt):
        campaign.run(kinds, 3, 1, journal)
    outcomes = campaign.run(kinds, 3, 1, journal)
    assert asked == [0, 1, 1, 2]
    assert [outcome.number for outcome in outcomes] == [0, 1, 2]


def test_the_same_seed_asks_the_same_question() -> None:
    first, again = (outcome_of("misfits", 4, 7, []) for _ in range(2))
    assert first == again
    assert first.command != outcome_of("misfits", 5, 7, []).command


def test_a_change_is_added_to_the_question() -> None:
    changed = with_change({"ctx": "4k"}, ("--dtype", "fp8", "--expert-parallel"))
    assert changed == {"ctx": "4k", "dtype": "fp8", "expert_parallel": "True"}
    assert command_of("plan", changed) == "kvrsim plan --ctx 4k --dtype fp8 --expert-parallel"


@pytest.mark.parametrize(("model", "parameters"), [("llama-3.1-70b", 70.55e9), ("mixtral-8x7b", 46.70e9)])
def test_own_arithmetic_counts_published_parameters(model: str, parameters: float) -> None:
    """The numbers of parameters that the models' cards print."""
    sizes = sizes_of(model)
    assert sizes is not None
    assert sizes.parameters + 2 * sizes.embedding == pytest.approx(parameters, rel=1e-3)
