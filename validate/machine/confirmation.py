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
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically
from kvrsim.units import format_bandwidth, format_seconds, format_tokens
from planner.api import confirm
from validate.machine.calibration import MODELS, calibrate
from validate.machine.sleep_ranks import Sleepers, Slept, ring_traffic, sleep

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
    from planner.confirm.views import write_traces

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
    found.write_plot(folder / f"{stem}.png")
    write_traces(found, folder / f"{stem}.trace.json")
    return f"{model}, {link}", found.to_dict()


def _slept(repeats: int) -> list[Slept]:
    found: list[Slept] = []
    for sleepers in SLEEPERS:
        traffic = ring_traffic(sleepers.num_ranks, 0.3, 2**18)
        found += sleep(sleepers, repeats=repeats, traffic=traffic, num_seeds=repeats)
    return found


# -- docs/results/confirmation.md: the tables of validate.machine.confirmation

Section = tuple[str, dict[str, Any]]  # of a setting: its name, and what `kvrsim confirm --json` prints
TARGET_ERROR, TARGET_REGRET, TARGET_SLEEP = 0.07, 0.03, 0.10
_SHOWN = 4  # pieces of a pipeline
SECOND = "#"  # in the name of a strategy's second best partition, which the summary leaves out


def page(sections: Sequence[Section], slept: Sequence[Slept], command: str) -> str:
    """The whole page."""
    made = "of this machine" if "--profile" in command else "of this machine, made just before"
    lines = [
        "# Plans against this machine",
        "",
        f"`{command}` on {date.today().isoformat()}.",
        "Output of `kvrsim confirm` for small models (8 layers, hidden size 512, random weights) on two ranks of one",
        f"thread, over gloo: TTFT predicted from a calibration {made},",
        "and measured round-robin. No prediction uses a prefill on two ranks.",
        "",
        *_conditions(sections),
        *_summary(sections, slept),
    ]
    for name, found in sections:
        lines += _section(name, found)
    return "\n".join([*lines, *_sleeping(slept)]) + "\n"


def _conditions(sections: Sequence[Section]) -> list[str]:
    if not sections:
        return []
    told = sections[0][1]["conditions"]
    return ["; ".join(f"{name} {value}" for name, value in told.items() if name != "model") + ".", ""]


def _summary(sections: Sequence[Section], slept: Sequence[Slept]) -> list[str]:
    """The targets, and what was found."""
    if not sections:
        return []
    errors = [abs(one["rel_error"]) for _, found in sections for one in _first(found)]
    right, told = (sum(found["orders"][name] for _, found in sections) for name in ("right", "significant"))
    paced = [abs(one["rel_error_at_pace"]) for _, found in sections for one in _first(found)]
    regrets = [found["regret"] for _, found in sections]
    beyond = sum(found["regret"] > TARGET_REGRET and found["regret_beyond_spread"] for _, found in sections)
    logits = [found["max_logit_error"] for _, found in sections]
    lines = [
        "## Summary",
        "",
        f"- error of predicted TTFT over all strategies: median {median(errors):.1%}, worst {max(errors):.1%}, of"
        f" {len(errors)};",
        f"- the same corrected for clock drift: median {median(paced):.1%} (target {TARGET_ERROR:.0%}), worst"
        f" {max(paced):.1%};",
        f"- regret of the plan: median {median(regrets):.1%}, worst {max(regrets):.1%}; above {TARGET_REGRET:.0%} and"
        f" significant in {beyond} of {len(regrets)} settings;",
        f"- order: {told} pairs of candidates have significantly different measured TTFTs; {right} of them were"
        " predicted in that order;",
        f"- largest difference of logits from one process's: {max(logits):.1e};",
    ]
    if slept:
        worst = max(abs(one.error) for one in slept)
        lines.append(f"- 4 and 8 sleeping ranks: worst error {worst:.1%} (target {TARGET_SLEEP:.0%}).")
    return [*lines, ""]


