"""KV-Runahead: each rank waits for the K and V of the tokens before its chunk, and hands them on with its own."""

from __future__ import annotations

from typing import Any

from kvrsim.runtime.exchange.base import Exchange
from kvrsim.runtime.kept.buffers import KvBuffer


class Chain(Exchange):
    """Receives are posted ahead: a message moves once its receive is posted."""

    def run(self, input_ids: Any) -> Any:
        """Post the first layers' receives, then run the chunk."""
        self._post_receives(0, self.plan.receives_ahead or len(self.geometry.linked_layers))
        return super().run(input_ids)

    def before_attention(self, layer: int) -> None:
        """Wait for the prefix, hand it on with the chunk (of a state, not yet), expect the next layer's."""
        self.receive(layer)
        if isinstance(self.buffer(layer), KvBuffer):
            self.hand_on(layer)
        if self.plan.receives_ahead is not None:
            ahead = self.geometry.linked_layers.index(layer) + self.plan.receives_ahead
            self._post_receives(ahead, ahead + 1)

    def after_scan(self, layer: int) -> None:
        """Hand the state on."""
        self.hand_on(layer)

    def _post_receives(self, first: int, end: int) -> None:
        """Of layers counted among those that are linked."""
        for layer in self.geometry.linked_layers[first:end]:
            self.post(layer)


EXCHANGE = Chain
