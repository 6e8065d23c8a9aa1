"""Plans compared with measurements on this machine, after a fresh calibration: docs/results/confirmation.md.

    python -m validate.confirmation

The command calibrates small-llama. At 2k tokens it then measures every strategy on two ranks over loopback, and the
baselines over emulated links: about 8 minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from validate.report import RESULTS, fill, kvrsim, output_of, write_page

MODEL = Path(__file__).parent / "models" / "small-llama.json"
LINKS: dict[str, tuple[str, ...]] = {  # options of `kvrsim confirm` for each setting
    "loopback": ("--strategies", "all"),
    "emulated 1 Gb/s": ("--link-bandwidth", "125MB/s", "--link-latency", "200us"),
    "emulated 250 Mb/s": ("--link-bandwidth", "31.25MB/s", "--link-latency", "200us"),
}
_LIMIT_S = 3600.0  # time limit of a command


def sections(profile: Path) -> Iterator[str]:
    """Yield the output of `kvrsim confirm` for each setting, under a heading."""
    for name, options in LINKS.items():
        words = ("--ctx", "2k", "--dtype", "fp32", "--attention", "sdpa", "--top", 1, "--no-virtual", *options)
        command = ("confirm", "--model", MODEL, "--profile", profile, "--gpus", 2, *words)
        output = output_of(*command, timeout_s=_LIMIT_S, accepted=(0, 1))
        print(output, flush=True)
        yield f"## {name}\n\n```text\n{output.strip()}\n```\n"


def main() -> None:
    """Calibrate, confirm, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "here.json")
        words = ("--model", MODEL, "--attention", "sdpa", "--minutes", 2, "-o", profile)
        kvrsim("calibrate", "all", *words, timeout_s=_LIMIT_S)
        parts = list(sections(profile))
    write_page(RESULTS / "confirmation.md", fill("confirmation", sections=parts))


if __name__ == "__main__":
    main()
