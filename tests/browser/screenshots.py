"""Pictures of the pages for the documentation: docs/images/pages/*.png.

    python -m tests.browser.screenshots [NAME ...] [--here PROFILE.json]      (make screenshots)

Each page is made by its command, opened in Chromium and moved as a reader would. The page of `confirm` needs a profile
of this machine, as `kvrsim calibrate all --model validate/models/small-llama.json` makes it; without --here its picture
stays as it is.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrsim.io.files import write_atomically
from tests.building.browser import Opened, start

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images" / "pages"
MODEL = ROOT / "validate" / "models" / "small-llama.json"
LARGEST_BYTES = 150_000
PLAN = ("plan", "--gpus", "8", "--ctx", "16k", "--plot", "plan.html")
MAP = (
    *("map", "--ctx", "1k:64k:x2", "--gpus", "2,4,8", "--link-bandwidths", "5GB/s,25GB/s,100GB/s,300GB/s"),
    *("--strategies", "tsp,kvr-s,ring,zigzag,ulysses,tp,tp2+kvr-s", "--plot", "map.html"),
)
CAPACITY = (
    *("capacity", "--model", "llama-3-8b", "--cluster", "h100-nvlink", "--profile", "h100-flash"),
    *("--requests", "synthetic:bursty,rate=6,requests=3000,context=lognormal:3000:0.9,max=24k"),
    *("--slo-ttft", "2s", "--price-per-gpu-hour", "2.5", "--html", "capacity.html"),
)

CONFIRM = (
    *("confirm", "--gpus", "2", "--ctx", "2k", "--model", "small-llama.json", "--profile", "here.json"),
    *("--attention", "sdpa", "--dtype", "fp32", "--no-virtual", "--repeats", "3", "--plot", "confirm.html"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One picture: the command, the actions and the window."""

    command: Sequence[str]  # the last word is the file of the page
    act: Callable[[Opened], object] = lambda _: None  # actions before the picture is taken
    size: tuple[int, int] = (1200, 860)  # CSS pixels
    dark: bool = False


def zoomed(page: Opened) -> None:
    """Zoom into the middle of both timelines and move the pointer to an operation."""
    canvas = "#gantt canvas"
    for _ in range(4):
        page.wheel(canvas, 640, 100, -240)
    page.script("window.scrollTo(0, document.querySelector('#timelines').offsetTop - 12)")
    x, y = page.script(
        "const [from, until] = kvTimelineChart.range(); const lane = kvTimelineChart.panels()[1].lanes[8].lane;"
        "let index = kvSpans.at(lane, (from + until) / 2, 1);"
        "while (!kvTimelineChart.panels()[1].timeline.kinds[lane.kind[index]].name.includes('attention')) index += 1;"
        "return kvTimelineChart.pointOf(1, 8, index)"
    )
    page.hover(canvas, x, y)
    page.script("window.scrollTo(0, document.querySelector('#timelines').offsetTop - 12)")


def at(selector: str) -> Callable[[Opened], object]:
    """Return an action that scrolls to an element."""
    return lambda page: page.script(
        f"window.scrollTo(0, document.querySelector('{selector}').closest('section').offsetTop - 12)"
    )


def pointed(page: Opened) -> None:
    """Move the pointer to a cell of a map."""
    section = "document.querySelector('#map').closest('section')"
    page.script(f"window.scrollTo(0, {section}.offsetTop - 12)")
    x, y = page.script("""
        const box = document.querySelector("#by-links .cell[data-x='4'][data-y='1']").getBoundingClientRect();
        const whole = document.querySelector("#by-links svg").getBoundingClientRect();
        return [box.x - whole.x + box.width / 2, box.y - whole.y + box.height / 2];
    """)
    page.hover("#by-links svg", x, y)
    page.script(f"window.scrollTo(0, {section}.offsetTop - 12)")


def led(page: Opened) -> None:
    """Switch zigzag off and colour the map by the winner's lead."""
    page.click("[data-key=lead]")
    page.click(".switches [data-key='4']")
    at("#map")(page)


def dearer(page: Opened) -> None:
    """Drag the target to a shorter time and the budget to a higher price."""
    y = page.script("return kvFleets.chart.plot().valToPos(kvFleets.state.target, 'y')")
    page.drag("#fleets .u-over", 800, y, 0, 45)
    x = page.script("return kvFleets.chart.plot().valToPos(kvFleets.state.budget, 'x')")
    page.drag("#fleets .u-over", x, 30, 330)
    at("#fleets")(page)


def busiest(page: Opened) -> None:
    """Show the longest queue."""
    page.click("#queue .tools > button")
    page.click("#queue .group button:nth-child(2)")
    at("#queue")(page)


PICTURES = {
    "plan": Picture(command=PLAN, size=(1200, 940)),
    "plan-zoomed": Picture(command=PLAN, act=zoomed, size=(1160, 700)),
    "plan-strategies": Picture(command=PLAN, act=at("#strategies"), size=(1200, 700), dark=True),
    "map": Picture(command=MAP, act=pointed, size=(1120, 700)),
    "map-lead": Picture(command=MAP, act=led, size=(1200, 470), dark=True),
    "capacity": Picture(command=CAPACITY, act=dearer, size=(1200, 790)),
    "capacity-queue": Picture(command=CAPACITY, act=busiest, size=(1200, 660), dark=True),
}


def main() -> None:
    """Make the named pictures, or all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of pictures")
    parser.add_argument("--here", type=Path, help="profile of this machine")
    chosen = parser.parse_args()
    pictures = dict(PICTURES)
    if chosen.here is not None:
        pictures["confirm"] = Picture(command=CONFIRM, size=(1200, 860))
    driver = start()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.here is not None:
            shutil.copy(chosen.here, Path(folder, "here.json"))
            shutil.copy(MODEL, folder)
        for name in chosen.names or pictures:
            content = picture(driver, pictures[name], Path(folder))
            assert len(content) < LARGEST_BYTES, f"{name}: {len(content)} bytes"
            FOLDER.mkdir(parents=True, exist_ok=True)
            write_atomically(FOLDER / f"{name}.png", content, argument="picture")
            print(f"{name}.png: {len(content)} bytes")
    driver.quit()


def picture(driver: Any, one: Picture, folder: Path) -> bytes:
    """The picture as PNG."""
    opened = Opened.at(driver, page_of(one.command, folder), one.size)
    opened.prefers("dark" if one.dark else "light")
    one.act(opened)
    opened.settle()
    return smaller(driver.get_screenshot_as_png())


def page_of(command: Sequence[str], folder: Path) -> Path:
    """The page that a command writes to the path in its last word; the command runs once."""
    page = folder / command[-1]
    if not page.exists():
        words = [sys.executable, "-m", "kvrsim", *command]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        assert page.exists(), done.stderr
    return page


def smaller(content: bytes) -> bytes:
    """The picture with 128 levels per colour channel: the difference is not visible and the file is smaller."""
    from PIL import Image

    image = (
        Image.open(io.BytesIO(content)).convert("RGB").point([level & 0xFE | level >> 7 for level in range(256)] * 3)
    )
    written = io.BytesIO()
    image.save(written, format="PNG", optimize=True)
    return written.getvalue()


if __name__ == "__main__":
    main()
