"""The first hour on a GPU node: `python -m validate.gpu [--quick] [--steps a,b] [--output FOLDER]`.

Each step runs in a process of its own with a time-out; what fails does not stop the rest. report.md and report.json are
written anew after each step; --steps keeps what the folder's report says of the others. Without a GPU the steps run on
the CPU with a tiny model. Exit code 1 where a step failed.
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
from pathlib import Path

from kvrsim.io.files import write_atomically
from validate.gpu.report import Report, page
from validate.gpu.steps import Finding, Scope, Step, steps

_SAID = 3  # last lines of a step that broke


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in steps()]
    parser.add_argument("--quick", action="store_true", help="as short as it can be: whether the steps run")
    parser.add_argument("--steps", help=f"some of {','.join(names)}")
    parser.add_argument("--output", default="gpu-report", metavar="FOLDER", help="default: gpu-report")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the steps and the report as a page, too")
    parser.add_argument("--run-step", nargs=2, metavar=("NAME", "SCOPE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.run_step:
        return _run_here(*chosen.run_step)
    wanted = names if chosen.steps is None else chosen.steps.split(",")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"--steps: got {','.join(unknown)!r}, accepted: some of {', '.join(names)}")
    scope = Scope(folder=chosen.output, num_gpus=_num_gpus(), quick=chosen.quick)
    report = Report(scope=scope, command=_command(chosen))
    if chosen.steps is not None:
        report.resume(steps())
    for step in steps():
        if step.name in wanted:
            _do(step, report)
    if chosen.page is not None:
        write_atomically(chosen.page, page(report).encode(), argument="page")
    print(f"{Path(chosen.output, 'report.md')}: {len(report.done)} steps, failed: {', '.join(report.failed) or 'none'}")
    return 1 if report.failed else 0


def _do(step: Step, report: Report) -> None:
    """Run one step; its begin and end are reported on standard error."""
    print(f"{step.name} ...", end=" ", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    why_not = step.applies(report.scope)
    finding = Finding(status="skipped", lines=[why_not]) if why_not else run_apart(step, report.scope)
    seconds = time.monotonic() - began_s
    report.add(step, finding, seconds)
    print(f"{finding.status} ({seconds:.0f} s)", file=sys.stderr)
    if finding.status in ("failed", "timed out"):
        first = next(iter(finding.lines), "")
        print(f"  {first}\n  must show: {step.must_show}\n  what to do: {step.otherwise}", file=sys.stderr)


def run_apart(step: Step, scope: Scope) -> Finding:
    """A step in a process group of its own, all of which ends with it, or with its time."""
    folder = Path(scope.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{step.name}.log"
    command = [sys.executable, "-m", "validate.gpu", "--run-step", step.name, json.dumps(scope.to_dict())]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, start_new_session=True)
        try:
            printed, _ = process.communicate(timeout=step.timeout_s)
        except subprocess.TimeoutExpired:
            return Finding(status="timed out", lines=[f"it has not ended within {step.timeout_s:.0f} s", *_last(log)])
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    try:
        return Finding(**json.loads(printed.decode().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return Finding(status="failed", lines=[f"it ended with exit code {process.returncode}", *_last(log)])


def _run_here(name: str, scope: str) -> int:
    """The step itself; its finding is the last line of standard output."""
    [step] = [step for step in steps() if step.name == name]
    try:
        finding = step.run(Scope(**json.loads(scope)))
    except Exception as error:  # whatever breaks is what the report is about
        finding = Finding(status="failed", lines=[f"{type(error).__name__}: {' '.join(str(error).split())}"])
    print(f"\n{json.dumps(finding.to_dict())}", flush=True)
    return 0


def _last(log: Path) -> list[str]:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-_SAID:]


def _num_gpus() -> int:
    from kvrsim.runtime.host import num_gpus

    return num_gpus()


def _command(chosen: argparse.Namespace) -> str:
    words = ["python -m validate.gpu", *(["--quick"] if chosen.quick else [])]
    return " ".join([*words, *([f"--steps {chosen.steps}"] if chosen.steps else [])])


if __name__ == "__main__":
    sys.exit(main())
