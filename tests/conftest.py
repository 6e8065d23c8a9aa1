"""Fixtures that tests of several packages use, and how often Hypothesis tries each law."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import util
from typing import Any

import pytest

from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.model.spec import ModelSpec
from tests.building.effort import register_profiles
from tests.building.process_state import changes, process_state

register_profiles()
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; a test that needs a width sets its own
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: with --dist loadfile, no process then begins a long file when the others end."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: num_slow[item.path], reverse=True)


def pytest_collection_finish() -> None:
    """Set the garbage collector as the command `kvrsim` does: it need not visit the objects of imported modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Remove multiprocessing's temporary folder now: pytest-xdist kills a process that needs more than 10 s to end."""
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is util._remove_temp_dir:  # type: ignore[attr-defined]
            finalizer()  # only this one: those of a pool's queues would leave its thread waiting for ever


@pytest.fixture(autouse=True)
def _process_stays_as_it_was() -> Iterator[None]:
    before = process_state()
    yield
    assert changes(before, process_state()) == []


@pytest.fixture(autouse=True)
def _no_progress_lines(_process_stays_as_it_was: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch progress lines off: on a slow machine they would appear on standard error."""
    monkeypatch.setattr("kvrsim.cli.progress.FIRST_LINE_S", float("inf"))


@pytest.fixture(scope="session")
def config() -> Callable[..., ModelSpec]:
    """A function that makes a small Llama; keyword arguments replace keys of its config.json."""

    def build(**keys: Any) -> ModelSpec:
        fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        fields |= {"num_hidden_layers": 2, "vocab_size": 101} | keys
        return read_config(JsonObject(fields=fields, where="test"), "small")

    return build


@dataclass
class FakeEvent:
    """A CUDA event with the time at which the device reaches it."""

    cuda: FakeCuda
    at_s: float | None = None

    def record(self) -> None:
        self.at_s = self.cuda.device_s

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.cuda.synchronized, "events are read before the device has come to them"
        assert self.at_s is not None
        assert other.at_s is not None
        return 1e3 * (other.at_s - self.at_s)


@dataclass
class FakeCuda:
    """A replacement of torch.cuda whose device has a simulated clock."""

    device_s: float = 0.0
    event_s: float = 0.0  # seconds of device work between two events
    synchronized: bool = False
    slept_cycles: list[int] = field(default_factory=list)

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        assert enable_timing
        self.compute(self.event_s)
        return FakeEvent(self)

    def current_stream(self) -> FakeCuda:
        return self  # the device has one stream

    def synchronize(self) -> None:
        self.synchronized = True

    def _sleep(self, cycles: int) -> None:
        self.slept_cycles.append(cycles)

    def compute(self, seconds: float) -> None:
        """Add a kernel of this many seconds."""
        self.device_s += seconds
        self.synchronized = False


@pytest.fixture
def fake_cuda() -> FakeCuda:
    """A fake torch.cuda for clocks that measure a CUDA device."""
    return FakeCuda()
