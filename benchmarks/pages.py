"""Interactive pages in Chromium: size, time until the first paint, and frames a second while a reader zooms.

The Gantt is that of 8 ranks x 80 layers: five strategies for the size and the paint, and 100,000 spans in view at once
for the frames. The browser draws without a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _report import spread, write

from kvrsim.pages.page import Page, write_page
from kvrsim.pages.prefill import plan_page
from kvrsim.pages.timeline import SCRIPTS, Shown, gantt_section, timelines_data
from kvrsim.results.timeline import Timeline
from kvrsim.setup import make_scenario
from planner.plan import make_plan
from tests.building.browser import NoBrowserError, Opened, start

LOADS = 7
FRAMES = 120
SPANS = 100_000
STRATEGIES = ("tsp", "kvr-s", "ring", "zigzag", "ulysses")

# Zooms in and out about the middle, one step a frame; milliseconds between frames, and of drawing alone.
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
    """A plan of five strategies, and a timeline of at least SPANS spans."""
    scenario, _ = make_scenario(model="llama-2-70b", gpus=8, ctx="16k", profile="a100-flash")
    plan = make_plan(scenario, strategies=STRATEGIES, every_timeline=True)
    return plan_page(plan), timeline_page(repeated(plan.timelines["ring"]))


def repeated(timeline: Timeline) -> Timeline:
    """The same again and again, until it has SPANS spans."""
    end_s, times = timeline.end_s, -(-SPANS // len(timeline.spans))
    moved = [
        replace(span, start_s=span.start_s + number * end_s, end_s=span.end_s + number * end_s)
        for number in range(times)
        for span in timeline.spans
    ]
    return replace(timeline, spans=tuple(moved), bases=timeline.bases * times)


def timeline_page(timeline: Timeline) -> Page:
    """It alone."""
    shown = [Shown(name=timeline.strategy, title=f"{len(timeline.spans)} spans", timeline=timeline)]
    return Page(title="Spans", sections=[gantt_section(several=False)], data=timelines_data(shown), scripts=SCRIPTS)


def painted_ms(page: Opened) -> tuple[float, float]:
    """Of one load: until the first paint, and until all is drawn."""
    code = """
        const paint = performance.getEntriesByName('first-contentful-paint')[0];
        return [paint.startTime, Math.max(...performance.getEntriesByName('kv-drawn').map((mark) => mark.startTime))];
    """
    first, drawn = page.script(code)
    return float(first), float(drawn)


def measured(driver: Any, page: Page, folder: Path) -> tuple[int, list[tuple[float, float]], list[float]]:
    """Bytes, times of each load, and milliseconds between frames."""
    path = folder / "page.html"
    write_page(page, path)
    loads = [painted_ms(Opened.at(driver, path)) for _ in range(LOADS)]
    driver.set_script_timeout(120)
    return path.stat().st_size, loads, driver.execute_async_script(_ZOOM, FRAMES)


def main() -> None:
    """Measure, and write the results."""
    load = os.getloadavg()[0]
    plan, many = pages()
    rows = {f"plan of {len(STRATEGIES)} strategies": plan, f"one timeline of {SPANS:,} spans": many}
    lines = [
        "| page | bytes | first paint, ms | drawn, ms | frames a second while zooming | slowest of 20 frames, ms |",
        "|---|---|---|---|---|---|",
    ]
    try:
        driver = start()
    except NoBrowserError as missing:
        sys.exit(f"benchmarks/pages.py: {missing}; nothing is measured")
    with tempfile.TemporaryDirectory() as folder:
        for name, page in rows.items():
            size, loads, frames = measured(driver, page, Path(folder))
            paints = [f"{spread([load[which] for load in loads])}" for which in (0, 1)]
            each = f"{1e3 / np.mean(frames):.1f} | {np.quantile(frames, 0.95):.1f}"
            lines.append(f"| {name} | {size:,} | {' | '.join(paints)} | {each} |")
        version = driver.capabilities["browserVersion"]
    driver.quit()
    lines += [
        "",
        f"Chromium {version}, without a window and without a GPU; median of {LOADS} loads, smallest and largest in"
        f" brackets; {FRAMES} frames, at most 60 a second.",
        "Both are of 8 ranks x 80 layers (llama-2-70b, 16k tokens, a100-flash); the plan's has tables and memory, too.",
        "Aims: below 1,500,000 bytes, first paint below 1000 ms, at least 30 frames a second.",
        f"Load average of the machine when this began: {load:.1f}. Above 0, others slow what was measured.",
    ]
    write("pages", "python benchmarks/pages.py", lines)


if __name__ == "__main__":
    main()
