"""Published rows are read unchanged; summaries of errors."""

from __future__ import annotations

from kvrsim.published import read_rows


def test_rows_are_plausible_and_distinct() -> None:
    rows = read_rows()
    assert len(rows) == len(set(rows)) == 161
    assert all(0.05 < row.ttft_s < 10 and row.num_gpus in (1, 2, 4, 8) for row in rows)
    assert sum(row.used_for_calibration for row in rows) == 141
    assert all(row.used_for_calibration == (row.link in ("300GB/s", "none")) for row in rows)


def test_blind_rows_are_marked() -> None:
    blind = [row for row in read_rows() if row.blind_until]
    assert {row.blind_until for row in blind} == {"2026-11-21"}
    models = {row.model for row in blind if row.link == "300GB/s"}
    assert models == {"llama-13b", "llama-30b", "llama-7b-mqa", "falcon-1b"}
    assert sum(row.link == "1GB/s" for row in blind) == 10
    assert len(blind) == 82
