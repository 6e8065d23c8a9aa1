"""Progress of long work, as functions of the planner report it."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[float, float | None, str], object]  # work done, the total (None: unknown), and a text
