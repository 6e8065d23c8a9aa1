"""PendingRanks: a layer timed alone, and while a receive is posted that no rank has answered.

A pending NCCL receive is a kernel: it occupies multiprocessors while it waits for its sender. A rank of a KV-Runahead
chain computes during one nearly all the time. The receive is posted through the runtime's own transport, so that it has
the same NCCL settings (streams, number of blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from calibrate.measure.compute_points import Point
from calibrate.measure.forward_timer import ComputeSetup, ForwardTimer
from calibrate.measure.link_ranks import START_S
from kvrsim.request import dtype_bytes
from kvrsim.runtime.ranks import RankPool, RankSlot
from kvrsim.runtime.transport import DistributedTransport

ALONE, PENDING = "layer_alone", "layer_pending"
_MOST_BYTES = 2**28  # of the message: as many blocks wait for it as for any longer one
_TIMEOUT_S = 60.0


class PendingRanks:
    """Two processes: the first computes and receives, the second sends on command.

    Raises RankError, naming the rank, where one dies or does not answer.
    """

    def __init__(self, setup: ComputeSetup) -> None:
        self._pool = RankPool(2, partial(PendingRank, setup=setup), start_s=START_S + _TIMEOUT_S)

    @property
    def pids(self) -> Sequence[int]:
        """Of the processes."""
        return self._pool.pids

    def sample(self, key: str) -> Mapping[str, float]:
        """Device seconds of one layer of a grid's point, alone and then beside a pending receive."""
        alone_s = self._pool.ask([0], ("layer", {"key": key}), _TIMEOUT_S)[0]
        self._pool.ask([0], ("post", {}), _TIMEOUT_S)
        pending_s = self._pool.ask([0], ("layer", {"key": key}), _TIMEOUT_S)[0]
        self._pool.ask([0, 1], ("complete", {}), _TIMEOUT_S)
        return {ALONE: alone_s, PENDING: pending_s}

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class PendingRank:
    """One of the two."""

    def __init__(self, *, slot: RankSlot, setup: ComputeSetup) -> None:
        rank, on_cuda = slot.rank, setup.device == "cuda"
        device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(device)
        timeout_s = START_S + _TIMEOUT_S
        self.transport = DistributedTransport(slot, size=2, device=device, timeout_s=timeout_s)
        self.transport.warmup()
        nbytes = setup.model.layer_cache_bytes(setup.max_context, dtype_bytes(setup.dtype))
        self.message = torch.zeros(min(nbytes, _MOST_BYTES), dtype=torch.uint8, device=device)
        self.timer = ForwardTimer.build(setup) if rank == 0 else None
        self.rank = rank
        self._receive: Any = None

    def layer(self, *, key: str) -> float:
        """Device seconds of a layer, at the clock of a long prefill."""
        assert self.timer is not None
        at = Point.parse(key)
        self.timer.layer_s(at)  # memory and kernels are there before the device may no longer be waited for
        return self.timer.layer_s(at, heat=not self.timer.clock.host_is_device)

    def post(self) -> None:
        """Post the receive."""
        self._receive = self.transport.irecv_prev(self.message)

    def complete(self) -> None:
        """Send the message, or wait for it."""
        if self.rank == 1:
            self.transport.isend_next(self.message).wait()
        else:
            self._receive.wait()
            self._receive = None
