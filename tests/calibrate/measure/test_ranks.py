"""Ranks with GPUs, made up: what they receive is there when they have been synchronised."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from calibrate.fit.elementwise import fit_host, fit_pending_share
from calibrate.measure.compute import compute_rows
from calibrate.measure.forward import ComputeSetup, Point
from calibrate.measure.links import LinkBench
from calibrate.measure.ranks import LinkRank, LinkSetup, PendingRanks
from kvrsim.compile import build_program, for_strategy
from kvrsim.executors.batch import run_batch
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import load_profile
from kvrsim.model.load import read_config
from kvrsim.program import Compute, Program
from kvrsim.runtime.ranks import Command, RankSlot
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from tests.building import examples
from tests.building.measurements import row as measured

SMALL = 2**16
SYNCHRONISE_S = 0.003
WAIT_S = 300.0  # for each other


class Tensor(np.ndarray[Any, Any]):
    """As far as the ranks know tensors."""

    def copy_(self, other: Any) -> None:
        self[...] = other

    def zero_(self) -> None:
        self[...] = 0


class Work:
    """What isend and irecv give."""

    def __init__(self, finish: Any) -> None:
        self.finish = finish

    def wait(self) -> None:
        self.finish()


class Wires:
    """What all ranks share."""

    def __init__(self, num_ranks: int, gpus: int) -> None:
        self.num_ranks, self.gpus = num_ranks, gpus
        self.queues: dict[Any, queue.Queue[Any]] = {}
        self.lock = threading.Lock()

    def way(self, *key: Any) -> queue.Queue[Any]:
        with self.lock:
            return self.queues.setdefault(key, queue.Queue())


class Torch:
    """torch, torch.distributed and torch.cuda of one rank."""

    uint8, float32 = np.uint8, np.float32

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank, self.pending = wires, rank, False
        self.distributed = self.cuda = self
        self.set_device_to: int | None = None
        self.devices: set[str] = set()
        self.backends: dict[Any, timedelta] = {}
        self.options: list[Any] = []  # of the groups of the edges
        self.ProcessGroupNCCL = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))

    def set_num_threads(self, count: int) -> None:
        assert count == 1

    def zeros(self, count: int, dtype: Any) -> Tensor:
        return np.zeros(count, dtype).view(Tensor)

    def full(self, shape: tuple[int], value: int, dtype: Any, device: str) -> Tensor:
        self.devices.add(device)
        return np.full(shape, value, dtype).view(Tensor)

    def empty(self, count: int, dtype: Any, device: str) -> Tensor:
        return np.zeros(count, dtype).view(Tensor)

    def device_count(self) -> int:
        return self.wires.gpus

    def set_device(self, device: int) -> None:
        self.set_device_to = device

    def synchronize(self) -> None:
        if self.pending:
            time.sleep(SYNCHRONISE_S)
        self.pending = False

    def init_process_group(self, backend: str, *, timeout: timedelta, **settings: Any) -> None:
        assert (backend, settings["world_size"]) == ("gloo", self.wires.num_ranks)
        assert timeout > timedelta(seconds=60)  # others may take long to import torch

    def new_group(self, ranks: list[int], backend: str, timeout: timedelta, pg_options: Any = None) -> Any:
        self.backends[*ranks, backend] = timeout
        if pg_options is not None:
            self.options.append(pg_options)
        return (*ranks, backend)

    def isend(self, tensor: Tensor, dst: int, group: Any) -> Work:
        self.wires.way(group, self.rank, dst).put(tensor.copy())
        return Work(lambda: None)

    def irecv(self, tensor: Tensor, src: int, group: Any) -> Work:
        def finish() -> None:
            self.pending = True
            tensor.copy_(self.wires.way(group, src, self.rank).get(timeout=WAIT_S))

        return Work(finish)

    def send(self, tensor: Tensor, dst: int, group: Any) -> None:
        self.wires.way("host", group, self.rank, dst).put(tensor.copy())

    def recv(self, tensor: Tensor, src: int, group: Any) -> None:
        tensor.copy_(self.wires.way("host", group, src, self.rank).get(timeout=WAIT_S))

    def all_gather_into_tensor(self, output: Tensor, piece: Tensor, group: Any) -> None:
        ranks = group[:-1]
        for rank in ranks:
            self.wires.way(group, "all", self.rank, rank).put(piece.copy())
        pieces = [self.wires.way(group, "all", rank, self.rank).get(timeout=WAIT_S) for rank in ranks]
        self.pending = True
        output.copy_(np.concatenate(pieces))

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        pieces = np.empty((len(group) - 1, *tensor.shape), tensor.dtype)
        self.all_gather_into_tensor(pieces.reshape(-1).view(Tensor), tensor, group)
        tensor.copy_(pieces.sum(axis=0))


class Threads:
    """Ranks in threads of this process, instead of a pool."""

    def __init__(self, num_ranks: int, gpus: int) -> None:
        self.num_ranks = num_ranks
        wires = Wires(num_ranks, gpus)
        self.torches = [Torch(wires, rank) for rank in range(num_ranks)]
        self.threads = ThreadPoolExecutor(num_ranks)
        made = [self.threads.submit(self._make, rank) for rank in range(num_ranks)]
        for failure in (future.exception() for future in made):
            if isinstance(failure, RuntimeError):  # others may only have waited in vain
                raise failure
        self.ranks = [future.result() for future in made]

    def _make(self, rank: int) -> LinkRank:
        return LinkRank(
            slot=RankSlot(rank=rank, store="unused"),
            setup=LinkSetup(num_ranks=self.num_ranks, backend="nccl", device="cuda", max_bytes=SMALL, timeout_s=10.0),
            torch=self.torches[rank],
        )

    def ask(self, ranks: Collection[int], command: Command, timeout_s: float) -> dict[int, Any]:
        method, arguments = command
        futures = {rank: self.threads.submit(getattr(self.ranks[rank], method), **arguments) for rank in ranks}
        return {rank: future.result(timeout_s) for rank, future in futures.items()}


def test_gpus_are_timed_until_they_have_what_they_receive() -> None:
    ranks = Threads(4, gpus=4)
    bench = LinkBench(LinkSetup(num_ranks=4, backend="nccl", device="cuda", max_bytes=SMALL, timeout_s=10.0), "made")
    bench._pool = ranks  # type: ignore[assignment]
    points = [point for point in bench.points() if point.nbytes == SMALL]
    bench._last_s = dict.fromkeys(points, SYNCHRONISE_S)  # few repeats
    rows = bench.rows({point: [bench.sample(point)] for point in points})
    assert {row.kernel for row in rows} == {"nccl", "nccl_p2p_ring"}
    assert all(SYNCHRONISE_S <= row.median_s < 1.0 for row in rows)
    assert {row.ranks for row in rows if row.operation == "all_gather"} == {2, 4}
    assert {row.kernel for row in rows if row.operation == "all_reduce"} == {"nccl", "nccl_p2p_ring"}
    for rank, torch in enumerate(ranks.torches):
        assert (torch.set_device_to, torch.devices) == (rank, {f"cuda:{rank}"})
        assert {group for group in torch.backends if group[-1] == "gloo"} == {(0, 1, 2, 3, "gloo")}
        assert set(torch.backends.values()) == {timedelta(seconds=8)}
        assert len(torch.options) == 4 * 3  # an edge each
        assert all(one.is_high_priority_stream and 0 < one.config.max_ctas <= 8 for one in torch.options)


def test_what_arrives_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torch, "irecv", lambda self, tensor, src, group: Work(lambda: None))
    monkeypatch.setitem(globals(), "WAIT_S", 1.0)
    with pytest.raises(RuntimeError, match="what rank 0 sent has not arrived"):
        Threads(2, gpus=2)


# -- A layer beside a receive that waits: measured on two ranks, fitted, and used where a rank receives.


def test_the_share_is_what_the_layer_loses_of_its_rate() -> None:
    rows = [measured("layer_alone", 3e-3, chunk=512, prefix=0), measured("layer_pending", 4e-3, chunk=512, prefix=0)]
    assert fit_pending_share(rows) == pytest.approx(0.25)
    assert fit_pending_share([]) == 0.0
    assert fit_pending_share([measured("layer_pending", 4e-3, chunk=64, prefix=0), rows[0]]) == 0.0, "of another shape"
    faster = [
        measured("layer_alone", 3e-3, chunk=512, prefix=0),
        measured("layer_pending", 2.9e-3, chunk=512, prefix=0),
    ]
    assert fit_pending_share(faster) == 0.0, "waiting makes nothing faster"


def test_a_message_takes_the_host_as_long_as_was_measured() -> None:
    layers = [measured("host_layer", 1e-3, dtype=None)]
    rates, operation = fit_host(layers, [], [measured("host_message", 4e-5, dtype=None)])
    assert (rates.message_s, rates.gather_piece_s) == (pytest.approx(4e-5), pytest.approx(8e-5))
    assert operation.num_rows == 2
    gathers = [measured("host_collective", 6e-5, dtype=None, ranks=2)]
    assert fit_host(layers, gathers, [])[0].gather_piece_s == pytest.approx(6e-5)


def scenario_of(gpus: int, share: float = 0.0, message_s: float = 0.0) -> Scenario:
    shipped = load_profile("a100-eager")
    links = replace(shipped.links, pending_share=share, sends="overlap")
    profile = replace(shipped, links=links, host=replace(shipped.host, message_s=message_s))
    return kvrsim.make_scenario(ctx="8k", gpus=gpus, profile=profile, cluster="a100-nvlink")[0]


def even(scenario: Scenario, strategy: str) -> Program:
    chunks = Partition.even(scenario.request.new_tokens, scenario.num_gpus).chunk_lens
    return build_program(scenario, STRATEGIES[strategy], [np.array([float(chunk)]) for chunk in chunks])


def layer_s(program: Program, rank: int) -> float:
    return sum(float(op.device_s[0]) for op in program.layers[0][rank] if isinstance(op, Compute))


@pytest.mark.parametrize("strategy", ["kvr-e", "kvr-direct"])
def test_ranks_that_receive_compute_slower_and_the_first_one_does_not(strategy: str) -> None:
    plain, slowed = (even(scenario_of(4, share), strategy) for share in (0.0, 0.25))
    assert layer_s(slowed, 0) == layer_s(plain, 0)
    for rank in (1, 2, 3):
        assert layer_s(slowed, rank) == pytest.approx(layer_s(plain, rank) / 0.75)


def simulated_s(scenario: Scenario, strategy: str) -> float:
    one = for_strategy(scenario, STRATEGIES[strategy])
    return float(run_batch(even(one, strategy), one.cluster)[-1, 0])


@given(st.floats(0.0, 0.6), st.floats(0.0, 1e-4))
@examples(25)
def test_a_chain_is_slower_by_at_most_what_its_ranks_lose(share: float, message_s: float) -> None:
    plain, slowed = scenario_of(4), scenario_of(4, share, message_s)
    before_s, after_s = simulated_s(plain, "kvr-e"), simulated_s(slowed, "kvr-e")
    calls = 4 * 2 * plain.model.num_hidden_layers * message_s
    assert before_s * (1 - 1e-12) <= after_s <= before_s / (1 - share) + calls + 1e-12


def test_two_ranks_time_a_layer_alone_and_beside_a_receive_that_waits() -> None:
    """On a CPU, over gloo; the receive is answered only after the layer."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 3, "vocab_size": 128, "intermediate_size": 96}
    model = read_config(JsonObject(fields=config, where="test"), "tiny")
    setup = ComputeSetup(
        model=model, config=config, device="cpu", dtype="fp32", kernels=("sdpa",), max_context=256, threads=1
    )
    at = Point(kernel="sdpa", chunk=64, prefix=0, kind="pending")
    ranks = PendingRanks(setup)
    try:
        samples = [ranks.sample(at) for _ in range(2)]
    finally:
        ranks.close()
    assert all(set(sample) == {"layer_alone", "layer_pending"} for sample in samples)
    assert all(seconds > 0 for sample in samples for seconds in sample.values())
    rows = compute_rows({at: samples}, model, dtype="fp32", device="x")
    assert [(row.operation, row.chunk, row.prefix) for row in rows] == [
        ("layer_alone", 64, 0),
        ("layer_pending", 64, 0),
    ]
    assert 0.0 <= fit_pending_share(rows) <= 0.9
