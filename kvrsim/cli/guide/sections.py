"""The sections of a command's help, in their order, and the options of each.

An option whose meaning depends on the command stands with the command's name before it. Commands that build on others
need no entries: an option has one section everywhere.
"""

from __future__ import annotations

SECTIONS: dict[str, tuple[str, ...]] = {
    "Question": (
        *("--ctx", "--gpus", "--model", "--strategies", "--strategy", "--partition", "--batch", "--cached-prefix"),
        *("--prefix-placement", "--dtype", "--expert-parallel", "--expert-imbalance", "--table", "--multiple"),
        "--link-bandwidths",
    ),
    "Workload": (*("--requests", "--rate-scale", "--replications", "--pack-tokens", "--order"),),
    "Target": ("--slo-ttft", "--percentile", "--sure", "--max-regret", "--max-error", "--max-logit-error"),
    "Fleet": (
        *("--max-gpus", "--group-sizes", "--uniform-only", "--price-per-gpu-hour", "capacity --objective", "--decode"),
        *("--tpot", "--kv-transfer-bandwidth"),
    ),
    "Machine": (
        *("--cluster", "--profile", "--engine", "--attention", "--memory-fraction", "--link-bandwidth"),
        *("--link-latency", "--topology", "--gpu", "--link", "--links", "--attention-kernel", "--compute"),
    ),
    "Search": ("--method", "--stride", "--only-deployable", "--executor", "--top", "--search", "confirm --minutes"),
    "Randomness": ("--noise", "--samples", "--seed"),
    "Measurement": (
        *("--device", "confirm --backend", "run --backend", "--ranks", "--threads", "--repeats", "--warmups"),
        *("--virtual", "--check", "--generate", "--side-traffic", "--timeout", "--minutes", "--max-bytes"),
        "--even-if-busy",
    ),
    "Processes": ("--jobs", "--backend", "--dask-address"),
    "Output": (
        *("--output", "--name", "--measurements", "--emit", "--breakdown", "--trace", "--plot", "--html", "--report"),
        *("--format", "--json", "--help"),
    ),
}
_PLACES = {option: (title, number) for title, options in SECTIONS.items() for number, option in enumerate(options)}
_TITLES = list(SECTIONS)


def place_of(command: str, option: str) -> tuple[str, int]:
    """The section of an option of a command (its name without `kvrsim`), and where in it the option stands."""
    return _PLACES.get(f"{command} {option}") or _PLACES[option]


def in_order(titles: set[str]) -> list[str]:
    """Titles as help shows them."""
    return sorted(titles, key=_TITLES.index)
