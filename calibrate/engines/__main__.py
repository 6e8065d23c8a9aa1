"""Fit the records of vLLM, SGLang, TensorRT-LLM and `serving`, and the rule for their intervals.

    python -m calibrate.engines SETTINGS.csv --configs FOLDER --prefills FILE.csv,FILE.csv

Writes kvrsim/data/engines and kvrsim/data/error_rule.json. The prefills are of other sources: the rule comes from them,
and how the newest builds launch kernels. Run `python -m validate.silicon` afterwards, which scores the records.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from calibrate.engines.prefills import parser_of
from calibrate.engines.records import FOLDER, records, write_records
from calibrate.engines.settings import read_settings
from calibrate.engines.shares import fit_shares, read_other_rows, training_settings
from kvrsim.error_rule import FILE
from kvrsim.errors import KvrsimError


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the records; return the exit code."""
    parser = parser_of("calibrate.engines", (__doc__ or "").split("\n", 1)[0])
    options = parser.parse_args(arguments)
    try:
        settings = read_settings(options.settings, options.configs)
        with tempfile.TemporaryDirectory() as folder:
            other = read_other_rows(options.prefills, options.configs, Path(folder))
            rule_fit = fit_shares(settings, other)
            training = training_settings(settings, other)
        rule_fit.rule.write()
        engines = records(settings, training, rule_fit.rule)
        write_records(engines)
    except KvrsimError as error:
        print(f"calibrate.engines: error: {error}", file=sys.stderr)
        return error.exit_code
    score = rule_fit.rule.scores["all"]
    print(
        f"{FILE}: {score.num_rows} prefills, {score.coverage:.0%} inside, interval score {score.interval_score:.2f}",
        file=sys.stderr,
    )
    print(f"{FOLDER}: {', '.join(engine.name for engine in engines)}, from {len(settings)} settings", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
