"""Workloads: what scaling and compressing keep, what is drawn at random, and what a summary says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from planner.capacity.workload import Source, Synthetic, Workload


def workload(count: int = 400, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    context = rng.integers(1, 5000, count)
    return Workload(
        name="made",
        kind="csv",
        arrival_s=np.cumsum(np.concatenate([[0.0], rng.exponential(1.0, count - 1)])),
        context_len=context,
        cached_prefix=rng.integers(0, context),
        output_tokens=rng.integers(1, 50, count),
    )


@given(factor=st.floats(0.1, 6.0), seed=st.integers(0, 2**20))
def test_scaling_keeps_the_time_and_the_kind_of_requests(factor: float, seed: int) -> None:
    before = workload()
    after = before.scaled(factor, np.random.default_rng(seed))
    assert len(after) == pytest.approx(factor * len(before), abs=5 * np.sqrt(len(before)))
    assert after.duration_s <= before.duration_s * (1 + 1 / (len(before) - 1)) + 1e-9
    known = set(zip(before.context_len.tolist(), before.cached_prefix.tolist(), strict=True))
    assert set(zip(after.context_len.tolist(), after.cached_prefix.tolist(), strict=True)) <= known
    if factor >= 1:
        assert np.bincount(after.context_len).sum() >= len(before)


def test_scaling_by_one_changes_nothing() -> None:
    before = workload()
    assert before.scaled(1, np.random.default_rng(0)) is before


def test_scaling_has_its_limits() -> None:
    with pytest.raises(InputError, match="rate_scale"):
        workload().scaled(1e6, np.random.default_rng(0))
    with pytest.raises(InputError, match="rate_scale"):
        workload(2).scaled(1e-9, np.random.default_rng(0))


@given(factor=st.floats(0.01, 100.0))
def test_replaying_faster_keeps_the_requests(factor: float) -> None:
    before = workload(50)
    after = before.faster(factor)
    assert after.arrival_s == pytest.approx(before.arrival_s / factor)
    assert np.array_equal(after.context_len, before.context_len)


def test_summary_counts_everything_once() -> None:
    made = workload()
    summary = made.summary()
    assert sum(row["requests"] for row in summary["histogram"]) == len(made) == summary["requests"]
    assert sum(row["share_of_new_tokens"] for row in summary["histogram"]) == pytest.approx(1.0)
    assert summary["context_tokens"]["max"] == made.context_len.max()
    assert summary["gap_variation"] == pytest.approx(1.0, abs=0.25)
    for row in summary["histogram"]:
        here = (made.context_len >= row["from_tokens"]) & (made.context_len < row["to_tokens"])
        assert here.sum() == row["requests"]


def test_one_request_has_no_rate() -> None:
    summary = workload(1).summary()
    assert summary["rate_per_s"] is None
    assert summary["gap_variation"] is None


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("bursty,cv=4", 4.0)])
def test_gaps_vary_as_asked(arrivals: str, variation: float) -> None:
    drawn = Synthetic.parse(f"{arrivals},rate=5,requests=60000,context=100").draw(np.random.default_rng(1))
    gaps = np.diff(drawn.arrival_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_diurnal_rate_swings_between_peak_and_trough() -> None:
    spec = "diurnal,rate=50,requests=100000,period=100s,peak=4,context=100"
    drawn = Synthetic.parse(spec).draw(np.random.default_rng(2))
    phase = drawn.arrival_s % 100
    trough, peak = ((phase < 10) | (phase > 90)).sum(), ((phase > 40) & (phase < 60)).sum()
    assert peak / trough == pytest.approx((1 + 0.6 * 0.935) / (1 - 0.6 * 0.935), rel=0.06)  # means over a tenth
    assert len(drawn) / drawn.duration_s == pytest.approx(50, rel=0.02)


def test_lognormal_lengths() -> None:
    drawn = Synthetic.parse("poisson,rate=1,requests=50000,context=lognormal:1k:0.8,max=1m").draw(
        np.random.default_rng(3)
    )
    logs = np.log(drawn.context_len)
    assert np.median(drawn.context_len) == pytest.approx(1024, rel=0.02)
    assert logs.std() == pytest.approx(0.8, rel=0.02)


def test_empirical_lengths_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("arrival_s,context_tokens,output_tokens\n0,10,1\n1,20,2\n2,20,3\n")
    spec = f"poisson,rate=1,requests=3000,context=file:{path},output=file:{path},cached=0.5"
    drawn = Synthetic.parse(spec).draw(np.random.default_rng(4))
    assert set(drawn.context_len.tolist()) == {10, 20}
    assert (drawn.context_len == 20).mean() == pytest.approx(2 / 3, abs=0.05)
    assert set(drawn.output_tokens.tolist()) == {1, 2, 3}
    assert np.array_equal(drawn.cached_prefix, drawn.context_len // 2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("steady,rate=1", "poisson, bursty, diurnal"),
        ("poisson", "rate"),
        ("poisson,rate=0", "rate"),
        ("poisson,rate=fast", "rate"),
        ("poisson,rate=1,speed=2", "key=value"),
        ("poisson,rate=1,rate=2", "once each"),
        ("poisson,rate=1,requests=10,duration=5s", "not both"),
        ("poisson,rate=1,duration=0.1s", "duration"),
        ("poisson,rate=1,context=lognormal:1k", "MEDIAN:SIGMA"),
        ("poisson,rate=1,context=file:nowhere.csv", "can be read"),
        ("poisson,rate=1,cached=1", "share"),
        ("diurnal,rate=1,peak=0.5", "peak"),
        ("bursty,rate=1,cv=-1", "cv"),
        ("poisson,rate=1,max=none", "max"),
    ],
)
def test_mistakes_in_a_specification(spec: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Source.of(f"synthetic:{spec}")


def test_the_same_seed_draws_the_same_and_replications_differ() -> None:
    source = Source.of("synthetic:bursty,rate=2,requests=100,context=lognormal:1k:1", rate_scale=3)
    first, again, other = source.workload(7), source.workload(7), source.workload(7, replication=1)
    assert len(first) == 300
    assert np.array_equal(first.arrival_s, again.arrival_s)
    assert np.array_equal(first.context_len, again.context_len)
    assert not np.array_equal(first.arrival_s, other.arrival_s)
