"""Which configurations of published models kvrsim plans: `python -m validate.models.support`.

Reads every config.json of the installed aiconfigurator-core (pip install '.[import]'), plans each on H200 GPUs and
rewrites docs/results/support.md. With --count it first counts the models' parameters with transformers again and
rewrites validate/data/model_counts.json, which the page compares with.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from calibrate.importers.aiconfigurator import find_package, package_name
from kvrsim.io.files import write_atomically
from validate.models.page import page
from validate.models.rows import COUNTS, configurations, count, read_counts, row

PAGE = Path(__file__).parents[2] / "docs" / "results" / "support.md"


def main() -> None:
    """Rewrite the page, and the counts on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count parameters with transformers first")
    asked = parser.parse_args()
    package = find_package("configurations", "models")
    paths = configurations(package / "model_configs")
    if asked.count:
        write_atomically(COUNTS, (json.dumps(count(paths), indent=1) + "\n").encode(), argument="counts")
    begin = time.perf_counter()
    counts = read_counts()
    found = [row(name, path, counts) for name, path in paths.items()]
    write_atomically(PAGE, page(found, package_name(package)).encode(), argument="page")
    planned = sum(one.plan is not None for one in found)
    print(f"docs/results/support.md: {planned} of {len(found)} planned in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
