"""The accuracy page, with a part on the paper and a part on serving engines: `python -m validate.accuracy`.

Rewrites docs/results/accuracy.md. A part is a list of Markdown lines that begins with a heading of the second level.
"""

from __future__ import annotations

from collections.abc import Sequence

from validate import serving
from validate.published import compare as paper
from validate.published.compare import run
from validate.report import RESULTS, fill, write_page

PAGE = RESULTS / "accuracy.md"


def page(parts: Sequence[Sequence[str]]) -> list[str]:
    """Markdown lines of the page."""
    return fill("accuracy", parts=[line for part in parts for line in part])


def main() -> None:
    """Rewrite the page."""
    result = run()
    write_page(PAGE, page([paper.part(result), serving.part(serving.compare())]))
    used = result["calibration"]
    shares = f"mean absolute error {used['mape']:.1%}, median {used['median_ape']:.1%}"
    print(f"docs/results/accuracy.md: {used['n']} rows used, {shares}")


if __name__ == "__main__":
    main()
