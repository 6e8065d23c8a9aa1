"""Work: what a capacity plan has simulated, its reports of progress, and its time budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvrsim.progress import OnProgress
from planner.processes import Pool

MANY = 250_000  # number of requests of all workloads together above which fewer designs are tried
_SEARCH_SHARE = 0.85  # share of the time budget after which no further design is simulated; the answer follows
_Item = TypeVar("_Item")


class Work:
    """The work of a capacity plan. Prefills have a known total; the number of fleets is known when they are done."""

    def __init__(self, pool: Pool | None = None, report: OnProgress | None = None) -> None:
        self.pool = pool or Pool()
        self.report = report
        self.stage = "fleets"  # what the simulated fleets are for
        self.simulated = 0  # requests in all simulations
        self.left_out = 0  # designs of this stage for which the time budget was too short

    def begin(self, stage: str) -> None:
        """Begin a search of fleets."""
        self.stage = stage
        self.left_out = 0

    def prefill(self, done: int, total: int) -> None:
        """Report the strategies whose prefill times are simulated, by group size and cached prefix."""
        if self.report is not None and total:
            self.report(done, total, "prefill times")

    def simulate(self, requests: int) -> None:
        """Count simulated requests."""
        self.simulated += requests
        if self.report is not None:
            self.report(self.simulated, None, f"{self.stage}: {self.simulated / 1e6:.3g} million requests simulated")

    def in_time(self, items: Sequence[_Item], is_enough: Callable[[], bool]) -> Iterator[_Item]:
        """Yield the items until the search has to end and the results so far are enough; count the others."""
        for number, item in enumerate(items):
            if self.is_late and is_enough():
                self.left_out += len(items) - number
                return
            yield item

    @property
    def is_late(self) -> bool:
        """Whether the search has to end, because the rest of the time budget is for the answer."""
        return self.pool.is_late(_SEARCH_SHARE)
