"""A capacity plan for people: its lines and tables, which every format prints, and its interactive page.

The data of the page hold every fleet that was simulated around the answer and the requests of the answer. The page
interpolates nothing: at another target, percentile, price or rate it shows one of these fleets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.units import format_bandwidth, format_bytes, format_seconds, format_tokens
from kvrsim.views.page import CHARTS, Html, Page, Section, Summary, facts_of, items, join, table, tag
from kvrsim.views.table import Cell, Column, seconds_cell
from planner.capacity.plot import draw, percentile_by_length, waiting
from planner.capacity.result import CapacityPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_DOTS = 12_000  # requests of the charts; of more, every second, third, ...
_MOST_STEPS = 20_000  # changes of the queue that are drawn as they are; of more, the longest queue in each of _BINS
_BINS = 4000
_DIGITS = 4
_HOURS_A_MONTH = 730
_LIMITS = {"memory": "memory limits it", "tpot": "the TPOT limits it", "requests": "all at once"}
Rows = list[list[str | Cell]]
Table = tuple[list[Column], Rows, str]  # with its caption


def headline(plan: CapacityPlan) -> str:
    """The target in one line."""
    name, target = plan.workload["name"], format_seconds(plan.slo_ttft_s)
    return f"{plan.percentile:g} % of {name} with a TTFT of at most {target}"


def verdict(plan: CapacityPlan) -> str:
    """The answer in one line."""
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
    text = f"{fleet.total_gpus} GPU{'s' * (fleet.total_gpus > 1)}"
    if fleet.decode is not None:
        text = f"{fleet.num_gpus} prefill + {fleet.decode.num_gpus} decode = {text}"
    elif plan.request.decoding.seconds_per_token is None:
        text += " for prefill only"
    if (cost := fleet.total_cost_per_hour) is not None:
        month = cost * _HOURS_A_MONTH
        text += f", {cost:.4g} $/h, " + (f"{month / 1e3:.3g} k$" if month >= 1e3 else f"{month:.0f} $") + " a month"
    return text


def details(plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """Labels and lines about the answer: its interval, lost requests, transfers, the fleet that decodes."""
    fleet, sent, decoders = plan.first, plan.kv_transfer, plan.decode_fleet
    if (interval := fleet.interval) is not None:
        safe = "safe: it ends below" if interval.safe else "NOT safe: it ends above"
        ends = f"{format_time(interval.low_s)} to {format_time(interval.high_s)}"
        target = format_seconds(plan.slo_ttft_s)
        yield "interval", f"80 % from {ends}, model and sampling together; {safe} the target of {target}"
    if plan.answer is not None:
        yield "engines", fleet.engine or "no engine has all of these strategies (--only-deployable vllm|sglang|trtllm)"
    if fleet.growth is not None:
        most, times, more = fleet.growth
        text = f"the fleet serves {most:g} times these requests" if most > 1 else "the fleet has no room for 1.1 times"
        if times is not None:
            text += f"; {times:g} times need " + (f"{more} GPUs that prefill" if more else "more GPUs than --max-gpus")
        yield "traffic", text
    for change in plan.would_meet:
        yield "would meet", change
    if fleet.unserved:
        yield "requests", f"{fleet.unserved} of {fleet.requests} never served; they count as late"
    if sent is not None and fleet.p50_kv_transfer_s is not None and fleet.p99_kv_transfer_s is not None:
        rate = "" if sent.mean_bytes_per_s is None else f", {format_bandwidth(sent.mean_bytes_per_s)} in all"
        after = f"{format_seconds(fleet.p50_kv_transfer_s)} (p50) and {format_seconds(fleet.p99_kv_transfer_s)} (p99)"
        yield "KV-cache", f"{format_bytes(sent.mean_bytes)} a request{rate}; gone {after} after the first token"
    if decoders is not None:
        gpus = f"{decoders.num_gpus} GPU{'s' * (decoders.num_gpus > 1)}"
        yield (
            "decodes",
            f"{gpus}: {decoders.replicas} × {decoders.gpus_per_group} ({decoders.strategy}), batches of"
            f" {decoders.batch} ({_LIMITS[decoders.limited_by]}), {format_seconds(decoders.step_s)} a step at"
            f" {decoders.context_tokens} tokens; at most {decoders.sequences_at_once} sequences at once, TPOT at most"
            f" {format_seconds(decoders.tpot_s)}",
        )


def group_table(plan: CapacityPlan) -> Table:
    """Where prompts go: one row per range of lengths."""
    titles = ("new tokens", "groups", "strategy, share of time", "requests")
    rows: Rows = []
    for group in plan.first.groups:
        strategies = ", ".join(f"{name} {share:.0%}" for name, share in group.strategies.items()) or "none"
        low, high = group.context_range
        rows.append([f"{low} to {high}", group.groups(), strategies, str(group.requests)])
    return [Column(title=title, number=title == "requests") for title in titles], rows, "Where prompts go"


def fleet_table(plan: CapacityPlan) -> Table:
    """The answer or the nearest miss, and the alternatives."""
    fleets = [plan.first, *plan.alternatives]
    priced = any(fleet.cost_per_hour is not None for fleet in fleets)
    columns = [
        Column(title="fleet"),
        Column(title="engine"),
        Column(title="GPUs", number=True),
        Column(title="p50", number=True, rank=2),
        Column(title="p95", number=True, rank=2),
        Column(title="p99", number=True),
        Column(title="max", number=True, rank=2),
        Column(title="in target", number=True),
        Column(title="utilised", number=True, rank=2, hint="Busy share of all GPU time"),
        *([Column(title="cost/hour", number=True)] if priced else []),
    ]
    rows: Rows = []
    for fleet in fleets:
        times = (fleet.p50_ttft_s, fleet.p95_ttft_s, fleet.p99_ttft_s, fleet.max_ttft_s)
        cost = fleet.total_cost_per_hour
        rows.append(
            [
                fleet.describe(),
                fleet.engine or "none",
                str(fleet.total_gpus),
                *(seconds_cell(one) if math.isfinite(one) else Cell(shown=format_time(one)) for one in times),
                Cell(shown=f"{fleet.in_time:.2%}", value=fleet.in_time),
                Cell(shown=f"{fleet.utilisation:.0%}", value=fleet.utilisation),
                *([] if cost is None else [Cell(shown=f"{cost:.2f}", value=cost)]),
            ]
        )
    return columns, rows, "Fleets: the answer first, then others that meet the target"


def token_table(plan: CapacityPlan) -> Table:
    """Percentiles of the lengths of the requests."""
    keys = ("mean", "p50", "p90", "p99", "max")
    names = ("context_tokens", "new_tokens", "output_tokens")
    columns = [Column(title=""), *(Column(title=key, number=True) for key in keys)]
    rows: Rows = [[name.replace("_", " "), *(f"{plan.workload[name][key]:.0f}" for key in keys)] for name in names]
    return columns, rows, "Tokens of the requests"


def length_table(plan: CapacityPlan) -> Table:
    """Requests by context."""
    columns = [Column(title=title, number=True) for title in ("contexts from", "requests", "share of new tokens")]
    rows: Rows = [
        [format_tokens(row["from_tokens"]), str(row["requests"]), f"{row['share_of_new_tokens']:.1%}"]
        for row in plan.workload["histogram"]
    ]
    return columns, rows, "Requests by context, in powers of two"


def as_text(rows: Rows) -> list[list[str]]:
    """Rows as they are shown."""
    return [[cell.shown if isinstance(cell, Cell) else cell for cell in row] for row in rows]


def format_time(seconds: float) -> str:
    """Formatted seconds; "unserved" for a percentile that falls among unserved requests."""
    return format_seconds(seconds) if math.isfinite(seconds) else "unserved"


def figure(plan: CapacityPlan) -> Figure:
    """TTFT by length, the queue over time, the Pareto front and the lengths."""
    return draw(plan, verdict(plan), _question(plan))


def summary(plan: CapacityPlan) -> Summary:
    """Fleets that meet the target, the answer first; where none does, the nearest miss."""
    columns, rows, _ = fleet_table(plan)
    meanings = plan.assumptions()
    notes = [*plan.reasons(), meanings["interval_meaning"], meanings["rests_on"], *plan.warnings]
    return Summary(
        answer=verdict(plan),
        question=_question(plan),
        caption="fleets",
        columns=columns,
        rows=as_text(rows),
        notes=notes,
    )


def _question(plan: CapacityPlan) -> str:
    model = plan.scenario.model.name
    return " · ".join((headline(plan), model, plan.cluster.describe(), *plan.question.kernels()))


def page(plan: CapacityPlan) -> Page:
    """Target, price and rate are moved, and the fleet is read off; fleets at other rates are simulated first."""
    return capacity_page(plan.explored())


def capacity_page(plan: CapacityPlan) -> Page:
    """The page of a plan; with fleets at other rates if it is `explored`."""
    served = plan.first.unserved < plan.first.requests
    miss = "" if plan.answer else ", the nearest miss"
    point = "Every point is a fleet that was simulated, groups × GPUs."
    leads = {  # by the title of the section and the id of its chart
        ("Fleets by cost and TTFT", "fleets"): f"Drag the target and the price, or move the sliders. {point}",
        (
            "What more requests need",
            "rates",
        ): "The cheapest of these fleets that meets the target, by the request rate.",
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
            Section(title="What was read", body=join(_workload(plan))),
        ],
        notes=[*plan.assumptions().values(), *plan.warnings],
        data=capacity_data(plan) if served else {},
        scripts=(*CHARTS, "controls.js", "fleets.js", "queue.js") if served else (),
        strategies=[name for group in plan.first.groups for name in group.strategies],
    )


def capacity_data(plan: CapacityPlan) -> dict[str, Any]:
    """Plain JSON values; null: never served."""
    tried = plan.front.tried
    prices = {round(one.cost_per_hour / one.num_gpus, 9) for one in tried if one.cost_per_hour is not None}
    return {
        "slo_s": plan.slo_ttft_s,
        "percentile": plan.percentile,
        "percentiles": list(plan.front.percentiles),
        "priced": plan.first.cost_per_hour is not None,
        "price_per_gpu_hour": prices.pop() if len(prices) == 1 else None,  # the one price of all GPUs
        "rate_per_s": plan.workload["rate_per_s"],
        "tried": [
            {
                "rate": one.rate,
                "gpus": one.num_gpus,
                "cost": one.cost_per_hour,
                "fleet": one.fleet,
                "ttft_s": _short(one.ttft_s),
                "utilisation": round(one.utilisation, 3),
                "requests": one.requests,
            }
            for one in tried
        ],
        "requests": _requests(plan),
    }


def _requests(plan: CapacityPlan) -> dict[str, Any]:
    """TTFTs over time and length, percentiles by length, and the queue."""
    curves = plan.first.curves
    assert curves is not None
    served = np.flatnonzero(np.isfinite(curves.ttft_s))
    step = -(-len(served) // _MOST_DOTS)
    some = served[::step]
    times_s, prompts = waiting(curves, _MOST_STEPS, _BINS)
    by_length = {one: percentile_by_length(curves, served, one) for one in (50.0, plan.percentile)}
    return {
        "count": len(curves.arrival_s),
        "every": step,
        "arrival_s": np.round(curves.arrival_s[some], 3).tolist(),
        "ttft_s": _short(curves.ttft_s[some]),
        "new_tokens": curves.new_tokens[some].tolist(),
        "by_length": [
            {"percentile": percentile, "new_tokens": _short(lengths), "ttft_s": _short(values)}
            for percentile, (lengths, values) in by_length.items()
        ],
        "queue": {"time_s": np.round(times_s, 3).tolist(), "waiting": prompts.astype(int).tolist()},
    }


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _facts(plan: CapacityPlan) -> dict[str, str]:
    """The question; the context is that of the longest request, and the GPUs those of the largest group."""
    facts = facts_of(plan.question)
    facts |= {"longest context": facts.pop("context"), "largest group": facts.pop("GPUs")}
    del facts["percentile"]
    target = f"{plan.percentile:g} % within {format_seconds(plan.slo_ttft_s)}"
    return {"requests": str(plan.workload["name"])} | facts | {"target": target}


def _fleets(plan: CapacityPlan) -> Iterable[str]:
    if plan.first.unserved == plan.first.requests:
        yield tag("p", verdict(plan))
        return
    columns, rows, caption = fleet_table(plan)
    yield table(columns, rows, caption=caption)
    yield from (tag("p", f"{label}: {line}.", class_="lead") for label, line in details(plan))
    columns, rows, caption = group_table(plan)
    yield table(columns, rows, caption=caption, sortable=False)


def _workload(plan: CapacityPlan) -> Iterable[Html]:
    read = plan.workload
    rate = "" if read["rate_per_s"] is None else f", {read['rate_per_s']:.3g} a second"
    words = f"{read['requests']} requests in {read['duration_s']:.6g} s{rate}; {read['cached_share']:.0%} cached"
    yield tag("p", f"{read['name']}: {words}")
    for columns, rows, caption in (token_table(plan), length_table(plan)):
        yield table(columns, rows, caption=caption, sortable=False)
