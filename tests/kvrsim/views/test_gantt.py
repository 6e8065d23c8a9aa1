"""The Gantt chart: all formats, reproducible bytes, and no half-written files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.results.timeline import Timeline
from kvrsim.strategies import STRATEGIES
from kvrsim.views.figure import save_figure
from kvrsim.views.gantt import MAX_DETAILED_RANKS, covered_shares, draw_gantt, is_solid, legend_entries, mean_colours
from kvrsim.views.style import OPERATIONS, operation_of


def timeline_of(strategy: str, gpus: int = 2, **options: str) -> Timeline:
    result = kvrsim.simulate(strategy=strategy, ctx=64 * gpus, gpus=gpus, timeline=True, **options)  # type: ignore[arg-type]
    assert result.timeline is not None
    return result.timeline


DRAWN = [(name, 4) for name in (*STRATEGIES, "tp2+kvr-s", "tp2+pp") if name != "kvr-p"]


@pytest.mark.parametrize(("strategy", "gpus"), [*DRAWN, ("single", 1), ("kvr-s", 1), ("ring", 1), ("pp", 1)])
def test_every_strategy_can_be_drawn(strategy: str, gpus: int, tmp_path: Path) -> None:
    save_figure(draw_gantt(timeline_of(strategy, gpus, model="llama-3-8b"), strategy, ""), tmp_path / "gantt.PNG")
    assert (tmp_path / "gantt.PNG").stat().st_size > 10_000


# Messages of each strategy, and operations of its ranks other than projection, append, attention and MLP.
CHAIN, RING = ({"KV"}, set[str]()), ({"KV"}, {"merge"})
DOES: dict[str, tuple[set[str], set[str]]] = {
    **{"single": (set(), set()), "tsp": ({"all-gather"}, set()), "zigzag": ({"all-gather"}, set())},
    **{"kvr-e": CHAIN, "kvr-s": CHAIN, "kvr-b": CHAIN, "kvr-direct": CHAIN, "tp2+kvr-e": ({"KV"}, {"collective"})},
    **{"ring": RING, "striped": RING, "zigzag-ring": RING, "tp2+ring": ({"KV"}, {"merge", "collective"})},
    **{"ulysses": ({"heads"}, set()), "tp": (set(), {"collective"}), "pp": ({"activations"}, set())},
    **{"pp-s": ({"activations"}, set()), "pp2+cp2": ({"activations", "all-gather"}, set())},
    **{"tp2+pp": ({"activations"}, {"collective"}), "cp4": ({"all-gather"}, set())},
}


@pytest.mark.parametrize("strategy", DOES)
def test_operations_are_drawn_as_what_they_are(strategy: str) -> None:
    timeline, (carries, does) = timeline_of(strategy, gpus=4, model="llama-3-8b", profile="a100-eager"), DOES[strategy]
    drawn = [(span, operation_of(span.kind, span.op)) for span in timeline.spans]
    assert {one for span, one in drawn if span.kind == "transfer"} == {OPERATIONS[op] for op in carries}
    worked = {one for span, one in drawn if is_solid(span)}
    assert worked == {OPERATIONS[op] for op in {"embedding", "qkv", "append", "attention", "output+mlp"} | does}
    assert all(one is OPERATIONS["attention"] for span, one in drawn if "attention" in span.name)
    assert all(one is OPERATIONS["collective"] for span, one in drawn if span.name == "all-reduce")
    assert timeline.gpus_per_rank == {"tp": 4}.get(strategy, 2 if strategy.startswith("tp2") else 1)
    entries = legend_entries(timeline.spans)
    assert len(set(entries.values())) == len(entries), "two things in one colour"
    assert {one.label for _, one in drawn} == set(entries) - {"odd layers: lighter"}
    for span in timeline.spans:
        first_word = span.name.partition(" ")[0]
        if span.kind == "transfer" or first_word in ("KV", "activations", "heads"):
            assert first_word == span.op


@given(seed=st.integers(0, 2**32 - 1))
def test_no_bar_is_lost_between_two_pixels(seed: int) -> None:
    """The pixels of two colours add up to the time of all bars, even of very thin ones."""
    rng = np.random.default_rng(seed)
    moments = np.sort(rng.random(4 * rng.integers(1, 40)))
    times = list(zip(moments[::2], moments[1::2], strict=True))
    bins, end_s = int(rng.integers(1, 300)), times[-1][1]
    by_colour = {"#ff0000": times[::2], "#0000ff": times[1::2]}
    shares = {colour: covered_shares(some, end_s, bins) for colour, some in by_colour.items()}
    pixels = mean_colours(shares, "#000000")
    assert pixels.shape == (bins, 3)
    for channel, some in ((0, times[::2]), (2, times[1::2])):
        covered_s = sum(until_s - begin_s for begin_s, until_s in some)
        assert pixels[:, channel].sum() * end_s / bins == pytest.approx(covered_s, rel=1e-9, abs=1e-9)


def test_many_ranks_are_drawn_in_thin_lanes(tmp_path: Path) -> None:
    heights = []
    for ranks in (MAX_DETAILED_RANKS, MAX_DETAILED_RANKS + 1):
        save_figure(draw_gantt(timeline_of("kvr-e", ranks), "lanes", ""), tmp_path / "gantt.svg")
        heights.append(float(re.findall(r'viewBox="0 0 \S+ (\S+)"', (tmp_path / "gantt.svg").read_text())[0]))
    assert heights[1] < heights[0] / 2
