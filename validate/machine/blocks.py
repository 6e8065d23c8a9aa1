"""KV-Runahead in query blocks against KVR-S on two ranks of this machine: docs/results/query_blocks.md.

    python -m validate.machine.blocks [--ctx 4k] [--attention sdpa] [--repeats 9] [--profile FILE] [--even-if-busy]

It calibrates, plans both, and measures them in turn. Exit code 1 where kvr-b is not predicted and measured to be faster
beyond both interquartile ranges, or where its logits are not one process's. About 4 minutes with nothing else running.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from kvrsim.builder import make_scenario
from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically
from planner.api import confirm
from planner.confirm.result import Candidate, Confirmation
from planner.simulate import run_simulation
from validate.machine.calibration import MODELS, calibrate

PAGE = Path(__file__).parents[2] / "docs" / "results" / "query_blocks.md"
STRATEGIES = ("kvr-s", "kvr-b")
MODEL = "small-llama"
CONFIG = str(MODELS / f"{MODEL}.json")
TOLERANCE = 1e-4  # of the largest logit


def blocks_of(found: Confirmation, candidate: Candidate, profile: Path) -> str:
    """Calls of attention of each rank."""
    scenario, _ = make_scenario(
        ctx=found.context_len, gpus=2, model=CONFIG, profile=str(profile), attention=found.attention, dtype=found.dtype
    )
    run = run_simulation(scenario, strategy=candidate.strategy, partition=candidate.partition)
    return ", ".join(map(str, run.query_blocks or (1,) * len(candidate.partition)))


def row(candidate: Candidate, blocks: str) -> str:
    """One strategy, predicted and measured."""
    return (
        f"| `{candidate.strategy}` | {', '.join(map(str, candidate.partition))} | {blocks} |"
        f" {candidate.predicted_s:.3f} | {candidate.median_s:.3f} | {candidate.iqr_s:.3f} |"
        f" {candidate.rel_error:+.1%} | {relative_error(candidate):.1e} |"
    )


def relative_error(candidate: Candidate) -> float:
    """Of the logits: the largest difference from one process's over the largest."""
    assert candidate.logits_error is not None
    assert candidate.logits_scale is not None
    return candidate.logits_error / candidate.logits_scale


def misses(whole: Candidate, blocks: Candidate) -> list[str]:
    """What was not shown."""
    found = []
    if blocks.predicted_s >= whole.predicted_s:
        found.append("`kvr-b` is not predicted to be faster")
    if whole.median_s - blocks.median_s <= whole.iqr_s + blocks.iqr_s:
        found.append("`kvr-b` is not measured to be faster beyond the interquartile ranges")
    if max(map(relative_error, (whole, blocks))) > TOLERANCE:
        found.append(f"logits differ from one process's by more than {TOLERANCE:g} of the largest")
    return found


def page(found: Confirmation, profile: Path, command: str) -> list[str]:
    """What was measured on what."""
    whole, blocks = found.candidates
    predicted, measured = whole.predicted_s / blocks.predicted_s - 1, whole.median_s / blocks.median_s - 1
    told = "; ".join(f"{name} {value}" for name, value in found.conditions.items() if name != "model")
    return [
        "# Query blocks on this machine",
        "",
        f"`{command}` on {date.today().isoformat()}. {found.model} (8 layers, hidden size 512, random weights),",
        f"{found.context_len} tokens, two ranks, {found.attention} attention, chunks and blocks by a profile of this",
        "machine. Measured: the median of repeated prefills, in turn. What the columns mean:",
        "[query blocks](../explanation/query-blocks.md).",
        "",
        "| strategy | chunks | calls of attention, by rank | predicted, s | measured, s | interquartile range, s |"
        " error | logits: difference over the largest |",
        "|---|---|---|---|---|---|---|---|",
        *(row(one, blocks_of(found, one, profile)) for one in found.candidates),
        "",
        f"`kvr-s` takes {predicted:.1%} more time than `kvr-b` by prediction, {measured:.1%} measured.",
        *(f"Not shown: {miss}." for miss in misses(whole, blocks)),
        *(f"Note: {note}." for note in found.warnings),
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
        told: dict[str, Any] = dict(attention=chosen.attention, dtype="fp32", strategies=STRATEGIES, top=1)
        here = {"repeats": chosen.repeats}
        found = confirm(ctx=chosen.ctx, model=CONFIG, profile=profile, virtual=False, hardware=here, **told)
        words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
        lines = page(found, profile, " ".join(["python -m validate.machine.blocks", *words]))
    write_atomically(chosen.page, ("\n".join(lines) + "\n").encode(), argument="page")
    print("\n".join(lines))
    sys.exit(1 if misses(*found.candidates) else 0)


if __name__ == "__main__":
    try:
        main()
    except KvrsimError as error:
        sys.exit(f"validate.machine.blocks: {error}")
