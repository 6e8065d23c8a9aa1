"""Fixtures that tests of several packages use, and how often Hypothesis tries each law."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.model.spec import ModelSpec
from tests.building.effort import register_profiles

register_profiles()
os.environ.pop("COLUMNS", None)  # from pytest-xdist; a test that needs a width sets one


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine takes longer than the time after which long work reports progress on standard error."""
    monkeypatch.setattr("kvrsim.cli.progress.FIRST_LINE_S", float("inf"))


@pytest.fixture(scope="session")
def config() -> Callable[..., ModelSpec]:
    """A small Llama with these keys of config.json instead of its own."""

    def build(**keys: Any) -> ModelSpec:
        fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        fields |= {"num_hidden_layers": 2, "vocab_size": 101} | keys
        return read_config(JsonObject(fields=fields, where="test"), "small")

    return build


@dataclass
class FakeEvent:
    """A CUDA event: it happens when the device comes to it."""

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
    """torch.cuda with a device whose work is done by the clock of the test."""

    device_s: float = 0.0
    event_s: float = 0.0  # seconds of work that the device has been given between any two events
    synchronized: bool = False
    slept_cycles: list[int] = field(default_factory=list)

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        assert enable_timing
        self.compute(self.event_s)
        return FakeEvent(self)

    def current_stream(self) -> FakeCuda:
        return self  # it has one stream, which can wait for its own work

    def synchronize(self) -> None:
        self.synchronized = True

    def _sleep(self, cycles: int) -> None:
        self.slept_cycles.append(cycles)

    def compute(self, seconds: float) -> None:
        """A kernel."""
        self.device_s += seconds
        self.synchronized = False


@pytest.fixture
def fake_cuda() -> FakeCuda:
    """A device for clocks that would measure one."""
    return FakeCuda()
