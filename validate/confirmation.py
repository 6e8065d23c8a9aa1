"""Plans against this machine, from a fresh calibration: docs/results/confirmation.md.

    python -m validate.confirmation [--quick] [--profile FILE] [--page FILE]

It calibrates small-llama, then measures every strategy on two ranks over loopback, and the baselines over emulated
links, at 2k and 4k tokens: about 20 minutes (`make confirmation`). --quick: loopback and 2k alone, about 4 minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from kvrsim.units import format_tokens
from validate.report import RESULTS, fill, kvrsim, numbers_table, write_page

PAGE = RESULTS / "confirmation.md"
MODEL = Path(__file__).parent / "models" / "small-llama.json"
EVERY = ("--strategies", "all")
LINKS: dict[str, tuple[str, ...]] = {  # options of each setting
    "loopback": EVERY,
    "emulated 1 Gb/s": ("--link-bandwidth", "125MB/s", "--link-latency", "200us"),
    "emulated 250 Mb/s": ("--link-bandwidth", "31.25MB/s", "--link-latency", "200us"),
}
TARGET_ERROR, TARGET_REGRET = 0.07, 0.03
_MOST_PIECES = 4  # of a pipeline that are listed one by one
_LIMIT_S = 3600.0  # of a command
Result = Mapping[str, Any]  # the output of `kvrsim confirm --json`


def main() -> None:
    """Calibrate, confirm, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="loopback and 2k alone")
    parser.add_argument("--profile", type=Path, help="of small-llama, instead of a calibration")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    arguments = parser.parse_args()
    model = ("--model", MODEL, "--attention", "sdpa")
    with tempfile.TemporaryDirectory() as folder:
        profile: Path = arguments.profile or Path(folder, "here.json")
        if arguments.profile is None:
            kvrsim(
                "calibrate", "all", *model, "--minutes", 1 if arguments.quick else 2, "-o", profile, timeout_s=_LIMIT_S
            )
        sections = []
        for ctx in ("2k",) if arguments.quick else ("2k", "4k"):
            for name, options in LINKS.items():
                if name == "loopback" or not arguments.quick:
                    words = ("--gpus", 2, "--ctx", ctx, "--dtype", "fp32", "--top", 1, "--no-virtual", *options)
                    more: dict[str, Any] = dict(timeout_s=_LIMIT_S, accepted=(0, 1))
                    result = kvrsim("confirm", *model, "--profile", profile, *words, **more)
                    sections.append((f"small-llama, {name}", result))
    command = f"python -m validate.confirmation{' --quick' if arguments.quick else ''}"
    write_page(arguments.page, page(sections, command))


def page(sections: Sequence[tuple[str, Result]], command: str) -> list[str]:
    """Return the lines of the page; sections: the results by the name of their setting."""
    results = [result for _, result in sections]
    candidates = [one for result in results for one in result["candidates"]]
    errors = [abs(one["rel_error"]) for one in candidates]
    right, significant = (sum(result["orders"][key] for result in results) for key in ("right", "significant"))
    regrets = [result["regret"] for result in results]
    beyond = sum(result["regret"] > TARGET_REGRET and result["regret_beyond_spread"] for result in results)
    return fill(
        "confirmation",
        command=command,
        date=date.today().isoformat(),
        conditions="; ".join(f"{name} {value}" for name, value in results[0]["conditions"].items() if name != "model"),
        error=f"median {median(errors):.1%} (target {TARGET_ERROR:.0%}), worst {max(errors):.1%}, of {len(errors)}",
        regret=f"median {median(regrets):.1%}, worst {max(regrets):.1%}; above {TARGET_REGRET:.0%} and significant in"
        f" {beyond} of {len(regrets)} settings",
        significant=significant,
        right=right,
        logits=f"{max(one['max_logit_error'] for one in results):.1e}",
        sections=[line for name, result in sections for line in _section(name, result)],
    )


def _section(name: str, result: Result) -> list[str]:
    """Return one setting: its link, the plan's choice, and a row per strategy."""
    times = ("predicted_ttft_s", "measured_ttft_s", "measured_iqr_s")
    places = ("predicted_rank", "measured_rank")
    rows = (
        (
            one["strategy"],
            _chunks(one),
            *(f"{one[key]:.3f}" for key in times),
            f"{one['rel_error']:+.1%}",
            *map(one.get, places),
        )
        for one in sorted(result["candidates"], key=lambda one: one["predicted_rank"])
    )
    heads = (
        "strategy",
        "tokens",
        "predicted, s",
        "measured, s",
        "IQR, s",
        "error",
        "predicted place",
        "measured place",
    )
    chosen = next(one["strategy"] for one in result["candidates"] if one["chosen"])
    link, orders, cluster = result["cluster"]["link"], result["orders"], result["cluster"]
    speed = f"{link['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s, {link['latency_s'] * 1e6:.3g} us"
    wrong = "; ".join(f"{fast} is faster than {slow}" for fast, slow in orders["wrong"])
    return [
        f"## {name}, {format_tokens(result['context_len'])} tokens",
        "",
        f"{cluster['num_gpus']} x {cluster['gpu']['name']}, {cluster['topology']} ({speed}). The plan chose {chosen};"
        f" regret {result['regret']:.1%} ± {result['regret_spread']:.1%} against {result['best_measured']['strategy']},"
        f" {'' if result['regret_beyond_spread'] else 'not '}significant; {result['conditions']['tsp']}. The machine"
        f" ran {result['speed']:.2f} times as fast as predicted (median). Of {orders['pairs']} pairs"
        f" {orders['significant']} differ significantly, {orders['right']} of them were predicted in the measured order"
        f"{f'; not predicted: {wrong}' if wrong else ''}.",
        "",
        *numbers_table(heads, rows),
        *(f"- {warning}" for warning in result["warnings"]),
        "",
    ]


def _chunks(candidate: Mapping[str, Any]) -> str:
    """Return chunks, or pieces with the layers of the stages; many pieces by number and length."""
    tokens = candidate["partition"]
    text = ", ".join(map(str, tokens))
    if len(tokens) > _MOST_PIECES:
        text = f"{len(tokens)} pieces of {min(tokens)} to {max(tokens)}"
    return text + (f"; layers {', '.join(map(str, candidate['layers']))}" if "layers" in candidate else "")


if __name__ == "__main__":
    main()
