"""Marks of a forward pass: clocks that record them, and hooks that set them on a Hugging Face model.

The runtime turns marks into timelines (kvrsim.runtime.trace), a calibration into rows (calibrate.measure.forward).
Marks of a layer, in this order:

    layer               it begins
    update              its K and V are computed; the cache's update begins
    wait, received      waiting for other ranks' K and V begins and ends
    send                own K and V are sent
    updated             the cache's update has ended; attention begins
    scan                instead, where a layer keeps a state: the state before the chunk is there
    attending           where attention itself sends and waits: it computes, after what it has sent
    sent                the state after the chunk is on its way
    output              attention has ended; the output projection begins
    layer_end           it has ended

`>NAME` and `<NAME` enclose one module. Around the layers: "start", "embedding" and "head" modules, and "token".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from kvrsim.runtime.geometry import Geometry

# Cycles a second for which a device is kept busy before a forward. It is above the clock of nearly all GPUs, so that
# the delay is at least as long as asked for.
_CYCLES_PER_S = 2.0e9
_EMPTY_MARKS = 8  # intervals before a forward that contain nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One moment of a forward pass."""

    name: str
    layer: int | None = None  # decoder layer; None: outside of the layers
    device_s: float  # when the device finished all that was issued before; seconds since the first mark
    host_s: float  # when the host issued it; seconds since the first mark


class Clock(Protocol):
    """Records the marks of one forward pass at a time."""

    start_s: float  # time.monotonic() of the first mark; the processes of one host share this clock

    @property
    def host_is_device(self) -> bool:
        """Whether the host computes itself, so that device_s and host_s are equal."""

    def start(self, hold_s: float = 0.0) -> None:
        """Remove all marks and wait for the device; then keep it busy for `hold_s`, so that the host runs ahead."""

    def mark(self, name: str, layer: int | None = None) -> None:
        """Record this moment."""

    def wait(self) -> None:
        """Return when the device has finished all that was issued."""

    def finish(self) -> Sequence[Mark]:
        """Wait for the device; returns all marks since start, in order."""


@dataclass(slots=True)
class CpuClock:
    """The monotonic clock."""

    start_s: float = 0.0
    marks: list[tuple[str, int | None, float]] = field(default_factory=list)

    @property
    def host_is_device(self) -> bool:
        """True."""
        return True

    def start(self, hold_s: float = 0.0) -> None:
        """Remove all marks; a CPU does not wait for a host."""
        self.marks = []

    def mark(self, name: str, layer: int | None = None) -> None:
        """Record the time."""
        now_s = time.monotonic()
        if not self.marks:
            self.start_s = now_s
        self.marks.append((name, layer, now_s))

    def wait(self) -> None:
        """Nothing is pending on a CPU."""

    def finish(self) -> Sequence[Mark]:
        """Host and device time are the same."""
        since = ((name, layer, at - self.start_s) for name, layer, at in self.marks)
        return [Mark(name=name, layer=layer, device_s=at, host_s=at) for name, layer, at in since]


@dataclass(slots=True)
class CudaClock:
    """CUDA events on the current stream; `cuda` is torch.cuda or a stand-in.

    `all_streams` False: wait for the current stream only. A receive that is pending on another stream would block a
    wait for the whole device for ever.
    """

    cuda: Any
    all_streams: bool = False
    start_s: float = 0.0
    marks: list[tuple[str, int | None, Any, float]] = field(default_factory=list)

    @property
    def host_is_device(self) -> bool:
        """False: the host only issues work."""
        return False

    def start(self, hold_s: float = 0.0) -> None:
        """Remove all marks, empty the device's queue, then run a kernel that only waits."""
        self.marks = []
        self.wait()
        if hold_s > 0:
            self.cuda._sleep(round(hold_s * _CYCLES_PER_S))

    def mark(self, name: str, layer: int | None = None) -> None:
        """Record an event behind all that was issued so far."""
        if not self.marks:
            self.start_s = time.monotonic()
        event = self.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, layer, event, time.monotonic()))

    def wait(self) -> None:
        """Wait for the current stream, or for all of them."""
        if self.all_streams:
            self.cuda.synchronize()
        else:
            self.cuda.current_stream().synchronize()

    def finish(self) -> Sequence[Mark]:
        """Events give milliseconds."""
        self.wait()
        if not self.marks:
            return []
        _, _, first, first_s = self.marks[0]
        return [
            Mark(name=name, layer=layer, device_s=first.elapsed_time(event) / 1e3, host_s=at - first_s)
            for name, layer, event, at in self.marks
        ]


def clock_of(device: Any, *, all_streams: bool = False) -> Clock:
    """The clock of a torch device, or of its type ("cpu" or "cuda")."""
    if getattr(device, "type", device) != "cuda":
        return CpuClock()
    import torch

    return CudaClock(torch.cuda, all_streams)


def mark_empty(clock: Clock) -> None:
    """Set marks with nothing between them: they show how long a mark takes on the device."""
    for _ in range(_EMPTY_MARKS + 1):
        clock.mark("empty")


def without_marks(marks: Sequence[Mark]) -> list[Mark]:
    """The marks after the empty ones, each reduced by the device time of the marks before it.

    Host times are unchanged: the runtime marks its layers too.
    """
    empty, rest = marks[: _EMPTY_MARKS + 1], marks[_EMPTY_MARKS + 1 :]
    gaps = [after.device_s - before.device_s for before, after in pairwise(empty)]
    one_s = float(np.median(gaps)) if gaps else 0.0
    found: list[Mark] = []
    for passed, mark in enumerate(rest):
        device_s = mark.device_s - passed * one_s
        found.append(replace(mark, device_s=max(device_s, found[-1].device_s) if found else device_s))
    return found


@contextmanager
def hooked(
    model: Any, geometry: Geometry, clock: Clock, *, parts: Sequence[str] = (), ends: bool = False, first_layer: int = 0
) -> Iterator[None]:
    """While the context lasts, the model's layers mark "layer", "output" and "layer_end".

    parts: names of modules of every layer that are marked too. ends: also mark the embedding and the head.
    first_layer: the number by which the first layer is known.
    """
    handles = []

    def before(module: Any, name: str, layer: int | None = None) -> None:
        handles.append(module.register_forward_pre_hook(_marking(clock, name, layer)))

    def after(module: Any, name: str, layer: int | None = None) -> None:
        handles.append(module.register_forward_hook(_marking(clock, name, layer)))

    for index, layer in enumerate(geometry.layers(model), start=first_layer):
        before(layer, "layer", index)
        after(layer, "layer_end", index)
        for part in parts:
            before(layer.get_submodule(part), f">{part}", index)
            after(layer.get_submodule(part), f"<{part}", index)
        if (output := geometry.output_projection_of(layer)) is not None:
            before(output, "output", index)
    if ends:
        for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
            before(module, f">{name}")
            after(module, f"<{name}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _marking(clock: Clock, name: str, layer: int | None) -> Callable[..., None]:
    def hook(*_: object) -> None:
        clock.mark(name, layer)

    return hook
