"""The readable forms of a capacity plan: lines and tables for all formats, the chart, and the interactive page.

The page's data contain the requests of the answer and all fleets that were simulated with fewer or more groups. The
page interpolates nothing: at another target, percentile or price it shows one of these fleets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
from planner.capacity.result import CapacityPlan, FleetAnswer, format_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE = "#4c78a8"
_ORANGE = "#ee8434"
# size of the chart in inches, without its title
_WIDTH = 8.0
_HEIGHT = 4.2
_MOST_DOTS = 12_000  # requests drawn in a chart; with more requests, every second, third, ... is drawn
_MOST_STEPS = 20_000  # changes of the queue drawn one by one; with more, the longest queue in each of _BINS
_BINS = 4000
_LEAST_IN_BIN = 20  # fewest requests per bin for a percentile by length
_DIGITS = 4
_HOURS_A_MONTH = 730
_LIMITS = {"memory": "memory limits it", "tpot": "the TPOT limits it", "requests": "all at once"}


def headline(plan: CapacityPlan) -> str:
    """One line about the target."""
    name = plan.workload["name"]
    target = format_seconds(plan.slo_ttft_s)
    return f"{plan.percentile:g} % of {name} with a TTFT of at most {target}"


def verdict(plan: CapacityPlan) -> str:
    """The answer, or the reason why there is none."""
    fleet = plan.first
    reached = format_time(fleet.target_ttft_s)
    if plan.answer is not None:
        served = "" if fleet.unserved == 0 else f" It serves {served_words(fleet)}."
        return f"{size_and_price(plan)}: {fleet.describe()}. {ordinal(plan.percentile)} percentile {reached}.{served}"
    if fleet.unserved == fleet.requests:
        return f"No fleet meets the target. None serves any of the {fleet.requests} requests."
    if fleet.no_decode is not None:
        return f"No fleet meets the target: {fleet.no_decode}. {fleet.describe()} would meet the TTFT."
    result = f"has a {ordinal(plan.percentile)} percentile of {reached}"
    if math.isinf(fleet.target_ttft_s):
        result = f"serves {served_words(fleet)}"
    elif fleet.target_ttft_s <= plan.slo_ttft_s:
        result += ", but the upper end of its interval is above the target"
    return f"No fleet meets the target. The nearest miss, {fleet.describe()}, {result}."


def served_words(fleet: FleetAnswer) -> str:
    """The share of the requests that a fleet serves: "97 % of the requests; the rest does not fit in its memory"."""
    share = format_share(fleet.served_share)
    longest = "" if fleet.longest_served is None else f" (it takes prompts of up to {fleet.longest_served} tokens)"
    return f"{share} of the requests; the rest does not fit in its memory{longest}"


def ordinal(percentile: float) -> str:
    """A percentile in words: 95th, 91st, 99.9th."""
    last = f"{percentile:g}"[-2:]
    ending = "th" if last in ("11", "12", "13") or "." in f"{percentile:g}" else ""
    return f"{percentile:g}{ending or {'1': 'st', '2': 'nd', '3': 'rd'}.get(last[-1], 'th')}"


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
    fleet = plan.first
    sent = plan.kv_transfer
    decoders = plan.decode_fleet
    if (interval := fleet.interval) is not None:
        safe = "safe: it ends below" if interval.safe else "NOT safe: it ends above"
        high = math.inf if interval.high_s is None else interval.high_s
        ends = f"{format_time(interval.low_s)} to {format_time(high)}"
        target = format_seconds(plan.slo_ttft_s)
        yield "interval", f"80 % from {ends}, model and sampling together; {safe} the target of {target}"
    if plan.answer is not None:
        yield "engines", fleet.engine or "no engine has all of these strategies (--only-deployable vllm|sglang|trtllm)"
    if plan.growth:
        yield "traffic", growth_words(plan)
    for change in plan.would_meet:
        yield "would meet", change
    if fleet.unserved:
        share = format_share(fleet.unserved / fleet.requests)
        yield "unserved", f"{share} of the requests are never served; they count as late"
    if (more := plan.serves_more) is not None:
        price = "" if more.total_cost_per_hour is None else f", {more.total_cost_per_hour:.4g} $/h"
        gpus = f"{more.total_gpus} GPUs{price}: {more.describe()}"
        yield "serves more", f"{format_share(more.served_share)} of the requests with {gpus}"
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
    workload = plan.workload
    lengths = plan.workload["context_tokens"]
    rate = "" if workload["rate_per_s"] is None else f", {workload['rate_per_s']:.3g} a second"
    contexts = f"contexts of {lengths['p50']} (p50), {lengths['p99']} (p99) and at most {lengths['max']} tokens"
    counts = f"{workload['requests']} in {workload['duration_s']:.6g} s{rate}"
    if len(fleet.runs) > 1:
        counts += f", in each of {len(fleet.runs)} random samples"
    yield "requests", f"{counts}; {contexts}, {workload['cached_share']:.0%} of them cached"


def growth_words(plan: CapacityPlan) -> str:
    """The GPUs for more requests: "1.5 times the requests need 8 GPUs, as now; 2 times 12 GPUs"."""
    texts: list[str] = []
    for growth in plan.growth:
        need = " the requests need" if not texts else ""
        gpus = "more GPUs than --max-gpus"
        if growth.num_gpus is not None:
            gpus = f"{growth.num_gpus} GPU{'s' * (growth.num_gpus > 1)}"
            if growth.num_gpus == plan.first.total_gpus:
                gpus += ", as now"
            elif growth.cost_per_hour is not None:
                gpus += f", {growth.cost_per_hour:.4g} $/h"
        texts.append(f"{growth.times:g} times{need} {gpus}")
    with_decoding = " (decoding included)" if plan.first.decode is not None else ""
    return "; ".join(texts) + with_decoding


def group_table(plan: CapacityPlan) -> Table:
    """Table of the groups that serve each range of lengths: one row per range."""
    rows = columns("new tokens", "groups", "strategy, share of time", ">share of requests")
    for group in plan.first.groups:
        strategies = ", ".join(f"{name} {share:.0%}" for name, share in group.strategies.items()) or "none"
        low, high = group.context_range
        share = format_share(group.requests / plan.first.requests)
        rows.add_row(f"{low} to {high}", group.groups(), strategies, share)
    return rows


def fleet_table(plan: CapacityPlan) -> Table:
    """The answer or the nearest miss, and the alternatives."""
    fleets = [plan.first, *plan.alternatives]
    priced = any(fleet.cost_per_hour is not None for fleet in fleets)
    decodes = any(fleet.decode is not None for fleet in fleets)
    serves_all = all(fleet.unserved == 0 for fleet in fleets)
    ranks = {"p95": 2, "p50": 3, "max": 4, "utilised": 5}  # columns that narrow screens leave out
    titles = ("GPUs", "p50", "p95", "p99", "max", "in target", "utilised", *["$/hour"] * priced)
    titles = (*titles[:6], *["served"] * (not serves_all), *titles[6:])
    hints = {"utilised": "Busy share of the time of the GPUs that prefill", "served": "Share of requests ever served"}
    if decodes:
        hints |= {"GPUs": "Prefill and decoding", "$/hour": "Prefill and decoding"}
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
            *([] if serves_all else [Cell(shown=format_share(fleet.served_share), value=fleet.served_share)]),
            Cell(shown=f"{fleet.utilisation:.0%}", value=fleet.utilisation),
            *([] if cost is None else [Cell(shown=f"{cost:.2f}", value=cost)]),
            style="bold" if number == 0 and plan.answer is not None else None,
        )
    return rows


def format_time(seconds: float) -> str:
    """Formatted seconds; "unserved" if the percentile is that of an unserved request."""
    return format_seconds(seconds) if math.isfinite(seconds) else "unserved"


def figure(plan: CapacityPlan) -> Figure:
    """The fleets that no cheaper one beats: the requested percentile of TTFT over cost or GPUs, prefill and decoding.

    Fleets whose upper end of the interval misses the target are marked if it must meet the target.
    """
    front = plan.pareto()
    fleet = plan.first
    priced = fleet.total_cost_per_hour is not None
    unsafe = [one for one in plan.tried if plan.request.sure and not one.is_safe]
    if plan.answer is None:
        head = Head(title="No fleet meets the target", subtitle=f"{verdict(plan)} {_question(plan)}", width=_WIDTH)
    else:
        served = "" if fleet.unserved == 0 else f", {format_share(fleet.served_share)} of the requests served"
        title = (
            f"{size_and_price(plan)}: {ordinal(plan.percentile)} percentile {format_time(fleet.target_ttft_s)}{served}"
        )
        head = Head(title=title, subtitle=f"{fleet.describe()} · {_question(plan)}", width=_WIDTH)
    with chart_style():
        panes = drawing(_WIDTH, _HEIGHT + head.height)
        height = _HEIGHT / (_HEIGHT + head.height)
        axes = panes.add_axes((0.11, 0.15 * height, 0.86, 0.82 * height))
        axes.plot(*_places(front), "o-", color=_BLUE, drawstyle="steps-post", label="no cheaper fleet is as fast")
        if unsafe:
            label = "not safe: the interval ends above the target"
            axes.plot(*_places(unsafe), "x", color=DIM, label=label)
        axes.axhline(plan.slo_ttft_s, color=_ORANGE, label=f"target {format_seconds(plan.slo_ttft_s)}")
        if math.isfinite(fleet.target_ttft_s):
            label = "the answer" if plan.answer is not None else "the nearest miss"
            axes.plot(*_places([fleet]), "o", label=label, color=_ORANGE, markersize=9, fillstyle="none")
        axes.set_yscale("log")
        low_s, high_s = axes.get_ylim()
        ticks_s = _log_ticks(low_s, high_s)
        axes.set_yticks(ticks_s, [f"{tick_s:g}" for tick_s in ticks_s])
        axes.set_yticks([], minor=True)
        axes.set_ylim(min(low_s, ticks_s[0]), max(high_s, ticks_s[-1]))
        what = "prefill and decoding" if fleet.decode is not None else "for prefill only"
        axes.set_xlabel(f"$ per hour, {what}" if priced else f"GPUs, {what}", color=DIM)
        axes.set_ylabel(f"{ordinal(plan.percentile)} percentile of TTFT, s", color=DIM)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, labelcolor=INK)
        head.draw(panes)
    return panes


def _places(fleets: Sequence[FleetAnswer]) -> tuple[list[float], list[float]]:
    """Cost or GPUs, and TTFT, of each fleet that serves enough requests to have one."""
    served = [fleet for fleet in fleets if math.isfinite(fleet.target_ttft_s)]
    costs = [fleet.total_gpus if fleet.total_cost_per_hour is None else fleet.total_cost_per_hour for fleet in served]
    return list(map(float, costs)), [fleet.target_ttft_s for fleet in served]


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks 1, 2, 5, 10, ... that enclose a range; over more than two decades, powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    first = max((number for number, tick in enumerate(ticks) if tick <= low), default=0)
    last = min((number for number, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    return ticks[first : last + 1]


def summary(plan: CapacityPlan) -> Summary:
    """Fleets that meet the target, the answer first; if none does, the nearest miss."""
    fleets = fleet_table(plan)
    meanings = plan.assumptions()
    return Summary(
        answer=verdict(plan),
        question=_question(plan),
        caption="fleets",
        columns=fleets.columns,
        rows=fleets.texts(),
        notes=[*plan.reasons(), meanings["interval_meaning"], meanings["provenance"], *plan.warnings],
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
    costs = [(one.total_cost_per_hour, one.total_gpus) for one in tried]
    prices = {round(cost / gpus, 9) for cost, gpus in costs if cost is not None}
    return {
        "slo_s": plan.slo_ttft_s,
        "percentile": plan.percentile,
        "percentiles": list(plan.first.ttft_s),
        "priced": plan.first.cost_per_hour is not None,
        "sure": plan.request.sure,
        "decodes": plan.first.decode is not None,
        "samples": len(plan.first.runs),
        "price_per_gpu_hour": prices.pop() if len(prices) == 1 else None,  # the price, if all GPUs have the same one
        "tried": [
            {
                "gpus": one.total_gpus,
                "cost": one.total_cost_per_hour,
                "fleet": _whole(one),
                "safe": one.is_safe,
                "served": one.served_share,
                "ttft_s": _short(one.ttft_s.values()),
                "utilisation": round(one.utilisation, 3),
                "requests": one.requests,
            }
            for one in tried
        ],
        "requests": _requests(plan),
    }


def _whole(fleet: FleetAnswer) -> str:
    """The groups of a fleet, with those that decode."""
    decoders = fleet.decode
    if decoders is None:
        return fleet.describe()
    groups = f"{decoders.replicas} × {decoders.gpus_per_group} GPU{'s' * (decoders.gpus_per_group > 1)}"
    return f"{fleet.describe()}; {groups} to decode"


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
    times_s = changes[order]
    number = np.cumsum(signs[order])
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
    fleets = fleet_table(plan)
    groups = group_table(plan)
    yield table(fleets.columns, fleets.rows, caption="Fleets: the answer first, then others that meet the target")
    yield from (tag("p", f"{label}: {line}.", class_="lead") for label, line in details(plan))
    yield table(groups.columns, groups.rows, caption="Where prompts go", sortable=False)
