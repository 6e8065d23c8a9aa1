"""The default campaign on GPUs of 40 and 80 GB: nothing is lost that fits, and nothing ends it.

Stand-ins take the place of a GPU and of the processes on it. They allocate nothing: they count the bytes that each
point needs, and keep them as torch does, until the process releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from calibrate.measure import compute, ranks
from calibrate.measure.campaign import Campaign, Outcome, SkippedPoint, measure
from calibrate.measure.compute import ComputeBench, grid
from calibrate.measure.forward import LAYERS, ComputeSetup, ForwardTimer, Point
from calibrate.measure.ranks import PendingRank, PendingRanks
from kvrsim.cli.commands.calibrate import LayerArgs
from kvrsim.errors import KvrsimError
from kvrsim.runtime import host
from kvrsim.runtime.faults import RankError, faults_of
from kvrsim.runtime.marks import MarkRecorder
from kvrsim.runtime.plan import RankSlot

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20  # of CUDA and NCCL, for each process
MAIN = "main"


class Gpu:
    """A GPU's memory, shared by processes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.held: dict[str, int] = {}  # bytes that each process never returns
        self.kept: dict[str, int] = {}  # bytes that each process keeps for later tensors

    def run(self, process: str, nbytes: int) -> None:
        """Use memory for a moment; torch then keeps it."""
        others = sum(self.held.values()) + sum(kept for name, kept in self.kept.items() if name != process)
        if others + nbytes > self.nbytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        self.kept[process] = max(self.kept.get(process, 0), nbytes)


class DeviceClock(MarkRecorder):
    """Marks of a device other than the host, such as a GPU."""

    host_is_device = False


def weights_bytes(setup: ComputeSetup) -> int:
    model = setup.model
    return 2 * LAYERS * int(model.layers[0].active_parameters) + 2 * 2 * model.vocab_size * model.hidden_size


def point_bytes(setup: ComputeSetup, at: Point) -> int:
    """Bytes of a forward in half precision: activations, K and V, and the scores or the mask of its kernel."""
    model = setup.model
    length = at.prefix + at.chunk
    tensors = 2 * at.chunk * (4 * model.hidden_size + 3 * 11008)
    cache = LAYERS * model.layer_cache_bytes(length, 2)
    scores = at.chunk * length
    kernel = {"eager": 8 * model.num_attention_heads * scores, "sdpa": 2 * scores, "flash": 0}[at.kernel]
    return int(tensors + cache + kernel)


class CountingTimer(ForwardTimer):
    """A timer whose forwards take no time and only count their memory."""

    gpu: Gpu
    process: str

    def _forward(self, at: Point, *, bare: bool, heat: bool) -> dict[str, float]:
        self.gpu.run(self.process, point_bytes(self.setup, at))
        model = self.setup.model
        flops = 2.0 * model.layers[0].active_parameters * at.chunk
        flops += 4.0 * model.num_attention_heads * model.head_dim * at.chunk * (at.prefix + at.chunk)
        layer_s = 1e-4 + flops / 1.5e14
        self.known_s[at] = LAYERS * layer_s
        names = ["prepare", "embedding", "head", "host_prepare", "host_layer", "before_attention", "cache_append"]
        names += ["attention", "after_attention", "activation", "rotary", "residual", "norm"]
        return dict.fromkeys(names, 0.25 * layer_s) | {"layer": layer_s}

    def release(self) -> None:
        self.gpu.kept[self.process] = 0


def counting(gpu: Gpu, process: str, setup: ComputeSetup) -> CountingTimer:
    gpu.held[process] = weights_bytes(setup) + CONTEXT_BYTES
    timer = CountingTimer(setup, DeviceClock())
    timer.gpu = gpu
    timer.process = process
    return timer


class LocalPool:
    """A RankPool in this process: errors arrive as in the real one, and end it."""

    def __init__(self, num_ranks: int, make: Callable[..., Any], *, start_s: float) -> None:
        self.workers = [make(slot=RankSlot(rank=rank, store="")) for rank in range(num_ranks)]

    def ask(self, asked: Collection[int], command: tuple[str, dict[str, Any]], timeout_s: float) -> dict[int, Any]:
        method, arguments = command
        if not self.workers:
            raise KvrsimError("the ranks have ended")
        answers = {}
        for rank in asked:
            try:
                answers[rank] = getattr(self.workers[rank], method)(**arguments)
            except Exception as error:
                self.close()
                raise RankError(faults_of(error, rank, None)) from None
        return answers

    def close(self) -> None:
        self.workers = []


