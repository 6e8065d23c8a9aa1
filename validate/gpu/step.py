"""Step: one thing that is tried in a process of its own, what it must show, and what to do if it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from validate.gpu.scope import Scope

Status = Literal["passed", "failed", "skipped", "timed out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a step has found."""

    status: Status
    lines: Sequence[str]  # for people
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"status": self.status, "lines": list(self.lines), "facts": dict(self.facts)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step."""

    name: str  # as --steps has it
    title: str
    must_show: str
    otherwise: str  # what to do
    run: Callable[[Scope], Finding]
    timeout_s: float  # on a GPU; a CPU's steps are small and get as long
    applies: Callable[[Scope], str | None] = lambda scope: None  # why it does not apply; None: it does


def finding_of(lines: Sequence[str], faults: Sequence[str], facts: Mapping[str, Any]) -> Finding:
    """Passed where nothing is wrong; what is wrong comes first."""
    return Finding(status="failed" if faults else "passed", lines=[*faults, *lines], facts=facts)


def kvrsim(*words: object, accepted: Sequence[int] = (0,)) -> dict[str, Any]:
    """A kvrsim command's JSON object.

    Raises RuntimeError with the last line that it said where its exit code is not accepted or it prints none.
    """
    command = [sys.executable, "-m", "kvrsim", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in accepted:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise RuntimeError(f"kvrsim {words[0]} ended with {done.returncode}: {said[-1].strip()}")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"kvrsim {words[0]} printed no JSON") from None
    return found
