"""RankProgress: how far ranks are that measure, on standard error."""

from __future__ import annotations

from kvrsim.cli.progress import Shown
from kvrsim.units import format_seconds


class RankProgress(Shown):
    """Steps that the first rank reports; each kind of step has its own estimate."""

    def __init__(self) -> None:
        super().__init__()
        self._what = ""
        self._since_s = 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        """Steps done, steps in all, and what they are."""
        if what != self._what:
            self._what, self._since_s = what, self.elapsed_s
        text = f"{done} of {total} {what}"
        if 0 < done < total:
            text += f", about {format_seconds((self.elapsed_s - self._since_s) / done * (total - done))} more"
        self.show(text, done, total)