class NoTransport:
    """A transport that allocates no memory."""

    device = torch.device("meta")

    def irecv_prev(self, tensor: Any) -> Any:
        return self

    isend_next = irecv_prev

    def wait(self) -> None:
        """Nothing is sent."""


def default_setup(monkeypatch: pytest.MonkeyPatch) -> ComputeSetup:
    """The setup of `kvrsim calibrate all` on eight GPUs, with no other options."""
    monkeypatch.setattr(host, "chosen_device", lambda device: "cuda")
    monkeypatch.setattr(host, "num_gpus", lambda: 8)
    return LayerArgs().setup()


def campaign_on(gpu: Gpu, setup: ComputeSetup, monkeypatch: pytest.MonkeyPatch, output: Path) -> Outcome:
    """Run the campaign of a setup on a stand-in of GPU 0; its second process is that of the pending receives."""

    def build(of_setup: ComputeSetup) -> CountingTimer:
        return counting(gpu, MAIN if MAIN not in gpu.held else "pending", of_setup)

    monkeypatch.setattr(ForwardTimer, "build", build)
    monkeypatch.setattr(ranks, "RankPool", LocalPool)
    monkeypatch.setattr(ranks, "open_transport", lambda how, slot, local: NoTransport())
    monkeypatch.setattr(compute, "device_name", lambda device, threads: "a stand-in")
    monkeypatch.setattr("calibrate.measure.campaign.busy_note", lambda: ())
    monkeypatch.setattr("kvrsim.io.journal.os.fsync", lambda file: None)  # the samples take no time
    campaign = Campaign(
        title="layers", build=lambda: ComputeBench.build(setup), about={}, origin=lambda rows: {}, output=output
    )
    return measure(campaign, budget_s=3600.0)


@pytest.mark.parametrize("memory_gib", [40, 80])
def test_the_default_campaign_loses_no_point_that_fits(
    memory_gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = default_setup(monkeypatch)
    gpu = Gpu(memory_gib * GIB)
    outcome = campaign_on(gpu, setup, monkeypatch, tmp_path / "compute.csv")
    free = gpu.nbytes - sum(gpu.held.values())
    points = grid(setup.max_context, setup.kernels)
    too_large = {str(point) for point in points if point_bytes(setup, point) > free}
    assert set(outcome.skipped) == too_large
    assert all("memory" in reason for reason in outcome.skipped.values())
    longest = Point(kernel="eager", chunk=setup.max_context, prefix=0)
    assert (str(longest) in too_large) == (memory_gib == 40), "the scores of eager attention take 64 GiB"
    assert len(too_large) < len(points) / 10
    assert {"layer_alone", "layer_pending", "host_layer"} <= {row.operation for row in outcome.rows}


def test_pending_points_that_do_not_fit_are_skipped_and_the_ranks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = default_setup(monkeypatch)
    gpu = Gpu(4 * GIB)
    monkeypatch.setattr(ForwardTimer, "build", lambda of_setup: counting(gpu, "pending", of_setup))
    monkeypatch.setattr(ranks, "RankPool", LocalPool)
    monkeypatch.setattr(ranks, "open_transport", lambda how, slot, local: NoTransport())
    pair = PendingRanks(setup)
    with pytest.raises(SkippedPoint, match="out of the device's memory"):
        pair.sample(Point(kernel="eager", chunk=4096, prefix=0, kind="pending"))
    assert set(pair.sample(Point(kernel="flash", chunk=4096, prefix=0, kind="pending"))) == {
        "layer_alone",
        "layer_pending",
    }


def test_ranks_that_fail_cost_only_their_own_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PendingRank) -> None:
        raise ValueError("NCCL did not start")

    setup = default_setup(monkeypatch)
    monkeypatch.setattr(PendingRank, "post", fail)
    outcome = campaign_on(Gpu(80 * GIB), setup, monkeypatch, tmp_path / "compute.csv")
    assert outcome.skipped
    assert all(point.startswith("pending ") for point in outcome.skipped)
    assert all("NCCL did not start" in reason for reason in outcome.skipped.values())
