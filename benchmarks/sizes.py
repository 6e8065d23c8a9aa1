"""Tensor, pipeline and context sizes that fill 8 and 16 H100, and KV-Runahead in groups beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from _report import write

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.executors.run import run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bytes, format_seconds
from planner.candidates import choose_partition

CLUSTERS = {8: "h100-nvlink", 16: "h100-2x8-ndr400"}
MODELS = {"llama-3-70b": "bf16", "qwen3-235b-a22b": "fp8"}
CONTEXTS = ("16k", "128k", "1024k")
MEASURED = "1.12 to 1.14"  # TP8 over TP4 above 8k tokens, Qwen3.8-Next-Flash on B200 (SGLang #39062)
SCALED = ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3-30b-a3b", "llama-3-70b")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One strategy at one context."""

    ttft_s: float
    pieces: int  # 1 where the context is not cut
    peak_bytes: int  # of the GPU that needs most
    fits: bool


def sizes(num_gpus: int) -> Iterator[str]:
    """Names of all powers of two whose product is the number of GPUs, tensor size first."""
    powers = [2**exponent for exponent in range(num_gpus.bit_length())]
    for tensor, stages, context in product(powers, repeat=3):
        if tensor * stages * context == num_gpus:
            parts = [f"{name}{size}" for name, size in (("tp", tensor), ("pp", stages), ("cp", context)) if size > 1]
            yield "tp" if parts == [f"tp{num_gpus}"] else "+".join(parts)


def run(name: str, model: str, num_gpus: int, context: str) -> Outcome | None:
    """None: the model does not divide so, or the weights alone do not fit."""
    scenario, _ = make_scenario(
        ctx=context, gpus=num_gpus, model=model, cluster=CLUSTERS[num_gpus], dtype=MODELS[model]
    )
    strategy = get_strategy(name)
    try:
        placed = for_strategy(scenario, strategy)
    except InputError:
        return None
    ranks = placed.cluster.num_gpus
    whole = kvrsim.Partition.even(placed.request.new_tokens, 1 if strategy.pipeline is not None else ranks)
    if max(part.weights for part in memory_of(placed, strategy, whole)) > placed.memory_limit.nbytes:
        return None
    strategy, cut = choose_partition(placed, strategy)
    memory = memory_of(placed, strategy, cut)
    return Outcome(
        ttft_s=run_partition(placed, strategy, cut).ttft_s,
        pieces=len(cut.chunk_lens) if strategy.pipeline is not None else 1,
        peak_bytes=max(part.total for part in memory),
        fits=fits(placed, memory),
    )


def table(model: str, num_gpus: int) -> Iterator[str]:
    """TTFT of all sizes; bold: the fastest that fits."""
    names = [*sizes(num_gpus), *(f"tp{size}+kvr-s" for size in (2, 4, 8) if size < num_gpus)]
    found = {(name, context): run(name, model, num_gpus, context) for name in names for context in CONTEXTS}
    best = {
        context: min((one.ttft_s for name in names if (one := found[name, context]) and one.fits), default=0.0)
        for context in CONTEXTS
    }
    yield from ("", f"## {model} ({MODELS[model]}) on {num_gpus} H100 (`{CLUSTERS[num_gpus]}`)", "")
    yield f"| strategy | {' | '.join(f'{context} | peak' for context in CONTEXTS)} |"
    yield "|---|" + "---|" * (2 * len(CONTEXTS))
    for name in names:
        if any(found[name, context] for context in CONTEXTS):
            yield f"| `{name}` | {' | '.join(_cell(found[name, one], best[one]) for one in CONTEXTS)} |"


def _cell(one: Outcome | None, best_s: float) -> str:
    if one is None:
        return "weights do not fit | "
    seconds = format_seconds(one.ttft_s)
    text = f"**{seconds}**" if one.fits and one.ttft_s == best_s else seconds
    pieces = f" ({one.pieces})" if one.pieces > 1 else ""
    return f"{text}{pieces} | {format_bytes(one.peak_bytes)}{'' if one.fits else ', too much'}"


def scaling() -> Iterator[str]:
    """How many times as fast as tensor parallelism on 4 GPUs 8 GPUs are, with tensor parallelism or context ranks."""
    contexts = ("8k", "16k", "32k", "128k")
    yield f"| model | cluster | {' | '.join(contexts)} |"
    yield "|---|---|" + "---|" * len(contexts)
    for cluster, model in product(("b200-nvlink5", "h100-nvlink"), SCALED):
        ratios = []
        for context in contexts:
            four_s = _ttft_s("tp", 4, model, cluster, context) or 0.0
            others = (_ttft_s(name, 8, model, cluster, context) for name in ("tp", "tp4+cp2"))
            ratios.append(" / ".join("-" if other_s is None else f"{four_s / other_s:.2f}" for other_s in others))
        yield f"| {model} | `{cluster}` | {' | '.join(ratios)} |"


def _ttft_s(name: str, gpus: int, model: str, cluster: str, context: str) -> float | None:
    """None: the model does not allow it."""
    with suppress(InputError):
        return kvrsim.simulate(strategy=name, gpus=gpus, ctx=context, model=model, cluster=cluster).ttft_s
    return None


def main() -> None:
    """Measure, and write benchmarks/results/sizes.md."""
    lines = [
        "TTFT in the simulator with the engine `serving` (in parentheses the number of even pieces), and the peak",
        "memory of a GPU. **Bold**: the fastest that fits. Left out: sizes that the model's heads or layers do not",
        "divide into, or whose weights alone do not fit. The GPUs of a stage are neighbours, so that pipelines cross",
        "nodes once a piece, with activations alone.",
    ]
    for model, num_gpus in product(MODELS, CLUSTERS):
        lines += table(model, num_gpus)
    lines += ["", "## Tensor parallelism on 8 GPUs over 4", ""]
    lines += [
        f"SGLang #39062 reports for Qwen3.8-Next-Flash on B200 that TP8 is {MEASURED} times as fast as TP4 above",
        "8k tokens. kvrsim does not have this model, whose indexer and hyper-connections are computed on every rank.",
        "These are the ratios of models that it has, and after the stroke those of `tp4+cp2`, the other way to use 8",
        "GPUs. Nothing is fitted to the reported ratio. -: layers with a state, which context ranks cannot split.",
        "",
        *scaling(),
    ]
    write("sizes", "python benchmarks/sizes.py", lines)


if __name__ == "__main__":
    main()
