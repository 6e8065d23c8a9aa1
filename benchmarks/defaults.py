"""Quality and CPU time of the default answer: 60 random questions to `kvrsim plan`, compared with all strategies.

The questions have 1 to 1024 GPUs and 1k to 10m tokens, with built-in models, clusters and engines. The default compares
strategies within a search budget. The reference compares all strategies that could fit, the rare ones as well, within
4 times the budget. A reference ends after MOST_REFERENCE_S of CPU time; the page then says how many strategies it
compared. Each answer is kept in build/, so the command resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import kvrsim
from kvrsim.arguments import SearchArgs
from planner.candidates import Candidate, Search, search_all, strategies_to_compare
from validate.report import table, write_benchmark

MODELS = (
    *("llama-7b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "mistral-7b", "falcon-7b"),
    *("deepseek-v3.2", "glm-5", "kimi-k2", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b"),
    *("minimax-m2.5", "mixtral-8x7b", "qwen3.5-35b-a3b", "nemotron-3-super-120b-a12b"),
)
NODES = ("h100", "h200", "b200", "h20", "a100-80gb")  # GPUs of nodes of eight
BUSES = ("l40s-pcie", "a100-10gbs-bus")
ENGINES = (None, None, None, "vllm", "sglang", "trtllm")
NUM_QUESTIONS, SEED = 60, 2026
BUDGET = 6.0  # search budget of the reference, seconds
MOST_REFERENCE_S = 20.0  # limit of one reference, CPU seconds
NEAR, MOST_S = 0.02, 8.0  # targets: gap, and CPU seconds
KEPT = Path(__file__).parents[1] / "build"  # folder of answers
HEADS = ("model", "cluster", "context", "engine", "default", "TTFT", "best of all", "gap", "CPU", "not tried", "cut")


class OutOfTimeError(Exception):
    """The reference has used its CPU time."""


class Question(NamedTuple):
    """One question; the cluster states the number of GPUs."""

    model: str
    cluster: str
    gpus: int
    context: int
    engine: str | None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `plan`."""
        options = {"model": self.model, "cluster": self.cluster, "gpus": self.gpus, "ctx": self.context}
        return options if self.engine is None else options | {"engine": self.engine}

    @property
    def words(self) -> list[str]:
        """The options as on the command line."""
        return [word for name, value in self.options.items() for word in (f"--{name}", str(value))]


Answers = dict[Question, Any]


def questions() -> list[Question]:
    """The questions of the benchmark; sizes are log-uniform."""
    rng = random.Random(SEED)
    asked = []
    for _ in range(NUM_QUESTIONS):
        gpus = 2 ** rng.randint(0, 10)
        context = round(1024 * 10240 ** rng.random())
        gpu = rng.choice(NODES)
        cluster = f"{max(1, gpus // 8)}x{min(gpus, 8)}x{gpu}"
        if gpus <= 16 and rng.random() < 0.2:
            cluster = rng.choice(BUSES)
        asked.append(Question(rng.choice(MODELS), cluster, gpus, context, rng.choice(ENGINES)))
    return asked


def default_answer(question: Question) -> dict[str, Any]:
    """The answer of the command, in a process of its own, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "kvrsim", "plan", *question.words, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 1):
        return {"error": done.stderr.strip().splitlines()[-1], "cpu_s": cpu_s}
    said = json.loads(done.stdout)
    not_tried = [name for group in said["not_tried"] for name in group["strategies"]]
    compared = [entry["strategy"] for entry in said["strategies"]]
    named = {*not_tried, *compared, *said["not_compared"]}
    fastest = said["fastest"] and [said["fastest"]["strategy"], said["fastest"]["ttft_s"]]
    return {"best": fastest, "not_tried": not_tried, "named": sorted(named), "cpu_s": cpu_s}


def reference(question: Question) -> dict[str, Any]:
    """The fastest of all strategies that could fit, the names of those that fit, and whether the time was too short."""
    scenario = kvrsim.make_scenario(**question.options)[0]
    compared = strategies_to_compare(scenario, None)
    everything = compared._replace(executions=(*compared.executions, *compared.rare), rare=())
    found: dict[str, Candidate] = {}

    def keep(candidate: Candidate) -> None:
        found[candidate.strategy.name] = candidate

    is_cut = False
    try:
        search_all(everything, Search(options=SearchArgs(search_budget=BUDGET), on_candidate=keep))
    except OutOfTimeError:
        is_cut = True
    fitting = [(candidate.ttft_s, name) for name, candidate in found.items() if candidate.fits]
    best = min(fitting)[::-1] if fitting else None
    names = sorted(name for _, name in fitting)
    return {"best": best, "fitting": names, "tried": len(found), "of": len(everything.executions), "is_cut": is_cut}


def reference_in_time(question: Question) -> dict[str, Any]:
    """The reference, from a process of its own."""
    command = [sys.executable, __file__, "--reference", json.dumps(list(question))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def limited_reference(question: Question) -> dict[str, Any]:
    """The reference of this process, which ends after MOST_REFERENCE_S of CPU time."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_REFERENCE_S)
    return reference(question)


