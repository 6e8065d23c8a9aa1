"""What the tests of several ranks run on each of them; started processes import this file by its name."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvrsim.runtime import bench
from kvrsim.runtime.bench import BenchReport, measure
from kvrsim.runtime.check import Difference, compare
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.job import Job, ModelChoice, run_job
from kvrsim.runtime.kept.layers import KeptTokens
from kvrsim.runtime.model import ModelForward, SleepForward, load_model
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.prefill import Prefill
from kvrsim.runtime.transport import EmulatedLink, EmulatedTransport, MessageTraffic, WrappedTransport
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS, kinds, variants

CONTEXT_LEN = 23
SPLIT, SPLIT_LAYERS = ("llama-mha", "llama-gqa", "llama-mqa", "falcon-mqa", "falcon-grouped"), 3
UNEVEN = {1: (23,), 2: (15, 8), 3: (11, 1, 11), 4: (9, 7, 1, 6)}


def within(difference: Difference, tolerance: float) -> bool:
    """Whether logits and KV cache differ by at most so much, and no token differs."""
    return difference.same_tokens and difference.logits <= tolerance and difference.kv_cache <= tolerance


def exact(difference: Difference) -> bool:
    """Whether logits differ by at most 1e-4 of the largest, what layers keep by 1e-4, and no token differs."""
    same = difference.logits <= 1e-4 * difference.logits_scale
    return same and difference.kv_cache <= 1e-4 and difference.same_tokens


def even_plans(context_len: int, num_ranks: int, *, batch: int = 1) -> list[RunPlan]:
    """One rank alone, TSP and KVR with even chunks: what any other partition is compared with."""
    even, whole = Partition.even(context_len, num_ranks), Partition(chunk_lens=(context_len,))
    return [
        RunPlan(strategy="single", partition=whole, batch=batch),
        RunPlan(strategy="tsp", partition=even, batch=batch),
        RunPlan(strategy="kvr", partition=even, batch=batch),
    ]


def model_of(name: str, kernel: str = "sdpa", seed: int = 1) -> Any:
    return load_model((CONFIGS | KINDS)[name], "fp32", "cpu", kernel, seed=seed, init_std=0.2)  # type: ignore[arg-type]


def kvr(*chunk_lens: int, **settings: Any) -> RunPlan:
    return RunPlan(strategy="kvr", partition=Partition(chunk_lens=chunk_lens), **settings)


def plans_of(size: int, kernel: str) -> list[RunPlan]:
    """Even and uneven chunks, one prompt and two, messages announced early and late, and TSP in every way."""
    even, uneven = Partition.even(CONTEXT_LEN, size), Partition(chunk_lens=UNEVEN[size])
    found = [
        RunPlan(strategy="kvr", partition=even, batch=2),
        RunPlan(strategy="kvr", partition=uneven, receives_ahead=None),
        RunPlan(strategy="kvr", partition=uneven, batch=2, receives_ahead=2),
        RunPlan(strategy="single", partition=Partition(chunk_lens=(CONTEXT_LEN,))),
        RunPlan(strategy="tsp", partition=even, batch=2, tsp_keys="truncated"),
        RunPlan(strategy="tsp", partition=uneven, tsp_keys="truncated", gather="collective"),
    ]
    if size > 2:
        found.append(kvr(14, 9))  # the first ranks only look on
    if kernel != "flash":
        found += [
            RunPlan(strategy="tsp", partition=uneven, batch=2, tsp_keys="dense"),
            RunPlan(strategy="tsp", partition=even, tsp_keys="dense", gather="collective"),
        ]
    return found


def exactness(transport: Any) -> list[tuple[str, str, Difference]]:
    """Every model, kernel and plan."""
    found = []
    for name, kernel in variants():
        model = model_of(name, kernel)
        for difference in compare(transport, model, plans_of_model(transport.size, name, kernel)):
            found.append((name, kernel, difference))
    return found


def plans_of_model(size: int, name: str, kernel: str) -> list[RunPlan]:
    """Those of ranks that have the whole model, and of some models parts."""
    return plans_of(size, kernel) + (split_plans(size, name) if kernel == "sdpa" and name in SPLIT else [])


def split_plans(size: int, name: str) -> list[RunPlan]:
    """Pipelines with pieces of any length, and tensor parallelism where the heads divide."""
    whole, found = Partition(chunk_lens=(CONTEXT_LEN,)), []
    if size <= SPLIT_LAYERS:
        found.append(RunPlan(strategy="pp", partition=Partition(chunk_lens=(9, 7, 1, 6)), batch=2))
        found.append(
            RunPlan(strategy="pp", partition=whole, stage_layers=(1,) * (size - 1) + (SPLIT_LAYERS + 1 - size,))
        )
    if size != 3 and name.startswith("llama"):
        found += [RunPlan(strategy="tp", partition=whole, batch=2, gather=gather) for gather in ("ring", "collective")]
    return found


def plans_of_kinds(size: int, kernel: str, least_chunk: int) -> list[RunPlan]:
    """Uneven chunks, one of them as short as can be, longer and shorter than the windows; and TSP."""
    uneven = Partition(chunk_lens=tuple(max(least_chunk, one) for one in UNEVEN[size]))
    keys: Any = "truncated" if kernel == "flash" else "dense"
    return [
        RunPlan(strategy="kvr", partition=uneven, batch=2),
        RunPlan(strategy="kvr", partition=Partition(chunk_lens=uneven.chunk_lens[::-1]), receives_ahead=None),
        RunPlan(strategy="single", partition=Partition(chunk_lens=(CONTEXT_LEN,))),
        RunPlan(strategy="tsp", partition=uneven, tsp_keys=keys, batch=2),
        RunPlan(strategy="tsp", partition=Partition.even(CONTEXT_LEN, size), tsp_keys="truncated", gather="collective"),
    ]


def exactness_of_kinds(transport: Any, kernels: list[str]) -> list[tuple[str, str, Difference]]:
    """Every kind of layer, with these kernels; four tokens are decoded behind each prefill."""
    found = []
    for name, kernel in kinds(*kernels):
        model = model_of(name, kernel)
        plans = plans_of_kinds(transport.size, kernel, Geometry.of(model).least_chunk)
        for difference in compare(transport, model, plans, num_tokens=4):
            found.append((name, kernel, difference))
    return found


class Spoiling(WrappedTransport):
    """A transport whose messages arrive as zeros."""

    def irecv(self, tensor: Any, src: int) -> Any:
        message = self.inner.irecv(tensor, src)

        class Zeroing:
            def wait(self) -> None:
                message.wait()
                tensor.zero_()

        return Zeroing()


def _shift(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = kwargs.get("position_ids")
    if positions is not None and positions.shape[1] > 1 and int(positions[0, 0]) > 0:
        kwargs["position_ids"] = positions + 3
    return args, kwargs


def spoilt(transport: Any, name: str, kernel: str, how: str) -> list[Difference]:
    """A prefill whose prefix is zeroed, or whose later chunks stand in the wrong place."""
    model, plan = model_of(name, kernel), kvr(12, 11)
    if how == "prefix":
        return compare(Spoiling(transport), model, [plan])
    model.base_model.register_forward_pre_hook(_shift, with_kwargs=True)
    return compare(transport, model, [plan])


def staged(transport: Any) -> list[Difference]:
    """Messages by way of scratch in host memory, as for GPUs that gloo cannot reach."""
    transport.staged = True
    return compare(transport, model_of("llama-gqa"), plans_of(transport.size, "sdpa"))


def trouble(kind: str) -> None:
    """What may happen to a rank."""
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hangs":
        time.sleep(1000)
    elif kind == "late":
        time.sleep(1.0)
    elif kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif kind == "error":
        raise ValueError("a shape that does not fit")


def troubled(
    transport: Any, kind: str, rank: int, layer: int, num_runs: int = 1, name: str = "llama-gqa", strategy: Any = "kvr"
) -> Any:
    """A prefill on which one rank gets into trouble when it comes to a layer."""
    note = transport.note

    def troubled_note(reached: int) -> None:
        note(reached)
        if reached == layer:
            trouble(kind)

    if transport.rank == rank:
        transport.note = troubled_note
    whole = strategy in ("single", "tp")
    chunks = Partition(chunk_lens=(CONTEXT_LEN,)) if whole else Partition.even(CONTEXT_LEN, transport.size)
    plan = RunPlan(strategy=strategy, partition=chunks)
    prefill = Prefill(ModelForward(model_of(name)), transport, plan)
    for _ in range(num_runs):
        outcome = prefill.run(random_prompt(101, plan))
    transport.barrier()  # which a rank that nobody waits for must come to, too
    return outcome.tokens


def mismatched(transport: Any, what: str) -> None:
    """The last rank has another plan or another model than the rest."""
    odd = transport.rank == transport.size - 1
    model = model_of("llama-gqa", seed=2 if odd and what == "model" else 1)
    chunks = (12, 11) if odd and what == "plan" else (11, 12)
    Prefill(ModelForward(model), transport, kvr(*chunks))


def silent(transport: Any, rank: int) -> int:
    """One rank never answers, and nobody waits for it."""
    if transport.rank == rank:
        time.sleep(1000)
    return transport.rank


def cores_of(transport: Any) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def rank_of(transport: Any) -> tuple[int, int]:
    return transport.rank, transport.size


def reporting(transport: Any, steps: int) -> int:
    for step in range(steps):
        transport.report(step + 1, steps, "steps")
    return int(transport.rank)


KEPT = KeptTokens(num_key_value_heads=4, head_dim=64, v_head_dim=64)
GEOMETRY = Geometry(model_type="llama", num_attention_heads=4, kept=(KEPT,) * 4)
TOKEN_BYTES = GEOMETRY.token_bytes(0)
BYTES_PER_S = 100e6


def layer_s(chunk: int, prefix: int) -> tuple[float, float]:
    """Seconds of one layer of a slow machine, before the exchange and after."""
    return chunk * 2e-5, chunk * 6e-5 + chunk * (prefix + chunk / 2) * 1e-8


def sleeping(transport: Any, plans: list[RunPlan], latency_s: float, traffic: MessageTraffic | None) -> BenchReport:
    """Real messages over emulated links, with sleeps instead of computing."""
    link = EmulatedLink(bandwidth_bytes_per_s=BYTES_PER_S, latency_s=latency_s)
    emulated = EmulatedTransport(transport, link, traffic)
    return measure(
        emulated, SleepForward(GEOMETRY, layer_s), plans, vocab_size=10, repeats=3, warmups=0, drift_tokens=400
    )


def benched(transport: Any) -> BenchReport:
    """A real model."""
    plans = [*even_plans(CONTEXT_LEN, transport.size), kvr(15, 8)]
    return measure(
        transport, ModelForward(model_of("llama-gqa")), plans, vocab_size=101, repeats=4, warmups=1, drift_tokens=9
    )


def sharing(transport: Any) -> tuple[int, int, bool]:
    """Bytes of K and V that all plans of a measurement hold, and that the largest needs; whether results agree."""
    made: list[Prefill] = []

    class Kept(Prefill):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    forward, plans = ModelForward(model_of("llama-gqa")), [*even_plans(CONTEXT_LEN, transport.size), kvr(15, 8)]
    geometry = forward.geometry
    bench.Prefill = Kept  # type: ignore[misc]
    measure(transport, forward, plans, vocab_size=101, repeats=1, warmups=0, drift_tokens=4)
    shared = [one.cache.buffers for one in made if one.cache is not None]
    held = {
        buffer.data.untyped_storage().data_ptr(): buffer.data.untyped_storage().nbytes()
        for buffers in shared
        for buffer in buffers
        if buffer is not None
    }
    kept = geometry.kept[0]
    assert isinstance(kept, KeptTokens)
    most = max(exchange_of(plan.strategy).tokens_held(plan, transport.rank, transport.size, kept) for plan in plans)
    needed = most * geometry.token_bytes(0) * geometry.num_hidden_layers
    same = True
    for one in made:
        ids = random_prompt(101, one.plan)
        same &= one.run(ids).tokens == Prefill(forward, transport, one.plan).run(ids).tokens
    return sum(held.values()), needed, same


def stopped(transport: Any, rank: int) -> None:
    """One rank is stopped, as by a debugger; the others wait for it."""
    if transport.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.barrier()


def listening(transport: Any) -> list[str]:
    """Addresses at which this process listens, as Linux writes them."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                found.append(local.split(":")[0])
    return found


