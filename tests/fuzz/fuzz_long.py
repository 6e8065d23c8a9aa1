"""A long run of the fuzzers: `python tests/fuzz/fuzz_long.py [--seed N] [--minutes M] [--case KIND:NUMBER]`.

Prints its seed, every case that breaks the law with the words that repeat it, and a count at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter

from fuzz_calls import random_call
from fuzz_commands import random_command
from fuzz_files import random_file

FUZZERS = {"calls": random_call, "commands": random_command, "files": random_file}
_SLOW_S = 10.0


def run_case(kind: str, seed: int, number: int) -> int:
    """One case of a fuzzer, the same for the same numbers; AssertionError where it breaks the law."""
    return FUZZERS[kind](random.Random(f"{seed}:{kind}:{number}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--case", metavar="KIND:NUMBER", help="this one alone")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    os.chdir(tempfile.mkdtemp(prefix="kvrsim-fuzz-"))
    if asked.case is not None:
        kind, _, number = asked.case.partition(":")
        print(run_case(kind, asked.seed, int(number)))
        return 0
    until_s, broken, answers = time.monotonic() + 60 * asked.minutes, 0, Counter[str]()
    number = 0
    while time.monotonic() < until_s:
        for kind in FUZZERS:
            began_s = time.monotonic()
            try:
                answers[f"{kind} {run_case(kind, asked.seed, number)}"] += 1
            except AssertionError as error:
                broken += 1
                print(f"\n--seed {asked.seed} --case {kind}:{number}\n{error}", flush=True)
            if (took_s := time.monotonic() - began_s) > _SLOW_S:
                print(f"slow: {took_s:.0f} s, --seed {asked.seed} --case {kind}:{number}", flush=True)
        number += 1
    print(f"{number} cases of each kind, {broken} broke the law; answers: {dict(sorted(answers.items()))}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
