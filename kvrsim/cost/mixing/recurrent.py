"""Costs of linear attention and state-space layers."""

from __future__ import annotations

import numpy as np

from kvrsim.cost.mixing.base import Mixing
from kvrsim.model.mixers import Recurrence
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.profile.rates.recurrence import SCAN_KERNELS, RecurrenceCall, RecurrenceSeconds
from kvrsim.program import Array


class RecurrentMixing(Mixing):
    """A convolution of the chunk, then a scan that waits for the state before it."""

    mixer: Recurrence
    has_own = True

    @property
    def kernels(self) -> int:
        """Of the scan, and the convolution."""
        return SCAN_KERNELS + (self.mixer.conv_channels > 0)

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Nothing: a state is replaced."""
        return 0.0 * chunk

    def own_s(self, chunk: Array) -> Array:
        """The convolution; of the tokens before the chunk it needs the last few inputs."""
        return self._called(chunk).convolution

    def mix_s(self, chunk: Array, prefix: Array) -> Array:
        """The scan, whatever the prefix."""
        return self._called(chunk).scan

    def decode_s(self, keys: Array) -> Array:
        """The state is read and written once."""
        width = self.setting.element_bytes
        nbytes = 2.0 * self.mixer.state_bytes(width) * 2 / width  # element-wise rates count elements of two bytes
        return self.cost.traffic_s(np.ones_like(keys), (Traffic("copy", nbytes, 1),))

    def _called(self, tokens: Array) -> RecurrenceSeconds:
        mixer = self.mixer
        return self.cost.recurrence_s(
            RecurrenceCall(
                tokens=tokens,
                kind=mixer.kind,
                num_key_heads=mixer.num_key_heads,
                num_value_heads=mixer.num_value_heads,
                key_head_dim=mixer.key_head_dim,
                value_head_dim=mixer.value_head_dim,
                conv_channels=mixer.conv_channels,
                conv_kernel=mixer.conv_kernel,
            )
        )
