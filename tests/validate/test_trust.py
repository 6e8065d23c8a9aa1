"""The page of trust by kind of question: every prefill is of one kind, and the largest cause of the width is named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from kvrsim.error_rule import error_rule
from tests.calibrate.engines.test_engines import made_up as made_up_settings
from tests.calibrate.engines.test_shares import made_up
from validate.results import ROOT
from validate.trust import has_expert_parallelism, kinds_of, main_cause


def test_every_prefill_is_of_one_kind() -> None:
    rows = made_up(200)
    settings = made_up_settings()
    tokens = np.resize([100, 1000, 20_000], 200)
    frame = rows.frame.assign(tokens=tokens, several_nodes=tokens == 1000, case="dense", prefill_s=1.0)
    kinds = kinds_of(settings, replace(rows, frame=frame))
    assert np.all(np.sum(list(kinds.values()), axis=0) == 1)
    assert np.array_equal(kinds["several nodes"], tokens == 1000)
    assert np.array_equal(kinds["fewer than 512 tokens"], tokens == 100)
    dense = (frame.kind == "dense").to_numpy()
    assert np.array_equal(kinds["dense, 16,384 tokens and more"], dense & (tokens == 20_000))


def test_expert_parallelism_is_that_of_the_setting() -> None:
    settings = made_up_settings()
    split = settings.rows.assign(moe_ep=np.resize([1, 2], len(settings)))
    rows = made_up(len(settings))
    columns = {name: settings.rows[name] for name in ("gpu", "engine", "prefill_s")}
    frame = rows.frame.assign(source="settings", case=settings.rows.model, **columns)
    flags = has_expert_parallelism(replace(settings, rows=split), replace(rows, frame=frame))
    assert np.array_equal(flags, np.resize([False, True], len(settings)))
    others = replace(rows, frame=frame.assign(source="elsewhere"))
    assert not has_expert_parallelism(replace(settings, rows=split), others).any()


def test_the_main_cause_has_most_of_the_variance() -> None:
    rows = made_up(20)
    rule = error_rule()
    host = tuple(replace(fact, engine_share=0.9) for fact in rows.facts)
    assert main_cause(replace(rows, facts=host), rule) == "engine"
    device = tuple(replace(fact, engine_share=0.0, is_mixture=True) for fact in rows.facts)
    assert main_cause(replace(rows, facts=device), rule) == "kernels"


PAGE_OF = {
    "kvrsim validate published": "accuracy",
    "kvrsim confirm": "studies",
    "python -m validate.multi_gpu": "multi_gpu",
    "python -m validate.trust": "trust",
    "python -m validate.silicon": "silicon",
    "python -m validate.accuracy": "accuracy",
    "python -m validate.confirmation": "confirmation",
}


def readme_rows() -> list[list[str]]:
    """The cells of the README's table of predictions and measurements, without its head."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("## Predicted against measured\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("cells", readme_rows(), ids=lambda cells: cells[0][:40])
def test_errors_of_the_readme_are_those_of_the_pages(cells: list[str]) -> None:
    page = (ROOT / "docs" / "results" / f"{PAGE_OF[cells[-1].strip('`')]}.md").read_text("utf-8")
    percents = re.findall(r"([\d.]+) %", " ".join(cells[1:-1]))
    assert percents or "all" in cells
    for percent in percents:
        assert re.search(rf"(?<![\d.]){re.escape(percent)} ?%", page), percent
