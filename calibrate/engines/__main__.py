"""Fit the records of vLLM, SGLang, TensorRT-LLM and `serving`, and write them to kvrsim/data/engines.

    python -m calibrate.engines SETTINGS.csv --configs FOLDER --prefills FILE.csv

The prefills are of other sources; only the widths of intervals for short prompts come from them. Run
`python -m validate.silicon` afterwards, which scores the records.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from calibrate.engines.prefills import read_prefills
from calibrate.engines.records import FOLDER, LEAST_SHORT, records, short_widths, write_records
from calibrate.engines.settings import read_settings
from kvrsim.errors import KvrsimError


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the records; return the exit code."""
    parser = ArgumentParser(prog="python -m calibrate.engines", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("settings", type=Path, metavar="SETTINGS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER", help="the models' configurations")
    parser.add_argument("--prefills", type=Path, required=True, metavar="FILE.csv", help="prefills of other sources")
    options = parser.parse_args(arguments)
    try:
        settings = read_settings(options.settings, options.configs)
        engines = records(settings)
        write_records(engines, LEAST_SHORT)  # the prefills are predicted with the new records
        write_records(engines, short_widths(read_prefills(options.prefills)))
    except KvrsimError as error:
        print(f"calibrate.engines: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{FOLDER}: {', '.join(engine.name for engine in engines)}, from {len(settings)} settings", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
