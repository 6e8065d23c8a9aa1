"""Quality and speed of the default answer: 60 questions to `kvrsim plan`, compared with `--strategies all`.

The default compares all strategies that can fit within a search budget; `all` searches each strategy to its end. TTFTs
are simulated, in one process per core. Then CPU seconds are measured: the whole command in its own process, one
question at a time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from itertools import product
from typing import Any, NamedTuple

import kvrsim
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.results.results import Plan
from planner.processes import Pool, cores
from validate.report import table, write_benchmark

MODELS = (
    *("deepseek-v3.2", "glm-5", "kimi-k2", "minimax-m2.5", "qwen3.5-397b-a17b", "qwen3.5-35b-a3b", "qwen3.5-27b"),
    *("gpt-oss-120b", "nemotron-3-super-120b-a12b", "llama-3.1-70b"),
)
CLUSTERS = ("2x8xh100", "8xh200", "8xb200")
CONTEXTS = ("16k", "128k")
QUESTIONS = tuple(product(MODELS, CLUSTERS, CONTEXTS))
NEAR, USUAL_S, MOST_S, USUAL = 0.02, 3.0, 8.0, 54  # targets: gap; CPU seconds of USUAL and of all questions
HEADS = ("model", "cluster", "context", "best", "TTFT", "best of all", "gap", "gap on engines", "CPU")

Answer = tuple[str, float] | None  # strategy and TTFT; None: nothing fits


class Answers(NamedTuple):
    """Answers of one plan."""

    best: Answer
    on_engines: Answer  # fastest strategy that an engine has
    unsearched: tuple[str, ...]  # strategies left by the search budget


def answers(question: tuple[str, str, str], **options: Any) -> Answers:
    """Make the plan for a question, and take its answers."""
    model, cluster, ctx = question
    plan: Plan = kvrsim.plan(model=model, cluster=cluster, ctx=ctx, **options)
    if not plan.feasible:
        return Answers(None, None, ())
    on_engines = [(one.ttft_s, one.strategy) for name in DEPLOY_ENGINES if (one := plan.best_on(name)) is not None]
    fastest = min(on_engines)[::-1] if on_engines else None
    return Answers((plan.best.strategy, plan.best.ttft_s), fastest, tuple(plan.search.unsearched))


def both_answers(question: tuple[str, str, str]) -> tuple[Answers, Answers]:
    """The answers by default, and with all strategies."""
    return answers(question), answers(question, strategies="all")


def gap(default: Answer, everything: Answer) -> float:
    """Relative difference of the default's TTFT from that of `all`; 0 if nothing fits in either."""
    return (
        default[1] / everything[1] - 1 if default and everything else float((default is None) != (everything is None))
    )


def cpu_s(question: tuple[str, str, str]) -> float:
    """User and system CPU seconds of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    model, cluster, ctx = question
    command = [sys.executable, "-m", "kvrsim", "plan", model, cluster, "--ctx", ctx]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and write benchmarks/results/defaults.md."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules of an installed package are compiled
    with Pool(jobs=cores()) as pool:
        pairs = pool.run_in_order(both_answers, [(question,) for question in QUESTIONS])
    gaps = [gap(mine.best, other.best) for mine, other in pairs]
    engine_gaps = [gap(mine.on_engines, other.on_engines) for mine, other in pairs]
    seconds = [cpu_s(question) for question in QUESTIONS]
    rows = []
    for question, (mine, other), *gaps_here, cpu in zip(QUESTIONS, pairs, gaps, engine_gaps, seconds, strict=True):
        best, reference = (one.best or ("nothing fits", float("nan")) for one in (mine, other))
        cells = [best[0], f"{best[1]:.4g} s", reference[0], *(f"{one:+.2%}" for one in gaps_here), f"{cpu:.2f} s"]
        rows.append([*question, *cells, ", ".join(mine.unsearched)])
    near, near_on_engines = (sum(one <= NEAR for one in each) for each in (gaps, engine_gaps))
    usual = sum(one <= USUAL_S for one in seconds)
    lines = [
        f"- best within {NEAR:.0%} of the best of all: {near} of {len(QUESTIONS)}; worst {max(gaps):+.2%}",
        f"- best that engines have, likewise: {near_on_engines}; worst {max(engine_gaps):+.2%}",
        f"- at most {USUAL_S:g} s of CPU: {usual} of {len(QUESTIONS)} (target {USUAL}); the longest"
        f" {max(seconds):.2f} s (target {MOST_S:g} s)",
        "",
        *table([*HEADS, "left by the budget"], rows),
    ]
    write_benchmark("defaults", lines)


if __name__ == "__main__":
    main()
