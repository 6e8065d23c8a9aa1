"""Predicted attention over 8 GPUs beside ring-flash-attention's published times: a gate, and what the parts do."""

from __future__ import annotations

import pytest

from validate.kernels import rings
from validate.kernels.ring_calls import GPUS, PACKED, TOKENS, VARIANTS, by_heads, ring
from validate.kernels.rings import PARTS, Comparison, call_s, comparisons, library

GATED = {"ring": 1.95, "striped": 1.44, "zigzag ring": 1.22, "all-gather, packed": 1.94}  # published ratios


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return {one.variant.title: one for one in comparisons()}


@pytest.mark.parametrize("title", GATED)
def test_published_ratios_within_a_tenth(title: str, found: dict[str, Comparison]) -> None:
    one = found[title]
    assert one.published_ratio == pytest.approx(GATED[title], abs=0.006)
    assert one.ratios[-1] == pytest.approx(GATED[title], rel=0.1)
    assert abs(one.error) < 0.1


def test_order_of_the_variants(found: dict[str, Comparison]) -> None:
    """The same on one sequence and on packed ones."""
    for titles in (("zigzag ring", "striped", "ring"), ("zigzag ring, packed", "all-gather, packed", "ring, packed")):
        assert sorted(titles, key=lambda title: found[title].published_s) == list(titles)
        assert sorted(titles, key=lambda title: found[title].parts_s[-1]) == list(titles)


def test_parts_only_add(found: dict[str, Comparison]) -> None:
    for one in found.values():
        assert len(one.parts_s) == len(PARTS)
        assert all(later >= before for before, later in zip(one.parts_s, one.parts_s[1:], strict=False))
        assert not one.variant.packed or one.parts_s[1] == one.parts_s[2], "a launch is that of all packed sequences"
    assert found["ring"].parts_s[-1] > found["ring"].parts_s[-2] > found["ring"].parts_s[-3]


def test_the_kernel_alone_takes_what_is_published() -> None:
    (costs,) = library().layer_costs()
    tokens = rings.tokens()
    assert costs.attention_s(tokens, 0 * tokens)[0] == pytest.approx(rings.published_s("single", packed=False))


def test_packed_sequences_share_messages_and_rounds() -> None:
    """Every packing fills a GPU; the sequences' work adds up, and their K, V go together."""
    scenario = library(packed=True)
    whole, *others = (ring("ring")(scenario, packing) for packing in PACKED)
    for layer in others:
        for (full, _), (passed, cast) in zip(whole, layer, strict=True):
            assert passed.nbytes == pytest.approx(full.nbytes)  # type: ignore[union-attr]
            assert passed.device_s.sum() < full.device_s.sum()  # type: ignore[union-attr]
            assert cast.kind == "merge"  # type: ignore[union-attr]
    assert all(sum(packing) == TOKENS for packing in PACKED)


def test_the_last_rank_of_an_all_gather_has_most_to_do() -> None:
    calls = [sum(op.device_s[0] for op in ops if hasattr(op, "device_s")) for ops in by_heads(library(), (TOKENS,))]
    assert calls == sorted(calls)
    assert len(calls) == GPUS


def test_page(found: dict[str, Comparison]) -> None:
    """Every variant in both tables; and what one fused kernel would give, which is below what is published."""
    text = rings.page(tuple(found.values()))
    for title, one in found.items():
        assert text.count(f"| {title} | ") == 2
        assert f"| {one.published_ratio:.2f} | {1e3 * one.parts_s[-1]:.2f} |" in text
    fused_s = call_s(library(fused_merge=True), VARIANTS[0])
    assert f"{fused_s / (GPUS * found['ring'].alone_s):.2f} (ring)" in text
    assert fused_s < min(found["ring"].parts_s[-1], found["ring"].published_s)
