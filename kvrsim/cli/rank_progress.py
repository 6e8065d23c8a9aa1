"""RankProgress: how far ranks are that measure, on standard error."""

from __future__ import annotations

from typing import Self

from kvrsim.cli.progress import Shown


class RankProgress(Shown):
    """Steps that the first rank reports; each kind of step has its own estimate."""

    def __init__(self) -> None:
        super().__init__(patience_s=0.0)  # ranks take seconds to start
        self._what = ""
        self._since_s = 0.0

    def __enter__(self) -> Self:
        self.show("starting ranks")
        return self

    def __call__(self, done: int, total: int, what: str) -> None:
        """Steps done, steps in all, and what they are."""
        if what != self._what:
            self._what, self._since_s = what, self.elapsed_s
        text = f"{done} of {total} {what}"
        if 0 < done < total:
            text += f", about {(self.elapsed_s - self._since_s) / done * (total - done):.0f} s more"
        self.show(text, done, total)
