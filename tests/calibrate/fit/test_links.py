"""Links that no datasheet describes, fitted to messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from calibrate.data import Measurement
from calibrate.fit.links import OWN_SHARE, SendRates, fit_all_gather, fit_all_reduce, fit_send_recv
from calibrate.measure.links import LinkPoint, link_points, measured_link
from kvrsim.hardware import GatherRates

MAX_BYTES = 2**26
NOISE = 0.05

# Rates similar to gloo's on the loopback of a small machine, and on a network of 250 Mbit/s.
LOOPBACK = SendRates(bandwidth_bytes_per_s=3.2e9, latency_s=9e-5, short_bytes_per_s=3e9)
SLOW = SendRates(bandwidth_bytes_per_s=3e7, latency_s=6e-3, short_bytes_per_s=3e7)


def timed(seconds_of: Callable[[LinkPoint], float], seed: int, num_ranks: int = 4) -> list[Measurement]:
    """Rows of gloo; each time has a random error of up to NOISE."""
    dice = np.random.default_rng(seed)
    rows = []
    for point in link_points(num_ranks, "gloo", MAX_BYTES):
        seconds = seconds_of(point) * dice.uniform(1 - NOISE, 1 + NOISE)
        names = [f"{src}>{dst}" for src, dst in point.flows]
        names = {"gather": ["all_gather"], "reduce": ["all_reduce"], "issue": ["send", "receive"]}.get(
            point.kind, names
        )
        sample = dict.fromkeys(names, seconds)
        rows += point.rows([sample], backend="gloo", device="CPU")
    return rows


def made(sends: SendRates, ring: float = 0.7) -> Callable[[LinkPoint], float]:
    """Return a function for the seconds of a point on a bus with these rates; a ring takes `ring` times as long."""
    gathers = GatherRates(
        launch_s=1.5 * sends.latency_s,
        hop_s=0.5 * sends.latency_s,
        small_bytes_per_s=0.3 * sends.bandwidth_bytes_per_s,
        large_bytes_per_s=0.6 * sends.bandwidth_bytes_per_s,
        setup_s=0.1 * sends.latency_s,
        own_share=OWN_SHARE,
    )

    def seconds(point: LinkPoint) -> float:
        nbytes = np.array(float(point.nbytes))
        if point.collective:
            passes = (2.0 if point.kind == "reduce" else 1.0) * (ring if point.kernel.endswith("ring") else 1.0)
            return float(gathers.seconds(nbytes, point.num_ranks)) * passes
        return float(sends.seconds(nbytes)) * len(point.flows)

    return seconds


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sends", [LOOPBACK, SLOW])
def test_links_without_a_datasheet_come_back(seed: int, sends: SendRates) -> None:
    rows = timed(made(sends), seed, num_ranks=3)
    link = measured_link(rows, "loopback")
    messages, gathers = fit_send_recv(rows, link), fit_all_gather(rows, link)
    assert messages.cross_validated.errors().mape < NOISE
    sizes = np.geomspace(1024.0, MAX_BYTES, 50)
    np.testing.assert_allclose(messages.rates.seconds(sizes), sends.seconds(sizes), rtol=NOISE)
    assert gathers.own.errors().mape < NOISE
    assert gathers.cross_validated.errors().mape < 2 * NOISE


@pytest.mark.parametrize(("ring", "faster", "slower"), [(0.7, "gloo_p2p_ring", "gloo"), (1.4, "gloo", "gloo_p2p_ring")])
def test_the_faster_all_gather_is_fitted_and_named(ring: float, faster: str, slower: str) -> None:
    rows = timed(made(LOOPBACK, ring), 0)
    fitted = fit_all_gather(rows, measured_link(rows, "mine"))
    assert fitted.source == f"kvrsim calibrate links ({faster}, faster when large than {slower})"
    assert fitted.operation.gather == ("ring" if faster == "gloo_p2p_ring" else "collective")
    assert fitted.operation.num_rows == _count(rows, faster)
    assert fitted.rates == fit_all_gather([row for row in rows if row.kernel == faster], measured_link(rows, "")).rates


def _count(rows: Sequence[Measurement], kernel: str) -> int:
    return sum(row.operation == "all_gather" and row.kernel == kernel for row in rows)


def test_all_reduces_come_back_from_the_fastest_kernel_of_each_size() -> None:
    sizes = [2**power for power in range(8, 30)]

    def row(nbytes: int, ranks: int, kernel: str, seconds: float) -> Measurement:
        about = dict(operation="all_reduce", device="d", nodes=1, source=kernel)
        return Measurement(bytes=nbytes, ranks=ranks, kernel=kernel, median_s=seconds, **about)  # type: ignore[arg-type]

    ring = [row(size, ranks, "ring", 2e-5 + size / 1e11) for size in sizes for ranks in (2, 8)]
    direct = [row(size, ranks, "direct", 4e-6 + ranks * size / 1e11) for size in sizes for ranks in (2, 8)]
    fitted = fit_all_reduce([*ring, *direct])
    for ranks in (2, 8):
        for size in sizes:
            want = min(2e-5 + size / 1e11, 4e-6 + ranks * size / 1e11)
            assert float(fitted.rates.seconds(np.array(float(size)), ranks)) == pytest.approx(want, rel=0.015)
    assert fitted.own.errors().num_rows == 2 * len(sizes)
    assert fitted.cross_validated.errors().median_ape < 0.05
