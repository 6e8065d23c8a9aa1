"""The pages of results: the command that writes each, the predictions that it rests on, and whether it is stale.

    python -m validate.results              write all pages that need only this checkout (`make results`)
    python -m validate.results NAME...      write these pages, such as `speed`
    python -m validate.results TRACES=FOLDER    write also the pages whose commands need this file or folder
    python -m validate.results --check      list stale pages; the exit code is 1 if there are any (`make check`)
    python -m validate.results --freeze NAME...     mark these pages: later versions of kvrsim predict other values

validate/results.json lists the pages and the predictions. A page ends with a comment that holds its command, commit,
date, machine, and the values of some predictions at that time. It is stale if its command has changed since, or if one
of these values now differs by more than _TOLERANCE. Pages that contain only times of a machine depend on no prediction.
Frozen pages are not checked; only pages that need more than this checkout can be frozen. After an interruption the same
command resumes: without NAME, pages that this machine wrote at this commit are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import kvrsim
from kvrsim.io.schema import JsonObject, read

ROOT = Path(__file__).parents[1]
# folders of pages
DOCS = "docs/results"
BENCHMARKS = "benchmarks/results"
_DATA = ROOT / "kvrsim" / "data"
_TOLERANCE = 1e-3  # relative tolerance; a smaller change of a prediction leaves a page valid
_MARK = "<!-- results "
_INPUT = re.compile(r"\b[A-Z]{2,}\b")  # an input in the command of a page, such as TRACES
_END_S = 10.0  # seconds in which an interrupted command must end

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
    needs: str | None = None  # what it needs besides this checkout; None: `make results` writes it
    program: str | None = None  # program without which the page is not written, such as chromium
    seconds: float = 0.0  # seconds that the command takes on two cores, for the estimate

    @property
    def name(self) -> str:
        """Name of the page in a command."""
        return Path(self.path).stem

    @property
    def file(self) -> Path:
        """Path of the page."""
        return ROOT / self.path

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the files and folders that the command needs."""
        return frozenset(_INPUT.findall(self.command))

    def lacks(self, inputs: Mapping[str, str]) -> str | None:
        """What the page still needs, given these inputs; None if it can be written."""
        if self.program is not None and shutil.which(self.program) is None:
            return self.program
        return None if self.inputs and self.inputs <= inputs.keys() else self.needs

    def is_written(self) -> bool:
        """Whether this command wrote the page on this machine at this commit, in a checkout without changes."""
        origin = origin_of(self.file.read_text("utf-8")) if self.file.exists() else None
        if origin is None or origin.commit.endswith("+"):
            return False
        return (origin.command, origin.commit, origin.machine) == (self.command, _commit(), machine())

    def write(self, inputs: Mapping[str, str]) -> int:
        """Run the command with these inputs; return its exit code. An interruption ends it, and prints nothing."""
        command = _INPUT.sub(lambda match: shlex.quote(inputs.get(match[0], match[0])), self.command)
        words = [sys.executable, *shlex.split(command)[1:]]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                os.killpg(process.pid, signal.SIGINT)  # it ends its own processes
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
            if code:
                errors.seek(0)
                sys.stderr.write(errors.read().decode(errors="replace"))
        return code

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
            before = origin.predictions.get(name)
            now = prediction(name)
            if not _is_equal(before, now):
                return f"prediction `{name}` was {before} and is {now}"
        return None


_ABOUT = JsonObject.read(Path(__file__).with_suffix(".json"), "results")
PAGES = tuple(read(ResultsPage, page) for page in _ABOUT.children("pages"))
PREDICTIONS: Mapping[str, Any] = _ABOUT.child("predictions").fields
FROZEN = frozenset(_ABOUT.sequence("frozen"))


def _digest(pattern: str) -> str:
    """Digest of the data files of kvrsim that match a pattern. Raises FileNotFoundError if none does."""
    digest = hashlib.sha256()
    paths = sorted(_DATA.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no file of {_DATA} matches {pattern}")
    for path in paths:
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
    what = f"pages to write: {', '.join(by_name)}; or inputs of their commands, such as TRACES=FOLDER"
    parser.add_argument("names", nargs="*", metavar="NAME", help=what)
    parser.add_argument("--check", action="store_true", help="write nothing, list stale pages")
    parser.add_argument("--freeze", action="store_true", help="run nothing, mark these pages as frozen")
    options = parser.parse_args(arguments)
    inputs = dict(name.split("=", 1) for name in options.names if "=" in name)
    names = [name for name in options.names if "=" not in name]
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"NAME: got {unknown[0]}, accepted: {', '.join(by_name)}")
    known = frozenset[str]().union(*(page.inputs for page in PAGES))
    if unknown := [name for name in inputs if name not in known]:
        parser.error(f"INPUT=PATH: got {unknown[0]}, accepted: {', '.join(sorted(known))}")
    pages = [by_name[name] for name in names]
    if options.check:
        lines = list(stale())
        print("\n".join(lines) or f"{len(PAGES)} pages of results are up to date; written at {_commits()}")
        return 1 if lines else 0
    if options.freeze:
        if short := [page.name for page in pages if page.needs is None]:
            parser.error(f"--freeze: got {short[0]}, accepted: pages that need more than a checkout; write it instead")
        for page in pages:
            page.freeze()
        return 0
    if not names:
        pages = [page for page in PAGES if page.lacks(inputs) is None]
        left = [f"{page.name} ({page.lacks(inputs)})" for page in PAGES if page not in pages]
        _report("not written: " + "; ".join(left))
        kept = [page for page in pages if page.is_written()]
        if kept:
            _report(f"kept, written at commit {_commit()}: {', '.join(page.name for page in kept)}")
        pages = [page for page in pages if page not in kept]
    return _write(pages, inputs)


def _write(pages: Sequence[ResultsPage], inputs: Mapping[str, str]) -> int:
    """Write pages in order, with an estimate of the time that is left; return the exit code of `main`."""
    if _commit().endswith("+"):
        _report("the checkout has changes that are not committed: an interrupted run will begin anew")
    failed: list[str] = []
    done_s = 0.0
    expected_s = 0.0
    for index, page in enumerate(pages):
        pace = done_s / expected_s if expected_s else 1.0
        left_s = pace * sum(one.seconds for one in pages[index:])
        _report(
            f"page {index + 1} of {len(pages)}, {page.name}: {pace * page.seconds:.0f} s; all: {left_s / 60:.0f} min"
        )
        begin_s = time.monotonic()
        try:
            code = page.write(inputs)
        except KeyboardInterrupt:
            _report(f"interrupted: {index - len(failed)} pages are written; the same command resumes with {page.name}")
            return 130
        taken_s = time.monotonic() - begin_s
        if code:
            failed.append(page.name)
        _report(f"{page.path}: {f'ended with {code} after ' * (code != 0)}{taken_s:.0f} s")
        done_s = done_s + taken_s
        expected_s = expected_s + page.seconds
    if failed:
        _report(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _commits() -> str:
    """The commits of the pages that need only this checkout, with the number of pages."""
    texts = [page.file.read_text("utf-8") for page in PAGES if page.needs is None and page.file.exists()]
    count = Counter(origin.commit for text in texts if (origin := origin_of(text)) is not None)
    return ", ".join(f"{commit} ({number})" for commit, number in count.most_common())


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):  # they interrupt, as Ctrl-C does
        signal.signal(ending, signal.default_int_handler)
    sys.exit(main())
