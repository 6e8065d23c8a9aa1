"""The fit recovers the constants that made the rows, and reports errors of rows that were left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvrsim
from kvrsim.engine import load_engine
from kvrsim.kernels.profile import load_profile
from kvrsim.published import PublishedTtft, read_rows
from validate.published.fit import (
    NAMES,
    PRIORS,
    START,
    coverage,
    link_coverage,
    p80_ape,
    partitions_for,
    profile_of,
    solve,
    speedup_errors,
    ttft_s,
)


def rows_of(*models: str) -> list[PublishedTtft]:
    """Rows of these models with strategies that need no searched partition."""
    rows = [row for row in read_rows() if row.model in models and row.used_for_calibration]
    return [row for row in rows if row.strategy in ("tsp", "single") and row.context_len in (1024, 8192)]


@pytest.mark.slow
def test_rows_made_by_known_constants_give_them_back() -> None:
    chains = [row for row in read_rows() if (row.model, row.strategy, row.context_len) == ("llama-7b", "kvr-s", 8192)]
    rows = [*rows_of("llama-7b", "falcon-1b", "falcon-7b"), *chains]
    true = START + np.log([0.95, 1.05, 1.2, 1.1, 0.9, 1.1, 1.3])
    made = profile_of(true, None)
    cheap = true.copy()  # chunks for cheaper messages: senders are late then, so that what messages cost decides TTFT
    cheap[NAMES.index("message_copies")] -= np.log(4.0)
    partitions = partitions_for(rows, profile_of(cheap, None))
    measured = [replace(row, ttft_s=ttft_s(row, made, partitions[row])) for row in rows]
    partitions = {row: partitions[old] for row, old in zip(measured, rows, strict=True)}
    result = np.exp(solve(measured, np.ones(len(rows)), partitions, START) - true)
    assert dict(zip(NAMES, result, strict=True)) == pytest.approx(dict.fromkeys(NAMES, 1.0), rel=0.1)


@pytest.mark.slow
def test_rows_of_llama_leave_falcons_bytes_at_their_prior() -> None:
    rows = rows_of("llama-7b")
    result = solve(rows, np.ones(len(rows)), partitions_for(rows, profile_of(START, None)), START)
    index = NAMES.index("falcon_bytes")
    assert result[index] == pytest.approx(PRIORS[index], abs=0.01)


def test_speedups_and_coverage_of_left_out_rows() -> None:
    rows = [row for row in read_rows() if row.model in ("llama-7b", "falcon-7b") and row.context_len == 8192]
    rows = [row for row in rows if row.num_gpus == 8]
    result = {row: np.log(1.1 if row.strategy == "tsp" else 1.0) for row in rows}
    assert speedup_errors(result) == pytest.approx([0.1, 0.1])
    assert coverage(dict.fromkeys(rows, 0.05)) == 1.0
    assert coverage({row: 0.0 if row.model == "llama-7b" else 1.0 for row in rows}) == 0.5


def test_each_model_counts_the_same_in_the_interval() -> None:
    """Models have equal weights, so the error of one row counts as much as nine rows of another model."""
    many = [row for row in read_rows() if row.model == "llama-7b" and row.link == "300GB/s"][:9]
    one = next(row for row in read_rows() if row.model == "falcon-7b")
    assert p80_ape({**dict.fromkeys(many, 0.0), one: np.log(1.2)}) == pytest.approx(0.2)


def test_coverage_on_links_that_were_not_fitted_is_that_of_the_shipped_profile() -> None:
    residual = load_profile("a100-eager").residual
    assert residual is not None
    assert residual.links == link_coverage()
    for link in residual.links:
        asked = {"ctx": "8k", "gpus": 4, "topology": "bus", "link_bandwidth": link.bytes_per_s}
        assert kvrsim.simulate(strategy="kvr-e", **asked).interval_coverage == link.coverage
    assert kvrsim.simulate(strategy="kvr-e", ctx="8k", gpus=4).interval_coverage == residual.coverage
    assert kvrsim.simulate(strategy="kvr-e", ctx="8k", gpus=4, link_bandwidth="100GB/s").interval_coverage is None


def test_the_engine_of_2023_has_the_host_of_the_profile() -> None:
    assert load_engine("hf-2023").host == load_profile("a100-eager").host