def _section(name: str, found: dict[str, Any]) -> list[str]:
    candidates = sorted(found["candidates"], key=lambda one: one["predicted_rank"])
    rows = [
        f"| {one['strategy']} | {_chunks(one)} | {one['predicted_ttft_s']:.3f} |"
        f" {one['measured_ttft_s']:.3f} | {one['measured_iqr_s']:.3f} | {one['rel_error']:+.1%} |"
        f" {one['rel_error_at_pace']:+.1%} | {one['predicted_rank']} | {one['measured_rank']} |"
        for one in candidates
    ]
    words = "significant" if found["regret_beyond_spread"] else "not significant"
    chosen = next(one for one in found["candidates"] if one["chosen"])
    orders = found["orders"]
    wrong = "; ".join(f"{fast} is faster than {slow}" for fast, slow in orders["wrong"])
    return [
        f"## {name}, {format_tokens(found['context_len'])} tokens",
        "",
        f"{_machine(found['cluster'])}. The plan chose {chosen['strategy']}; regret {found['regret']:.1%} ±"
        f" {found['regret_spread']:.1%} against {found['best_measured']['strategy']}, {words};"
        f" {found['tsp']}. {_pace(found['pace'])}"
        f" Of {orders['pairs']} pairs {orders['significant']} differ significantly, {orders['right']} of them were"
        f" predicted in the measured order{f'; not predicted: {wrong}' if wrong else ''}.",
        "",
        "| strategy | tokens | predicted, s | measured, s | IQR, s | error | drift-corrected | predicted place |"
        " measured place |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        *_parts(candidates),
        *(f"- {warning}" for warning in found["warnings"]),
        *[""] * bool(found["warnings"]),
    ]


def _machine(cluster: dict[str, Any]) -> str:
    """The ranks and the link between two of them."""
    link = cluster["link"]
    reached = f"{format_bandwidth(link['bandwidth_bytes_per_s'])}, {format_seconds(link['latency_s'])}"
    ranks = f"{cluster['num_gpus']} x {cluster['gpu']['name']}"
    return f"{cluster['name']}: {ranks}, {cluster['topology']} ({link['name']}, {reached})"


def _chunks(one: dict[str, Any]) -> str:
    """Chunks, or pieces with the layers of the stages; many pieces by number and length."""
    tokens = one["partition"]
    text = ", ".join(map(str, tokens))
    if len(tokens) > _SHOWN:
        least, most = min(tokens), max(tokens)
        text = f"{len(tokens)} pieces of {least}" + (f" to {most}" if most > least else "")
    return text + (f"; layers {', '.join(map(str, one['layers']))}" if "layers" in one else "")


def _parts(candidates: Sequence[dict[str, Any]]) -> list[str]:
    """Measured minus predicted seconds of every part, strategy by strategy."""
    told = [(one["strategy"], found) for one in candidates if (found := one["measured_minus_predicted_s"])]
    if not told:
        return []
    names = list(told[0][1])
    return [
        "Measured minus predicted seconds on the rank that has the first token, of one more prefill, not corrected for"
        " clock drift:",
        "",
        f"| strategy | {' | '.join(names)} |",
        f"| --- |{' ---: |' * len(names)}",
        *(f"| {name} | {' | '.join(f'{found[part]:+.3f}' for part in names)} |" for name, found in told),
        "",
    ]


def _pace(pace: dict[str, Any]) -> str:
    what = f"{format_tokens(pace['num_tokens'])} tokens on every rank at once"
    took = f"{pace['measured_s']:.3f} s ({min(pace['samples_s']):.3f} to {max(pace['samples_s']):.3f})"
    speed = f"{pace['speed']:.2f} of the speed during calibration"
    return f"{what} took {took}, predicted {pace['predicted_s']:.3f} s: {speed}."


def _sleeping(slept: Sequence[Slept]) -> list[str]:
    if not slept:
        return []
    rows = []
    for one in slept:
        noise = "|  |  |"
        if one.noisy_simulated_s is not None and one.noisy_measured_s is not None:
            simulated, measured = one.noisy_simulated_s / one.simulated_s, one.noisy_measured_s / one.measured_s
            noise = f"| {simulated - 1:+.1%} | {measured - 1:+.1%} |"
        times = f"{one.simulated_s:.3f} | {one.measured_s:.3f} | {one.iqr_s:.3f} | {one.error:+.1%}"
        rows.append(f"| {one.num_ranks} | {one.name} | {times} {noise}")
    return [
        "## 4 and 8 ranks, and side traffic",
        "",
        "Real messages over emulated links, compute replaced by sleeps; simulated by the event executor from the same",
        "durations. The last columns: how much longer TTFT gets (median) when others' messages take 30 % of the time",
        "of every link, the paper's noise experiment in miniature: TSP suffers more.",
        "",
        "| ranks | strategy | simulated, s | measured, s | IQR, s | error | side traffic, simulated | measured |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
    ]


def _first(found: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Each strategy once."""
    return (one for one in found["candidates"] if SECOND not in one["strategy"])


if __name__ == "__main__":
    from validate.machine.confirmation import main as run  # so that ranks find what they run by its name

    try:
        run()
    except KvrsimError as error:
        sys.exit(f"validate.machine.confirmation: {error}")
