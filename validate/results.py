"""The pages of results: the command that writes each, the predictions that it rests on, and whether it is stale.

    python -m validate.results              write each page that needs only this checkout (`make results`)
    python -m validate.results NAME...      write these pages, such as `speed`
    python -m validate.results --check      list stale pages; the exit code is 1 if there are any (`make check`)
    python -m validate.results --freeze NAME...     mark these pages: later versions of kvrsim predict other values

validate/results.json lists the pages and the predictions. A page ends with a comment that holds its command, commit,
date, machine, and the values of some predictions at that time. It is stale if its command has changed since, or if one
of these values now differs by more than _TOLERANCE. Pages that contain only times of a machine depend on no prediction.
Frozen pages are not checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import kvrsim
from kvrsim.io.schema import JsonObject, read

ROOT = Path(__file__).parents[1]
DOCS, BENCHMARKS = "docs/results", "benchmarks/results"  # folders of pages
_DATA = ROOT / "kvrsim" / "data"
_TOLERANCE = 1e-3  # relative tolerance; a smaller change of a prediction leaves a page valid
_MARK = "<!-- results "

Value = float | str


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of the figures on a page."""

    command: str
    commit: str  # commit of the checkout, followed by "+" if the checkout had other changes
    date: str
    machine: str
    predictions: Mapping[str, Value]
    is_frozen: bool = False  # whether the page is kept although predictions have changed

    def describe(self) -> str:
        """Format the line below the title of a page."""
        text = f"`{self.command}` on {self.date} at commit {self.commit}: {self.machine}."
        return text + " Frozen: some predictions have changed since." * self.is_frozen

    def enclose(self, lines: Iterable[str]) -> list[str]:
        """Add this origin to the lines of a page: below the title, and as the last line."""
        title, *rest = "\n".join(lines).rstrip().split("\n")
        return [title, "", self.describe(), *rest, "", f"{_MARK}{json.dumps(asdict(self))} -->"]


@dataclass(frozen=True, kw_only=True)
class ResultsPage:
    """A page, the command that writes it, and the predictions that its figures depend on."""

    path: str  # path from the root of the repository
    command: str
    rests_on: tuple[str, ...] = ()  # keys of PREDICTIONS
    needs: str | None = None  # what it needs besides this checkout and some minutes; None: `make results` writes it

    @property
    def name(self) -> str:
        """Name of the page in a command."""
        return Path(self.path).stem

    @property
    def file(self) -> Path:
        """Path of the page."""
        return ROOT / self.path

    def write(self) -> int:
        """Run the command; return its exit code."""
        words = shlex.split(self.command)
        words[0] = sys.executable
        return subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode

    def freeze(self) -> None:
        """State on the page that predictions have changed since it was written."""
        text = self.file.read_text("utf-8")
        origin = origin_of(text)
        assert origin is not None, f"{self.path} does not say where it comes from"
        frozen = replace(origin, is_frozen=True)
        self.file.write_text("\n".join(frozen.enclose(body(text).splitlines())) + "\n", "utf-8")

    def staleness(self) -> str | None:
        """The reason why the page must be written again; None: it is up to date."""
        if not self.file.exists():
            return None if self.needs else "the page is missing"
        if (origin := origin_of(self.file.read_text("utf-8"))) is None:
            return "it does not say where it comes from"
        if origin.is_frozen:
            return None
        if self.needs is None and origin.command != self.command:
            return f"`{origin.command}` wrote it"
        for name in self.rests_on:
            before, now = origin.predictions.get(name), prediction(name)
            if not _is_equal(before, now):
                return f"prediction `{name}` was {before} and is {now}"
        return None


_ABOUT = JsonObject.read(Path(__file__).with_suffix(".json"), "results")
PAGES = tuple(read(ResultsPage, page) for page in _ABOUT.children("pages"))
PREDICTIONS: Mapping[str, Any] = _ABOUT.child("predictions").fields
FROZEN = frozenset(_ABOUT.sequence("frozen"))


