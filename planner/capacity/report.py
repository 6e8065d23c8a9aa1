"""A capacity plan as one self-contained HTML file with tables and embedded plots."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from kvrsim.io.files import write_atomically
from kvrsim.units import format_bandwidth, format_bytes, format_seconds
from planner.capacity.answer import CapacityPlan, FleetAnswer
from planner.capacity.plots import PANELS, picture

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2f36; max-width: 980px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } th, td { text-align: left; padding: .2em .9em .2em 0; vertical-align: top }
th { border-bottom: 1px solid #b8bdc6 } td.n, th.n { text-align: right }
td.n { white-space: nowrap }
img { max-width: 100% } .answer { font-size: 1.2em } .dim { color: #5b616b }
"""
_COLUMNS = ("fleet", "GPUs", "p50", "p95", "p99", "longest", "in time", "utilisation", "cost per hour")
UNSERVED = "unserved"  # shown for a percentile that falls among unserved requests


def write_report(plan: CapacityPlan, path: str | Path, argument: str = "html") -> None:
    """Write the file atomically; InputError naming the argument where it cannot be written."""
    write_atomically(path, html(plan).encode(), argument=argument)


def html(plan: CapacityPlan) -> str:
    """The page as text."""
    parts = [
        f"<h1>{escape(headline(plan))}</h1>",
        f'<p class="answer">{escape(verdict(plan))}</p>',
        f'<p class="dim">{escape(f"{plan.model} · {plan.cluster.describe()} · profile {plan.profile}")}</p>',
        *_fleets(plan),
        *_reasons(plan),
        *(_panel(plan, name) for name in PANELS),
        *_workload(plan),
        "<h2>What this rests on</h2>",
        _list([plan.decoding, plan.dispatch, plan.interval_meaning, plan.rests_on, *plan.warnings]),
    ]
    title = escape(headline(plan))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def headline(plan: CapacityPlan) -> str:
    """The target in one line."""
    name, target = plan.workload["name"], format_seconds(plan.slo_ttft_s)
    return f"{plan.percentile:g} % of {name} with a TTFT of at most {target}"


def verdict(plan: CapacityPlan) -> str:
    """The answer in one line."""
    fleet = plan.first
    reached_s = fleet.target.value_s
    if plan.answer is not None:
        gpus = f"{fleet.num_gpus} GPU{'s' * (fleet.num_gpus > 1)}"
        return f"{gpus}: {fleet.describe()}. {plan.percentile:g}th percentile {format_seconds(reached_s)}."
    if fleet.unserved == fleet.requests:
        return f"No fleet meets the target. None serves any of the {fleet.requests} requests."
    said = f"has a {plan.percentile:g}th percentile of {format_time(reached_s)}"
    if reached_s == float("inf"):
        said = f"never serves {fleet.unserved} of {fleet.requests} requests"
    return f"No fleet meets the target. The nearest miss, {fleet.describe()}, {said}."


def interval(plan: CapacityPlan) -> str | None:
    """The confidence interval in one line, with a note where it ends above the target; None: unknown."""
    low_s, high_s = plan.first.target.low_s, plan.first.target.high_s
    if low_s is None or high_s is None:
        return None
    ends = f"{format_time(low_s)} to {format_time(high_s)}"
    if plan.answer is not None and high_s > plan.slo_ttft_s:
        ends += f", which ends ABOVE the target of {format_seconds(plan.slo_ttft_s)} (--sure requires it below)"
    return f"{ends}. {plan.first.target.meaning}"


def losses(fleet: FleetAnswer) -> str | None:
    """Restarted and unserved requests in one line; None: there are none."""
    parts = []
    if fleet.retried:
        parts.append(f"{fleet.retried} restarted after a failure")
    if fleet.unserved:
        parts.append(f"{fleet.unserved} of {fleet.requests} never served; they count as late")
    return ", ".join(parts) or None


