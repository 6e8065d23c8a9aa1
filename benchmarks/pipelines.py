"""Pieces of a pipeline in the simulator: even pieces, SGLang's dynamic chunking, and searched pieces.

Dynamic chunking as in SGLang (python/sglang/srt/managers/scheduler_pp_mixin.py, read in 2026): a l^2 + b l + c is
fitted to latencies of whole prompts of l tokens. A piece after L tokens has the length x for which the fitted latency
grows as much as over the first piece. A smooth factor (SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR, 0.75) moves x towards the
length of the first piece; x is at least a quarter of that length, rounded down to a multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.execution import Execution, place
from kvrsim.execution import execute as executed
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from planner.search.minimise import Evaluator
from planner.search.pipeline import PAGE, search_pipeline, with_step_time
from planner.search.search import SearchResult
from validate.report import write_benchmark

EVEN, SEARCHED = get_strategy("pp"), get_strategy("pp-s")
MODELS = ("qwen3-8b", "qwen2.5-7b", "llama-3-8b", "llama-3-70b")
FLOORS = (4096, PAGE)  # minimum number of tokens of a piece
SMOOTH = 0.75  # SGLang's default smooth factor
FIXED = (4096, 8192, 16384)  # tokens per piece: usual values of SGLang's chunked_prefill_size
TARGET = 0.08  # target: minimum relative gain of searched pieces over even pieces
_FITTED, _MOST = 24, 64  # number of whole prompts in the fit; largest number of pieces


def fitted(scenario: Scenario, longest: int) -> tuple[float, float]:
    """Quadratic and linear coefficients of a prompt's latency in the first stage, fitted as in SGLang."""
    lengths = np.linspace(longest / _FITTED, longest, _FITTED).astype(int)
    seconds = []
    for length in lengths:
        short, _ = _with_context(scenario, int(length))
        seconds.append(Evaluator(executed(short, EVEN)).one((int(length),)) / short.cluster.num_gpus)
    design = np.column_stack([lengths.astype(float) ** 2, lengths.astype(float), np.ones(len(lengths))])
    square, straight, _ = np.linalg.lstsq(design, np.array(seconds), rcond=None)[0]
    return float(square), max(0.0, float(straight))


def _with_context(scenario: Scenario, length: int) -> tuple[Scenario, int]:
    from dataclasses import replace

    return replace(scenario, request=replace(scenario.request, context_len=length)), length


