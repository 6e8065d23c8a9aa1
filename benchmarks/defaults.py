"""Quality and speed of the default answer: 60 questions to `kvrsim plan`, compared with `--strategies all`.

The default compares all strategies that can fit within a search budget; `all` searches each strategy to its end. TTFTs
are simulated. CPU seconds are measured for the whole command in its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import kvrsim
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.results.results import Plan
from validate.report import write_benchmark

MODELS = (
    *("deepseek-v3.2", "glm-5", "kimi-k2", "minimax-m2.5", "qwen3.5-397b-a17b", "qwen3.5-35b-a3b", "qwen3.5-27b"),
    *("gpt-oss-120b", "nemotron-3-super-120b-a12b", "llama-3.1-70b"),
)
CLUSTERS = ("2x8xh100", "8xh200", "8xb200")
CONTEXTS = ("16k", "128k")
QUESTIONS = tuple(product(MODELS, CLUSTERS, CONTEXTS))
NEAR, USUAL_S, MOST_S, USUAL = 0.02, 3.0, 8.0, 54  # targets: gap; CPU seconds of USUAL and of all questions
ALL = Path(__file__).parent / "results" / "defaults_all.json"  # answers with `--strategies all`, which take hours

# Strategy and TTFT for the keys "best", "engines" and "probe"; None: nothing fits. No search changes the probe.
Answer = dict[str, dict[str, Any] | None]


def answer(plan: Plan) -> Answer:
    """The best strategy of a plan, the fastest that an engine has, and one that shows changes of the model of time."""
    on_engines = [one for name in DEPLOY_ENGINES if plan.feasible and (one := plan.best_on(name)) is not None]
    fastest = min(on_engines, key=lambda one: one.ttft_s, default=None)
    probe = next((one for one in plan.strategies if one.strategy == "tp"), plan.strategies[-1])
    rows = {"best": plan.best if plan.feasible else None, "engines": fastest, "probe": probe}
    return {key: one and {"strategy": one.strategy, "ttft_s": float(f"{one.ttft_s:.9g}")} for key, one in rows.items()}


def ask(question: tuple[str, str, str], **options: Any) -> Plan:
    """Make the plan for a question."""
    model, cluster, ctx = question
    return kvrsim.plan(model=model, cluster=cluster, ctx=ctx, **options)


def gap(default: Answer, everything: Answer, key: str) -> float:
    """Relative difference of the default's TTFT from that of `all`; 0 if nothing fits in either."""
    here, there = default[key], everything[key]
    return 0.0 if here is None and there is None else here["ttft_s"] / there["ttft_s"] - 1 if here and there else 1.0


def cpu_s(question: tuple[str, str, str]) -> float:
    """User and system CPU seconds of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    model, cluster, ctx = question
    command = [sys.executable, "-m", "kvrsim", "plan", model, cluster, "--ctx", ctx]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def answer_of_all(question: tuple[str, str, str], default: Answer, *, anew: bool) -> Answer:
    """The answer with `all`, from the file unless the model of time has changed or `anew` is true."""
    known: dict[str, Answer] = json.loads(ALL.read_text()) if ALL.exists() else {}
    key = " ".join(question)
    if anew or key not in known or known[key]["probe"] != default["probe"]:
        known[key] = answer(ask(question, strategies="all"))
        ALL.write_text(json.dumps(known, indent=1) + "\n")
    return known[key]


def main() -> None:
    """Measure, and write benchmarks/results/defaults.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="search all strategies again: hours")
    anew = parser.parse_args().anew
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules of an installed package are compiled
    cells, gaps, engine_gaps, seconds = [], [], [], []
    for question in QUESTIONS:
        plan = ask(question)
        mine = answer(plan)
        other = answer_of_all(question, mine, anew=anew)
        gaps.append(gap(mine, other, "best"))
        engine_gaps.append(gap(mine, other, "engines"))
        seconds.append(cpu_s(question))
        left = ", ".join(plan.search.unsearched)
        best, reference = (one["best"] or {"strategy": "nothing fits", "ttft_s": float("nan")} for one in (mine, other))
        cells.append(
            f"| {' | '.join(question)} | {best['strategy']} | {best['ttft_s']:.4g} s | {reference['strategy']} |"
            f" {gaps[-1]:+.2%} | {engine_gaps[-1]:+.2%} | {seconds[-1]:.2f} s | {left} |"
        )
        print(cells[-1], flush=True)
    count, usual = len(QUESTIONS), sum(one <= USUAL_S for one in seconds)
    near, near_on_engines = (sum(one <= NEAR for one in each) for each in (gaps, engine_gaps))
    lines = [
        f"- best within {NEAR:.0%} of the best of all: {near} of {count}; worst {max(gaps):+.2%}",
        f"- best that engines have, likewise: {near_on_engines}; worst {max(engine_gaps):+.2%}",
        f"- at most {USUAL_S:g} s of CPU: {usual} of {count} (target {USUAL}); the longest {max(seconds):.2f} s"
        f" (target {MOST_S:g} s)",
        "",
        "| model | cluster | context | best | TTFT | best of all | gap | gap on engines | CPU | left by the budget |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *cells,
    ]
    write_benchmark("defaults", lines)


if __name__ == "__main__":
    main()
