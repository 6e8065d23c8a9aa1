"""What tests of the strategies' exchanges run on each rank; started processes import this file by its name."""

from __future__ import annotations

from typing import Any

from kvrsim.errors import InputError
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.bench import measure
from kvrsim.runtime.check import Difference, compare
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.prefill import Prefill
from kvrsim.runtime.transport import EmulatedLink, EmulatedTransport
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.runtime_workers import CONTEXT_LEN, UNEVEN, Spoiling, model_of

STRATEGIES = ("kvr_direct", "zigzag", "ring", "striped", "zigzag_ring", "ulysses")
MODELS = (
    ("llama-mha", "eager"), ("llama-gqa", "flash"), ("llama-mqa", "sdpa"),
    ("falcon-mqa", "flash"), ("falcon-grouped", "sdpa"), ("falcon-mha", "eager"),
)  # fmt: skip
EVEN_LEN = 24  # of every number of ranks a multiple


def plans_of(size: int, geometry: Geometry) -> list[RunPlan]:
    """Two prompts in even chunks, one in uneven chunks, where the strategy takes them."""
    found = []
    for strategy in STRATEGIES:
        even = RunPlan(strategy=strategy, partition=Partition.even(CONTEXT_LEN, size), batch=2)
        uneven = RunPlan(strategy=strategy, partition=Partition(chunk_lens=UNEVEN[size]))
        found += [plan for plan in (even, uneven) if not refused(plan, geometry)]
    return [*found, RunPlan(strategy="zigzag", partition=Partition.even(CONTEXT_LEN, size), gather="collective")]


def refused(plan: RunPlan, geometry: Geometry) -> str:
    """Why the model cannot run the plan; nothing where it can."""
    try:
        exchange_of(plan.strategy).check(plan, geometry)
    except InputError as error:
        return str(error)
    return ""


def exactness(transport: Any) -> list[tuple[str, Difference]]:
    """Every strategy on every model, the last model over emulated links, too."""
    found = []
    for name, kernel in {2: MODELS, 3: MODELS[::2], 4: MODELS[1::2]}[transport.size]:
        model = model_of(name, kernel)
        plans = plans_of(transport.size, Geometry.of(model))
        found += [(f"{name} {kernel}", one) for one in compare(transport, model, plans, num_tokens=3)]
    emulated = EmulatedTransport(transport, EmulatedLink(bandwidth_bytes_per_s=1e9))
    return found + [("emulated", one) for one in compare(emulated, model, plans[::2], num_tokens=1)]


def ahead(transport: Any) -> list[Difference]:
    """Direct sends of layers with windows and states, announced one layer ahead, and all."""
    found = []
    for name in ("gemma3", "qwen3_next", "deepseek_v3", "falcon-alibi"):
        settings: list[dict[str, Any]] = [{"receives_ahead": None, "batch": 2}, {}]
        plans = [
            RunPlan(strategy="kvr_direct", partition=Partition(chunk_lens=UNEVEN[transport.size]), **one)
            for one in settings
        ]
        found += compare(transport, model_of(name, "sdpa"), plans, num_tokens=3)
    return found


def spoilt(transport: Any) -> list[Difference]:
    """Messages that arrive as zeros."""
    model = model_of("llama-gqa")
    return compare(Spoiling(transport), model, plans_of(transport.size, Geometry.of(model))[::2])


def held_bytes(transport: Any, name: str) -> dict[str, list[tuple[int, int]]]:
    """By strategy, rank by rank: bytes of K and V that are kept, and of what one layer at a time needs."""
    forward, found = ModelForward(model_of(name)), {}
    for strategy in STRATEGIES:
        plan = RunPlan(strategy=strategy, partition=Partition.even(EVEN_LEN, transport.size))
        prefill = Prefill(forward, transport, plan)
        assert prefill.cache is not None
        kept = sum(buffer.data.nbytes for buffer in prefill.cache.buffers if buffer is not None)
        own = kept, sum(part.nbytes for part in prefill.exchange.scratch())
        found[strategy] = transport.exchange(own)
    return found


def held_and_shown(transport: Any, name: str) -> tuple[dict[str, list[tuple[int, int]]], dict[str, Timeline]]:
    """The same, and by strategy the timeline of one prefill."""
    plans = [RunPlan(strategy=one, partition=Partition.even(EVEN_LEN, transport.size)) for one in STRATEGIES]
    report = measure(transport, ModelForward(model_of(name)), plans, vocab_size=101, repeats=1, warmups=0)
    return held_bytes(transport, name), dict(zip(STRATEGIES, report.timelines, strict=True))
