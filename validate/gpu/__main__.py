"""The first hour on a GPU node: `python -m validate.gpu [--quick] [--steps a,b] [--output FOLDER]`.

Each step runs in a process of its own with a time-out; a failure does not stop the other steps. report.md and
report.json are rewritten after each step; with --steps the folder's report keeps its results of the other steps.
Without a GPU the steps run on the CPU with a tiny model. Exit code 1 where a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.io.files import write_atomically
from validate.gpu.steps import STEPS, Finding, Scope, Step
from validate.report import table

_NO_GPU = (
    "**No GPU was available.** The steps ran on a CPU with a tiny model, to show that they run. Nothing here says how"
    " fast or how right kvrsim is on a GPU."
)
_MOST_CHARACTERS = 400  # of a line
_LOG_LINES = 3  # of a step that ended without a result
_FAILURES = ("failed", "timed out")


@dataclass(kw_only=True, slots=True)
class Report:
    """Results of the steps that have run; rewritten after each."""

    scope: Scope
    command: str
    done: list[tuple[Step, Finding, float]] = field(default_factory=list)  # with seconds
    again: list[str] = field(default_factory=list)  # steps that were run again on their own

    def resume(self, steps: Sequence[Step]) -> None:
        """Take over the results of these steps from the folder's report if it is from a run like this one."""
        try:
            stored = json.loads(Path(self.scope.folder, "report.json").read_text("utf-8"))
            if (stored["num_gpus"], stored["quick"]) != (self.scope.num_gpus, self.scope.quick):
                return
            results = {one["name"]: one for one in stored["steps"]}
            done = [
                (step, Finding(**{key: result[key] for key in ("status", "lines", "facts")}), float(result["seconds"]))
                for step in steps
                if (result := results.get(step.name)) is not None
            ]
            self.command, self.again = str(stored["command"]), [str(name) for name in stored.get("again", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        self.done = done

    @property
    def failed(self) -> list[str]:
        """Names of the steps that failed or ran out of time."""
        return [step.name for step, finding, _ in self.done if finding.status in _FAILURES]

    def add(self, step: Step, finding: Finding, seconds: float) -> None:
        """Add or replace the result of a step, and write the report."""
        names = [known.name for known, *_ in self.done]
        if step.name in names:
            self.done[names.index(step.name)] = (step, finding, seconds)
            self.again = [*(name for name in self.again if name != step.name), step.name]
        else:
            self.done.append((step, finding, seconds))
        folder = Path(self.scope.folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / "report.json", f"{json.dumps(self.to_dict(), indent=2)}\n".encode(), argument="output"
        )
        write_atomically(folder / "report.md", self.to_markdown().encode(), argument="output")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        steps = [
            {"name": step.name, "must_show": step.must_show, "otherwise": step.otherwise, "seconds": round(seconds, 1)}
            | finding.to_dict()
            for step, finding, seconds in self.done
        ]
        return {
            "command": self.command,
            "again": self.again,
            "num_gpus": self.scope.num_gpus,
            "quick": self.scope.quick,
            "ok": not self.failed,
            "failed": self.failed,
            "steps": steps,
        }

    def to_markdown(self) -> str:
        """The report."""
        again = f"; run again on their own: {', '.join(self.again)}" if self.again else ""
        parts = ["# Report", f"`{self.command}`{again}"]
        if not self.scope.on_gpu:
            parts.append(_NO_GPU)
        if self.done:
            rows = [(step.name, finding.status, f"{seconds:.0f} s") for step, finding, seconds in self.done]
            parts.append("\n".join(table(("step", "result", "time"), rows)).rstrip())
        for step, finding, _ in self.done:
            lines = "\n".join(f"- {_escape(line)}" for line in finding.lines)
            parts += [f"## {step.title}", f"Must show: {step.must_show}.", f"**{finding.status}**", lines]
            if finding.status in _FAILURES:
                parts.append(f"What to do: {step.otherwise}.")
        return "\n\n".join(part for part in parts if part) + "\n"


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def _escape(line: str) -> str:
    """One line of Markdown that shows the text literally, without its end if it is long."""
    text = cell(" ".join(line.split())).replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--quick", action="store_true", help="as short as it can be: whether the steps run")
    parser.add_argument("--steps", help=f"some of {','.join(names)}")
    parser.add_argument("--output", default="gpu-report", metavar="FOLDER", help="default: gpu-report")
    parser.add_argument("--run-step", nargs=2, metavar=("NAME", "SCOPE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run_step:
        return _run_here(*options.run_step)
    wanted = names if options.steps is None else options.steps.split(",")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"--steps: got {','.join(unknown)!r}, accepted: some of {', '.join(names)}")
    scope = Scope(folder=options.output, num_gpus=_num_gpus(), quick=options.quick)
    report = Report(scope=scope, command=_command(options))
    if options.steps is not None:
        report.resume(STEPS)
    for step in STEPS:
        if step.name in wanted:
            _run(step, report)
    print(
        f"{Path(options.output, 'report.md')}: {len(report.done)} steps, failed: {', '.join(report.failed) or 'none'}"
    )
    return 1 if report.failed else 0


def _run(step: Step, report: Report) -> None:
    """Run one step and add its result; progress goes to standard error."""
    print(f"{step.name} ...", end=" ", file=sys.stderr, flush=True)
    start_s = time.monotonic()
    reason = step.applies(report.scope)
    finding = Finding(status="skipped", lines=[reason]) if reason else run_apart(step, report.scope)
    seconds = time.monotonic() - start_s
    report.add(step, finding, seconds)
    print(f"{finding.status} ({seconds:.0f} s)", file=sys.stderr)
    if finding.status in _FAILURES:
        first = next(iter(finding.lines), "")
        print(f"  {first}\n  must show: {step.must_show}\n  what to do: {step.otherwise}", file=sys.stderr)


def run_apart(step: Step, scope: Scope) -> Finding:
    """Run a step in a process group of its own, which is killed at the end of the step or of its time."""
    folder = Path(scope.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{step.name}.log"
    command = [sys.executable, "-m", "validate.gpu", "--run-step", step.name, json.dumps(scope.to_dict())]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=step.timeout_s)
        except subprocess.TimeoutExpired:
            return Finding(status="timed out", lines=[f"it has not ended within {step.timeout_s:.0f} s", *_last(log)])
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    try:
        return Finding(**json.loads(output.decode().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return Finding(status="failed", lines=[f"it ended with exit code {process.returncode}", *_last(log)])


def _run_here(name: str, scope: str) -> int:
    """Run a step in this process; its result is the last line of standard output."""
    step = next(step for step in STEPS if step.name == name)
    try:
        finding = step.run(Scope(**json.loads(scope)))
    except Exception as error:  # any error of a step is a result for the report
        finding = Finding(status="failed", lines=[f"{type(error).__name__}: {' '.join(str(error).split())}"])
    print(f"\n{json.dumps(finding.to_dict())}", flush=True)
    return 0


def _last(log: Path) -> list[str]:
    return [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()][-_LOG_LINES:]


def _num_gpus() -> int:
    from kvrsim.runtime.host import num_gpus

    return num_gpus()


def _command(options: argparse.Namespace) -> str:
    words = ["python -m validate.gpu", *(["--quick"] if options.quick else [])]
    return " ".join([*words, *([f"--steps {options.steps}"] if options.steps else [])])


if __name__ == "__main__":
    sys.exit(main())
