"""Workloads: scaling, random draws, summaries, and files of traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from planner.capacity import workload as module
from planner.capacity.workload import BLOCK_TOKENS, MAX_LINE, RequestSource, Synthetic, Workload, read_trace
from tests.planner.capacity.made_requests import made


def workload(count: int = 400, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    context = rng.integers(1, 5000, count)
    return made(rng.exponential(1.0, count - 1), context, rng.integers(0, context))


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
    assert peak / trough == pytest.approx((1 + 0.6 * 0.935) / (1 - 0.6 * 0.935), rel=0.06)  # means over 0.1 periods
    assert len(drawn) / drawn.duration_s == pytest.approx(50, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("steady,rate=1", "poisson, bursty, diurnal"),
        ("poisson", "rate"),
        ("poisson,rate=1,rate=2", "once each"),
        ("poisson,rate=1,requests=10,duration=5s", "not both"),
        ("poisson,rate=1,context=lognormal:1k", "MEDIAN:SIGMA"),
        ("diurnal,rate=1,peak=0.5", "peak"),
    ],
)
def test_mistakes_in_a_specification(spec: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        RequestSource.of(f"synthetic:{spec}")


def test_the_same_seed_draws_the_same_and_replications_differ() -> None:
    source = RequestSource.of("synthetic:bursty,rate=2,requests=100,context=lognormal:1k:1", rate_scale=3)
    first, again, other = source.workload(7), source.workload(7), source.workload(7, replication=1)
    assert len(first) == 300
    assert np.array_equal(first.arrival_s, again.arrival_s)
    assert np.array_equal(first.context_len, again.context_len)
    assert not np.array_equal(first.arrival_s, other.arrival_s)


OWN = "arrival_s,context_tokens,output_tokens\n0.5,100,10\n2.5,300,20\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,10\n2023-11-16 18:15:48.6805900,300,20\n"
)
MOONCAKE = "\n".join(
    json.dumps({"timestamp": time, "input_length": length, "output_length": out, "hash_ids": hashes})
    for time, length, out, hashes in (
        (1000, 1000, 5, [1, 2]),
        (3000, 1500, 6, [1, 2, 3]),
        (3000, 600, 7, [4, 2]),
        (4000, 700, 8, [1, 2]),
    )
)


def written(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_text(text)
    return str(path)


ZONES = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,100,10\n2024-05-10T02:00:02+02:00,300,20\n"
GATEWAY = "id,ts,prompt_tokens,completion_tokens\na,2026-11-01T10:00:00Z,100,10\nb,2026-11-01T10:00:02Z,300,20\n"
CACHED = "arrival_s,context_tokens,cached_tokens,output_tokens\n0.5,100,0,10\n2.5,300,256,20\n"


@pytest.mark.parametrize(
    ("text", "cached"), [(OWN, [0, 0]), (AZURE, [0, 0]), (ZONES, [0, 0]), (CACHED, [0, 256]), (GATEWAY, [0, 0])]
)
def test_csv_formats_hold_the_same(tmp_path: Path, text: str, cached: list[int]) -> None:
    trace = read_trace(written(tmp_path, text))
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 2.0], abs=1e-6)
    assert trace.context_len.tolist() == [100, 300]
    assert trace.output_tokens.tolist() == [10, 20]
    assert trace.cached_prefix.tolist() == cached
    assert trace.notes == ()


def test_mooncake_lines_count_leading_blocks_seen_before(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert trace.arrival_s.tolist() == [0.0, 2.0, 2.0, 3.0]
    assert trace.context_len.tolist() == [1000, 1500, 600, 700]
    # The third prompt begins with a new block; the fourth has only known blocks, and one token is still computed.
    assert trace.cached_prefix.tolist() == [0, 2 * BLOCK_TOKENS, 0, 699]
    assert "fully cached" in trace.notes[0]


def test_zero_lengths_are_left_out_and_disorder_is_mended(tmp_path: Path) -> None:
    text = "arrival_s,context_tokens,output_tokens\n9,5,1\n3,0,1\n4,7,1\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.context_len.tolist() == [7, 5]
    assert trace.arrival_s.tolist() == [0.0, 5.0]
    assert "1 requests with a context of 0 tokens left out (the first in line 3)" in trace.notes
    assert any("sorted" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "header"),
        ("time,length\n1,2\n", "line 1"),
        ("arrival_s,context_tokens,output_tokens\n1,2\n", "line 2"),
        ("arrival_s,context_tokens,output_tokens\n1,2,3\n1,x,3\n", "line 3: context_tokens"),
        ("arrival_s,context_tokens,output_tokens\n1,0,3\n", "no context"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "line 2: TIMESTAMP"),
        (MOONCAKE + "\nnonsense\n", "line 5"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read_trace(written(tmp_path, text))
    assert "requests" in str(caught.value)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**4)),
        min_size=1,
        max_size=30,
    )
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]]
) -> None:
    lines = ["arrival_s,context_tokens,cached_tokens,output_tokens"]
    lines += [",".join(map(str, row)) for row in rows]
    trace = read_trace(written(tmp_path_factory.mktemp("trace"), "\n".join(lines) + "\n"))
    ordered = sorted(rows, key=lambda row: row[0])  # a stable sort, as in the reader
    assert trace.arrival_s.tolist() == [row[0] - ordered[0][0] for row in ordered]
    assert trace.context_len.tolist() == [row[1] for row in ordered]
    assert trace.cached_prefix.tolist() == [min(row[2], row[1] - 1) for row in ordered]
    assert np.array_equal(trace.new_tokens, trace.context_len - trace.cached_prefix)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{{"timestamp": {"9" * 400}, "input_length": 5, "output_length": 1}}\n', "line 1: timestamp"),
        (f'{{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [{"9" * 400}]}}\n', "64 bits"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "more": "' + "x" * MAX_LINE + '"}\n',
            "at most 131072",
        ),
        (OWN.splitlines()[0] + '\n1,"' + "x\n" * MAX_LINE + '",2\n', "line"),
    ],
)
def test_numbers_and_lines_without_bounds_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read_trace(written(tmp_path, text))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("row", ["1.0,5,1\n", '{"timestamp": 1, "input_length": 5, "output_length": 1}\n'])
def test_a_trace_without_end_is_refused_at_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: str) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 1000)
    head = "" if row.startswith("{") else "arrival_s,context_tokens,output_tokens\n"
    with pytest.raises(InputError, match="got 'more than 1000 requests', accepted: 1 to 1000 requests"):
        read_trace(written(tmp_path, head + 2000 * row + "nonsense that is never read\n"))


def test_columns_are_read_by_the_names_given(tmp_path: Path) -> None:
    path = written(tmp_path, GATEWAY.replace("ts", "when").replace("prompt_tokens", "size"))
    assert RequestSource.of(path, columns="timestamp=when,context=size").workload(0).context_len.tolist() == [100, 300]
    for columns, message in ((None, "prompt_tokens"), ("moment=when", "timestamp=COLUMN"), ("context=hour", "hour")):
        with pytest.raises(InputError, match=message):
            RequestSource.of(path, columns=columns)


def test_a_data_frame_is_read_as_its_csv(tmp_path: Path) -> None:
    import pandas

    path = written(tmp_path, GATEWAY)
    frame = pandas.read_csv(path, parse_dates=["ts"])
    from_frame, from_file = RequestSource.of(frame).workload(0), RequestSource.of(path).workload(0)
    assert from_frame.arrival_s.tolist() == from_file.arrival_s.tolist()
    assert from_frame.context_len.tolist() == from_file.context_len.tolist()


def test_lengths_are_drawn_uniformly() -> None:
    lengths = (
        RequestSource.of("synthetic:poisson,rate=1,requests=4000,context=uniform:32k:128k").workload(0).context_len
    )
    assert 32768 <= lengths.min() < 33500
    assert 130000 < lengths.max() <= 131072
    assert lengths.mean() == pytest.approx((32768 + 131072) / 2, rel=0.02)


@pytest.mark.parametrize("text", ["uniform:4k", "uniform:8k:4k", "about 4k"])
def test_a_wrong_distribution_names_those_that_are_accepted(text: str) -> None:
    with pytest.raises(InputError, match=r"context: .*uniform:LOW:HIGH"):
        RequestSource.of(f"synthetic:poisson,rate=1,context={text}")


def test_the_defaults_that_decide_the_answer_are_in_a_note() -> None:
    workload = RequestSource.of("synthetic:poisson,rate=4,requests=40").workload(0)
    assert workload.notes == ("by default context=lognormal:1k:1, output=200, cached=0, max=128k",)
    given = "requests=40,context=lognormal:1k:1,output=200,cached=0,max=128k"
    same = RequestSource.of(f"synthetic:poisson,rate=4,{given}").workload(0)
    assert not same.notes
    assert (same.context_len == workload.context_len).all()