def _digest(pattern: str) -> str:
    """Digest of the data files of kvrsim that match a pattern."""
    digest = hashlib.sha256()
    for path in sorted(_DATA.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def prediction(name: str) -> Value:
    """The value of one of PREDICTIONS: a digest of files, the p99 of a fleet, or the TTFT of a simulation."""
    question = PREDICTIONS[name]
    if isinstance(question, str):
        return _digest(question)
    if "requests" in question:
        answer = kvrsim.capacity(**question).answer
        return answer.p99_ttft_s if answer else math.inf
    return float(f"{kvrsim.simulate(**question).ttft_s:.9g}")


def _is_equal(before: Value | None, now: Value) -> bool:
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=_TOLERANCE)
    return before == now


def with_origin(path: Path, lines: Iterable[str], command: str | None = None) -> list[str]:
    """Add the origin to the lines of a page; return the lines unchanged if it is not one of PAGES.

    command: the command that wrote the page, if it is not the one in PAGES.
    """
    page = next((one for one in PAGES if one.file == path.resolve()), None)
    if page is None:
        return list(lines)
    origin = Origin(
        command=command or page.command,
        commit=_commit(),
        date=time.strftime("%Y-%m-%d"),
        machine=machine(),
        predictions={name: prediction(name) for name in page.rests_on},
    )
    return origin.enclose(lines)


def origin_of(text: str) -> Origin | None:
    """The origin in the last line of a page; None if there is none."""
    last = text.rstrip().rsplit("\n", 1)[-1]
    if not last.startswith(_MARK):
        return None
    return Origin(**json.loads(last.removeprefix(_MARK).removesuffix(" -->")))


def body(text: str) -> str:
    """A page without its origin, as its command wrote it."""
    title, _, _, *rest = text.rstrip().split("\n")
    return "\n".join([title, *rest[:-1]]).rstrip() + "\n"


def machine() -> str:
    """Describe this machine by processor, cores, and versions of Python and numpy."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    cpu = next(names, platform.processor())
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"


def spread(values: Sequence[float]) -> str:
    """Format the median, the smallest and the largest value."""
    return f"{np.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _commit() -> str:
    """The commit of this checkout, followed by "+" if files other than pages have changed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    pages = [f":!{folder}" for folder in (DOCS, BENCHMARKS)]
    return git("rev-parse", "--short=8", "HEAD") + "+" * bool(git("status", "--porcelain", "--", ".", *pages))


def stale() -> Iterator[str]:
    """Yield one line for each page that must be written again, or that is missing in PAGES."""
    pages = {page.path for page in PAGES} | FROZEN
    for page in PAGES:
        if reason := page.staleness():
            yield f"{page.path}: {reason}; `{page.command}` writes it"
    for folder in (DOCS, BENCHMARKS):
        for file in sorted((ROOT / folder).glob("*.md")):
            if (path := file.relative_to(ROOT).as_posix()) not in pages:
                yield f"{path}: add the page and its command to validate/results.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages, or check them."""
    parser = argparse.ArgumentParser(prog="python -m validate.results", description=(__doc__ or "").split("\n", 1)[0])
    by_name = {page.name: page for page in PAGES}
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages to write: " + ", ".join(by_name))
    parser.add_argument("--check", action="store_true", help="write nothing, list stale pages")
    parser.add_argument("--freeze", action="store_true", help="run nothing, mark these pages as frozen")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in by_name]:
        parser.error(f"NAME: got {unknown[0]}, accepted: {', '.join(by_name)}")
    if options.check:
        lines = list(stale())
        print("\n".join(lines) or f"{len(PAGES)} pages of results are up to date")
        return 1 if lines else 0
    if options.freeze:
        for name in options.names:
            by_name[name].freeze()
        return 0
    pages = [by_name[name] for name in options.names] or [page for page in PAGES if not page.needs]
    failed = 0
    for page in pages:
        begin_s = time.monotonic()
        code = page.write()
        failed += code != 0
        ended = f"ended with {code} after " * (code != 0)
        print(f"{page.path}: {ended}{time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
    others = [f"{page.name} ({page.needs})" for page in PAGES if page not in pages]
    if others and not options.names:
        print(f"not written: {', '.join(others)}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
