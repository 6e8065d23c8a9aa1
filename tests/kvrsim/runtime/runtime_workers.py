"""Functions that tests run on each of several ranks; new processes import this file by its name."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvrsim.errors import InputError
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.exchange import exchange_of, make_exchange
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.measure import Stopwatch, measure, prompt_of, run_job
from kvrsim.runtime.model import ModelForward, load_model
from kvrsim.runtime.plan import Difference, Job, ModelChoice, Report, RunPlan
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS, kernels_of

CONTEXT_LEN = 23
EVEN_LEN = 24  # a multiple of every number of ranks
UNEVEN = {1: (23,), 2: (15, 8), 3: (11, 1, 11), 4: (9, 7, 1, 6)}
PLAIN = ("kvr", "kvr_direct", "tsp", "zigzag", "ring", "striped", "zigzag_ring", "ulysses")  # one chunk per rank

LLAMA = ModelChoice(config=CONFIGS["llama-gqa"], dtype="fp32", attention="sdpa")

Result = tuple[str, str, str, Difference]  # model, kernel, plan


def exact(difference: Difference, tolerance: float = 1e-4) -> bool:
    """Whether the error of the logits, relative to the largest one, is within the tolerance, and tokens are equal."""
    return difference.logits <= tolerance * difference.logits_scale and difference.first_unequal is None


def model_of(name: str, kernel: str = "sdpa", seed: int = 1) -> Any:
    return load_model((CONFIGS | KINDS)[name], "fp32", "cpu", kernel, seed)  # type: ignore[arg-type]


def run_plan(strategy: str, *chunk_lens: int, **settings: Any) -> RunPlan:
    return RunPlan(strategy=strategy, partition=Partition(chunk_lens=chunk_lens), **settings)


def kvr(*chunk_lens: int, **settings: Any) -> RunPlan:
    return run_plan("kvr", *chunk_lens, **settings)


def four_plans() -> list[RunPlan]:
    """Plans for two ranks: one rank alone, TSP, and two of KVR."""
    return [run_plan("single", CONTEXT_LEN), run_plan("tsp", 12, 11), kvr(12, 11), kvr(15, 8)]


def plans_of(size: int, geometry: Geometry) -> list[RunPlan]:
    """Plans for every strategy that the model can run: even and uneven chunks, one and two prompts, all settings."""
    least = geometry.least_chunk
    uneven = tuple(max(least, one) for one in UNEVEN[size])
    even = Partition.even(CONTEXT_LEN, size).chunk_lens
    layers = geometry.num_hidden_layers
    blocks = tuple(tuple(1 + (3 * rank + layer) % 5 for layer in range(layers)) for rank in range(size))
    plans = [run_plan("single", CONTEXT_LEN)]
    for name in PLAIN:
        plans += [run_plan(name, *even, batch=2), run_plan(name, *uneven), run_plan(name, *uneven[::-1], batch=2)]
    plans += [
        run_plan("tsp", *even, gather="collective"),
        run_plan("zigzag", *even, gather="collective"),
        run_plan("kvr", *uneven, query_blocks=blocks),
        run_plan("kvr", *even, batch=2, query_blocks=((64,) * layers,) * size),
        run_plan("single", CONTEXT_LEN, output_tokens=5),
        run_plan("kvr", *uneven, batch=2, output_tokens=5),
        run_plan("kvr_direct", *uneven, output_tokens=5),
        run_plan("tsp", *even, output_tokens=5),
        run_plan("tp", CONTEXT_LEN, batch=2, output_tokens=5),
        run_plan("tp", CONTEXT_LEN, gather="collective"),
        run_plan("pp", 9, 7, 1, 6, batch=2, stage_layers=Partition.even(max(layers, size), size).chunk_lens),
        run_plan("pp", CONTEXT_LEN, stage_layers=(1,) * (size - 1) + (layers + 1 - size,)),
    ]
    return [plan for plan in plans if not refused(plan, geometry, size)]


def refused(plan: RunPlan, geometry: Geometry, size: int = 2) -> str:
    """The reason why the model cannot run the plan on `size` ranks, or "" if it can."""
    try:
        exchange_of(plan.strategy).check(plan, geometry)
    except InputError as error:
        return str(error)
    if plan.strategy in ("tp", "ulysses") and 4 % size:
        return "four heads do not divide"
    return ""


def compare(transport: Any, model: Any, plans: list[RunPlan]) -> list[tuple[str, Difference]]:
    """Label of each plan and its difference from the result of one process."""
    results = []
    for batch in sorted({plan.batch for plan in plans}):
        alike = [plan for plan in plans if plan.batch == batch]
        job = Job(model=LLAMA, plans=tuple(alike), repeats=0, warmups=0)
        results += [(one.plan.label, one.difference) for one in measure(transport, ModelForward(model), job).timings]
    assert len(results) == len(plans)
    return results  # type: ignore[return-value]


def exactness(transport: Any, models: list[tuple[str, str]], *, shared: bool = False) -> list[Result]:
    """Difference of every plan from one process, for these models and kernels.

    shared: the kernels of a model share its plans, as if dealt in turn, so that each plan runs with one of them.
    """
    results = []
    for name, kernel in models:
        model = model_of(name, kernel)
        plans = plans_of(transport.size, Geometry.of(model))
        if shared:
            kernels = kernels_of(name)
            plans = plans[kernels.index(kernel) :: len(kernels)]
        results += [(name, kernel, *one) for one in compare(transport, model, plans)]
    return results


def over_other_transports(transport: Any, *, staged: bool) -> list[tuple[str, Difference]]:
    """Differences of plans whose messages use this transport, or host memory as for GPUs that gloo cannot access."""
    model = model_of("llama-gqa")
    before = transport.staged
    transport.staged = staged
    try:
        return compare(transport, model, plans_of(transport.size, Geometry.of(model))[:: 1 if staged else 2])
    finally:
        transport.staged = before
        transport._scratch.clear()


def spoil(transport: Any) -> None:
    """Make all messages arrive as zeros."""
    irecv = transport.irecv

    def zeroing(tensor: Any, src: int) -> Any:
        message = irecv(tensor, src)
        return SimpleNamespace(wait=lambda: (message.wait(), tensor.zero_()))

    transport.irecv = zeroing


def _shift(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = kwargs.get("position_ids")
    if positions is not None and positions.shape[1] > 1 and int(positions[0, 0]) > 0:
        kwargs["position_ids"] = positions + 3
    return args, kwargs


def spoilt(transport: Any, models: list[tuple[str, str]]) -> list[Result]:
    """Differences of plans whose messages arrive as zeros, and of a chain whose later chunks have wrong positions."""
    results, whole = [], ("single", "tp", "pp")
    for name, kernel in models:
        model = model_of(name, kernel)
        plans = [plan for plan in plans_of(transport.size, Geometry.of(model)) if plan.strategy not in whole]
        plans = [plan for plan in plans if plan.gather == "ring"]
        spoil(transport)
        results += [(name, kernel, *one) for one in compare(transport, model, plans)]
        del transport.irecv
        model.base_model.register_forward_pre_hook(_shift, with_kwargs=True)
        results += [(name, kernel, *one) for one in compare(transport, model, [kvr(12, 11)])]
    return results


def memory_and_messages(transport: Any, name: str) -> tuple[dict[str, list[int]], dict[str, Timeline]]:
    """For each strategy: bytes of K and V on each rank, and a timeline."""
    forward, sizes = ModelForward(model_of(name)), {}
    plans = [RunPlan(strategy=one, partition=Partition.even(EVEN_LEN, transport.size)) for one in PLAIN]
    report = measure(transport, forward, Job(model=LLAMA, plans=tuple(plans), repeats=1, warmups=0, check_logits=False))
    for plan in plans:
        exchange = make_exchange(forward, transport, plan)
        assert exchange.cache is not None
        kept = sum(buffer.data.nbytes for buffer in exchange.cache.buffers if buffer is not None)
        sizes[plan.strategy] = transport.exchange(kept)
    return sizes, {one.plan.strategy: one.timeline for one in report.timings if one.timeline is not None}


def trouble(kind: str) -> None:
    """Cause a failure of this rank."""
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hangs":
        time.sleep(1000)
    elif kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif kind == "error":
        raise ValueError("a shape that does not fit")


def troubled(transport: Any, kind: str, rank: int, layer: int, strategy: str = "kvr") -> Any:
    """Run a prefill in which one rank fails when it reaches a layer."""
    note = transport.slot.note

    def troubled_note(reached: int) -> None:
        note(reached)
        if reached == layer:
            trouble(kind)

    if transport.rank == rank:
        transport.slot = replace(transport.slot, note=troubled_note)
    plan = RunPlan(strategy=strategy, partition=Partition.even(CONTEXT_LEN, 1 if strategy == "tp" else transport.size))
    forward = ModelForward(model_of("llama-gqa"))
    make_exchange(forward, transport, plan).prefill(prompt_of(forward, plan, 0))
    transport.barrier()  # a failed rank must reach the barrier, too, even if no rank waits for its messages


def mismatched(transport: Any, changed: dict[str, Any]) -> None:
    """Run a job whose arguments differ on the last rank."""
    job = Job(model=LLAMA, plans=(kvr(11, 12),), repeats=2, warmups=1, check_logits=False)
    run_job(transport, replace(job, **changed) if transport.rank == transport.size - 1 else job)


def silent(transport: Any, rank: int) -> int:
    """One rank never answers, although no rank waits for it."""
    if transport.rank == rank:
        time.sleep(1000)
    return int(transport.rank)


def cores_of(transport: Any) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def gathered(transport: Any) -> tuple[list[float], list[str], list[float], list[str]]:
    """Gather equal pieces, then unequal ones; return the rows, and the scratch memory that was used for each."""
    results: list[Any] = []
    for boundaries in ((0, 2, 4), (0, 1, 4)):
        whole = torch.full((5, 1), 9.0)  # a row after those that are gathered stays as it is
        whole[boundaries[transport.rank] : boundaries[transport.rank + 1]] = transport.rank + 1.0
        transport._scratch.clear()
        transport.all_gather(whole, boundaries)
        results += [whole.flatten().tolist(), sorted(key[0] for key in transport._scratch)]
    return tuple(results)  # type: ignore[return-value]


def rank_of(transport: Any) -> tuple[int, int]:
    return transport.rank, transport.size


def reporting(transport: Any, steps: int) -> int:
    for step in range(steps):
        transport.slot.report(step + 1, steps, "steps")
    return int(transport.rank)


def benched(transport: Any, name: str = "llama-gqa") -> Report:
    """Measure four plans."""
    job = Job(model=LLAMA, plans=tuple(four_plans()), repeats=4, check_logits=False)
    return measure(transport, ModelForward(model_of(name)), job)


def sharing(transport: Any) -> tuple[int, bool]:
    """Bytes of K and V of all plans together, and whether the results equal those of each plan alone."""
    forward, plans = ModelForward(model_of("llama-gqa")), four_plans()
    watch, storages, same = Stopwatch(transport, forward, plans), {}, True
    for plan in plans:
        watch.ttft_s(plan)
        shared, alone = watch.exchange(plan), make_exchange(forward, transport, plan)
        alone.prefill(prompt_of(forward, plan, 0))
        same &= shared.logits is None or torch.equal(shared.logits, alone.logits)
        for buffer in () if shared.cache is None else shared.cache.buffers:
            assert buffer is not None
            storage = buffer.data.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()), same


def listening(transport: Any) -> tuple[list[str], str, bool]:
    """Addresses on which this process listens, gloo's interface, and whether a process group exists."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    addresses = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                addresses.append(local.split(":")[0])
    return addresses, os.environ.get("GLOO_SOCKET_IFNAME", ""), torch.distributed.is_initialized()


class Evil:
    """An object whose pickle creates a folder when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def sends_a_pickle(transport: Any, path: str) -> None:
    """Send, from the last rank, a pickle that runs code when it is read."""
    transport.exchange(Evil(path) if transport.rank == transport.size - 1 else {"rank": transport.rank})
