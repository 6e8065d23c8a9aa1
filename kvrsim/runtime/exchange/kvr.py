"""KV-Runahead: each rank waits for the K and V of the tokens before its chunk, and hands them on with its own."""

from __future__ import annotations

from typing import Any

from kvrsim.runtime.exchange.base import Exchange
from kvrsim.runtime.kept.buffers import KvBuffer


class Chain(Exchange):
    """Receives are posted ahead: a message moves once its receive is posted."""

    def run(self, input_ids: Any) -> Any:
        """Post the first layers' receives, then run the chunk."""
        for layer in self.geometry.linked_layers[: self._ahead]:
            self.post(layer)
        return super().run(input_ids)

    def before_attention(self, layer: int) -> None:
        """Wait for the prefix, hand it on with the chunk (of a state, not yet), expect the next layer's."""
        self.receive(layer)
        if isinstance(self.buffer(layer), KvBuffer):
            self.hand_on(layer)
        self.expect_ahead(layer)

    def expect_ahead(self, layer: int) -> None:
        """Post the receive of the layer that is `receives_ahead` further on."""
        ahead = self.geometry.linked_layers.index(layer) + self._ahead
        for later in self.geometry.linked_layers[ahead : ahead + 1]:
            self.post(later)

    def after_scan(self, layer: int) -> None:
        """Hand the state on."""
        self.hand_on(layer)

    @property
    def _ahead(self) -> int:
        """Layers for which receives are posted before their turn."""
        return self.plan.receives_ahead or len(self.geometry.linked_layers)


EXCHANGE = Chain
