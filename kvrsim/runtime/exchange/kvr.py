"""KV-Runahead: each rank waits for the K and V of the tokens before its chunk, and hands them on with its own."""

from __future__ import annotations

from typing import Any

from kvrsim.runtime.cache import UpdateEvent
from kvrsim.runtime.exchange.base import Exchange
from kvrsim.runtime.kept.buffers import KvBuffer
from kvrsim.runtime.ranks.rings import Pending


class Chain(Exchange):
    """Receives are posted ahead: a message moves once its receive is posted.

    Prompts may follow each other without a barrier: what a layer keeps is written anew once the next rank has taken
    what was sent of it, and the first layers' receives of the next prompt are posted before the last layer's attention.
    """

    def __init__(self, *args: Any) -> None:
        """As Exchange."""
        self._leaving: dict[int, Pending] = {}  # by layer, what the next rank has not taken yet
        self._is_ahead = False  # whether the first layers' receives are posted already
        super().__init__(*args)

    def reset(self) -> None:
        """Forget the prefill before."""
        super().reset()
        self._is_ahead = False

    def run(self, input_ids: Any) -> Any:
        """Post the first layers' receives, then run the chunk."""
        if not self._is_ahead:
            self._post_receives(0, self._ahead or len(self.geometry.linked_layers))
        self._is_ahead = self.more and self._ahead is not None
        return super().run(input_ids)

    def finish(self) -> None:
        """Wait until what was sent may be overwritten."""
        for layer in list(self._leaving):
            self._free(layer)
        super().finish()

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """A layer that is to write what it keeps waits until the next rank has taken the prompt before."""
        if event == "update":
            self._free(layer)
        super().on_update(event, layer)

    def before_attention(self, layer: int) -> None:
        """Wait for the prefix, hand it on with the chunk (of a state, not yet), expect the next layer's."""
        self.receive(layer)
        if isinstance(self.buffer(layer), KvBuffer):
            self.hand_on(layer)
        self.expect_ahead(layer)

    def expect_ahead(self, layer: int) -> None:
        """Post the receives of the layer that is so many further on."""
        if self._ahead is not None:
            ahead = self.geometry.linked_layers.index(layer) + self._ahead
            self._post_receives(ahead, ahead + 1)

    def after_scan(self, layer: int) -> None:
        """Hand the state on."""
        self.hand_on(layer)

    def post(self, layer: int) -> None:
        """Expect what the rank before hands on, where it may be written."""
        self._free(layer)
        super().post(layer)

    def hand_on(self, layer: int) -> None:
        """Send what this layer keeps, and know when it is taken."""
        super().hand_on(layer)
        if self._sends:
            self._leaving[layer] = self._sends.pop()

    @property
    def _ahead(self) -> int | None:
        """Layers for which receives are posted before; None: all of a prompt, at its beginning."""
        wanted = self.plan.receives_ahead
        return None if wanted is None or wanted >= len(self.geometry.linked_layers) else wanted

    def _post_receives(self, first: int, end: int) -> None:
        """Of layers counted among those that are linked; behind the last, the next prompt's first."""
        linked = self.geometry.linked_layers
        for index in range(first, end):
            if index < len(linked):
                self.post(linked[index])
            elif self.more:
                self.post(linked[index - len(linked)])

    def _free(self, layer: int) -> None:
        if layer in self._leaving:
            self._leaving.pop(layer).wait()


EXCHANGE = Chain
