"""Prefills on serving engines of 2023 and 2024 compared with predictions by the engines' records.

The records in kvrsim/data/engines/NAME.json are frozen: they were fitted by this module's `--fit` at commit 479bb5ad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.engine import SHORT_TOKENS, load_engine
from kvrsim.published import read_table
from kvrsim.scenario import Scenario
from planner.simulate import run_simulation
from validate.published.compare import DATA
from validate.report import fill, summary, table

if TYPE_CHECKING:
    import pandas

ENGINES = ("vllm-2023", "tensorrt-llm-0.5", "lmdeploy-0.1", "loongserve-2024", "mooncake-vllm-0.11")
_PROFILES = {"a100": "a100-flash", "a800": "a100-flash", "h100": "h100-flash", "h800": "h100-flash"}
_TYPES = {"num_gpus": int, "context_len": int, "batch": int, "seconds": float}
_LENGTHS = {"below 512": 512, "512 to 2047": 2048, "2048 to 8191": 8192, "8192 and more": math.inf}  # upper ends


def compare() -> pandas.DataFrame:
    """All prefills with columns tokens, rel_error and inside (whether the interval contains the measurement).

    A row with a text in `left_out` is left out of the comparison by that rule.
    """
    import pandas

    frame = pandas.DataFrame(read_table(DATA / "serving_prefills.csv")).astype(_TYPES)
    rows = pandas.concat([frame[frame.engine_name == name] for name in ENGINES], ignore_index=True)
    seconds = np.array([_predicted_s(row) for row in rows.itertuples()])
    measured_s, (predicted_s, low_s, high_s) = rows.seconds.to_numpy(), seconds.T
    inside = (low_s <= measured_s) & (measured_s <= high_s)
    return rows.assign(tokens=rows.context_len * rows.batch, rel_error=predicted_s / measured_s - 1, inside=inside)


def scenario_of(row: Mapping[str, Any]) -> Scenario:
    """The scenario of a row, by column."""
    scenario, _ = make_scenario(
        ctx=int(row["context_len"]),
        gpus=int(row["num_gpus"]),
        model=row["model"],
        profile=_PROFILES[row["cluster"].partition("-")[0]],
        cluster=row["cluster"],
        batch=int(row["batch"]),
        dtype=row["dtype"],
        engine=row["engine_name"],
    )
    return scenario


def _predicted_s(row: Any) -> tuple[float, float, float]:
    """Predicted seconds of a row, and the ends of their 80 % interval."""
    result = run_simulation(scenario_of(row._asdict()), strategy=row.strategy)
    return result.ttft_s, result.ttft_low_s, result.ttft_high_s


def summaries(rows: pandas.DataFrame, key: str | pandas.Series) -> dict[str, dict[str, Any]]:
    """Summaries of the errors by group. `key`: a column, or one value per row. Groups with short prompts come first."""
    groups = rows.assign(key=rows[key] if isinstance(key, str) else key).sort_values("tokens", kind="stable")
    return {
        str(name): summary(group.rel_error.tolist(), group.inside.tolist())
        for name, group in groups.groupby("key", sort=False)
    }


def figures(rows: pandas.DataFrame) -> dict[str, dict[str, Any]]:
    """The figures of the page's first table: long prompts, and prompts so short that the engine may take most time."""
    own = rows[rows.left_out == ""]
    names = np.where(own.tokens >= SHORT_TOKENS, "512 tokens and more", "below 512 tokens")
    return dict(sorted(summaries(own, names).items()))


def part(rows: pandas.DataFrame) -> list[str]:
    """Markdown lines of the accuracy page's part on serving engines."""
    fits = {name: load_engine(name).fit for name in ENGINES}
    settings = (
        (name, f"{fit.left_out}s", f"{fit.left_out_median_ape:.1%}", f"{fit.left_out_mape:.1%}", f"{fit.coverage:.0%}")
        for name, fit in fits.items()
        if fit is not None
    )
    own = rows[rows.left_out == ""]
    others = rows[rows.left_out != ""]
    lengths = [next(name for name, end in _LENGTHS.items() if tokens < end) for tokens in own.tokens]
    return fill(
        "accuracy_serving",
        predictions=_table("prediction", figures(rows)),
        settings=table(("engine", "left out", "median error", "mean", "inside, 512 tokens and more"), settings),
        engines=_table("engine", summaries(own[own.tokens >= SHORT_TOKENS], "engine_name")),
        lengths=_table("tokens of all prompts", summaries(own, lengths)),
        strategies=_table("strategy", summaries(own, "strategy")),
        rules=_table("engine and rule", summaries(others, others.engine_name + ", `" + others.left_out + "`")),
    )


def _table(title: str, groups: dict[str, dict[str, Any]]) -> list[str]:
    """Table of summaries by name."""
    formats = {"median_ape": ".1%", "mape": ".1%", "median": "+.1%", "coverage": ".0%"}
    rows = (
        (name, group["n"], *(f"{group[key]:{spec}}" for key, spec in formats.items())) for name, group in groups.items()
    )
    return table((title, "rows", "median error", "mean", "with sign (median)", "inside"), rows)