def gap(default: list[Any] | None, everything: list[Any] | None) -> float:
    """Relative difference of the default's TTFT from the reference's; 0 if nothing fits in either."""
    if default is None or everything is None:
        return float((default is None) != (everything is None))
    return float(default[1]) / float(everything[1]) - 1


def write(asked: list[Question], defaults: Answers, references: Answers) -> None:
    """Write benchmarks/results/defaults.md."""
    rows = []
    gaps = []
    unnamed = []
    num_cut = 0
    for question in asked:
        default = defaults[question]
        other = references[question]
        cells = ["nothing fits", ""]
        if default.get("best"):
            name, ttft_s = default["best"]
            cells = [name, f"{ttft_s:.4g} s"]
        if "error" in default:
            cells = [default["error"], ""]
        gaps.append(gap(default.get("best"), other["best"]))
        unnamed += [name for name in other["fitting"] if name not in default.get("named", ())]
        cells += [(other["best"] or ["nothing fits"])[0], f"{gaps[-1]:+.2%}"]
        cells += [f"{default['cpu_s']:.1f} s", str(len(default.get("not_tried", ())))]
        num_cut += other["is_cut"]
        cells += [f"after {other['tried']} of {other['of']}" if other["is_cut"] else ""]
        rows.append([question.model, question.cluster, str(question.context), question.engine or "", *cells])
    near = sum(one <= NEAR for one in gaps)
    seconds = [default["cpu_s"] for default in defaults.values()]
    quick = sum(one <= MOST_S for one in seconds)
    lines = [
        f"The first {len(asked)} of {NUM_QUESTIONS} questions.",
        "",
        f"The reference compares all strategies that could fit, the rare ones as well, with a search budget of"
        f" {BUDGET:g} s, and",
        f"at most {MOST_REFERENCE_S:g} s of CPU. `cut` says after how many strategies a reference ended; strategies"
        " that it had not",
        "searched may be faster than what it found. A strategy that takes long is simulated only if an estimate of it",
        "is at most 1.5 times the best TTFT.",
        "",
        f"- best within {NEAR:.0%} of the reference's best: {near} of {len(gaps)}; worst {max(gaps):+.2%}",
        f"- strategies that fit in a reference and that the answer does not name: {len(unnamed)}",
        f"- at most {MOST_S:g} s of CPU: {quick} of {len(seconds)}; the longest {max(seconds):.1f} s",
        f"- references that were cut: {num_cut}",
        "",
        *table([*HEADS], rows),
    ]
    command = f"python benchmarks/defaults.py --first {len(asked)}"
    write_benchmark("defaults", lines, command if len(asked) < NUM_QUESTIONS else None)


def main() -> None:
    """Answer the questions that are not answered yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=NUM_QUESTIONS, metavar="N", help="ask only the first N questions")
    parser.add_argument("--reference", metavar="QUESTION", help=argparse.SUPPRESS)  # one reference, in this process
    options = parser.parse_args()
    if options.reference is not None:
        print(json.dumps(limited_reference(Question(*json.loads(options.reference)))))
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules of an installed package are compiled
    asked = questions()[: options.first]
    defaults = answered("default", asked, default_answer)
    references = answered("reference", asked, reference_in_time)
    write(asked, defaults, references)


def answered(name: str, asked: list[Question], answer_of: Callable[[Question], Any]) -> Answers:
    """The answers to all questions; those that are kept in build/ are not computed again."""
    path = KEPT / f"defaults-{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    answers = {Question(*kept["question"]): kept["answer"] for kept in map(json.loads, lines)}
    for question in asked:
        if question not in answers:
            answers[question] = answer_of(question)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"question": list(question), "answer": answers[question]}) + "\n")
    return {question: answers[question] for question in asked}


if __name__ == "__main__":
    main()