def interfaces(transport: Any) -> tuple[str, bool]:
    """The interface that gloo uses, and whether there is a process group."""
    return os.environ.get("GLOO_SOCKET_IFNAME", ""), torch.distributed.is_initialized()


class Evil:
    """A pickle that does something when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def sends_a_pickle(transport: Any, path: str) -> None:
    """The last rank speaks as a stranger would."""
    if transport.rank == transport.size - 1:
        transport.exchange(Evil(path))
    transport.exchange({"rank": transport.rank})


def jobs_that_differ(transport: Any, changed: dict[str, Any]) -> None:
    """The last rank has other arguments than the rest."""
    choice = ModelChoice(config=CONFIGS["llama-gqa"], dtype="fp32", attention="sdpa")
    job = Job(model=choice, plans=(kvr(11, 12),), repeats=2, warmups=1, check_logits=False)
    run_job(transport, replace(job, **changed) if transport.rank == transport.size - 1 else job)


def benched_kind(transport: Any, name: str) -> BenchReport:
    """A model whose layers keep different things."""
    plans = [even_plans(CONTEXT_LEN, transport.size)[1], kvr(15, 8)]
    return measure(transport, ModelForward(model_of(name)), plans, vocab_size=101, repeats=1, warmups=0)


def in_blocks(size: int, layers: int) -> list[RunPlan]:
    """KVR in as many query blocks on each rank and layer, more than a chunk has tokens, one, and any number between."""
    partition = Partition(chunk_lens=UNEVEN[size])
    counts = [[1 + (3 * rank + layer) % 5 for layer in range(layers)] for rank in range(size)]
    return [
        RunPlan(strategy="kvr", partition=partition, batch=2, query_blocks=((4,) * layers,) * size),
        RunPlan(strategy="kvr", partition=partition, query_blocks=tuple(map(tuple, counts))),
        RunPlan(strategy="kvr", partition=partition, query_blocks=((64,) * layers,) * size),
    ]


def exactness_in_blocks(transport: Any, names: list[str], kernels: list[str]) -> list[tuple[str, str, Difference]]:
    """These models with these kernels, in query blocks."""
    found = []
    for name in names:
        for kernel in kernels:
            model = model_of(name, kernel)
            plans = in_blocks(transport.size, model.config.num_hidden_layers)
            found += [(name, kernel, one) for one in compare(transport, model, plans, num_tokens=2) or []]
    return found
