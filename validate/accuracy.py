"""The accuracy page, with a part on the paper and a part on serving engines: `python -m validate.accuracy [--gate]`.

The command rewrites docs/results/accuracy.md. A part is a list of Markdown lines that begins with a heading of the
second level. --gate: also store today's errors in validate/data/gate.json. A test fails if a later error is more than
MOST_WORSE above the stored error, so store errors only with a change that explains them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvrsim.io.schema import write_json
from validate import serving
from validate.published import compare as paper
from validate.report import RESULTS, fill, write_page

if TYPE_CHECKING:
    import pandas

PAGE = RESULTS / "accuracy.md"
GATE = paper.DATA / "gate.json"
MOST_WORSE = 0.01  # one percentage point


def page(parts: Sequence[Sequence[str]]) -> list[str]:
    """Markdown lines of the page."""
    return fill("accuracy", parts=[line for part in parts for line in part])


def figures(result: Mapping[str, Any], prefills: pandas.DataFrame) -> dict[str, float]:
    """The errors that must not get worse, as fractions: of the paper's rows and of serving engines."""
    errors = {
        "paper, models left out": paper.residual_of_paper().cross_validated_mape,
        "paper, rows in the fit": result["calibration"]["mape"],
        "paper, worst model": max(model["mape"] for model in result["by_model"].values()),
        "paper, all rows": result["all"]["mape"],
    }
    for name, group in serving.figures(prefills).items():
        errors |= {f"serving, {name}, {error}": group[error] for error in ("median_ape", "mape")}
    return {name: round(float(value), 4) for name, value in errors.items()}


def main(*options: str) -> None:
    """Rewrite the page, and the gate with --gate."""
    result = paper.run()
    prefills = serving.compare()
    write_page(PAGE, page([paper.part(result), serving.part(prefills)]))
    if "--gate" in options:
        write_json(GATE, figures(result, prefills), argument="gate")
    calibration = result["calibration"]
    shares = f"mean absolute error {calibration['mape']:.1%}, median {calibration['median_ape']:.1%}"
    print(f"docs/results/accuracy.md: {calibration['n']} rows used, {shares}")


if __name__ == "__main__":
    main(*sys.argv[1:])
