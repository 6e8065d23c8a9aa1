"""Representations of results: figures with the answer as title, pages, and tables in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import kvrsim
from kvrsim.errors import InputError
from kvrsim.results.results import Viewable
from kvrsim.units import format_seconds

REQUESTS = "synthetic:poisson,rate=2,requests=60,context=lognormal:1k:0.5,max=4k"


@pytest.fixture(scope="module")
def results() -> dict[str, Viewable]:
    return {
        "plan": kvrsim.plan(ctx="4k", gpus=4, strategies=["single", "tsp", "kvr-e", "ring", "tp2+ring"]),
        "plan with timelines": kvrsim.plan(ctx="4k", gpus=4, strategies=["tsp", "ring"], timeline=True),
        "plan that does not fit": kvrsim.plan(ctx="256k", gpus=2, strategies=["single", "tsp"]),
        "simulation": kvrsim.simulate(strategy="pp", ctx="4k", gpus=4, timeline=True),
        "map": kvrsim.map_strategies(
            ctx=["1k", "4k"],
            gpus=[2, 8],
            link_bandwidths=["1GB/s", "100GB/s"],
            strategies=["tsp", "kvr-s", "ring", "tp"],
        ),
        "capacity": kvrsim.capacity(
            model="llama-7b",
            cluster="a100-nvlink",
            requests=REQUESTS,
            slo_ttft="2s",
            max_gpus=4,
            strategies=["single", "tp"],
        ),
    }


NAMES = [*("plan", "plan with timelines", "plan that does not fit", "simulation"), *("map", "capacity")]
PAGES = ("plan with timelines", "simulation", "map", "capacity")


def boxes(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Every visible text and its box in pixels; ticks outside of their axis are not drawn."""
    FigureCanvasAgg(figure).draw()
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            unseen |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in unseen and text.get_visible() and text.get_text().strip():
            yield text.get_text(), text.get_window_extent()


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_inside_and_apart(name: str, results: dict[str, Viewable]) -> None:
    figure = results[name].plot()
    value = list(boxes(figure))
    page = figure.bbox.padded(2)
    outside = [text for text, box in value if not (box.xmin >= page.xmin and box.xmax <= page.xmax)]
    outside += [text for text, box in value if not (box.ymin >= page.ymin and box.ymax <= page.ymax)]
    assert outside == []
    over = [(one[0], two[0]) for one, two in combinations(value, 2) if one[1].padded(-2).overlaps(two[1].padded(-2))]
    assert over == []


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_says_the_answer(name: str, results: dict[str, Viewable]) -> None:
    figure, result = results[name].plot(), results[name]
    title = next(text.get_text() for text in figure.texts)
    if isinstance(result, kvrsim.Plan | kvrsim.SimResult):
        of = result.first if isinstance(result, kvrsim.Plan) else result
        assert of.strategy in title
        assert format_seconds(of.ttft_s) in title
        assert result._repr_html_().startswith(f"<div><p><strong>{title}")
    image, size = figure._repr_png_()  # type: ignore[attr-defined]
    assert image.startswith(b"\x89PNG")
    assert 400 <= size["width"] <= 1200


@pytest.mark.parametrize("name", NAMES)
def test_names_are_escaped(name: str, results: dict[str, Viewable]) -> None:
    evil, result = "<script>alert(1)</script>", results[name]
    question = replace(result.question, model=evil)  # type: ignore[attr-defined]
    model = {"model": evil} if "model" in {one.name for one in fields(result)} else {}  # type: ignore[arg-type]
    renamed = replace(result, question=question, warnings=(evil,), **model)  # type: ignore[type-var]
    shown = renamed._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown


@pytest.mark.parametrize("name", NAMES)
def test_plot_writes_by_the_suffix(name: str, results: dict[str, Viewable], tmp_path: Path) -> None:
    results[name].plot(tmp_path / "it.svg")
    assert (tmp_path / "it.svg").read_bytes().startswith(b"<?xml")
    with pytest.raises(InputError, match="plot"):
        results[name].plot(tmp_path / "it.gif")
    if name in PAGES:
        results[name].write_plot(tmp_path / "it.html")
        assert (tmp_path / "it.html").read_text().startswith("<!DOCTYPE html>")
    else:
        with pytest.raises(InputError, match="timeline"):
            results[name].plot(tmp_path / "it.html")
