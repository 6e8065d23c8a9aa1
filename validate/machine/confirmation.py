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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from kvrsim.units import format_bandwidth, format_seconds, format_tokens
from planner.api import confirm
from validate.machine.calibration import KERNEL, MODELS, calibrate, conditions_line, output_folder
from validate.machine.sleep_ranks import Sleepers, SleepRun, sleep
from validate.report import RESULTS, fill, numbers_table, run_command, write_page

PAGE = RESULTS / "confirmation.md"
LINKS: dict[str, dict[str, Any]] = {
    "loopback": {},
    "emulated 1 Gb/s": {"link_bandwidth": 125e6, "link_latency": 2e-4},
    "emulated 250 Mb/s": {"link_bandwidth": 31.25e6, "link_latency": 2e-4},
}
Result = Mapping[str, Any]  # the output of `kvrsim confirm --json`
Section = tuple[str, Result]  # with the name of the setting
TARGET_ERROR, TARGET_REGRET, TARGET_SLEEP = 0.07, 0.03, 0.10
_MOST_PIECES = 4  # of a pipeline that are listed one by one
SECOND = "#"  # in the name of a strategy's second best partition, which the summary leaves out
SLEEPERS = (
    Sleepers(num_ranks=4, context_len=2048, link_bytes_per_s=30e6),
    Sleepers(num_ranks=8, context_len=4096, link_bytes_per_s=30e6),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A confirmation on two ranks: model, link and context."""

    model: str
    link: str  # of LINKS
    ctx: str
    repeats: int
    top: int = 1  # partitions measured per strategy
    strategies: tuple[str, ...] | None = None  # None: the default ones

    @property
    def name(self) -> str:
        """Model and link."""
        return f"{self.model}, {self.link}"

    def confirm(self, profile: Path, folder: Path) -> Section:
        """Measure, and write a plot and traces to the folder."""
        from planner.confirm.views import write_traces

        print(f"{self.name}, {self.ctx}", file=sys.stderr)
        confirmation = confirm(
            ctx=self.ctx,
            model=MODELS / f"{self.model}.json",
            profile=profile,
            gpus=2,
            strategies=self.strategies,
            top=self.top,
            virtual=False,
            hardware={"repeats": self.repeats},
            attention=KERNEL,
            dtype="fp32",
            **LINKS[self.link],
        )
        stem = f"{self.model}-{self.link}-{self.ctx}".replace(" ", "-").replace("/", "")
        confirmation.write_plot(folder / f"{stem}.png")
        write_traces(confirmation, folder / f"{stem}.trace.json")
        return self.name, confirmation.to_dict()


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
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    with output_folder(arguments.keep) as folder:
        profile = arguments.profile or _calibrated("small-llama", folder, arguments)
        contexts = (arguments.contexts or ("2k" if quick else "2k,4k")).split(",")
        settings = _llama(contexts, arguments.repeats or (5 if quick else 6), quick=quick)
        sections = [setting.confirm(profile, folder) for setting in settings]
        if not quick:
            falcon = Setting(model="small-falcon", link="loopback", ctx="2k", repeats=4, strategies=("all",))
            sections.append(falcon.confirm(_calibrated("small-falcon", folder, arguments), folder))
    runs = [] if quick else _sleep(5)
    words: list[str] = [word for word in ("--quick", "--even-if-busy") if word in sys.argv]
    words += [f"--contexts {arguments.contexts}"] if arguments.contexts else []
    words += [f"--repeats {arguments.repeats}"] if arguments.repeats else []
    words += [f"--profile {arguments.profile.name}"] if arguments.profile else []
    write_page(arguments.page, page(sections, runs, " ".join(["python -m validate.machine.confirmation", *words])))
    print(arguments.page.read_text("utf-8"))


def _calibrated(name: str, folder: Path, arguments: argparse.Namespace) -> Path:
    """A new profile of this machine."""
    profile = folder / f"{name}.json"
    options = ["--minutes", "1" if arguments.quick else "2", *(["--even-if-busy"] if arguments.even_if_busy else [])]
    calibrate(MODELS / f"{name}.json", profile, options)
    return profile


def _llama(contexts: Sequence[str], repeats: int, *, quick: bool) -> Iterator[Setting]:
    """Every strategy over loopback, the baselines over emulated links; fewer repetitions at longer contexts."""
    for number, ctx in enumerate(contexts):
        rounds = max(3, repeats - repeats * number // 3)
        top = 1 if quick else 2
        yield Setting(model="small-llama", link="loopback", ctx=ctx, repeats=rounds, top=top, strategies=("all",))
        if not quick:
            emulated = [link for link in LINKS if link != "loopback"]
            yield from (Setting(model="small-llama", link=link, ctx=ctx, repeats=rounds) for link in emulated)


def _sleep(repeats: int) -> list[SleepRun]:
    return [run for sleepers in SLEEPERS for run in sleep(sleepers, repeats=repeats)]


def page(sections: Sequence[Section], runs: Sequence[SleepRun], command: str) -> list[str]:
    """Lines of docs/results/confirmation.md."""
    lines = [conditions_line(sections[0][1]["conditions"]), ""] if sections else []
    lines += _summary([result for _, result in sections], runs)
    lines += [line for name, result in sections for line in _section(name, result)]
    return fill(
        "confirmation",
        command=command,
        date=date.today().isoformat(),
        origin="of this machine" if "--profile" in command else "of this machine, made just before",
        sections=lines + _sleeping(runs),
    )


def _summary(results: Sequence[Result], runs: Sequence[SleepRun]) -> list[str]:
    """The targets and the results."""
    if not results:
        return []
    candidates = [one for result in results for one in result["candidates"] if SECOND not in one["strategy"]]
    errors = [abs(one["rel_error"]) for one in candidates]
    right, significant = (sum(result["orders"][key] for result in results) for key in ("right", "significant"))
    regrets = [result["regret"] for result in results]
    beyond = sum(result["regret"] > TARGET_REGRET and result["regret_beyond_spread"] for result in results)
    lines = [
        "## Summary",
        "",
        f"- error of predicted TTFT over all strategies: median {median(errors):.1%} (target {TARGET_ERROR:.0%}),"
        f" worst {max(errors):.1%}, of {len(errors)};",
        f"- regret of the plan: median {median(regrets):.1%}, worst {max(regrets):.1%}; above {TARGET_REGRET:.0%} and"
        f" significant in {beyond} of {len(regrets)} settings;",
        f"- order: {significant} pairs of candidates have significantly different measured TTFTs; {right} of them were"
        " predicted in that order;",
        f"- largest difference of logits from one process's: {max(one['max_logit_error'] for one in results):.1e};",
    ]
    if runs:
        worst = max(abs(run.error) for run in runs)
        lines.append(f"- 4 and 8 sleeping ranks: worst error {worst:.1%} (target {TARGET_SLEEP:.0%}).")
    return [*lines, ""]


def _section(name: str, result: Result) -> list[str]:
    candidates = sorted(result["candidates"], key=lambda one: one["predicted_rank"])
    rows = (
        (
            one["strategy"],
            _chunks(one),
            *(f"{one[key]:.3f}" for key in ("predicted_ttft_s", "measured_ttft_s", "measured_iqr_s")),
            f"{one['rel_error']:+.1%}",
            one["predicted_rank"],
            one["measured_rank"],
        )
        for one in candidates
    )
    heads = ("strategy", "tokens", "predicted, s", "measured, s", "IQR, s", "error")
    words = "significant" if result["regret_beyond_spread"] else "not significant"
    best = next(one for one in result["candidates"] if one["chosen"])
    orders = result["orders"]
    wrong = "; ".join(f"{fast} is faster than {slow}" for fast, slow in orders["wrong"])
    return [
        f"## {name}, {format_tokens(result['context_len'])} tokens",
        "",
        f"{_machine(result['cluster'])}. The plan chose {best['strategy']}; regret {result['regret']:.1%} ±"
        f" {result['regret_spread']:.1%} against {result['best_measured']['strategy']}, {words};"
        f" {result['conditions']['tsp']}. The machine ran {result['speed']:.2f} times as fast as predicted (median)."
        f" Of {orders['pairs']} pairs {orders['significant']} differ significantly, {orders['right']} of them were"
        f" predicted in the measured order{f'; not predicted: {wrong}' if wrong else ''}.",
        "",
        *numbers_table((*heads, "predicted place", "measured place"), rows),
        *(f"- {warning}" for warning in result["warnings"]),
        *[""] * bool(result["warnings"]),
    ]


def _machine(cluster: Mapping[str, Any]) -> str:
    """The ranks and the link between two of them."""
    link = cluster["link"]
    speed = f"{format_bandwidth(link['bandwidth_bytes_per_s'])}, {format_seconds(link['latency_s'])}"
    ranks = f"{cluster['num_gpus']} x {cluster['gpu']['name']}"
    return f"{cluster['name']}: {ranks}, {cluster['topology']} ({link['name']}, {speed})"


def _chunks(candidate: Mapping[str, Any]) -> str:
    """Chunks, or pieces with the layers of the stages; many pieces by number and length."""
    tokens = candidate["partition"]
    text = ", ".join(map(str, tokens))
    if len(tokens) > _MOST_PIECES:
        least, most = min(tokens), max(tokens)
        text = f"{len(tokens)} pieces of {least}" + (f" to {most}" if most > least else "")
    return text + (f"; layers {', '.join(map(str, candidate['layers']))}" if "layers" in candidate else "")


def _sleeping(runs: Sequence[SleepRun]) -> list[str]:
    if not runs:
        return []
    rows = (
        (run.num_ranks, run.name, *(f"{seconds:.3f}" for seconds in _seconds(run)), f"{run.error:+.1%}") for run in runs
    )
    heads = ("ranks", "strategy", "simulated, s", "measured, s", "IQR, s", "error")
    return fill("confirmation_sleep", runs=numbers_table(heads, rows))


def _seconds(run: SleepRun) -> tuple[float, float, float]:
    return run.simulated_s, run.timing.median_s, run.timing.iqr_s


if __name__ == "__main__":
    from validate.machine.confirmation import main as run  # so that the ranks can import functions by name

    sys.exit(run_command(run))
