"""Plans against this machine, from a fresh calibration: docs/results/confirmation.md.

    python -m validate.machine.confirmation [--quick] [--contexts 2k,4k] [--repeats N] [--profile FILE]
        [--keep FOLDER] [--even-if-busy]

It calibrates, then measures every strategy on two ranks over loopback and the baselines over emulated links, then runs
4 and 8 sleeping ranks. About 25 minutes (`make confirmation`); --quick: one model, loopback alone, about 4 minutes at
2k and 6 at 4k.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically
from planner.api import confirm
from validate.machine.calibration import MODELS, calibrate
from validate.machine.confirmation_page import Section, page
from validate.machine.confirmation_ranks import Sleepers, Slept, ring_traffic, sleep

PAGE = Path(__file__).parents[2] / "docs" / "results" / "confirmation.md"
LINKS: dict[str, dict[str, Any]] = {
    "loopback": {},
    "emulated 1 Gb/s": {"link_bandwidth": 125e6, "link_latency": 2e-4},
    "emulated 250 Mb/s": {"link_bandwidth": 31.25e6, "link_latency": 2e-4},
}
SLEEPERS = (
    Sleepers(num_ranks=4, context_len=2048, link_bytes_per_s=30e6),
    Sleepers(num_ranks=8, context_len=4096, link_bytes_per_s=30e6),
)


def main() -> None:
    """Calibrate, confirm, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model over loopback, few repetitions")
    parser.add_argument("--contexts", help="of the prefills; default 2k,4k, with --quick 2k")
    parser.add_argument("--repeats", type=int, help="of each strategy at the first context; default 6, with --quick 5")
    parser.add_argument("--profile", type=Path, help="of small-llama, instead of a calibration")
    parser.add_argument("--keep", type=Path, help="folder for profiles, traces and pictures")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    parser.add_argument("--even-if-busy", action="store_true", help="while others use the machine")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        profile = chosen.profile or _calibrated("small-llama", folder, chosen)
        sections = [*_llama(profile, folder, chosen)]
        if not chosen.quick:
            sections += _falcon(folder, chosen)
    slept = [] if chosen.quick else _slept(5)
    words: list[str] = [word for word in ("--quick", "--even-if-busy") if word in sys.argv]
    words += [f"--contexts {chosen.contexts}"] if chosen.contexts else []
    words += [f"--repeats {chosen.repeats}"] if chosen.repeats else []
    if chosen.profile:
        words.append(f"--profile {chosen.profile.name}")
    command = " ".join(["python -m validate.machine.confirmation", *words])
    text = page(sections, slept, command)
    write_atomically(chosen.page, text.encode(), argument="page")
    print(text)


def _calibrated(name: str, folder: Path, chosen: argparse.Namespace) -> Path:
    """A profile of this machine, just made."""
    profile = folder / f"{name}.json"
    options = ["--minutes", "1" if chosen.quick else "2", *(["--even-if-busy"] if chosen.even_if_busy else [])]
    calibrate(MODELS / f"{name}.json", profile, options)
    return profile


def _llama(profile: Path, folder: Path, chosen: argparse.Namespace) -> list[Section]:
    """Every strategy over loopback, the baselines over emulated links; longer contexts a third less often."""
    found, repeats = [], chosen.repeats or (5 if chosen.quick else 6)
    for number, ctx in enumerate((chosen.contexts or ("2k" if chosen.quick else "2k,4k")).split(",")):
        rounds = max(3, repeats - repeats * number // 3)
        for name, link in list(LINKS.items())[: 1 if chosen.quick else None]:
            which = "all" if name == "loopback" else None
            top = 2 if name == "loopback" and not chosen.quick else 1
            told: dict[str, Any] = dict(ctx=ctx, repeats=rounds, top=top, strategies=which, **link)
            found.append(_confirmed("small-llama", name, profile, folder, **told))
    return found


def _falcon(folder: Path, chosen: argparse.Namespace) -> list[Section]:
    profile = _calibrated("small-falcon", folder, chosen)
    return [_confirmed("small-falcon", "loopback", profile, folder, ctx="2k", repeats=4, top=1, strategies="all")]


def _confirmed(
    model: str,
    link: str,
    profile: Path,
    folder: Path,
    *,
    ctx: str,
    repeats: int,
    top: int,
    strategies: str | None,
    **scenario: Any,
) -> Section:
    from planner.confirm.timelines import write_plot, write_traces

    print(f"{model}, {link}, {ctx}", file=sys.stderr)
    found = confirm(
        ctx=ctx,
        model=MODELS / f"{model}.json",
        profile=profile,
        gpus=2,
        strategies=None if strategies is None else strategies.split(","),
        top=top,
        virtual=False,
        hardware={"repeats": repeats},
        attention="sdpa",
        dtype="fp32",
        **scenario,
    )
    stem = f"{model}-{link}-{ctx}".replace(" ", "-").replace("/", "")
    write_plot(found, folder / f"{stem}.png")
    write_traces(found, folder / f"{stem}.trace.json")
    return f"{model}, {link}", found.to_dict()


def _slept(repeats: int) -> list[Slept]:
    found: list[Slept] = []
    for sleepers in SLEEPERS:
        traffic = ring_traffic(sleepers.num_ranks, 0.3, 2**18)
        found += sleep(sleepers, repeats=repeats, traffic=traffic, num_seeds=repeats)
    return found


if __name__ == "__main__":
    from validate.machine.confirmation import main as run  # so that ranks find what they run by its name

    try:
        run()
    except KvrsimError as error:
        sys.exit(f"validate.machine.confirmation: {error}")
