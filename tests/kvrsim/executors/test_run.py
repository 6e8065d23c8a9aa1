"""The choice of executors: fast ways are taken where they suit, and blocks have a limited size."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.executors.batch import _Evaluation, run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import Runner, check_executor, finish_s, ttft_s
from kvrsim.hardware import load_cluster
from kvrsim.program import AllGather, Compute, Op, Program
from kvrsim.strategies import STRATEGIES, get_strategy


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
    place: Any = importlib.import_module(f"kvrsim.executors.{module}")
    calls = calls_of(monkeypatch, getattr(place, *cls) if cls else place, name)
    scenario = for_strategy(make_scenario(**{"ctx": 4000, "gpus": 4} | options)[0], get_strategy(strategy))
    gpus = scenario.cluster.num_gpus
    finish_s(scenario, get_strategy(strategy), np.full((1, gpus), 4000.0 / gpus))
    assert len(calls) == number


@pytest.mark.parametrize(
    ("layers", "pieces", "work"),
    [
        (2, (2, 2, 2), (1, 0, 1)),
        (3, (1, 1, 0, 0), (1, 1, 1, 1)),
        (5, (1, 1, 3, 3), (1, 1, 4, 0)),
        (7, (0, 1, 2, 2), (2, 3, 4, 4)),
    ],
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


def test_many_samples_are_run_one_partition_at_a_time() -> None:
    runner = Runner(for_strategy(make_scenario(ctx=1000, gpus=2)[0], STRATEGIES["tsp"]), STRATEGIES["tsp"])
    assert runner.rows_at_once(2**20) == 1


def test_blocks_hold_all_partitions() -> None:
    scenario = for_strategy(make_scenario(ctx=1000, gpus=2)[0], STRATEGIES["kvr-s"])
    rows = np.array([[first, 1000.0 - first] for first in range(1, 1000)] * 20)
    times_s = ttft_s(scenario, STRATEGIES["kvr-s"], rows)
    assert times_s.shape == (len(rows),)
    alone_s = [ttft_s(scenario, STRATEGIES["kvr-s"], row[None])[0] for row in rows[:3]]
    assert times_s[:3] == pytest.approx(np.array(alone_s), rel=1e-11, abs=0)


def test_the_executor_of_a_request() -> None:
    assert [check_executor(None, records=records) for records in (False, True)] == ["batch", "event"]
    assert [check_executor("event", records=records) for records in (False, True)] == ["event", "event"]
    assert check_executor("batch", records=False) == "batch"
    for name, records in (("batch", True), ("chain", False)):
        with pytest.raises(InputError, match="executor"):
            check_executor(name, records=records)