def decodes(plan: CapacityPlan) -> str | None:
    """The fleet that decodes in one line; None: it was not asked for, or there is none."""
    fleet = plan.decode_fleet
    if fleet is None:
        return None
    limit = {"memory": "memory limits it", "tpot": "the TPOT limits it", "requests": "all at once"}[fleet.limited_by]
    count = f"{fleet.num_gpus} GPU{'s' * (fleet.num_gpus > 1)}: {fleet.replicas} × {fleet.gpus_per_group}"
    return (
        f"{count} ({fleet.strategy}), batches of {fleet.batch} ({limit}), {format_seconds(fleet.step_s)} a step at"
        f" {fleet.context_tokens} tokens; at most {fleet.sequences_at_once} sequences at once, TPOT at most"
        f" {format_seconds(fleet.tpot_s)}"
    )


def transfers(plan: CapacityPlan) -> str | None:
    """What leaves for the fleet that decodes in one line; None: not counted."""
    sent, fleet = plan.kv_transfer, plan.first
    if sent is None or fleet.p50_kv_transfer_s is None or fleet.p99_kv_transfer_s is None:
        return None
    rate = "" if sent.mean_bytes_per_s is None else f", {format_bandwidth(sent.mean_bytes_per_s)} in all"
    after = f"{format_seconds(fleet.p50_kv_transfer_s)} (p50) and {format_seconds(fleet.p99_kv_transfer_s)} (p99)"
    return f"{format_bytes(sent.mean_bytes)} a request{rate}; gone {after} after the first token"


def groups_of_fleet(fleet: FleetAnswer) -> Iterable[tuple[str, str, str, str]]:
    """One row a length bucket: new tokens, groups, strategies by share of time, requests."""
    for group in fleet.groups:
        low, high = group.context_range
        strategies = ", ".join(f"{name} {share:.0%}" for name, share in group.strategies.items()) or "none"
        yield f"{low} to {high}", group.groups(), strategies, str(group.requests)


def format_time(seconds: float) -> str:
    """Formatted seconds; UNSERVED for infinity."""
    return format_seconds(seconds) if seconds < float("inf") else UNSERVED


def _fleets(plan: CapacityPlan) -> Iterable[str]:
    if plan.first.unserved == plan.first.requests:
        return
    yield "<h2>Fleets</h2>"
    yield _table(_COLUMNS, [_fleet_row(fleet) for fleet in (plan.first, *plan.alternatives)], numbers_from=1)
    told = {"Interval": interval(plan), "Requests": losses(plan.first)}
    told |= {"KV-cache": transfers(plan), "Fleet that decodes": decodes(plan)}
    yield from (f"<p>{label}: {escape(text)}.</p>" for label, text in told.items() if text is not None)
    yield "<h2>Where prompts go</h2>"
    titles = ("new tokens", "groups × GPUs", "strategy, share of time", "requests")
    yield _table(titles, groups_of_fleet(plan.first))


def _fleet_row(fleet: FleetAnswer) -> list[str]:
    times = (fleet.p50_ttft_s, fleet.p95_ttft_s, fleet.p99_ttft_s, fleet.max_ttft_s)
    shown = map(format_time, times)
    cost = "" if fleet.cost_per_hour is None else f"{fleet.cost_per_hour:.2f}"
    return [
        fleet.describe(),
        str(fleet.num_gpus),
        *shown,
        f"{fleet.in_time:.2%}",
        f"{fleet.utilisation:.0%}",
        cost,
    ]


def _reasons(plan: CapacityPlan) -> Iterable[str]:
    if plan.infeasible:
        yield "<h2>What does not meet the target</h2>"
        yield _list(plan.reasons())


def _panel(plan: CapacityPlan, name: str) -> str:
    image = base64.b64encode(picture(plan, (PANELS[name],))).decode()
    return f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,{image}">'


def _workload(plan: CapacityPlan) -> Iterable[str]:
    read = plan.workload
    yield "<h2>What was read</h2>"
    rate = "" if read["rate_per_s"] is None else f", {read['rate_per_s']:.3g} a second"
    yield f"<p>{read['requests']} requests in {read['duration_s']:.6g} s{rate}; {read['cached_share']:.0%} cached</p>"
    names = ("context_tokens", "new_tokens", "output_tokens")
    rows = [
        [name.replace("_", " "), *(f"{read[name][key]:.0f}" for key in ("mean", "p50", "p90", "p99", "max"))]
        for name in names
    ]
    yield _table(("", "mean", "p50", "p90", "p99", "max"), rows, numbers_from=1)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 99) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        parts = (
            f"<{tag}{' class=n' if index >= numbers_from else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    return "<table>" + line(titles, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
