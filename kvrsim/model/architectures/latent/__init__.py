"""Models with latent attention, and with attention to chosen keys."""

from __future__ import annotations

from kvrsim.model.architectures.parts import Reader

READERS: dict[str, Reader] = {}
