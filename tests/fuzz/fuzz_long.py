"""A campaign of random command lines, files and calls, which resumes and writes a page.

    python tests/fuzz/fuzz_long.py [--seed N] [--minutes M] [--commands N] [--files N] [--calls N] [--page PAGE.md]
    python tests/fuzz/fuzz_long.py --seed N --case KIND:NUMBER

Each process runs cases with warm imports. The journal keeps every case. The same command resumes a seed; it first runs
the broken cases of the journal again. A case is broken if it breaks the law of fuzz_law.py, is silent for more than
10 s of CPU time, or needs more than 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_calls import random_call
from fuzz_commands import random_command
from fuzz_files import random_file
from fuzz_law import Silence

from kvrsim.text import in_markdown, markdown_table
from validate.report import write_page

FUZZERS = {"commands": random_command, "files": random_file, "calls": random_call}
MOST_SILENT_S = 11.0  # progress begins after 10 s; its first line may come a second later
MOST_BYTES = 2**30
CASES_OF_A_PROCESS = 300  # number of cases per process; a new process starts with empty caches
Case = tuple[int, str, int]  # seed, fuzzer, number


def run_case(kind: str, seed: int, number: int) -> int:
    """Run one case of a fuzzer, reproducible by its numbers; raises AssertionError if it breaks the law."""
    return FUZZERS[kind](random.Random(f"{seed}:{kind}:{number}"))


def measured(case: Case) -> dict[str, Any]:
    """Run a case and return its record for the journal."""
    seed, kind, number = case
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of memory
    Silence.longest_s, begin_s, error = 0.0, time.process_time(), None
    try:
        code = int(run_case(kind, seed, number))
    except AssertionError as broken:
        code, error = -1, str(broken)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    record = {"seed": seed, "kind": kind, "number": number, "code": code, "cpu_s": time.process_time() - begin_s}
    record |= {"silent_s": Silence.longest_s, "bytes": 1024 * int(peak.split()[1])}
    if error is None and record["silent_s"] > MOST_SILENT_S:
        error = f"silent for {record['silent_s']:.0f} s of CPU time"
    if error is None and record["bytes"] > MOST_BYTES:
        error = f"{record['bytes'] / 2**20:.0f} MiB"
    return record | ({} if error is None else {"error": error})


def _start() -> None:
    os.chdir(tempfile.mkdtemp(prefix="kvrsim-fuzz-"))
    sys.stdin.close()


def read(journal: Path) -> dict[Case, dict[str, Any]]:
    """Last record of each case in the journal; `repaired` holds the error that a case had before."""
    records: dict[Case, dict[str, Any]] = {}
    for line in journal.read_text("utf-8").splitlines() if journal.exists() else ():
        one = json.loads(line)
        case = one["seed"], one["kind"], one["number"]
        before = records.get(case, {})
        if "error" not in one and (old := before.get("error", before.get("repaired"))):
            one["repaired"] = old
        records[case] = one
    return records


def pending(seed: int, targets: dict[str, int], records: dict[Case, dict[str, Any]]) -> Iterator[Case]:
    """Broken cases first, then cases of the seed that have not run, at the same pace for all fuzzers."""
    yield from (case for case, one in records.items() if "error" in one)
    places = sorted((number / target, kind, number) for kind, target in targets.items() for number in range(target))
    yield from (case for _, kind, number in places if (case := (seed, kind, number)) not in records)


HEAD = """# Random command lines, files and calls

A case breaks the law if it ends in a traceback or in an error that names no parameter, prints invalid JSON, is silent
for more than 10 s of CPU time, or needs more than 1 GiB of memory. The table has the largest CPU time, silence and
memory of all cases; one process runs several cases. The code of a call is 1 if it was answered. The commit is that of
the last cases.
"""


def page(records: dict[Case, dict[str, Any]]) -> str:
    """The campaign as Markdown."""
    rows = []
    for kind in FUZZERS:
        if of := [one for one in records.values() if one["kind"] == kind]:
            codes = Counter("broken" if "error" in one else str(one["code"]) for one in of)
            longest = (f"{max(one[key] for one in of):.1f} s" for key in ("cpu_s", "silent_s"))
            size = f"{max(one['bytes'] for one in of) / 2**20:.0f} MiB"
            ends = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
            rows.append((kind, f"{len(of):,}", ends, *longest, size))
    heads = ("fuzzer", "cases", "exit codes", "longest CPU", "longest silence", "memory")
    seeds = Counter(one["seed"] for one in records.values())
    runs = ", ".join(f"{seed} ({count:,} cases)" for seed, count in seeds.items())
    lines = [*HEAD.splitlines(), "", f"Seeds: {runs}.", "", markdown_table(heads, rows), ""]
    for title, key in (("Cases that break the law", "error"), ("Cases that broke the law before a repair", "repaired")):
        found = [(case, one[key]) for case, one in records.items() if key in one]
        lines += [f"## {title}: {len(found)}", ""]
        lines += [
            f"- `--seed {seed} --case {kind}:{number}`: {in_markdown(text[:300])}"
            for (seed, kind, number), text in found
        ]
        lines += [""] if found else []
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--minutes", type=float, default=10.0)
    for kind, target in {"commands": 20_000, "files": 10_000, "calls": 10_000}.items():
        parser.add_argument(f"--{kind}", type=int, default=target, help=f"default: {target}")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--journal", type=Path, default=Path(".fuzz.jsonl"))
    parser.add_argument("--page", type=Path, help="write the page of all cases of the journal")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="run only this one")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    if given.case is not None:
        kind, _, number = given.case.partition(":")
        _start()
        print(measured((given.seed, kind, int(number))))
        return 0
    records, until_s = read(given.journal), time.monotonic() + 60 * given.minutes
    cases = pending(given.seed, {kind: getattr(given, kind) for kind in FUZZERS}, dict(records))
    context = multiprocessing.get_context("fork")
    with (
        context.Pool(given.processes, _start, maxtasksperchild=CASES_OF_A_PROCESS) as pool,
        given.journal.open("a") as file,
    ):
        room = threading.Semaphore(4 * given.processes)
        for one in pool.imap_unordered(measured, _until(until_s, cases, room)):
            room.release()
            print(json.dumps(one), file=file, flush=True)
            if "error" in one:
                print(f"\n--seed {one['seed']} --case {one['kind']}:{one['number']}\n{one['error']}", flush=True)
    records = read(given.journal)
    text = page(records)
    print(text)
    if given.page is not None:
        write_page(given.page, text.splitlines())
    return int(any("error" in one for one in records.values()))


def _until(end_s: float, cases: Iterator[Case], room: threading.Semaphore) -> Iterator[Case]:
    """The cases that start before `end_s`, each as soon as there is room for it."""
    for case in cases:
        room.acquire()
        if time.monotonic() > end_s:
            return
        yield case


if __name__ == "__main__":
    sys.exit(main())
