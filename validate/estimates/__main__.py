"""`python -m validate.estimates`: rewrite docs/results/estimates.md.

With --package the installed package aiconfigurator-core is asked first, and its estimates are stored.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically
from validate.estimates.cases import cases
from validate.estimates.compared import Compared, compare
from validate.estimates.matrices import counted
from validate.estimates.page import page
from validate.estimates.prediction import predict
from validate.estimates.stored import Estimates

PAGE = Path(__file__).parents[2] / "docs" / "results" / "estimates.md"


def all_compared(estimates: Estimates) -> tuple[Compared, ...]:
    """Every case, predicted anew."""
    return tuple(compare(case, predict(case), estimates) for case in cases())


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page."""
    parser = ArgumentParser(prog="python -m validate.estimates", description="Rewrite docs/results/estimates.md.")
    parser.add_argument("--package", action="store_true", help="ask the installed aiconfigurator-core, minutes")
    options = parser.parse_args(arguments)
    try:
        if options.package:
            Estimates.from_package().write()
        estimates = Estimates.read()
        write_atomically(
            PAGE, page(all_compared(estimates), counted(estimates.weights), estimates.version).encode(), argument="page"
        )
    except KvrsimError as error:
        print(f"validate.estimates: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
