"""The accuracy page, of parts on the paper, on serving engines and on operations: `python -m validate.accuracy`.

Rewrites docs/results/accuracy.md and its plot. A part is Markdown lines under a heading of the second
level.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrsim.kernels.profile import OPERATION_KINDS, builtin_profiles, load_profile
from validate import serving
from validate.published import compare as paper
from validate.published.compare import run
from validate.report import RESULTS, fill, table, write_page

PAGE = RESULTS / "accuracy.md"


def page(parts: Sequence[Sequence[str]]) -> list[str]:
    """Lines of the page, Markdown."""
    return fill("accuracy", parts=[line for part in parts for line in part])


def main() -> None:
    """Rewrite the pages and their plots."""
    result = run()
    write_page(PAGE, page([paper.part(result, PAGE.with_suffix(".png")), serving.part(serving.compare()), part()]))
    used = result["calibration"]
    shares = f"mean absolute error {used['mape']:.1%}, median {used['median_ape']:.1%}"
    print(f"docs/results/accuracy.md: {used['n']} rows used, {shares}")


_TITLES = {
    "gemm": "matrix products",
    "attention": "attention",
    "latent": "latent attention",
    "sparse": "sparse attention",
    "experts": "experts",
    "recurrence": "recurrences",
    "elementwise": "element-wise",
    "send_recv": "messages",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
}


def part() -> list[str]:
    """The page's part on operations, Markdown lines."""
    profiles = [profile for profile in map(load_profile, builtin_profiles()) if profile.operations]
    measured = {kind for profile in profiles for kind, fit in profile.operations.items() if fit.num_rows}
    kinds = [kind for kind in OPERATION_KINDS if kind in measured]
    rows = []
    for profile in profiles:
        fits = [profile.operations.get(kind) for kind in kinds]
        cells = [f"{fit.cross_validated_mape:.1%} ({fit.num_rows})" if fit and fit.num_rows else "-" for fit in fits]
        rows.append((profile.name, *cells))
    heads = ("profile", *(_TITLES.get(kind, kind) for kind in kinds))
    return fill("accuracy_operations", operations=table(heads, rows))


if __name__ == "__main__":
    main()
