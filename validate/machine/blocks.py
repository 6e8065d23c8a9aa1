"""KV-Runahead in query blocks against KVR-S on two ranks of this machine: docs/results/query_blocks.md.

    python -m validate.machine.blocks [--ctx 4k] [--attention sdpa] [--repeats 9] [--profile FILE] [--even-if-busy]

It calibrates, plans both, and measures them in turn. Exit code 1 where kvr-b is not predicted and measured to be faster
beyond both interquartile ranges, or where its logits are not one process's. About 4 minutes with nothing else running.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically
from kvrsim.partition import Partition
from kvrsim.runtime.bench import Timing
from kvrsim.runtime.check import Difference
from kvrsim.runtime.job import JobReport, run_job
from kvrsim.runtime.ranks.launch import launch
from kvrsim.setup import make_scenario
from planner.confirm.hardware import Hardware, run_plan
from planner.plan import make_plan
from validate.machine.calibration import MODELS, calibrate

PAGE = Path(__file__).parents[2] / "docs" / "results" / "query_blocks.md"
STRATEGIES = ("kvr-s", "kvr-b")
MODEL = "small-llama"
TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One strategy, predicted and measured."""

    strategy: str
    partition: tuple[int, ...]
    query_blocks: tuple[int, ...] | None
    predicted_s: float
    measured: Timing
    difference: Difference

    def __str__(self) -> str:
        timing, blocks = self.measured, self.query_blocks or ("one",)
        return (
            f"| `{self.strategy}` | {', '.join(map(str, self.partition))} | {', '.join(map(str, blocks))} |"
            f" {self.predicted_s:.3f} | {timing.median_s:.3f} | {timing.iqr_s:.3f} |"
            f" {self.predicted_s / timing.median_s - 1:+.1%} |"
            f" {self.difference.logits / self.difference.logits_scale:.1e} |"
        )


def compared(ctx: str, attention: str, profile: Path, repeats: int) -> tuple[list[Row], dict[str, str]]:
    """Both strategies on two ranks, in turn, and the conditions."""
    config = str(MODELS / f"{MODEL}.json")
    scenario, _ = make_scenario(ctx=ctx, gpus=2, model=config, profile=str(profile), attention=attention, dtype="fp32")
    plan = make_plan(scenario, strategies=STRATEGIES)
    hardware = Hardware(config=config, repeats=repeats)
    runs = [run_plan(scenario, one.strategy, Partition(chunk_lens=one.partition), "ring") for one in plan.strategies]
    job, longest_s = hardware.job(scenario, tuple(runs)), max(one.ttft_s for one in plan.strategies)
    how = hardware.launch(2, longest_s, 2 * (repeats + 4) * longest_s)
    report: JobReport = launch(run_job, job, how=how)[-1]
    rows = [
        Row(
            strategy=one.strategy,
            partition=one.partition,
            query_blocks=one.query_blocks,
            predicted_s=one.ttft_s,
            measured=timing,
            difference=difference,
        )
        for one, timing, difference in zip(plan.strategies, report.bench.timings, report.differences, strict=True)
    ]
    return rows, report.bench.conditions


def misses(whole: Row, blocks: Row) -> list[str]:
    """What was not shown."""
    found = []
    if blocks.predicted_s >= whole.predicted_s:
        found.append("kvr-b is not predicted to be faster")
    gain_s = whole.measured.median_s - blocks.measured.median_s
    if gain_s <= whole.measured.iqr_s + blocks.measured.iqr_s:
        found.append("kvr-b is not measured to be faster beyond the interquartile ranges")
    if any(row.difference.logits > TOLERANCE * row.difference.logits_scale for row in (whole, blocks)):
        found.append(f"logits differ from one process's by more than {TOLERANCE:g} of the largest")
    return found


def page(rows: Sequence[Row], conditions: dict[str, str], command: str, ctx: str) -> list[str]:
    """What was measured on what."""
    whole, blocks = rows
    predicted, measured = (
        whole.predicted_s / blocks.predicted_s - 1,
        whole.measured.median_s / blocks.measured.median_s - 1,
    )
    told = "; ".join(f"{name} {value}" for name, value in conditions.items() if name != "model")
    return [
        "# Query blocks on this machine",
        "",
        f"`{command}` on {date.today().isoformat()}. {MODEL} (8 layers, hidden size 512, random weights), {ctx}",
        "tokens, two ranks, chunks and blocks by a profile of this machine. Measured: the median of repeated prefills,",
        "in turn. What the columns mean: [query blocks](../explanation/query-blocks.md).",
        "",
        "| strategy | chunks | calls of attention, by rank | predicted, s | measured, s | interquartile range, s |"
        " error | logits: difference over the largest |",
        "|---|---|---|---|---|---|---|---|",
        *map(str, rows),
        "",
        f"`kvr-b` is {predicted:+.1%} faster by prediction, {measured:+.1%} measured.",
        *(f"Not shown: {miss}." for miss in misses(whole, blocks)),
        "",
        f"{told}.",
    ]


def main() -> None:
    """Calibrate, plan, measure, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctx", default="4k")
    parser.add_argument("--attention", default="sdpa", choices=("eager", "sdpa"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", type=Path, help=f"of {MODEL}, instead of a calibration")
    parser.add_argument("--minutes", default="2", help="for the calibration")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    parser.add_argument("--even-if-busy", action="store_true", help="while others use the machine")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        profile = chosen.profile or Path(temporary) / f"{MODEL}.json"
        if chosen.profile is None:
            options = ["--minutes", chosen.minutes, *(["--even-if-busy"] if chosen.even_if_busy else [])]
            calibrate(MODELS / f"{MODEL}.json", profile, options, chosen.attention)
        rows, conditions = compared(chosen.ctx, chosen.attention, profile, chosen.repeats)
    words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
    lines = page(rows, conditions, " ".join(["python -m validate.machine.blocks", *words]), chosen.ctx)
    write_atomically(chosen.page, ("\n".join(lines) + "\n").encode(), argument="page")
    print("\n".join(lines))
    sys.exit(1 if misses(*rows) else 0)


if __name__ == "__main__":
    try:
        main()
    except KvrsimError as error:
        sys.exit(f"validate.machine.blocks: {error}")
