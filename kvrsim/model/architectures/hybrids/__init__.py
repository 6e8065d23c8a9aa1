"""Models some of whose layers are linear attention or state-space layers."""

from __future__ import annotations

from kvrsim.model.architectures.parts import Reader

READERS: dict[str, Reader] = {}
