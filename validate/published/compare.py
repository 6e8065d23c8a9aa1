"""Predicted beside published, row by row: `kvrsim validate published`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.io.files import write_atomically
from kvrsim.scenario import Scenario
from planner.simulate import run_simulation
from validate.published.page import part
from validate.published.reference import Row, read_rows

MOST_MAPE = 0.05  # of the rows used for calibration: worse is a regression
_BANDWIDTH = {"10GB/s": 10e9, "1GB/s": 1e9}  # links with the CUDA-direct link off
_CHUNKS = {"10GB/s": "kvr-e", "1GB/s": "kvr-s"}  # how rows that say only KVR are read


def scenario_of(row: Row) -> tuple[Scenario, str]:
    """The scenario and the strategy by which a row is simulated.

    Below NVLink's bandwidth GPU-direct is off and every transfer crosses the host: one bus that all flows
    share. "kvr" rows are simulated with even chunks at 10 GB/s; at 1 GB/s, where even chunks alone would send for
    longer than the printed TTFTs, with searched ones. See docs/results/slow_links.md.
    """
    link: dict[str, Any] = {}
    if row.link in _BANDWIDTH:
        link = {"topology": "bus", "link_bandwidth": _BANDWIDTH[row.link], "link_latency": 10e-6}
    scenario, _ = make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=row.profile, **link)
    return scenario, _CHUNKS[row.link] if row.strategy == "kvr" else row.strategy


def run() -> dict[str, Any]:
    """All rows and their errors; "ok" is false where the calibrated rows are off by more than MOST_MAPE."""
    rows: list[dict[str, Any]] = []
    for row in read_rows():
        scenario, strategy = scenario_of(row)
        result = run_simulation(scenario, strategy=strategy)
        rows.append(
            {
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
        )
    calibrated = [row for row in rows if row["used_for_calibration"]]
    used = summary(calibrated)
    return {
        "rows": rows,
        "calibration": used,
        "held_out": summary([row for row in rows if not row["used_for_calibration"]]),
        "all": summary(rows),
        "by_model": summaries(calibrated, "model"),
        "by_link": summaries(rows, "link"),
        "ok": used["mape"] is not None and used["mape"] <= MOST_MAPE,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Number of rows; mean, median and largest absolute relative error, and the share inside their intervals."""
    if not rows:
        return {"n": 0, "mape": None, "median_ape": None, "max_ape": None, "coverage": None}
    size = np.abs([row["rel_error"] for row in rows])
    return {
        "n": len(rows),
        "mape": float(size.mean()),
        "median_ape": float(np.median(size)),
        "max_ape": float(size.max()),
        "coverage": float(np.mean([row["inside"] for row in rows])),
    }


def summaries(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """A summary for each value of one of the rows' fields, in the order of the data."""
    values = dict.fromkeys(str(row[key]) for row in rows)
    return {value: summary([row for row in rows if str(row[key]) == value]) for value in values}


def write_report(result: Mapping[str, Any], path: str | Path) -> None:
    """Write the rows and their errors as a page, and its plot beside it as NAME.png."""
    page = Path(path)
    lines = ["# How far the predictions are from published TTFTs", "", *part(result, page.with_suffix(".png"))]
    write_atomically(page, "\n".join(lines).encode(), argument="report")
