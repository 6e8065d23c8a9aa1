"""The choice of executors: fast ways are taken where they suit, and blocks have a limited size."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.batch import _Evaluation, run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import _KEPT, Runner, check_executor, finish_s, run_partition, run_program, ttft_s
from kvrsim.hardware import Cluster, load_cluster
from kvrsim.noise import Noise, NoiseDraw
from kvrsim.program import AllGather, Array, Compute, Op, Program, Recv, Send
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES, get_strategy
from tests.building import executed


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """A list that grows with each call of the owner's function."""
    run, calls = getattr(owner, name), list[str]()

    def counted(*values: Any, **options: Any) -> Any:
        calls.append(name)
        return run(*values, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "number", "strategy", "options"),
    [
        ("run", "run_batch", 0, "kvr-s", {}),  # chains are run by a recurrence
        ("run", "run_batch", 0, "kvr-e", {"gpus": 2}),
        ("run", "build_program", 0, "pp", {"profile": "a100-flash"}),
        ("pipeline._PipelineRun", "_in_steps", 0, "pp", {"profile": "a100-flash"}),
        ("bus._Graph", "take", 5, "tsp", {"topology": "bus"}),  # prologue, four of 32 layers
        ("bus._Run", "_deliver", 1, "kvr-s", {"topology": "bus", "profile": "a100-flash"}),  # only at the start
    ],
)
def test_fast_ways_are_taken(
    owner: str, name: str, number: int, strategy: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, *cls = owner.split(".")
    holder: Any = importlib.import_module(f"kvrsim.executors.{module}")
    calls = calls_of(monkeypatch, getattr(holder, *cls) if cls else holder, name)
    scenario = place(make_scenario(**{"ctx": 4000, "gpus": 4} | options)[0], get_strategy(strategy)).placed
    gpus = scenario.cluster.num_gpus
    finish_s(executed(scenario, get_strategy(strategy)), np.full((1, gpus), 4000.0 / gpus))
    assert len(calls) == number


@pytest.mark.parametrize(
    ("layers", "pieces", "work"),
    [(2, (2, 2, 2), (1, 0, 1)), (3, (1, 1, 0, 0), (1, 1, 1, 1)), (7, (0, 1, 2, 2), (2, 3, 4, 4))],
)
def test_layers_are_run_until_they_advance_alike(
    layers: int, pieces: tuple[int, ...], work: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times advance alike over one layer or a cycle of several; one cycle shows it if no host delays anything."""
    calls = calls_of(monkeypatch, _Evaluation, "_run")
    layer = tuple(
        (AllGather(nbytes=np.array([float(nbytes)])), Compute(name="work", device_s=np.array([float(work_s)])))
        for nbytes, work_s in zip(pieces, work, strict=True)
    )
    none: tuple[tuple[Op, ...], ...] = ((),) * len(layer)
    program = Program(strategy="test", prologue=none, layers=(layer,), layer_kind_index=(0,) * 49, epilogue=none)
    cluster = load_cluster(num_gpus=len(layer)).with_link(bandwidth_bytes_per_s=1.0, latency_s=0.0)
    assert run_batch(program, cluster)[:, 0].tolist() == list(EventSimulation(program, cluster).finish_s)
    assert len(calls) == layers + 2, "prologue, layers, epilogue"


@pytest.mark.parametrize(("ranks", "layers"), [(2, 3), (3, 4), (4, 5), (5, 49), (6, 7)])
def test_a_delay_goes_around_a_ring(ranks: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank begins late; each layer delays the next rank. A cycle of five layers is not looked for."""
    calls = calls_of(monkeypatch, _Evaluation, "_run")
    layer = tuple(
        (Send(dst=(rank + 1) % ranks, nbytes=np.ones(1)), Recv(src=(rank - 1) % ranks)) for rank in range(ranks)
    )
    late = tuple((Compute(name="work", device_s=np.full(1, float(rank == 0))),) for rank in range(ranks))
    none: tuple[tuple[Op, ...], ...] = ((),) * ranks
    program = Program(strategy="test", prologue=late, layers=(layer,), layer_kind_index=(0,) * 49, epilogue=none)
    cluster = load_cluster(num_gpus=ranks).with_link(bandwidth_bytes_per_s=1.0, latency_s=1.0)
    finish_s = run_batch(program, cluster)[:, 0].tolist()
    assert finish_s == list(EventSimulation(program, cluster).finish_s)
    assert finish_s == [98.0 + (rank == 49 % ranks) for rank in range(ranks)]
    assert len(calls) == layers + 2, "prologue, layers, epilogue"


@pytest.mark.parametrize(
    ("name", "options", "samples", "rows"),
    [
        ("kvr-s", {"gpus": 2}, 1, 2**14),  # arrays of a chain take 256 KiB
        ("kvr-s", {"gpus": 8}, 1, 2**12),
        ("kvr-s", {"gpus": 512}, 1, 64),
        ("kvr-s", {"gpus": 8}, 2**12, 2),
        ("tsp", {"gpus": 2}, 1, 2**13),
        ("tsp", {"gpus": 32}, 1, 2**13),
        ("tsp", {"gpus": 2}, 2**10, 8),
        ("tsp", {"gpus": 2}, 2**20, 1),
        ("tsp", {"gpus": 2, "topology": "bus"}, 1, 2**13),  # 32 layers, 2 x 2 messages each
        ("tsp", {"gpus": 64, "topology": "bus"}, 1, 8),  # 32 layers, 64 x 64 messages each
        ("kvr-s", {"gpus": 64, "topology": "bus"}, 1, 512),
        ("tsp", {"gpus": 256, "topology": "bus"}, 1, 1),
    ],
)
def test_blocks_have_a_limited_size(name: str, options: dict[str, Any], samples: int, rows: int) -> None:
    """Partitions that are evaluated together: as many as the caches and the memory allow."""
    strategy = STRATEGIES[name]
    runner = Runner(executed(place(make_scenario(ctx=1000, **options)[0], strategy).placed, strategy))
    assert runner.rows_at_once(samples) == rows
    assert [block.shape[1] for block in runner.blocks(np.ones((2 * rows + 1, 2)), samples)] == [rows, rows, 1]


def test_blocks_hold_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, shapes = place(make_scenario(ctx=1000, gpus=2)[0], STRATEGIES["kvr-s"]).placed, list[tuple[int, ...]]()
    run = Runner.finish_s

    def noted(*values: Any, **options: Any) -> Any:
        finish_s = run(*values, **options)
        shapes.append(finish_s.shape)
        return finish_s

    monkeypatch.setattr(Runner, "finish_s", noted)
    rows = np.array([[first, 1000.0 - first] for first in range(1, 1000)] * 20)
    times_s = ttft_s(executed(scenario, STRATEGIES["kvr-s"]), rows)
    assert shapes == [(1, 2**14), (1, len(rows) - 2**14)]  # only the last rank, in blocks
    assert times_s.shape == (len(rows),)
    alone_s = [ttft_s(executed(scenario, STRATEGIES["kvr-s"]), row[None])[0] for row in rows[:3]]
    assert times_s[:3] == pytest.approx(np.array(alone_s), rel=1e-11, abs=0)


@pytest.mark.parametrize(("ranks", "layers", "sizes"), [(32, 32, [32, 32, 1]), (64, 512, [1] * 65)])
def test_samples_on_a_bus_are_run_in_groups(
    ranks: int, layers: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group has at most a million messages, or one sample."""
    none: tuple[tuple[Op, ...], ...] = ((),) * ranks
    program = Program(strategy="test", prologue=none, layers=(none,), layer_kind_index=(0,) * layers, epilogue=none)
    draws = list[NoiseDraw]()

    def noted(program: Program, cluster: Cluster, draw: NoiseDraw) -> Array:
        draws.append(draw)
        return np.full((program.num_ranks, draw.num_samples), float(len(draws)))

    monkeypatch.setattr("kvrsim.executors.bus.run_shared", noted)
    cluster = make_scenario(ctx=1000, gpus=ranks, topology="bus")[0].cluster
    draw = NoiseDraw(Noise(compute_jitter=0.1), ranks, seed=0, samples=range(65))
    finish_s = run_program(program, cluster, draw)
    assert [one.num_samples for one in draws] == sizes
    assert finish_s[0, 0].tolist() == np.repeat(np.arange(1.0, len(sizes) + 1), sizes).tolist()


def test_freed_memory_is_kept() -> None:
    """Glibc keeps freed memory after an array of at least 128 KiB and at most 32 MiB."""
    assert 2**24 <= 8 * _KEPT < 2**25


def test_one_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event executor runs only for a timeline, for noise, or on request."""
    calls = calls_of(monkeypatch, EventSimulation, "__init__")
    strategy, draw = STRATEGIES["tsp"], NoiseDraw(Noise(compute_jitter=0.1), 2, seed=0)
    scenario = place(make_scenario(ctx=1000, gpus=2)[0], strategy).placed
    partition = Partition.even(1000, 2)
    quiet_s = run_partition(executed(scenario, strategy), partition).ttft_s
    assert not calls
    assert run_partition(executed(scenario, strategy), partition, executor="event").ttft_s == pytest.approx(
        quiet_s, rel=1e-11
    )
    timed = run_partition(executed(scenario, strategy), partition, timeline=True)
    assert timed.timeline is not None
    assert timed.timeline.end_s == pytest.approx(quiet_s, rel=1e-11)
    assert run_partition(executed(scenario, strategy), partition, draw=draw).ttft_s != pytest.approx(quiet_s, rel=1e-3)
    assert len(calls) == 3


def test_the_executor_of_a_request() -> None:
    assert [check_executor(None, records=records) for records in (False, True)] == ["batch", "event"]
    assert [check_executor("event", records=records) for records in (False, True)] == ["event", "event"]
    assert check_executor("batch", records=False) == "batch"
    for name, records in (("batch", True), ("chain", False)):
        with pytest.raises(InputError, match="executor"):
            check_executor(name, records=records)
