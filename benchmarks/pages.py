"""Interactive pages in Chromium: size, time until the first paint, and frames per second while a reader zooms.

For size and paint, a page shows the timelines of five strategies with 8 ranks x 80 layers. For the frames, a page shows
100,000 spans at once. The browser draws without a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.results.timeline import Timeline
from kvrsim.views.page import Page, write_page
from kvrsim.views.plan import plan_page
from kvrsim.views.timeline import SCRIPTS, LabelledTimeline, gantt_section, timelines_data
from planner.plan import make_plan
from tests.browser.screenshots import PICTURES, page_of
from tests.building.browser import NoBrowserError, Opened, start
from validate.report import write_benchmark
from validate.results import spread

LOADS = 7
FRAMES = 120
SPANS = 100_000
STRATEGIES = ("tsp", "kvr-s", "ring", "zigzag", "ulysses")

# Script that zooms in and out about the middle, one step per frame; returns the milliseconds between frames.
_ZOOM = """
const [frames, done] = arguments;
const chart = kvTimelineChart;
const [from, until] = chart.range();
const times = [];
let last = null;
function frame(now) {
  if (last !== null) times.push(now - last);
  last = now;
  if (times.length === frames) return done(times);
  const share = 0.5 + 0.5 * Math.cos((2 * Math.PI * times.length) / frames);
  const half = ((until - from) / 2) * (0.02 + 0.98 * share);
  chart.to((from + until) / 2 - half, (from + until) / 2 + half);
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
"""


def pages() -> tuple[Page, Page]:
    """A page with a plan of five strategies, and a page with a timeline of at least SPANS spans."""
    scenario, _ = make_scenario(model="llama-2-70b", gpus=8, ctx="16k", profile="a100-flash")
    plan = make_plan(scenario, strategies=STRATEGIES, timelines="all")
    return plan_page(plan), timeline_page(repeated(plan.timelines["ring"]))


def repeated(timeline: Timeline) -> Timeline:
    """The timeline, repeated until it has at least SPANS spans."""
    end_s, times = timeline.end_s, -(-SPANS // len(timeline.spans))
    moved = [
        replace(span, start_s=span.start_s + number * end_s, end_s=span.end_s + number * end_s)
        for number in range(times)
        for span in timeline.spans
    ]
    return replace(timeline, spans=tuple(moved), bases=timeline.bases * times)


def timeline_page(timeline: Timeline) -> Page:
    """A page with only this timeline."""
    shown = [LabelledTimeline(name=timeline.strategy, title=f"{len(timeline.spans)} spans", timeline=timeline)]
    return Page(title="Spans", sections=[gantt_section(several=False)], data=timelines_data(shown), scripts=SCRIPTS)


def painted_ms(page: Opened) -> tuple[float, float]:
    """Milliseconds from the start of a load until the first paint, and until everything is drawn."""
    code = """
        const paint = performance.getEntriesByName('first-contentful-paint')[0];
        return [paint.startTime, Math.max(...performance.getEntriesByName('kv-drawn').map((mark) => mark.startTime))];
    """
    first, drawn = page.script(code)
    return float(first), float(drawn)


def row(driver: Any, name: str, path: Path, *, zooms: bool = False) -> str:
    """A row with a page's size, times of painting and drawing, and frame rate while zooming."""
    loads = [painted_ms(Opened.at(driver, path)) for _ in range(LOADS)]
    paints = [f"{spread([load[which] for load in loads])}" for which in (0, 1)]
    frames = driver.execute_async_script(_ZOOM, FRAMES) if zooms else []
    each = [f"{1e3 / np.mean(frames):.1f}", f"{np.quantile(frames, 0.95):.1f}"] if zooms else ["", ""]
    return f"| {' | '.join([name, f'{path.stat().st_size:,}', *paints, *each])} |"


def written(page: Page, path: Path) -> Path:
    """Write a page to a file, and return the path."""
    write_page(page, path)
    return path


def main() -> None:
    """Measure, and write benchmarks/results/pages.md."""
    load = os.getloadavg()[0]
    lines = [
        "| page | bytes | first paint, ms | drawn, ms | frames a second while zooming | slowest of 20 frames, ms |",
        "|---|---|---|---|---|---|",
    ]
    try:
        driver = start()
    except NoBrowserError as missing:
        sys.exit(f"benchmarks/pages.py: {missing}; nothing is measured")
    driver.set_script_timeout(120)
    plan, many = pages()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        title = f"plan of {len(STRATEGIES)} strategies, 8 ranks x 80 layers"
        lines.append(row(driver, title, written(plan, folder / "five.html"), zooms=True))
        title = f"one timeline of {SPANS:,} spans"
        lines.append(row(driver, title, written(many, folder / "many.html"), zooms=True))
        for command in dict.fromkeys(picture.command for picture in PICTURES.values()):
            lines.append(row(driver, f"`kvrsim {' '.join(command)}`", page_of(command, folder)))
    lines += [
        "",
        f"Chromium {driver.capabilities['browserVersion']}, without a window and without a GPU; median of {LOADS}"
        f" loads, smallest and largest in brackets; {FRAMES} frames, at most 60 a second.",
        "The first two are of llama-2-70b, 16k tokens, a100-flash; the plan's has tables and memory, too.",
        "Aims: below 1,500,000 bytes, first paint below 1000 ms, at least 30 frames a second.",
        f"Load average of the machine when this began: {load:.1f}. Above 0, others slow what was measured.",
    ]
    driver.quit()
    write_benchmark("pages", lines)


if __name__ == "__main__":
    main()
