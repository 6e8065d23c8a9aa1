"""The readable forms of a capacity plan: lines and tables for all formats, the chart, and the interactive page.

The page's data contain the requests of the answer and all fleets that were simulated with fewer or more groups. The
page interpolates nothing: at another target, percentile or price it shows one of these fleets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.interp import percentile_of
from kvrsim.program import Array
from kvrsim.units import format_bandwidth, format_bytes, format_seconds
from kvrsim.views.figure import Head, drawing
from kvrsim.views.page import CHARTS, Page, Section, Summary, facts_of, items, join, table, tag
from kvrsim.views.style import DIM, INK, chart_style
from kvrsim.views.table import Cell, Column, Table, columns, seconds_cell
from planner.capacity.fleet import FleetRun, Indices
from planner.capacity.result import CapacityPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _ORANGE = "#4c78a8", "#ee8434"
_WIDTH, _HEIGHT = 8.0, 4.2  # size of the chart in inches, without its title
_MOST_DOTS = 12_000  # requests drawn in a chart; with more requests, every second, third, ... is drawn
_MOST_STEPS = 20_000  # changes of the queue drawn one by one; with more, the longest queue in each of _BINS
_BINS = 4000
_LEAST_IN_BIN = 20  # fewest requests per bin for a percentile by length
_DIGITS = 4
_HOURS_A_MONTH = 730
_LIMITS = {"memory": "memory limits it", "tpot": "the TPOT limits it", "requests": "all at once"}


def headline(plan: CapacityPlan) -> str:
    """One line about the target."""
    name, target = plan.workload["name"], format_seconds(plan.slo_ttft_s)
    return f"{plan.percentile:g} % of {name} with a TTFT of at most {target}"


def verdict(plan: CapacityPlan) -> str:
    """One line about the answer."""
    fleet = plan.first
    reached = format_time(fleet.target_ttft_s)
    if plan.answer is not None:
        return f"{size_and_price(plan)}: {fleet.describe()}. {plan.percentile:g}th percentile {reached}."
    if fleet.unserved == fleet.requests:
        return f"No fleet meets the target. None serves any of the {fleet.requests} requests."
    result = f"has a {plan.percentile:g}th percentile of {reached}"
    if math.isinf(fleet.target_ttft_s):
        result = f"never serves {fleet.unserved} of {fleet.requests} requests"
    return f"No fleet meets the target. The nearest miss, {fleet.describe()}, {result}."


def size_and_price(plan: CapacityPlan) -> str:
    """The whole fleet in words: "12 prefill + 4 decode = 16 GPUs, 40 $/h, 29 k$ a month"."""
    fleet = plan.first
    text = _sum_of(fleet.num_gpus, fleet.decode.num_gpus if fleet.decode else 0)
    if (cost := fleet.total_cost_per_hour) is not None:
        month = cost * _HOURS_A_MONTH
        text += f", {cost:.4g} $/h, " + (f"{month / 1e3:.3g} k$" if month >= 1e3 else f"{month:.0f} $") + " a month"
    return text


def _sum_of(prefill: int, decode: int) -> str:
    total = f"{prefill + decode} GPU{'s' * (prefill + decode > 1)}"
    return f"{prefill} prefill + {decode} decode = {total}" if decode else f"{total} for prefill only"


def details(plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """Labels and lines about the answer: its interval, lost requests, transfers, the fleet that decodes."""
    fleet, sent, decoders = plan.first, plan.kv_transfer, plan.decode_fleet
    if (interval := fleet.interval) is not None:
        safe = "safe: it ends below" if interval.safe else "NOT safe: it ends above"
        high = math.inf if interval.high_s is None else interval.high_s
        ends = f"{format_time(interval.low_s)} to {format_time(high)}"
        target = format_seconds(plan.slo_ttft_s)
        yield "interval", f"80 % from {ends}, model and sampling together; {safe} the target of {target}"
    if plan.answer is not None:
        yield "engines", fleet.engine or "no engine has all of these strategies (--only-deployable vllm|sglang|trtllm)"
    if (growth := fleet.growth) is not None:
        text = "the fleet has no room for 1.1 times"
        if growth.serves > 1:
            text = f"the fleet serves {growth.serves:g} times these requests"
        if growth.next is not None:
            gpus = None if growth.num_gpus is None else _sum_of(growth.num_gpus, growth.decode_gpus)
            text += f"; {growth.next:g} times need {gpus or 'more GPUs than --max-gpus'}"
        yield "traffic", text
    for change in plan.would_meet:
        yield "would meet", change
    if fleet.unserved:
        yield "unserved", f"{fleet.unserved} of {fleet.requests} never served; they count as late"
    if sent is not None and fleet.p50_kv_transfer_s is not None and fleet.p99_kv_transfer_s is not None:
        rate = "" if sent.mean_bytes_per_s is None else f", {format_bandwidth(sent.mean_bytes_per_s)} in all"
        after = f"{format_seconds(fleet.p50_kv_transfer_s)} (p50) and {format_seconds(fleet.p99_kv_transfer_s)} (p99)"
        yield "KV-cache", f"{format_bytes(sent.mean_bytes)} per request{rate}; gone {after} after the first token"
    if decoders is not None:
        gpus = f"{decoders.num_gpus} GPU{'s' * (decoders.num_gpus > 1)}"
        yield (
            "decodes",
            f"{gpus}: {decoders.replicas} × {decoders.gpus_per_group} ({decoders.strategy}), batches of"
            f" {decoders.batch} ({_LIMITS[decoders.limited_by]}), {format_seconds(decoders.step_s)} a step at"
            f" {decoders.context_tokens} tokens; at most {decoders.sequences_at_once} sequences at once, TPOT at most"
            f" {format_seconds(decoders.tpot_s)}",
        )
    workload, lengths = plan.workload, plan.workload["context_tokens"]
    rate = "" if workload["rate_per_s"] is None else f", {workload['rate_per_s']:.3g} a second"
    contexts = f"contexts of {lengths['p50']} (p50), {lengths['p99']} (p99) and at most {lengths['max']} tokens"
    counts = f"{workload['requests']} in {workload['duration_s']:.6g} s{rate}"
    yield "requests", f"{counts}; {contexts}, {workload['cached_share']:.0%} of them cached"


def group_table(plan: CapacityPlan) -> Table:
    """Table of the groups that serve each range of lengths: one row per range."""
    rows = columns("new tokens", "groups", "strategy, share of time", ">requests")
    for group in plan.first.groups:
        strategies = ", ".join(f"{name} {share:.0%}" for name, share in group.strategies.items()) or "none"
        low, high = group.context_range
        rows.add_row(f"{low} to {high}", group.groups(), strategies, str(group.requests))
    return rows


def fleet_table(plan: CapacityPlan) -> Table:
    """The answer or the nearest miss, and the alternatives."""
    fleets = [plan.first, *plan.alternatives]
    priced = any(fleet.cost_per_hour is not None for fleet in fleets)
    ranks = {"p95": 2, "p50": 3, "max": 4, "utilised": 5}  # columns that narrow screens leave out
    titles = ("GPUs", "p50", "p95", "p99", "max", "in target", "utilised", *["cost/hour"] * priced)
    hints = {"utilised": "Busy share of all GPU time"}
    numbers = (
        Column(title=title, number=True, rank=ranks.get(title, 1), hint=hints.get(title, "")) for title in titles
    )
    rows = Table(columns=[Column(title="fleet"), Column(title="engine"), *numbers])
    for number, fleet in enumerate(fleets):
        times = (fleet.p50_ttft_s, fleet.p95_ttft_s, fleet.p99_ttft_s, fleet.max_ttft_s)
        cost = fleet.total_cost_per_hour
        rows.add_row(
            fleet.describe(),
            fleet.engine or "none",
            str(fleet.total_gpus),
            *(seconds_cell(one) if math.isfinite(one) else Cell(shown=format_time(one)) for one in times),
            Cell(shown=f"{fleet.in_time:.2%}", value=fleet.in_time),
            Cell(shown=f"{fleet.utilisation:.0%}", value=fleet.utilisation),
            *([] if cost is None else [Cell(shown=f"{cost:.2f}", value=cost)]),
            style="bold" if number == 0 and plan.answer is not None else None,
        )
    return rows


def format_time(seconds: float) -> str:
    """Formatted seconds; "unserved" if the percentile is that of an unserved request."""
    return format_seconds(seconds) if math.isfinite(seconds) else "unserved"


def figure(plan: CapacityPlan) -> Figure:
    """The Pareto front of fleets: the requested percentile of TTFT over cost or GPUs, with target and answer."""
    points = plan.pareto()
    priced = any(point.cost_per_hour is not None for point in points)
    cost = [point.cost_per_hour or point.num_gpus for point in points]
    fleet = plan.first
    head = Head(title=verdict(plan), subtitle=_question(plan), width=_WIDTH)
    with chart_style():
        panes = drawing(_WIDTH, _HEIGHT + head.height)
        height = _HEIGHT / (_HEIGHT + head.height)
        axes = panes.add_axes((0.11, 0.15 * height, 0.86, 0.82 * height))
        axes.plot(cost, [point.target_ttft_s for point in points], "o-", color=_BLUE, drawstyle="steps-post")
        axes.axhline(plan.slo_ttft_s, color=_ORANGE, label=f"target {format_seconds(plan.slo_ttft_s)}")
        if math.isfinite(fleet.target_ttft_s):
            axes.plot(
                [fleet.cost_per_hour or fleet.num_gpus],
                [fleet.target_ttft_s],
                "o",
                color=_ORANGE,
                markersize=9,
                fillstyle="none",
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel("cost per hour" if priced else "GPUs that prefill", color=DIM)
        axes.set_ylabel(f"{plan.percentile:g}th percentile of TTFT, s", color=DIM)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, labelcolor=INK)
        head.draw(panes)
    return panes


def summary(plan: CapacityPlan) -> Summary:
    """Fleets that meet the target, the answer first; if none does, the nearest miss."""
    fleets, meanings = fleet_table(plan), plan.assumptions()
    return Summary(
        answer=verdict(plan),
        question=_question(plan),
        caption="fleets",
        columns=fleets.columns,
        rows=fleets.texts(),
        notes=[*plan.reasons(), meanings["interval_meaning"], meanings["rests_on"], *plan.warnings],
    )


def _question(plan: CapacityPlan) -> str:
    model = plan.scenario.model.name
    return " · ".join((headline(plan), model, plan.cluster.describe(), *plan.question.kernels()))


def page(plan: CapacityPlan) -> Page:
    """The interactive page, where the user moves the target and the price to see the fleet that meets them."""
    served = plan.first.unserved < plan.first.requests
    miss = "" if plan.answer else ", the nearest miss"
    point = "Every point is a fleet that was simulated, groups × GPUs."
    leads = {  # key: title of the section and id of its chart
        ("Fleets by cost and TTFT", "fleets"): f"Drag the target and the price, or move the sliders. {point}",
        ("Queue over time", "queue"): f"{plan.first.describe()}{miss}. Drag to zoom in, double-click to see all.",
        ("TTFT by length", "lengths"): "The same requests, by their new tokens.",
    }
    pictures = [Section(title=title, lead=lead, body=tag("div", id=name)) for (title, name), lead in leads.items()]
    reasons = Section(title="What does not meet the target", body=items(plan.reasons()))
    return Page(
        title=f"{plan.percentile:g} % of the requests with a TTFT of at most {format_seconds(plan.slo_ttft_s)}",
        answer=verdict(plan),
        facts=_facts(plan),
        sections=[
            *(pictures if served else ()),
            Section(title="Fleets", body=join(_fleets(plan))),
            *([reasons] if plan.infeasible else []),
        ],
        notes=[*plan.assumptions().values(), *plan.warnings],
        data=page_data(plan) if served else {},
        scripts=(*CHARTS, "controls.js", "fleets.js", "queue.js") if served else (),
        strategies=[name for group in plan.first.groups for name in group.strategies],
    )


def page_data(plan: CapacityPlan) -> dict[str, Any]:
    """Plain JSON values; null: the request is never served."""
    tried = plan.tried
    prices = {round(one.cost_per_hour / one.num_gpus, 9) for one in tried if one.cost_per_hour is not None}
    return {
        "slo_s": plan.slo_ttft_s,
        "percentile": plan.percentile,
        "percentiles": list(plan.first.ttft_s),
        "priced": plan.first.cost_per_hour is not None,
        "price_per_gpu_hour": prices.pop() if len(prices) == 1 else None,  # the price, if all GPUs have the same one
        "tried": [
            {
                "gpus": one.num_gpus,
                "cost": one.cost_per_hour,
                "fleet": one.describe(),
                "ttft_s": _short(one.ttft_s.values()),
                "utilisation": round(one.utilisation, 3),
                "requests": one.requests,
            }
            for one in tried
        ],
        "requests": _requests(plan),
    }


def _requests(plan: CapacityPlan) -> dict[str, Any]:
    """Chart data: TTFTs over time and length, percentiles by length, and the queue."""
    run = plan.first.runs[0]
    served = np.flatnonzero(np.isfinite(run.ttft_s))
    step = -(-len(served) // _MOST_DOTS)
    some = served[::step]
    times_s, prompts = waiting(run, _MOST_STEPS, _BINS)
    by_length = {one: _percentile_by_length(run, served, one) for one in (50.0, plan.percentile)}
    return {
        "count": len(run.workload),
        "every": step,
        "arrival_s": np.round(run.workload.arrival_s[some], 3).tolist(),
        "ttft_s": _short(run.ttft_s[some]),
        "new_tokens": run.workload.new_tokens[some].tolist(),
        "by_length": [
            {"percentile": percentile, "new_tokens": _short(lengths), "ttft_s": _short(values)}
            for percentile, (lengths, values) in by_length.items()
        ],
        "queue": {"time_s": np.round(times_s, 3).tolist(), "waiting": prompts.astype(int).tolist()},
    }


def waiting(run: FleetRun, most_changes: int, bins: int) -> tuple[Array, Array]:
    """Times in seconds, and the number of waiting prompts from each time on.

    If there are more than `most_changes` changes: the maximum in each of `bins` equal intervals of time.
    """
    changes = np.concatenate([run.workload.arrival_s, run.begin_s])
    signs = np.repeat([1.0, -1.0], len(run.workload))
    order = np.lexsort((signs, changes))  # at equal times, departures come before arrivals
    order = order[np.isfinite(changes[order])]
    times_s, number = changes[order], np.cumsum(signs[order])
    last = np.append(np.diff(times_s) > 0, True)  # whether this is the last change at its time
    if last.sum() <= most_changes:
        return times_s[last], number[last]
    edges = np.linspace(times_s[0], max(times_s[-1], times_s[0] + 1e-9), bins + 1)
    first = np.searchsorted(times_s, edges[:-1])
    most = [number[max(0, a - 1) : b].max(initial=0.0) for a, b in zip(first, [*first[1:], len(number)], strict=True)]
    return edges, np.array([*most, most[-1]])


def _percentile_by_length(run: FleetRun, served: Indices, percentile: float) -> tuple[Array, Array]:
    """Percentile of TTFT by length, in half-octave bins with enough requests: middle of each bin, and value."""
    half_octave = np.floor(2 * np.log2(run.workload.new_tokens[served]))
    bins, counts = np.unique(half_octave, return_counts=True)
    bins = bins[counts >= _LEAST_IN_BIN]
    values = [percentile_of(run.ttft_s[served[half_octave == one]], percentile) for one in bins]
    return 2.0 ** ((bins + 0.5) / 2), np.array(values)


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _facts(plan: CapacityPlan) -> dict[str, str]:
    """Facts of the question, with the longest request's context and the largest group's GPUs."""
    facts = facts_of(plan.question)
    facts |= {"longest context": facts.pop("context"), "largest group": facts.pop("GPUs")}
    del facts["percentile"]
    target = f"{plan.percentile:g} % within {format_seconds(plan.slo_ttft_s)}"
    return {"requests": str(plan.workload["name"])} | facts | {"target": target}


def _fleets(plan: CapacityPlan) -> Iterable[str]:
    if plan.first.unserved == plan.first.requests:
        yield tag("p", verdict(plan))
        return
    fleets, groups = fleet_table(plan), group_table(plan)
    yield table(fleets.columns, fleets.rows, caption="Fleets: the answer first, then others that meet the target")
    yield from (tag("p", f"{label}: {line}.", class_="lead") for label, line in details(plan))
    yield table(groups.columns, groups.rows, caption="Where prompts go", sortable=False)
