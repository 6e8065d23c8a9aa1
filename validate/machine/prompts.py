"""Prompts behind each other on a chain, against the simulator: docs/results/prompts.md.

    python -m validate.machine.prompts [--ranks 2,4,8] [--count 8] [-o PAGE]

Ranks sleep instead of computing, with real messages over emulated links, so that more ranks than cores can be looked
at. `kvrsim run --requests` measures a real model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median

from kvrsim.executors.event import EventSimulation
from kvrsim.results.quartiles import interquartile_range
from kvrsim.runtime.emulated import EmulatedTransport
from kvrsim.runtime.job import Job, ModelChoice
from kvrsim.runtime.model import SleepForward
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.prompts.run import PromptsReport, measure_prompts
from kvrsim.runtime.ranks.launch import Launch, launch
from kvrsim.runtime.ranks.transport import Transport
from validate.machine.confirmation_ranks import GEOMETRY, Sleepers

PAGE = Path(__file__).parents[2] / "docs" / "results" / "prompts.md"
_CONTEXT_LEN, _LINK_BYTES_PER_S = 3200, 20e6
_PAUSE = 1.25  # of the time in which a chain without pauses gives a prompt's first token
_NOBODY = ModelChoice(config="llama-7b", dtype="fp32", attention="sdpa")  # which no rank loads


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One chain and one pattern of arrivals."""

    num_ranks: int
    name: str
    arrivals: str
    throughput_per_s: float  # measured, the median repetition's
    throughput_iqr_per_s: float
    simulated_per_s: float
    mean_ttft_s: float  # measured, the median repetition's
    simulated_ttft_s: float
    alone_per_s: float  # prompts over the simulated TTFT of one, which a barrier between prompts would give

    @property
    def error(self) -> float:
        """Of the throughput; above 0: simulated too many."""
        return self.simulated_per_s / self.throughput_per_s - 1

    @property
    def ttft_error(self) -> float:
        """Above 0: simulated too long."""
        return self.simulated_ttft_s / self.mean_ttft_s - 1


def prompts_on_rank(
    transport: Transport, sleepers: Sleepers, cases: Sequence[tuple[RunPlan, tuple[float, ...]]], repeats: int
) -> list[PromptsReport]:
    """Run by every rank: each plan with its arrivals."""
    forward = SleepForward(GEOMETRY, sleepers.layer_s)
    emulated = EmulatedTransport(transport, sleepers.link)

    def job(plan: RunPlan) -> Job:
        return Job(model=_NOBODY, plans=(plan,), repeats=repeats, warmups=0, check_logits=False)

    return [measure_prompts(emulated, forward, job(plan), arrivals_s) for plan, arrivals_s in cases]


def rows_of(num_ranks: int, count: int, repeats: int) -> list[Row]:
    """Simulate and measure even and shrinking chunks, prompts all at once and with pauses."""
    sleepers = Sleepers(num_ranks=num_ranks, context_len=_CONTEXT_LEN, link_bytes_per_s=_LINK_BYTES_PER_S)
    cases, named = [], []
    for name, plan in sleepers.plans().items():
        if plan.strategy != "kvr":
            continue
        at_once = EventSimulation(sleepers.program(plan), sleepers.cluster, arrivals_s=(0.0,) * count)
        ends_s = at_once.finishes_s[-1]
        pause_s = _PAUSE * (ends_s[-1] - ends_s[0]) / (count - 1)
        for arrivals, every_s in (("all at once", 0.0), (f"one every {pause_s * 1e3:.0f} ms", pause_s)):
            cases.append((plan, tuple(every_s * number for number in range(count))))
            named.append((name, arrivals))
    how = Launch(num_ranks=num_ranks, timeout_s=60, deadline_s=600)
    reports: list[PromptsReport] = launch(prompts_on_rank, sleepers, cases, repeats, how=how)[-1]
    return [
        _row(sleepers, plan, arrivals_s, report, *names)
        for (plan, arrivals_s), names, report in zip(cases, named, reports, strict=True)
    ]


def _row(
    sleepers: Sleepers, plan: RunPlan, arrivals_s: tuple[float, ...], report: PromptsReport, name: str, arrivals: str
) -> Row:
    simulation = EventSimulation(sleepers.program(plan), sleepers.cluster, arrivals_s=arrivals_s)
    alone = EventSimulation(sleepers.program(plan), sleepers.cluster)
    lasts = [ranks[-1].end_s for ranks in report.repeats]
    found = [len(ends_s) / ends_s[-1] for ends_s in lasts]
    ttft_s = [mean(end - time_s for end, time_s in zip(ends_s, arrivals_s, strict=True)) for ends_s in lasts]
    simulated_s = simulation.finishes_s[-1]
    return Row(
        num_ranks=sleepers.num_ranks,
        name=name,
        arrivals=arrivals,
        throughput_per_s=median(found),
        throughput_iqr_per_s=interquartile_range(found),
        simulated_per_s=len(arrivals_s) / simulated_s[-1],
        mean_ttft_s=median(ttft_s),
        simulated_ttft_s=mean(end - time_s for end, time_s in zip(simulated_s, arrivals_s, strict=True)),
        alone_per_s=1 / alone.finish_s[-1],
    )


def page(rows: Sequence[Row], command: str, count: int, repeats: int) -> str:
    """The rows as a page."""
    errors, ttft_errors = ([abs(getattr(row, name)) for row in rows] for name in ("error", "ttft_error"))
    lines = [
        "# Prompts behind each other on a chain",
        "",
        f"`{command}` on {date.today().isoformat()}. {count} equal prompts of {_CONTEXT_LEN} tokens",
        "follow each other on a chain of KVR ranks, without a barrier: a rank begins the next prompt when it has",
        "ended its chunk.",
        "Ranks sleep instead of computing.",
        f"Messages are real, over emulated links of {_LINK_BYTES_PER_S * 1e-6:g} MB/s. The",
        "simulated figures come from the event executor of `kvrsim simulate`, with the same times of layers and",
        f"links. Measured: the median of {repeats} repetitions. With a barrier between prompts, a chain would give",
        "the prompts per second of the last column.",
        "",
        f"Error of the throughput: median {median(errors):.1%}, worst {max(errors):.1%}; of the mean TTFT: median"
        f" {median(ttft_errors):.1%}, worst {max(ttft_errors):.1%}.",
        "",
        "| ranks | chunks | arrivals | measured, 1/s | interquartile range | simulated, 1/s | error"
        " | mean TTFT, s | simulated, s | error | with a barrier, 1/s |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = (
            str(row.num_ranks), row.name, row.arrivals, f"{row.throughput_per_s:.2f}",
            f"{row.throughput_iqr_per_s:.2f}", f"{row.simulated_per_s:.2f}", f"{row.error:+.1%}",
            f"{row.mean_ttft_s:.3f}", f"{row.simulated_ttft_s:.3f}",
            f"{row.ttft_error:+.1%}", f"{row.alone_per_s:.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    chosen = parser.parse_args()
    rows = [row for ranks in chosen.ranks.split(",") for row in rows_of(int(ranks), chosen.count, chosen.repeats)]
    command = f"python -m validate.machine.prompts --ranks {chosen.ranks} --count {chosen.count}"
    chosen.output.write_text(page(rows, command, chosen.count, chosen.repeats), encoding="utf-8")
    print(chosen.output.read_text("utf-8"))


if __name__ == "__main__":
    main()
