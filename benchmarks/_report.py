"""Where benchmark results go: benchmarks/results/NAME.md, with the machine they were measured on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """One line: processor, cores, Python, numpy."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def spread(values: Sequence[float]) -> str:
    """Median, and the smallest and largest."""
    return f"{np.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def write(name: str, command: str, lines: Sequence[str]) -> None:
    """Write the results of one benchmark, and print them."""
    head = [f"# {name}", "", f"`{command}` on {time.strftime('%Y-%m-%d')}: {machine()}.", ""]
    text = "\n".join([*head, *lines]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
