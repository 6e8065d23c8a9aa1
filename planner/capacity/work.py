"""Work: the progress of a capacity plan over all its steps, and its time budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvrsim.arguments import OnProgress
from planner.capacity.request import CapacityRequest
from planner.processes import Pool

MANY = 250_000  # requests of all workloads together, above which fewer designs are tried
_REQUEST_S, _PACKED_S = 1.3e-6, 10e-6  # seconds to simulate one request, alone or in packed steps
# Usual numbers of simulations in a search: uniform and mixed designs, larger fleets, with `sure`, and for the answer.
_UNIFORM, _MIXED, _LARGER, _LARGER_OF_MANY, _SURE, _ANSWER = 12, 15, 30, 10, 30, 8
_SEARCH_SHARE = 0.85  # share of the time budget after which no further design is simulated; the answer follows
_Item = TypeVar("_Item")


class Work:
    """What a capacity plan has done and what remains, in approximate seconds of one core; the requests simulated.

    A search of fleets simulates designs, then larger fleets of the best designs. Until these are known, the number of
    simulations is a usual one.
    """

    def __init__(
        self,
        request: CapacityRequest,
        requests: int,
        stretch: int = 0,
        pool: Pool | None = None,
        report: OnProgress | None = None,
    ) -> None:
        """requests: number of requests of all workloads; stretch: of those on which mixed designs are searched."""
        self.pool, self.report = pool or Pool(), report
        self.simulated = self.left_out = 0  # requests; designs for which the time budget was too short
        self._request_s = _REQUEST_S if request.pack_tokens is None else _PACKED_S
        self._pass_s = requests * self._request_s
        larger = _LARGER if requests <= MANY else _LARGER_OF_MANY
        self._later_s = (larger + _ANSWER + _SURE * request.sure) * self._pass_s
        self._search_s = _UNIFORM * self._pass_s + _MIXED * stretch * self._request_s + self._later_s
        self._done_s = self._left_s = self._least_left_s = 0.0

    def begin(self, prefills_s: float, searches: float) -> None:
        """Begin a search: expect prefills of groups that take this long, then a number of searches of fleets."""
        self.simulated = self.left_out = 0
        self._left_s, self._least_left_s = prefills_s + searches * self._search_s, self._later_s
        self.add(0.0)

    def finish(self, fleets: int) -> None:
        """Expect the last step of a search: a number of larger fleets, then the answer."""
        self._left_s, self._least_left_s = (fleets + _ANSWER) * self._pass_s, 0.0

    def add(self, seconds: float) -> None:
        """Count work that was expected to take this long, and report the progress."""
        self._done_s += seconds
        self._left_s = max(self._left_s - seconds, self._least_left_s)
        if self.report is not None:
            self.report(100 * self._done_s / max(self._done_s + self._left_s, 1e-9), 100, "fleets, % of the work")

    def simulate(self, requests: int) -> None:
        """Count simulated requests."""
        self.simulated += requests
        self.add(self._request_s * requests)

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
