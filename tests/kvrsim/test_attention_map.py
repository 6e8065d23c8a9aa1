"""The counts of the KV-Runahead paper: its figures, its equations, and the simulated programs."""

from __future__ import annotations

import doctest
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim import attention_map
from kvrsim.attention_map import AttentionMap, PaperCounts
from kvrsim.strategies import get_strategy
from tests.building import examples
from tests.building.commands import answer, refusal, run

CHUNKS = st.lists(st.integers(1, 500), min_size=1, max_size=8).map(tuple)


def test_the_papers_example_of_eleven_tokens() -> None:
    assert doctest.testmod(attention_map).attempted >= 5
    assert doctest.testmod(attention_map).failed == 0


def test_figures_4_and_5() -> None:
    tsp = AttentionMap(chunks=(3, 3, 3), gathers=True)
    kvr = AttentionMap(chunks=(4, 3, 2), gathers=False)
    assert (tsp.dot_products, tsp.kv_entries) == ((27, 27, 27), 36)
    assert (kvr.dot_products, kvr.kv_entries) == ((16, 21, 18), 22)


@given(chunks=CHUNKS, blocks=st.integers(1, 8))
@examples(40)
def test_blocks_of_queries_and_chunks_cover_the_lower_triangle(chunks: tuple[int, ...], blocks: int) -> None:
    """Rectangles hold every kept product; more blocks waste less; kvr-b's products are those of its cost."""
    whole = AttentionMap(chunks=chunks, gathers=False)
    parts = AttentionMap(
        chunks=tuple(blocks * chunk for chunk in chunks), gathers=False, query_blocks=(blocks,) * len(chunks)
    )
    for attention in (whole, parts, AttentionMap(chunks=chunks, gathers=True)):
        ends = [first + queries for first, queries, _ in attention.rectangles]
        assert all(keys >= end for end, (_, _, keys) in zip(ends, attention.rectangles, strict=True))
        assert all(end == first for end, (first, _, _) in pairwise_ends(attention, ends))
        assert ends[-1] == attention.num_tokens
        assert attention.needed <= sum(attention.dot_products)
        assert 0 < attention.coverage <= 1
    start = 0
    for chunk, count in zip(parts.chunks, parts.dot_products, strict=True):
        assert count == pytest.approx(chunk * start + chunk**2 * (blocks + 1) / (2 * blocks))
        start += chunk


def pairwise_ends(attention: AttentionMap, ends: list[int]) -> list[tuple[int, tuple[int, int, int]]]:
    """The end of each rectangle beside the next rectangle."""
    return [(ends[index], after) for index, (_, after) in enumerate(pairwise(attention.rectangles))]


@given(chunks=CHUNKS)
@examples(40)
def test_equation_1_is_least_for_even_chunks(chunks: tuple[int, ...]) -> None:
    """Equation 1 = TTFT(1) / 2 x (1 + sum of squared shares) / p; for even chunks it is Equation 4."""
    counts = PaperCounts(strategy="kvr-s", attention=AttentionMap(chunks=chunks, gathers=False), single_s=2.0)
    shares = [chunk / sum(chunks) for chunk in chunks]
    assert counts.least_s == pytest.approx((1 + sum(share**2 for share in shares)) / len(chunks))
    assert counts.least_s >= counts.ttft_star_s * (1 - 1e-12)
    if len(set(chunks)) == 1:
        assert counts.least_s == pytest.approx(counts.ttft_star_s)


def test_simulate_explains_with_the_counts_of_its_own_partition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "map.png"
    question = ("simulate", "--strategy", "kvr-s", "--gpus", "8", "--ctx", "16k")
    out, _ = run(capsys, *question, "--explain", "--plot", str(picture))
    result = answer(capsys, *question, "--explain")
    counts = result["counts"]
    assert counts["dot_products"] == list(AttentionMap(chunks=tuple(result["partition"]), gathers=False).dot_products)
    assert f"{counts['kv_entries']:,}" in out
    assert picture.stat().st_size > 1000
    bounds = kvrsim.plan(gpus=8, ctx="16k", strategies=["kvr-s"]).bounds
    assert counts["ttft_star_s"] == pytest.approx(bounds.ttft_star_s)
    assert "counts" not in answer(capsys, "simulate", "--strategy", "tsp", "--gpus", "2", "--ctx", "1k")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategy zigzag", "--explain: got 'zigzag', accepted: tsp, kvr-e, kvr-s, kvr-p or kvr-b"),
        ("--strategy tp2+kvr-s", "--explain: got 'tp2+kvr-s', accepted: tsp"),
        ("--strategy tsp --cached-prefix 1k", "--cached-prefix: got '1024', accepted: 0 with --explain"),
        ("--strategy tsp --model gpt-oss-120b --cluster 4xh100", "--explain: got 'gpt-oss-120b'"),
        ("--strategy tsp --plot map.html", "--plot: got 'map.html', accepted: a picture with --explain"),
    ],
)
def test_what_the_paper_does_not_count_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, "simulate", "--gpus", "4", "--ctx", "8k", "--explain", *words.split())


def test_every_strategy_of_the_paper_is_counted() -> None:
    for name in ("tsp", "kvr-e", "kvr-s", "kvr-p", "kvr-b"):
        assert AttentionMap.of(get_strategy(name), (2, 1), None).num_tokens == 3
