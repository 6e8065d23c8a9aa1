"""Report: what the steps have found so far, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.io.files import write_atomically
from validate.gpu.steps import Finding, Scope, Step, steps

_NO_GPU = (
    "**No GPU was available.** The steps ran on a CPU with a tiny model, to show that they run. Nothing here says how"
    " fast or how right kvrsim is on a GPU."
)
_ABOUT = """\
`make gpu` (or `python -m validate.gpu`) is the first command to run on a GPU node. It checks, in this order, everything
that measured times depend on. Each step runs in a separate process with a time-out. A step that fails does not stop the
others. `gpu-report/report.md` and `report.json` are rewritten after each step, and the output of each step is beside
them. `--steps transport,clock` runs some steps again and replaces their results in the report. The exit code is 1 if a
step failed.

kvrsim's code for CUDA and NCCL has been reviewed and tested with stand-ins; **no GPU was available when this page was
written**. Allow about an hour on eight GPUs. Without a GPU the same steps run on the CPU with a tiny model, in a few
minutes. Steps that need missing hardware are skipped, with a note.
"""
_MOST_CHARACTERS = 400  # of a line


@dataclass(kw_only=True, slots=True)
class Report:
    """The findings in the order of the steps; written anew after each."""

    scope: Scope
    command: str
    done: list[tuple[Step, Finding, float]] = field(default_factory=list)  # with seconds
    again: list[str] = field(default_factory=list)  # steps that were run again on their own

    def resume(self, steps: Sequence[Step]) -> None:
        """Keep what a report in the folder says of these steps, if it is of a run like this one."""
        try:
            told = json.loads(Path(self.scope.folder, "report.json").read_text("utf-8"))
            if (told["num_gpus"], told["quick"]) != (self.scope.num_gpus, self.scope.quick):
                return
            found = {one["name"]: one for one in told["steps"]}
            kept = [
                (step, Finding(**{key: found[step.name][key] for key in ("status", "lines", "facts")}), seconds)
                for step in steps
                if step.name in found and isinstance(seconds := found[step.name]["seconds"], float)
            ]
            self.command, self.again = str(told["command"]), [str(name) for name in told.get("again", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        self.done = kept

    @property
    def failed(self) -> list[str]:
        """Names of the steps that did not show what they must."""
        return [step.name for step, finding, _ in self.done if finding.status in ("failed", "timed out")]

    def add(self, step: Step, finding: Finding, seconds: float) -> None:
        """One step more, instead of what was known of it; on the disk when this returns."""
        names = [known.name for known, *_ in self.done]
        if step.name in names:
            self.done[names.index(step.name)] = (step, finding, seconds)
            self.again = [*(name for name in self.again if name != step.name), step.name]
        else:
            self.done.append((step, finding, seconds))
        self.write()

    def write(self) -> None:
        """report.md and report.json in the scope's folder, each whole or not at all."""
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

    def to_markdown(self, level: int = 1) -> str:
        """A page whose title is a heading of that level."""
        head, sub = "#" * level, "#" * (level + 1)
        again = f"; run again on their own: {', '.join(self.again)}" if self.again else ""
        parts = [f"{head} Report", f"`{self.command}`{again}"]
        if not self.scope.on_gpu:
            parts.append(_NO_GPU)
        if self.done:
            parts.append(_table(self.done))
        for step, finding, _ in self.done:
            lines = [f"- {_safe(line)}" for line in finding.lines]
            parts += [f"{sub} {step.title}", f"Must show: {step.must_show}.", f"**{finding.status}**", "\n".join(lines)]
            if finding.status in ("failed", "timed out"):
                parts.append(f"What to do: {step.otherwise}.")
        return "\n\n".join(part for part in parts if part) + "\n"


def page(report: Report) -> str:
    """docs/how-to/gpu.md: what the steps are, and a report."""
    rows = [f"| `{step.name}` | {cell(step.must_show)} | {cell(step.otherwise)} |" for step in steps()]
    table = "\n".join(["| step | must show | otherwise |", "|---|---|---|", *rows])
    return "\n".join(["# The first hour on a GPU node", "", _ABOUT, table, "", report.to_markdown(level=2)])


def cell(text: str) -> str:
    """In a table of Markdown."""
    return text.replace("|", "\\|")


def _table(done: Sequence[tuple[Step, Finding, float]]) -> str:
    rows = [f"| {step.name} | {finding.status} | {seconds:.0f} s |" for step, finding, seconds in done]
    return "\n".join(["| step | result | time |", "|---|---|---|", *rows])


def _safe(line: str) -> str:
    """One line of Markdown that shows what it says."""
    text = " ".join(line.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
