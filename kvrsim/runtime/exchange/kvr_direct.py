"""KV-Runahead without forwarding: every rank sends its own K and V to all later ranks. A state goes down the chain."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvrsim.runtime.exchange.kvr import Chain
from kvrsim.runtime.kept.buffers import KvBuffer
from kvrsim.runtime.transport import Pending

if TYPE_CHECKING:
    from kvrsim.runtime.plan import RunPlan


class Direct(Chain):
    """Pieces arrive in place, from the first rank's on."""

    def __init__(self, *args: Any) -> None:
        """As Exchange."""
        self._coming: dict[int, list[tuple[int, Pending]]] = {}
        super().__init__(*args)

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[tuple[int, int]]:
        """From each rank to all later ones."""
        return [(src, dst) for src in range(size) for dst in range(src + 1, size)]

    def reset(self) -> None:
        """Forget the prefill before."""
        super().reset()
        self._coming.clear()

    def post(self, layer: int) -> None:
        """Expect each earlier rank's piece, as far as the chunk sees it."""
        buffer = self.buffer(layer)
        if not isinstance(buffer, KvBuffer):
            super().post(layer)
            return
        assert self.place is not None
        first, found = self.transport.rank - self.place, []
        for src, (start, end) in enumerate(pairwise(self.plan.partition.boundaries[: self.place + 1])):
            if (start := max(start, buffer.first_seen)) < end:
                found.append((first + src, self.transport.irecv(buffer.rows(start, end), first + src)))
        self._coming[layer] = found

    def receive(self, layer: int) -> None:
        """Wait for every earlier rank's piece."""
        super().receive(layer)
        for src, message in self._coming.pop(layer, []):
            self.wait_for(message, layer, src)

    def before_attention(self, layer: int) -> None:
        """Send the chunk's K and V to all later ranks, then wait for those of the earlier ones."""
        buffer = self.buffer(layer)
        if isinstance(buffer, KvBuffer):
            assert self.place is not None
            start, end = self.bounds()
            later = self.plan.partition.boundaries[self.place + 1 : -1]
            for number, chunk_start in enumerate(later, start=1):
                if (first := max(start, buffer.kept.first_seen(chunk_start))) < end:
                    self.send(buffer.rows(first, end), layer, self.transport.rank + number)
        self.receive(layer)
        self.expect_ahead(layer)


EXCHANGE = Direct
