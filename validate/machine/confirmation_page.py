"""docs/results/confirmation.md: the tables of validate.machine.confirmation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from statistics import median
from typing import Any

from kvrsim.units import format_bandwidth, format_seconds, format_tokens
from validate.machine.confirmation_ranks import Slept

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
