"""Other busy processes on this host are noticed; the limit depends on the number of cores."""

from __future__ import annotations

import os

import pytest

from kvrsim.runtime import host


@pytest.mark.parametrize(
    ("cpus", "cores", "is_noted"), [(2, 0.3, True), (2, 0.2, False), (128, 7.9, False), (128, 8.1, True)]
)
def test_a_host_is_busy_from_a_quarter_of_a_core_or_a_sixteenth_of_many(
    monkeypatch: pytest.MonkeyPatch, cpus: int, cores: float, is_noted: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    readings = iter([100.0, 100.0 + cores * 0.3])
    monkeypatch.setattr(host, "_busy_s", lambda: next(readings))
    notes = host.busy_note()
    assert [f"use {cores:.1f} cores" in note for note in notes] == [True] * is_noted
