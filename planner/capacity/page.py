"""A capacity plan as an interactive page: target, price and rate are moved, and the fleet is read off.

The data hold every fleet that was simulated around the answer (planner/capacity/front.py) and the requests of the
answer. The page interpolates nothing: at another target, percentile, price or rate it shows one of these fleets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvrsim.units import format_seconds, format_tokens
from kvrsim.views.page import CHARTS, Cell, Column, Html, Page, Section, facts_of, items, join, seconds_cell, table, tag
from planner.capacity.answer import CapacityPlan, Curves, FleetAnswer, TriedFleet
from planner.capacity.plots import percentile_by_length, waiting
from planner.capacity.report import (
    UNSERVED,
    decodes,
    groups_of_fleet,
    interval,
    losses,
    transfers,
    verdict,
)

_MOST_DOTS = 12_000  # requests of the charts; of more, every second, third, ...
_MOST_STEPS = 20_000  # changes of the queue that are drawn as they are; of more, the longest queue in each of _BINS
_BINS = 4000
_DIGITS = 4


def capacity_page(plan: CapacityPlan) -> Page:
    """The page of a plan; with fleets at other rates if it is `explored`."""
    served = plan.first.unserved < plan.first.requests
    pictures = (
        Section(
            title="Fleets by cost and TTFT",
            lead="Drag the target and the price, or move the sliders. Every point is a fleet that was simulated,"
            " groups × GPUs.",
            body=tag("div", id="fleets"),
        ),
        Section(
            title="What more requests need",
            lead="The cheapest of these fleets that meets the target, by the rate of the requests.",
            body=tag("div", id="rates"),
        ),
        Section(
            title="Queue over time",
            lead=f"{plan.first.describe()}{'' if plan.answer else ', the nearest miss'}. Drag over a stretch of time to"
            " zoom in, double-click to see all.",
            body=tag("div", id="queue"),
        ),
        Section(title="TTFT by length", lead="The same requests, by their new tokens.", body=tag("div", id="lengths")),
    )
    return Page(
        title=f"{plan.percentile:g} % of the requests with a TTFT of at most {format_seconds(plan.slo_ttft_s)}",
        answer=verdict(plan),
        facts=_facts(plan),
        sections=[
            *(pictures if served else ()),
            Section(title="Fleets", body=join(_fleets(plan))),
            *_reasons(plan),
            Section(title="What was read", body=join(_workload(plan))),
        ],
        notes=[plan.decoding, plan.dispatch, plan.interval_meaning, plan.rests_on, *plan.warnings],
        data=capacity_data(plan) if served else {},
        scripts=(*CHARTS, "controls.js", "fleets.js", "queue.js") if served else (),
        strategies=[name for group in plan.first.groups for name in group.strategies],
    )


def capacity_data(plan: CapacityPlan) -> dict[str, Any]:
    """Plain JSON values; null: never served, or not simulated."""
    curves = plan.first.curves
    assert curves is not None
    return {
        "slo_s": plan.slo_ttft_s,
        "percentile": plan.percentile,
        "percentiles": list(plan.percentiles),
        "priced": plan.first.cost_per_hour is not None,
        "price_per_gpu_hour": _price(plan.tried),
        "rate_per_s": plan.workload["rate_per_s"],
        "tried": [_tried(one) for one in plan.tried],
        "requests": _requests(plan, curves),
    }


def _tried(one: TriedFleet) -> dict[str, Any]:
    return {
        "rate": one.rate,
        "gpus": one.num_gpus,
        "cost": one.cost_per_hour,
        "fleet": one.fleet,
        "ttft_s": _shorts(one.ttft_s),
        "utilisation": round(one.utilisation, 3),
        "requests": one.requests,
    }


def _price(tried: Iterable[TriedFleet]) -> float | None:
    """The one price of all GPUs; None: there is none, or several."""
    prices = {round(one.cost_per_hour / one.num_gpus, 9) for one in tried if one.cost_per_hour is not None}
    return prices.pop() if len(prices) == 1 else None


def _requests(plan: CapacityPlan, curves: Curves) -> dict[str, Any]:
    """TTFTs over time and length, percentiles by length, and the queue."""
    served = np.flatnonzero(np.isfinite(curves.ttft_s))
    step = -(-len(served) // _MOST_DOTS)
    shown = served[::step]
    times_s, prompts = waiting(curves, _MOST_STEPS, _BINS)
    lines = []
    for percentile in dict.fromkeys((50.0, plan.percentile)):
        lengths, values = percentile_by_length(curves, served, percentile)
        lines.append({"percentile": percentile, "new_tokens": _shorts(lengths), "ttft_s": _shorts(values)})
    return {
        "count": len(curves.arrival_s),
        "every": step,
        "arrival_s": [round(float(one), 3) for one in curves.arrival_s[shown]],
        "ttft_s": _shorts(curves.ttft_s[shown]),
        "new_tokens": curves.new_tokens[shown].tolist(),
        "by_length": lines,
        "queue": {"time_s": [round(float(one), 3) for one in times_s], "waiting": [int(one) for one in prompts]},
    }


def _shorts(values: Iterable[float]) -> list[float | None]:
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
    columns = (
        Column(title="fleet"),
        Column(title="GPUs", number=True),
        *(Column(title=name, number=True, rank=2) for name in ("p50", "p95")),
        Column(title="p99", number=True),
        Column(title="longest", number=True, rank=2),
        Column(title="in time", number=True),
        Column(title="utilisation", number=True, rank=2, hint="Busy share of all GPU time"),
        Column(title="cost per hour", number=True),
    )
    rows = [_fleet_row(fleet) for fleet in (plan.first, *plan.alternatives)]
    yield table(columns, rows, caption="Fleets: the answer first, then others that meet the target")
    told = {"Interval": interval(plan), "Requests": losses(plan.first)}
    told |= {"KV-cache": transfers(plan), "Fleet that decodes": decodes(plan)}
    yield from (tag("p", f"{label}: {words}.", class_="lead") for label, words in told.items() if words is not None)
    yield tag("h3", "Where prompts go")
    titles = ("new tokens", "groups × GPUs", "strategy, share of time", "requests")
    columns = tuple(Column(title=title, number=title == "requests") for title in titles)
    yield table(columns, groups_of_fleet(plan.first), caption="Where prompts go", sortable=False)


def _fleet_row(fleet: FleetAnswer) -> list[str | Cell]:
    times = (fleet.p50_ttft_s, fleet.p95_ttft_s, fleet.p99_ttft_s, fleet.max_ttft_s)
    cost = fleet.cost_per_hour
    return [
        fleet.describe(),
        str(fleet.num_gpus),
        *(seconds_cell(one) if math.isfinite(one) else Cell(shown=UNSERVED) for one in times),
        Cell(shown=f"{fleet.in_time:.2%}", value=fleet.in_time),
        Cell(shown=f"{fleet.utilisation:.0%}", value=fleet.utilisation),
        "" if cost is None else Cell(shown=f"{cost:.2f}", value=cost),
    ]


def _reasons(plan: CapacityPlan) -> Sequence[Section]:
    if not plan.infeasible:
        return ()
    return (Section(title="What does not meet the target", body=items(plan.reasons())),)


def _workload(plan: CapacityPlan) -> Iterable[Html]:
    read = plan.workload
    rate = "" if read["rate_per_s"] is None else f", {read['rate_per_s']:.3g} a second"
    words = f"{read['requests']} requests in {read['duration_s']:.6g} s{rate}; {read['cached_share']:.0%} cached"
    yield tag("p", f"{read['name']}: {words}")
    shares = ("mean", "p50", "p90", "p99", "max")
    rows: list[list[str | Cell]] = [
        [name.replace("_", " "), *(Cell(shown=f"{read[name][key]:.0f}", value=read[name][key]) for key in shares)]
        for name in ("context_tokens", "new_tokens", "output_tokens")
    ]
    columns = (Column(title=""), *(Column(title=name, number=True) for name in shares))
    yield table(columns, rows, caption="Tokens of the requests", sortable=False)
    yield tag("h3", "Contexts")
    columns = (
        Column(title="from", number=True),
        Column(title="requests", number=True),
        Column(title=""),
        Column(title="share of new tokens", number=True),
        Column(title=""),
    )
    most = max(row["requests"] for row in read["histogram"])
    bars: list[list[str | Cell]] = [
        [
            format_tokens(row["from_tokens"]),
            str(row["requests"]),
            _bar(row["requests"] / most, "requests"),
            f"{row['share_of_new_tokens']:.1%}",
            _bar(row["share_of_new_tokens"], "share of new tokens"),
        ]
        for row in read["histogram"]
    ]
    yield table(columns, bars, caption="Requests by context, in powers of two", sortable=False)


def _bar(share: float, label: str) -> Html:
    return tag("meter", value=f"{share:.4f}", min=0, max=1, aria_label=label)
