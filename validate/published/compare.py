"""Predictions compared with the paper's TTFTs, row by row: `kvrsim validate published`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.kernels.profile import Residual, load_profile
from kvrsim.published import PublishedTtft, read_rows
from kvrsim.scenario import Scenario
from planner.simulate import run_simulation
from validate.report import fill, summary, table

DATA = Path(__file__).parents[1] / "data"
MOST_MAPE = 0.05  # largest mean error of the rows used for calibration; a larger error is a regression
BANDWIDTH = {"10GB/s": 10e9, "1GB/s": 1e9}  # bytes/s by link; rows at these links have GPU-direct off


def scenario_of(row: PublishedTtft) -> tuple[Scenario, str]:
    """The scenario and the strategy with which a row is simulated.

    In rows at 10 and 1 GB/s GPU-direct is off, and every transfer crosses the host: one bus that all flows share, on
    which a message holds its sender. "kvr" rows are simulated with searched chunks. See docs/results/figures.md.
    """
    link: dict[str, Any] = {}
    if row.link in BANDWIDTH:
        link = {"topology": "bus", "link_bandwidth": BANDWIDTH[row.link], "link_latency": 10e-6}
    scenario, _ = make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=row.profile, **link)
    if row.strategy == "kvr":
        return scenario, "kvr-s"
    return scenario, row.strategy


def check_row(row: PublishedTtft) -> dict[str, Any]:
    """A row's simulated TTFT, its interval and its error."""
    scenario, strategy = scenario_of(row)
    result = run_simulation(scenario, strategy=strategy)
    return {
        "source": row.source,
        "case": row.case,
        "model": row.model,
        "profile": row.profile,
        "link": row.link,
        "reported_s": row.ttft_s,
        "simulated_s": result.ttft_s,
        "low_s": result.ttft_low_s,
        "high_s": result.ttft_high_s,
        "rel_error": result.ttft_s / row.ttft_s - 1,
        "inside": row.is_inside(result.ttft_low_s, result.ttft_high_s),
        "used_for_calibration": row.used_for_calibration,
        "blind_until": row.blind_until,
    }


def run() -> dict[str, Any]:
    """All rows and their errors; "ok" is false if the mean error of the calibrated rows is above MOST_MAPE."""
    rows = [check_row(row) for row in read_rows()]
    calibrated = [row for row in rows if row["used_for_calibration"]]
    calibration = summary_of(calibrated)
    return {
        "rows": rows,
        "calibration": calibration,
        "held_out": summary_of([row for row in rows if not row["used_for_calibration"]]),
        "all": summary_of(rows),
        "by_model": summaries(calibrated, "model"),
        "by_link": summaries(rows, "link"),
        "ok": calibration["mape"] is not None and calibration["mape"] <= MOST_MAPE,
    }


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summary of some rows of `run`."""
    return summary([row["rel_error"] for row in rows], [row["inside"] for row in rows])


def summaries(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """A summary for each value of a field of the rows, in the order of the data."""
    values = dict.fromkeys(str(row[key]) for row in rows)
    return {value: summary_of([row for row in rows if str(row[key]) == value]) for value in values}


def part(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines of the page's part on the paper."""
    left_out = json.loads((DATA / "a100_eager_left_out.json").read_text("utf-8"))["rel_error"]
    rows = [row for row in read_rows() if row.used_for_calibration]
    by_model = {model: [left_out[row.case] for row in rows if row.model == model] for model in result["by_model"]}
    never_blind = [left_out[row.case] for row in rows if not row.blind_until]
    mean, median = _mean_median(never_blind)
    return fill(
        "accuracy_paper",
        run=result,
        models=_models(result, by_model),
        never_blind=len(never_blind),
        mean=mean,
        median=median,
        residual=residual_of_paper(),
    )


def _models(result: Mapping[str, Any], left_out: Mapping[str, Sequence[float]]) -> list[str]:
    """Table of errors of each model's used rows, with the model in the fit and without it."""
    rows = []
    for model, errors in result["by_model"].items():
        cells = [model, errors["n"]]
        cells += [f"{errors[key]:.1%}" for key in ("mape", "median_ape", "max_ape")]
        cells += _mean_median(left_out[model])
        rows.append(cells)
    return table(("model", "n", "mean", "median", "largest", "left out: mean", "median"), rows)


def _mean_median(errors: Sequence[float]) -> tuple[str, str]:
    """Mean and median of the absolute values, as text."""
    sizes = np.abs(errors)
    return f"{sizes.mean():.1%}", f"{np.median(sizes):.1%}"


def residual_of_paper() -> Residual:
    """Held-out errors of a100-eager, the profile that is fitted to the paper's rows."""
    residual = load_profile("a100-eager").residual
    assert residual is not None
    return residual
