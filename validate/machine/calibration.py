"""How well a fresh calibration of this machine predicts held-out whole prefills: docs/results/calibration.md.

For each small model: `kvrsim calibrate all` in a folder of its own, then measured and predicted TTFTs of one process at
context lengths that are not in the grid. --rounds repeats all of it, because the speed of a shared machine changes.

    python -m validate.machine.calibration [--minutes 2] [--rounds 2] [--keep FOLDER] [--even-if-busy]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import kvrsim
from kvrsim.runtime.measure import measure
from kvrsim.runtime.model import ModelForward, load_model
from kvrsim.runtime.plan import Report, RunPlan, Timing
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import Transport
from kvrsim.scenario import Partition
from validate.report import RESULTS, fill, numbers_table, write_page

PAGE = RESULTS / "calibration.md"
MODELS = Path(__file__).parents[1] / "models"
CONTEXTS = (300, 700, 1100, 1700, 2500, 3300, 3900)  # tokens; none is a chunk of the grid
REPEATS = 9
KERNEL = "sdpa"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """One context, predicted and measured."""

    context_len: int
    predicted_s: float
    low_s: float
    high_s: float
    measured: Timing

    @property
    def error(self) -> float:
        """Above 0: predicted too long."""
        return self.predicted_s / self.measured.median_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_s <= self.measured.median_s <= self.high_s


def single(transport: Transport, config: str) -> Report:
    """Run by one rank: TTFTs of whole prefills."""
    model = load_model(config)
    plans = [RunPlan(strategy="single", partition=Partition(chunk_lens=(length,))) for length in CONTEXTS]
    return measure(transport, ModelForward(model), plans, repeats=REPEATS, warmups=1)


def calibrate(config: Path, profile: Path, options: Sequence[str], attention: str = KERNEL) -> float:
    """Run `kvrsim calibrate all` and return its duration in seconds; exits with its code if it fails."""
    start_s = time.monotonic()
    command = [sys.executable, "-m", "kvrsim.cli.main", "calibrate", "all", "--model", str(config), "-o", str(profile)]
    if code := subprocess.run([*command, "--attention", attention, *options], check=False).returncode:
        sys.exit(code)
    return time.monotonic() - start_s


def predicted(config: Path, profile: Path, timings: Sequence[Timing]) -> list[Prefill]:
    """The profile's predictions of measured prefills."""
    prefills = []
    for timing in timings:
        length = timing.plan.context_len
        run = kvrsim.simulate(
            strategy="single", gpus=1, ctx=length, model=str(config), profile=str(profile), dtype="fp32"
        )
        low_s, high_s = run.ttft_low_s, run.ttft_high_s
        prefills.append(
            Prefill(context_len=length, predicted_s=run.ttft_s, low_s=low_s, high_s=high_s, measured=timing)
        )
    return prefills


def error_summary(prefills: Sequence[Prefill]) -> str:
    """Errors and the share inside the interval, in a sentence."""
    errors = np.abs([prefill.error for prefill in prefills])
    inside = sum(prefill.is_inside for prefill in prefills)
    return (
        f"Error: median {np.median(errors):.1%}, mean {errors.mean():.1%}, worst {errors.max():.1%}; {inside} of"
        f" {len(prefills)} inside the 80 % interval."
    )


def section(name: str, seconds: float, prefills: Sequence[Prefill]) -> list[str]:
    """One model's table."""
    heads = ("context, tokens", "measured, s", "interquartile range, s", "predicted, s", "interval, s", "error")
    rows = (
        (
            prefill.context_len,
            f"{prefill.measured.median_s:.3f}",
            f"{prefill.measured.iqr_s:.3f}",
            f"{prefill.predicted_s:.3f}",
            f"{prefill.low_s:.3f} to {prefill.high_s:.3f}",
            f"{prefill.error:+.1%}",
        )
        for prefill in prefills
    )
    sentence = f"`calibrate all` took {seconds:.0f} s. {error_summary(prefills)}"
    return [f"## {name}", "", sentence, "", *numbers_table(heads, rows)]


def conditions_line(conditions: Mapping[str, Any]) -> str:
    """The machine and software of measurements, but for the model."""
    return "; ".join(f"{name} {value}" for name, value in conditions.items() if name != "model") + "."


@contextlib.contextmanager
def output_folder(path: Path | None) -> Iterator[Path]:
    """The folder, created if it is missing; without a path a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = path or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def main() -> None:
    """Calibrate, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", default="2", help="for each calibration")
    parser.add_argument("--rounds", type=int, default=2, help="calibrations of each model")
    parser.add_argument("--keep", type=Path, help="folder for profiles, CSVs and reports")
    parser.add_argument("--even-if-busy", action="store_true", help="while others use the machine")
    arguments = parser.parse_args()
    options = ["--minutes", arguments.minutes, *(["--even-if-busy"] if arguments.even_if_busy else [])]
    sections: list[str] = []
    by_model: dict[str, list[Prefill]] = {}
    with output_folder(arguments.keep) as folder:
        for number in range(1, arguments.rounds + 1):
            for name in ("small-llama", "small-falcon"):
                config, profile = MODELS / f"{name}.json", folder / f"{name}-{number}.json"
                seconds = calibrate(config, profile, options)
                report = launch(single, str(config), how=Launch(num_ranks=1, deadline_s=1200))[0]
                prefills = predicted(config, profile, report.timings)
                sections += section(f"{name}, round {number}", seconds, prefills)
                by_model.setdefault(name, []).extend(prefills)
    words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
    command = " ".join(["python -m validate.machine.calibration", *words])
    lines = fill(
        "calibration",
        command=command,
        date=date.today().isoformat(),
        kernel=KERNEL,
        conditions=conditions_line(report.conditions),
        errors=[f"- {name}: {error_summary(prefills)}" for name, prefills in by_model.items()],
        all_errors=error_summary([prefill for prefills in by_model.values() for prefill in prefills]),
        sections=sections,
    )
    write_page(PAGE, lines)
    print(PAGE.read_text("utf-8"))


if __name__ == "__main__":
    from validate.machine.calibration import main as run  # so that the ranks can import `single` by name

    run()
