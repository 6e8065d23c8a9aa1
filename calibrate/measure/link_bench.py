"""LinkBench: times of messages and collectives between the ranks of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.measure.device_watch import DeviceWatch
from calibrate.measure.link_points import LinkPoint, flow_text, link_points
from calibrate.measure.link_ranks import START_S, LinkRank
from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.runtime.ranks import RankPool

BACKENDS = {"gloo": ("cpu",), "nccl": ("cuda",)}  # and the devices that they move
MAX_BYTES = 2**26  # K and V of one layer of 4096 hidden elements in half precision, for 4096 tokens
_LEAST_BYTES = 2**10
_MOST_BYTES = 2**34
_MOST_RANKS = 64


class LinkBench:
    """A bench of links: one process per rank, started on first use.

    Raises InputError for invalid settings, and KvrsimError, naming the rank, where one dies or does not answer within
    `timeout_s`.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        device_name: str,
        backend: str = "gloo",
        device: str = "cpu",
        num_threads: int = 1,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        if backend not in BACKENDS:
            raise InputError("backend", backend, ", ".join(BACKENDS))
        if device not in BACKENDS[backend]:
            raise InputError("device", device, f"{', '.join(BACKENDS[backend])} with {backend}")
        for name, value, low, high in (
            ("num_ranks", num_ranks, 2, _MOST_RANKS),
            ("num_threads", num_threads, 1, 2**16),
            ("max_bytes", max_bytes, _LEAST_BYTES, _MOST_BYTES),
        ):
            if not low <= value <= high:
                raise InputError(name, value, f"a whole number from {low} to {high}")
        if not 0 < timeout_s <= 86400:
            raise InputError("timeout_s", timeout_s, "seconds above 0 and at most a day")
        self.backend, self.device_name, self.num_ranks, self.timeout_s = backend, device_name, num_ranks, timeout_s
        self._device = device
        self._watch: DeviceWatch | None = None  # made when it is first asked
        self._points = {point.key: point for point in link_points(num_ranks, backend, max_bytes)}
        self._last_s: dict[str, float] = {}  # seconds of one transfer, as last measured
        self._pool: RankPool | None = None
        self._make = partial(
            LinkRank,
            num_ranks=num_ranks,
            backend=backend,
            device=device,
            num_threads=num_threads,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
        )

    @property
    def pool(self) -> RankPool:
        """The ranks, which this starts."""
        if self._pool is None:
            self._pool = RankPool(self.num_ranks, self._make, start_s=START_S + self.timeout_s)
        return self._pool

    def points(self) -> Sequence[str]:
        """Keys of the points, the cheapest first."""
        return tuple(self._points)

    def expected_s(self, point: str) -> float:
        """Of one sample: its transfers, and the synchronisations before them."""
        found = self._point(point)
        one_s = found.guess_s(self.backend)
        short_s = LinkPoint(kind="send", flows=((0, 1),), nbytes=1).guess_s(self.backend)
        return found.repeats(one_s) * (one_s + 2 * short_s)

    def sample(self, point: str) -> Mapping[str, float]:
        """Seconds of each message ("0>1"), or of the collective; medians of repeats where they are short."""
        found = self._point(point)
        repeats = found.repeats(self._last_s.get(point, found.guess_s(self.backend)))
        if found.kind == "issue":
            return self._issue(found, repeats)
        seconds = self._collective(found, repeats) if found.collective else self._exchange(found, repeats)
        self._last_s[point] = max(seconds.values())
        return seconds

    def rows(self, samples: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Measurement]:
        """Medians and interquartile ranges, in the order of the points."""
        hosts = self._pool.hosts if self._pool else ["here"] * self.num_ranks
        rows = []
        for key, point in self._points.items():
            if samples.get(key):
                rows += point.rows(samples[key], backend=self.backend, device=self.device_name, hosts=hosts)
        return rows

    def conditions(self) -> Mapping[str, Any] | None:
        """The slowest clock and the most power of the ranks' GPUs; None on a CPU."""
        if self._device != "cuda":
            return None
        if self._watch is None:
            self._watch = DeviceWatch.of_visible(import_module("torch"), range(self.num_ranks))
        reading = self._watch.read()
        return None if reading is None else fields_to_json(reading)

    def pids(self) -> Sequence[int]:
        """Of the ranks, which this starts."""
        return self.pool.pids

    def close(self) -> None:
        """End the ranks; they start again on the next use."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _point(self, key: str) -> LinkPoint:
        point = self._points.get(key)
        if point is None:
            LinkPoint.parse(key)  # says what is wrong with it, if anything
            raise InputError("point", key, f"a point of {self.num_ranks} ranks over {self.backend}")
        return point

    def _exchange(self, point: LinkPoint, repeats: int) -> dict[str, float]:
        """Seconds of each message, from the start of the first one after a synchronisation."""
        arguments = {"flows": point.flows, "nbytes": point.nbytes, "repeats": repeats}
        times = self.pool.ask(point.ranks, ("exchange", arguments), self.timeout_s)
        senders = [src for src, _ in point.flows]
        began_s = np.min([[began for began, _ in times[src]] for src in senders], axis=0)
        arrived_s = {flow: np.array([arrived for _, arrived in times[flow[1]]]) for flow in point.flows}
        return {flow_text(flow): float(np.median(ends - began_s)) for flow, ends in arrived_s.items()}

    def _issue(self, point: LinkPoint, repeats: int) -> dict[str, float]:
        """Of the host: the call that sends, and the one that receives."""
        [flow] = point.flows
        arguments = {"flow": flow, "nbytes": point.nbytes, "repeats": repeats}
        took_s = self.pool.ask(point.ranks, ("issue", arguments), self.timeout_s)
        return {"send": float(np.median(took_s[flow[0]])), "receive": float(np.median(took_s[flow[1]]))}

    def _collective(self, point: LinkPoint, repeats: int) -> dict[str, float]:
        """Seconds between the ends of consecutive collectives on the last rank to finish."""
        assert point.collective is not None
        arguments = {
            "kernel": point.kernel,
            "num_ranks": point.num_ranks,
            "nbytes": point.nbytes,
            "repeats": repeats,
        }
        ends_s = self.pool.ask(point.ranks, (point.kind, arguments), self.timeout_s)
        last_s = np.max(list(ends_s.values()), axis=0)
        return {point.collective: float(np.median([after - before for before, after in pairwise(last_s)]))}
