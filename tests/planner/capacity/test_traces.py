"""Traces: each format is recognised by its first line, and every bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from planner.capacity import traces
from planner.capacity.traces import BLOCK_TOKENS, MAX_LINE, read_trace

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


@pytest.mark.parametrize(("text", "kind"), [(OWN, "csv"), (AZURE, "azure")])
def test_csv_formats_hold_the_same(tmp_path: Path, text: str, kind: str) -> None:
    trace = read_trace(written(tmp_path, text))
    assert trace.kind == kind
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 2.0], abs=1e-6)
    assert trace.context_len.tolist() == [100, 300]
    assert trace.output_tokens.tolist() == [10, 20]
    assert trace.cached_prefix.tolist() == [0, 0]
    assert trace.notes == ()


def test_mooncake_lines_count_leading_blocks_seen_before(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE), "mooncake")
    assert trace.arrival_s.tolist() == [0.0, 2.0, 2.0, 3.0]
    assert trace.context_len.tolist() == [1000, 1500, 600, 700]
    # The third begins with a block that is new; the fourth has all its blocks seen, and keeps a token to compute.
    assert trace.cached_prefix.tolist() == [0, 2 * BLOCK_TOKENS, 0, 699]
    assert "fully cached" in trace.notes[0]


def test_mooncake_as_csv_keeps_what_is_cached(tmp_path: Path) -> None:
    text = "arrival_s,context_tokens,cached_tokens,output_tokens\n0.0,6758,0,500\n0.0,7322,512,490\n"
    trace = read_trace(written(tmp_path, text), "mooncake")
    assert trace.cached_prefix.tolist() == [0, 512]
    assert trace.new_tokens.tolist() == [6758, 6810]


def test_dates_may_carry_a_zone(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,1\n2024-05-10T02:00:01+02:00,6,2\n"
    )
    assert read_trace(written(tmp_path, text)).arrival_s.tolist() == pytest.approx([0.0, 0.99007], abs=1e-5)


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
        ("arrival_s,context_tokens,output_tokens\n", "0 requests"),
        ("arrival_s,context_tokens,output_tokens\n1,2\n", "line 2"),
        ("arrival_s,context_tokens,output_tokens\n1,2,3\n1,x,3\n", "line 3: context_tokens"),
        ("arrival_s,context_tokens,output_tokens\n1,-2,3\n", "line 2: context_tokens"),
        ("arrival_s,context_tokens,output_tokens\ninf,2,3\n", "line 2: arrival_s"),
        ("arrival_s,context_tokens,output_tokens\n-1,2,3\n", "line 2"),
        ("arrival_s,context_tokens,output_tokens\n1,0,3\n", "no context"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "line 2: TIMESTAMP"),
        ('{"timestamp": 1}\n', "line 1"),
        (MOONCAKE + "\nnonsense\n", "line 5"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}\n', "input_length"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read_trace(written(tmp_path, text))
    assert "requests" in str(caught.value)


def test_a_named_format_is_insisted_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="columns of azure"):
        read_trace(written(tmp_path, MOONCAKE), "azure")
    assert read_trace(written(tmp_path, OWN), "azure").kind == "azure"  # this project's columns will do


@pytest.mark.parametrize("name", ["nowhere.csv", "."])
def test_unreadable_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="can be read"):
        read_trace(str(tmp_path / name))


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_trace(str(tmp_path / "trace.csv"))


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
    ordered = sorted(rows, key=lambda row: row[0])  # stable, as the reader's
    assert trace.arrival_s.tolist() == [row[0] - ordered[0][0] for row in ordered]
    assert trace.context_len.tolist() == [row[1] for row in ordered]
    assert trace.cached_prefix.tolist() == [min(row[2], row[1] - 1) for row in ordered]
    assert np.array_equal(trace.new_tokens, trace.context_len - trace.cached_prefix)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{{"timestamp": {"9" * 400}, "input_length": 5, "output_length": 1}}\n', "line 1: timestamp"),
        (f'{{"timestamp": 1, "input_length": {"9" * 400}, "output_length": 1}}\n', "line 1: input_length"),
        (f'{{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [{"9" * 400}]}}\n', "64 bits"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["' + "x" * 65 + '"]}\n',
            "64 characters",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "more": "' + "x" * MAX_LINE + '"}\n',
            "at most 131072",
        ),
        ("{" + " " * MAX_LINE + "\n", "at most 131072"),
        (OWN.splitlines()[0] + '\n1,"' + "x\n" * MAX_LINE + '",2\n', "line"),
    ],
)
def test_numbers_and_lines_without_bounds_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read_trace(written(tmp_path, text))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("row", ["1.0,5,1\n", '{"timestamp": 1, "input_length": 5, "output_length": 1}\n'])
def test_a_trace_without_end_is_refused_at_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: str) -> None:
    monkeypatch.setattr(traces, "MAX_REQUESTS", 1000)
    head = "" if row.startswith("{") else "arrival_s,context_tokens,output_tokens\n"
    with pytest.raises(InputError, match="got 'more than 1000 requests', accepted: 1 to 1000 requests"):
        read_trace(written(tmp_path, head + 2000 * row + "nonsense that is never read\n"))


def test_blocks_without_end_are_refused_at_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(traces, "MAX_BLOCKS", 3)
    line = '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2, 3, 4]}\n'
    with pytest.raises(InputError, match="at most 3 blocks in all"):
        read_trace(written(tmp_path, line))
