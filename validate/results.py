"""The pages of results: the command that writes each, the predictions that it rests on, and whether it is stale.

    python -m validate.results              write each page that needs only this checkout (`make results`)
    python -m validate.results NAME...      write these pages, such as `speed`
    python -m validate.results --check      list stale pages; the exit code is 1 if there are any (`make check`)
    python -m validate.results --freeze NAME...     mark these pages: later versions of kvrsim predict other values

A page ends with a comment that holds its command, commit, date, machine, and the values of some predictions
(`PREDICTIONS`) at that time. It is stale if its command has changed since, or if one of these values now differs by
more than _TOLERANCE. Pages that contain only times of a machine depend on no prediction. Frozen pages are not checked.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import kvrsim

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
    is_frozen: bool = False  # whether predictions have changed since, and the page was kept

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
    needs: str = ""  # requirements besides this checkout and some minutes; "": `make results` writes the page

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
        if self.needs == "" and origin.command != self.command:
            return f"`{origin.command}` wrote it"
        for name in self.rests_on:
            before, now = origin.predictions.get(name), prediction(name)
            if not _is_equal(before, now):
                return f"prediction `{name}` was {before} and is {now}"
        return None


def _seconds(strategy: str, model: str, cluster: str, **options: Any) -> float:
    return float(f"{kvrsim.simulate(strategy=strategy, model=model, cluster=cluster, **options).ttft_s:.9g}")


def _digest(pattern: str) -> str:
    """Digest of the data files of kvrsim that match a pattern."""
    digest = hashlib.sha256()
    for path in sorted(_DATA.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _fleet_s() -> float:
    requests = "synthetic:poisson,rate=60,requests=300,context=1k"
    options = {"model": "llama-3.1-8b", "cluster": "8xh100", "group_sizes": "1", "replications": 1}
    answer = kvrsim.capacity(requests=requests, slo_ttft="1s", **options).answer
    return answer.p99_ttft_s if answer else math.inf


_LLAMA_7B = {"model": "llama-7b", "cluster": "a100-nvlink"}
_LLAMA_8B = {"model": "llama-3.1-8b", "cluster": "8xh100"}
PREDICTIONS: Mapping[str, Callable[[], Value]] = {  # each takes some hundredths of a second
    "eager": partial(_seconds, "tsp", **_LLAMA_7B, ctx="8k", gpus=4),
    "eager-searched": partial(_seconds, "kvr-s", **_LLAMA_7B, ctx="16k", gpus=4),
    "falcon": partial(_seconds, "single", "falcon-7b", "a100-nvlink", ctx="4k", gpus=1),
    "bus": partial(_seconds, "kvr-s", **_LLAMA_7B, ctx="4k", gpus=2, topology="bus", link_bandwidth="10GB/s"),
    "noise": partial(_seconds, "kvr-e", **_LLAMA_7B, ctx="4k", gpus=2, noise="paper", seed=1),
    "chain": partial(_seconds, "kvr-s", **_LLAMA_8B, ctx="32k", gpus=8),
    "zigzag": partial(_seconds, "zigzag", **_LLAMA_8B, ctx="32k", gpus=8),
    "pipeline": partial(_seconds, "pp-s", **_LLAMA_8B, ctx="8k", gpus=2),
    "prefix": partial(
        _seconds, "kvr-s", **_LLAMA_8B, ctx="64k", cached_prefix="32k", prefix_placement="sharded", gpus=4
    ),
    "vllm": partial(_seconds, "tp", "llama-3.1-70b", "8xh200", ctx="8k", gpus=8, engine="vllm"),
    "sglang": partial(_seconds, "tp", "deepseek-v3", "8xh200", ctx="8k", gpus=8, engine="sglang"),
    "trtllm": partial(_seconds, "tp", "llama-3.1-70b", "8xb200", ctx="8k", gpus=8, engine="trtllm"),
    "vllm-2023": partial(_seconds, "tp", "llama-2-7b", "a100-nvlink", ctx="4k", gpus=2, engine="vllm-2023"),
    "states": partial(_seconds, "kvr-e", "qwen3.5-35b-a3b", "8xh200", ctx="32k", gpus=8),
    "fleet": _fleet_s,
    "profiles": partial(_digest, "profiles/*.json"),
    "types": partial(_digest, "types/*.json"),
    "flags": partial(_digest, "deploy.json"),
}
PAGES = (
    ResultsPage(
        path=f"{DOCS}/accuracy.md",
        command="python -m validate.accuracy",
        rests_on=("eager", "falcon", "bus", "vllm-2023"),
    ),
    ResultsPage(path=f"{DOCS}/figures.md", command="python -m validate.figures", rests_on=("eager-searched", "noise")),
    ResultsPage(path=f"{DOCS}/profiles.md", command="python -m validate.profiles", rests_on=("profiles",)),
    ResultsPage(path=f"{DOCS}/support.md", command="python -m validate.models", rests_on=("types",)),
    ResultsPage(path=f"{BENCHMARKS}/speed.md", command="python benchmarks/speed.py"),
    ResultsPage(path=f"{BENCHMARKS}/workers.md", command="python benchmarks/workers.py"),
    ResultsPage(path=f"{BENCHMARKS}/capacity.md", command="python benchmarks/capacity.py", rests_on=("fleet",)),
    ResultsPage(path=f"{BENCHMARKS}/hybrids.md", command="python benchmarks/hybrids.py", rests_on=("states",)),
    ResultsPage(path=f"{BENCHMARKS}/pipelines.md", command="python benchmarks/pipelines.py", rests_on=("pipeline",)),
    ResultsPage(
        path=f"{BENCHMARKS}/predictor.md", command="python benchmarks/predictor.py", rests_on=("eager-searched",)
    ),
    ResultsPage(path=f"{BENCHMARKS}/prefixes.md", command="python benchmarks/prefixes.py", rests_on=("prefix",)),
    ResultsPage(
        path=f"{BENCHMARKS}/table_quality.md",
        command="python benchmarks/table_quality.py",
        rests_on=("eager-searched", "chain"),
    ),
    ResultsPage(
        path=f"{BENCHMARKS}/mutation.md",
        command="python benchmarks/mutation.py --report",
        needs="hours: `python benchmarks/mutation.py` tries the mutants",
    ),
    ResultsPage(
        path=f"{BENCHMARKS}/search_quality.md",
        command="python benchmarks/search_quality.py 12 80 150",
        rests_on=("chain", "bus", "pipeline"),
        needs="an hour",
    ),
    ResultsPage(
        path=f"{BENCHMARKS}/defaults.md",
        command="python benchmarks/defaults.py",
        rests_on=("zigzag", "sglang"),
        needs="10 minutes, and hours where the model of time has changed",
    ),
    ResultsPage(path=f"{BENCHMARKS}/pages.md", command="python benchmarks/pages.py", needs="Chromium"),
    ResultsPage(
        path=f"{BENCHMARKS}/capacity_traces.md",
        command="python benchmarks/capacity.py --traces FOLDER",
        rests_on=("fleet",),
        needs="public traces",
    ),
    ResultsPage(
        path=f"{DOCS}/fuzz.md",
        command="python tests/fuzz/fuzz_long.py --minutes 60 --page docs/results/fuzz.md",
        needs="an hour",
    ),
    ResultsPage(path=f"{DOCS}/confirmation.md", command="python -m validate.confirmation", needs="20 quiet minutes"),
    ResultsPage(
        path=f"{DOCS}/silicon.md",
        command="python -m validate.silicon SETTINGS.csv --configs FOLDER",
        rests_on=("vllm", "sglang", "trtllm"),
        needs="published settings",
    ),
    ResultsPage(
        path=f"{DOCS}/engine_flags.md",
        command="python -m validate.engine_flags vllm=PYTHON sglang=PYTHON",
        rests_on=("flags",),
        needs="installed engines",
    ),
)
FROZEN = {  # pages that no command writes any more; each names the commit whose command wrote it
    f"{DOCS}/closed_loop.md",
    f"{DOCS}/studies.md",
    f"{DOCS}/trust.md",  # a summary of other pages, written by hand
}


@cache
def prediction(name: str) -> Value:
    """The value of one of PREDICTIONS."""
    return PREDICTIONS[name]()


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
    known = {page.path for page in PAGES} | FROZEN
    for page in PAGES:
        if reason := page.staleness():
            yield f"{page.path}: {reason}; `{page.command}` writes it"
    for folder in (DOCS, BENCHMARKS):
        for file in sorted((ROOT / folder).glob("*.md")):
            if (path := file.relative_to(ROOT).as_posix()) not in known:
                yield f"{path}: add the page and its command to PAGES in validate/results.py"


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
    left = [f"{page.name} ({page.needs})" for page in PAGES if page not in pages]
    if left and not options.names:
        print(f"not written: {', '.join(left)}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
