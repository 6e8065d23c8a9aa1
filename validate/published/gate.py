"""Accuracy on the paper that may not get worse: `python -m validate.published.gate` stores today's figures.

Store them anew only with a change that is explained: a later figure may be MOST_WORSE above the stored one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvrsim.io.files import write_atomically
from kvrsim.profile.profile import load_profile
from validate.published.compare import run
from validate.published.reference import DATA

PATH = DATA / "paper_gate.json"
MOST_WORSE = 0.01  # a point


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Mean absolute errors: models left out of the fit, rows of the fit, its worst model, and all rows."""
    residual = load_profile("a100-eager").residual
    assert residual is not None
    found = {
        "left_out": residual.cross_validated_mape,
        "calibration": result["calibration"]["mape"],
        "worst_model": max(errors["mape"] for errors in result["by_model"].values()),
        "all": result["all"]["mape"],
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def worse(now: Mapping[str, float], stored: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Figures that are missing or more than MOST_WORSE above the stored ones, with both."""
    pairs = {name: (now.get(name, float("inf")), value) for name, value in stored.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] > pair[1] + MOST_WORSE}


def stored_figures() -> dict[str, float]:
    """The stored figures."""
    return {name: float(value) for name, value in json.loads(PATH.read_text("utf-8")).items()}


def main() -> None:
    """Store today's figures."""
    write_atomically(PATH, (json.dumps(figures(run()), indent=2) + "\n").encode(), argument="gate")
    print(PATH.read_text("utf-8"))


if __name__ == "__main__":
    main()