def dynamic(scenario: Scenario, first: int, smooth: float, fit: tuple[float, float]) -> tuple[int, ...]:
    """SGLang's pieces, of which the first has `first` tokens."""
    square, straight = fit
    tokens = scenario.request.new_tokens
    target = square * first * first + straight * first
    pieces = [min(first, tokens)]
    while (done := sum(pieces)) < tokens:
        slope = 2 * square * done + straight
        exact = (math.sqrt(slope * slope + 4 * square * target) - slope) / (2 * square)
        piece = max(int(first + smooth * (exact - first)), first // 4) // PAGE * PAGE
        pieces.append(min(max(piece, PAGE), tokens - done))
    return tuple(pieces)


class Setting:
    """A model, and how the engine's step time is computed; searches are cached."""

    def __init__(self, model: str, steps: Callable[[Execution], Execution], title: str) -> None:
        scenario, _ = make_scenario(ctx="128k", gpus=8, model=model, cluster="h100-nvlink")
        self.model, self.title, self.placed = model, title, steps(place(scenario, SEARCHED)).placed
        self.even, self.tokens = Evaluator(executed(self.placed, EVEN)), self.placed.request.new_tokens
        self._found: dict[int, SearchResult] = {}

    def found(self, floor: int) -> SearchResult:
        """The best pieces of at least `floor` tokens."""
        if floor not in self._found:
            self._found[floor] = search_pipeline(executed(self.placed, SEARCHED), least_piece=floor)
        return self._found[floor]

    def rows(self) -> list[str]:
        """Rows with the best pieces of each kind, for each of FLOORS."""
        fit, lines = fitted(self.placed, self.tokens // 4), []
        for floor in FLOORS:
            found = self.found(floor)
            numbers = sorted({round(float(one)) for one in np.geomspace(2, min(self.tokens // floor, _MOST * 8), 24)})
            even_s, number = min((self._even_s(one), one) for one in numbers)
            # SGLang's guide: first piece 2 or 3 times the best even one; all pieces at least a quarter of the first.
            base = self.tokens // number
            asked = [(times * base // PAGE * PAGE, smooth) for times in (2, 3) for smooth in (0.65, SMOOTH, 0.85)]
            tried = {one: dynamic(self.placed, *one, fit) for one in asked}
            tuned_s, (first, smooth) = min((self.even.one(pieces), one) for one, pieces in tried.items())
            default_s = self.even.one(dynamic(self.placed, 2 * base // PAGE * PAGE, SMOOTH, fit))
            lines.append(
                f"| {self.model} | {self.title} | {floor} | {even_s:.3f} s ({number}) | {default_s:.3f} s |"
                f" {tuned_s:.3f} s ({first}, {smooth}) | {found.ttft_s:.3f} s ({len(found.partition.chunk_lens)}) |"
                f" {even_s / found.ttft_s - 1:+.1%} | {default_s / found.ttft_s - 1:+.1%} |"
                f" {tuned_s / found.ttft_s - 1:+.1%} | {found.report.seconds:.1f} |"
            )
        return lines

    def fixed_rows(self) -> list[str]:
        """Rows with pieces of a fixed length, compared with searched pieces of at least that length."""
        lines, free_s = [], self.found(PAGE).ttft_s
        for length in FIXED:
            even_s = self._even_s(self.tokens // length)
            found = self.found(length)
            gain = even_s / found.ttft_s - 1
            verdict = "met" if gain >= TARGET else "not met"
            layers = ",".join(map(str, found.strategy.stage_layers or ()))
            shown = f"{found.ttft_s:.3f} s ({len(found.partition.chunk_lens)}; {layers})"
            lines.append(
                f"| {self.model} | {self.title} | {length} | {even_s:.3f} s | {shown} | {gain:+.1%} |"
                f" {verdict} | {even_s / free_s - 1:+.1%} |"
            )
        return lines

    def _even_s(self, number: int) -> float:
        return self.even.one(Partition.even(self.tokens, number).chunk_lens)


_INTRODUCTION = """131,072 tokens on 8 H100 (`h100-nvlink`), TTFT in the simulator.

## Pieces of a fixed length

Even: pieces of this length, as an engine runs them (`--chunked-prefill-size`), and even layers. `pp-s`: searched pieces
of at least this length (number of pieces; layers of the stages). Faster: by how much even pieces take longer.
Target: 8 % faster. Any length: what searched pieces of 64 tokens and more
gain over the even ones.

The last piece attends to the whole context and then passes all other stages alone. A floor of the pieces keeps it as
long as the last of the even ones, so that what is left to gain is fewer steps and layers that suit the stages better.
Layers that the stages do not divide evenly leave much of it (36 and 28 layers on 8 stages), those that they do little
(32 and 80 layers).

| model | step of the engine | pieces | even | `pp-s` | faster | target | any length |
|---|---|---|---|---|---|---|---|---|---|"""
_DYNAMIC = """
## The best of each kind

Even: the best number of even pieces (it). Dynamic: SGLang's dynamic chunking, whose first piece is twice the best even
one, smooth factor 0.75, and the best of first pieces twice and three times the best even one and of smooth factors
0.65, 0.75, 0.85. Dynamic chunking has no floor but a quarter of the first piece. `pp-s`: searched (number of pieces);
the columns after it are how much longer the others take.

| model | step of the engine | pieces at least | even | dynamic | dynamic, tuned | `pp-s` | even | dynamic | tuned | \
search |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Measure, and write benchmarks/results/pipelines.md."""
    kinds: tuple[tuple[Callable[[Execution], Execution], str], ...] = (
        (lambda execution: execution, "central"),
        (lambda execution: with_step_time(execution, "mean"), "mean"),
    )
    settings = [Setting(model, steps, title) for model in MODELS for steps, title in kinds]
    fixed, best = [_INTRODUCTION], [_DYNAMIC]
    for setting in settings:
        fixed += setting.fixed_rows()
        best += setting.rows()
    write_benchmark("pipelines", [*fixed, *best])


if __name__ == "__main__":
    main()
