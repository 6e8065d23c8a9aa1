"""Descriptions of noise: values of --noise, and one-line errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster, load_cluster
from kvrsim.noise import ACCEPTED, Distribution, Noise, SideTraffic, parse_noise, shipped_noise


@pytest.mark.parametrize(
    ("spec", "noise"),
    [
        ("side-traffic", Noise(side_traffic=SideTraffic())),
        (
            "side-traffic:duty=0.5,share=0.67,slowdown=0.03",
            Noise(side_traffic=SideTraffic(duty=0.5, share=0.67, slowdown=0.03)),
        ),
        ("jitter:0.05", Noise(compute_jitter=0.05, message_jitter=0.05)),
        ("slow-gpu:3x1.2", Noise(slow_gpus=(SlowGpu(rank=3, factor=1.2),))),
        ("slow-link:3-2x4", Noise(slow_links=(SlowLink(first=2, second=3, factor=4.0),))),
        (
            "slow-gpu:0x2,1x3 + jitter:0.1",
            Noise(
                compute_jitter=0.1,
                message_jitter=0.1,
                slow_gpus=(SlowGpu(rank=0, factor=2.0), SlowGpu(rank=1, factor=3.0)),
            ),
        ),
    ],
)
def test_a_spec_says_what_it_reads_as(spec: str, noise: Noise) -> None:
    assert parse_noise(spec) == noise


@pytest.mark.parametrize(
    "spec",
    [
        *("", "+", "junk", "junk:1", "side-traffic:duty", "side-traffic:duty=2", "side-traffic:share=1", "jitter"),
        *("side-traffic:duty=0.1,duty=0.2", "side-traffic:dwell=0s", "side-traffic:dwell=5", "side-traffic:speed=1"),
        *("jitter:nan", "jitter:-0.1", "jitter:0.1,0.2", "slow-gpu", "slow-gpu:x2", "slow-gpu:1x0.5", "slow-gpu:1xinf"),
        *("slow-link:1x2", "slow-link:1-1x2", "slow-link:1-2x1.2.3", "slow-gpu:1x2,1x3", "jitter:0.1+jitter:0.2"),
        *("paper+side-traffic", "slow-link:1-2x2,2-1x3", "missing.json", "paper:1", "side-traffic:duty=0.1=0.2"),
    ],
)
def test_a_mistake_costs_one_line(spec: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_noise(spec)
    message = str(caught.value)
    assert message.startswith("noise")
    assert "accepted: " in message
    assert "\n" not in message


@given(spec=st.text(alphabet="side-trafcjl:gpu=,.+0123456789xknow \n", max_size=40))
def test_any_text_is_read_or_refused(spec: str) -> None:
    try:
        noise = parse_noise(spec)
        text = noise.describe()
        assert json.loads(json.dumps(noise.to_dict())) == noise.to_dict()
    except InputError as error:
        text = str(error)
    assert "\n" not in text


def test_what_ships_is_accepted_and_named() -> None:
    for name in shipped_noise():
        assert parse_noise(name).is_random
        assert name in ACCEPTED


def test_where_a_noise_has_no_place() -> None:
    switch, chain, bus = (replace(load_cluster(num_gpus=4), topology=kind) for kind in ("switch", "chain", "bus"))
    for cluster, spec in (
        (switch, "slow-gpu:4x2"),
        (switch, "slow-link:3-4x2"),
        (chain, "slow-link:0-2x2"),
        (bus, "slow-link:0-1x2"),
        (bus, "side-traffic:share=0,slowdown=0.1"),
    ):
        with pytest.raises(InputError, match="noise"):
            parse_noise(spec).place_on(cluster)
    for spec in ("jitter:0.1", "side-traffic:duty=0", "slow-gpu:1x2"):
        parse_noise(spec).place_on(bus)


def test_an_even_cluster_stays_what_it_is() -> None:
    cluster = load_cluster(num_gpus=4)
    assert parse_noise("slow-gpu:1x1+slow-link:0-1x1").place_on(cluster) is cluster
    uneven = parse_noise("slow-gpu:1x2+slow-link:1-2x4").place_on(cluster)
    assert isinstance(uneven, UnevenCluster)
    assert [uneven.slowness(rank) for rank in range(4)] == [1.0, 2.0, 1.0, 1.0]
    for src, dst in ((1, 2), (2, 1)):
        assert uneven.path(src, dst).bandwidth_bytes_per_s * 4 == cluster.path(src, dst).bandwidth_bytes_per_s
    assert uneven.path(0, 1) == cluster.path(0, 1)
    far = parse_noise("slow-link:1-2x4").place_on(replace(cluster, topology="chain")).path(0, 3)
    assert far.bandwidth_bytes_per_s * 4 == cluster.link.bandwidth_bytes_per_s


@given(ttft_s=st.lists(st.floats(0.1, 10), min_size=1, max_size=200))
def test_a_distribution_is_in_order(ttft_s: list[float]) -> None:
    result = Distribution.of(ttft_s, quiet_s=0.1, seed=3)
    assert result.p50.value_s <= result.p95.value_s <= result.p99.value_s <= result.worst_s == max(ttft_s)
    for name in ("mean", "p50", "p95", "p99"):
        estimate = getattr(result, name)
        assert estimate.low_s is None or estimate.low_s <= estimate.value_s * (1 + 1e-12)
        assert estimate.high_s is None or estimate.value_s <= estimate.high_s * (1 + 1e-12)
    assert all(value is None or math.isfinite(value) for key, value in result.to_dict().items() if key.endswith("_s"))


def test_limits_hold_what_they_promise() -> None:
    """The limits of the 95th percentile contain it in about 95 of 100 sets of 100 uniform samples."""
    import numpy as np

    rng = np.random.default_rng(0)
    sets = [Distribution.of(rng.random(100).tolist(), quiet_s=1.0, seed=0).p95 for _ in range(400)]
    inside = [(one.low_s or 0.0) <= 0.95 <= (1.0 if one.high_s is None else one.high_s) for one in sets]
    assert 0.92 <= sum(inside) / len(inside) <= 0.995
