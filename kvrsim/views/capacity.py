"""The readable forms of a capacity plan: lines and tables for all formats, the chart, and the interactive page.

The page's data contain the requests of the answer and all fleets that were simulated with fewer or more groups. The
page interpolates nothing: at another target, percentile or price it shows one of these fleets.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.program import Array
from kvrsim.units import format_bandwidth, format_bytes, format_count, format_seconds
from kvrsim.views.figure import Head, drawing
from kvrsim.views.page import CHARTS, Page, Section, Summary, facts_of, items, join, table, tag
from kvrsim.views.style import DIM, INK, chart_style
from kvrsim.views.table import Cell, Column, Table, columns, seconds_cell
from planner.capacity.decode import DecodeFleet
from planner.capacity.fleet import FleetRun, Indices
from planner.capacity.hits import CacheHits, TurnTimes
from planner.capacity.result import CapacityPlan, FleetAnswer, FleetInterval, format_share
from planner.capacity.transfer import KvTransfer
from planner.percentile import percentile_of

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
_ENDINGS = {"1": "st", "2": "nd", "3": "rd"}  # of ordinal numbers, by their last digit


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
        return f"{signature(plan)} {fleet_words(plan)}"
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


def fleet_words(plan: CapacityPlan) -> str:
    """The fleet of the answer: its GPUs and price, its groups, the percentile of TTFT, and what it does not serve."""
    fleet = plan.first
    reached = format_time(fleet.target_ttft_s)
    text = f"{size_and_price(plan)}: {fleet.describe()}. {ordinal(plan.percentile)} percentile {reached}."
    if fleet.unserved:
        text += f" It serves {served_words(fleet)}."
    return text


def served_words(fleet: FleetAnswer) -> str:
    """The share of the requests that a fleet serves: "97 % of the requests; the rest does not fit in its memory"."""
    text = f"{format_share(fleet.served_share)} of the requests; the rest does not fit in its memory"
    if fleet.longest_served is not None:
        text += f" (it takes prompts of up to {fleet.longest_served} tokens)"
    return text


def ordinal(percentile: float) -> str:
    """A percentile in words: 95th, 91st, 99.9th."""
    number = f"{percentile:g}"
    if "." in number or number.endswith(("11", "12", "13")):
        return f"{number}th"
    return number + _ENDINGS.get(number[-1], "th")


def size_and_price(plan: CapacityPlan) -> str:
    """The whole fleet in words: "12 prefill + 4 decode = 16 GPUs, 40 $/h, 29 k$ a month"."""
    fleet = plan.first
    total = format_count(fleet.total_gpus, "GPU")
    parts: list[str] = []
    if fleet.decode is not None:
        parts = [f"{fleet.num_gpus} prefill", f"{fleet.decode.num_gpus} decode"]
    elif fleet.idle_gpus:
        parts = [f"{fleet.num_gpus} working"]
    if fleet.idle_gpus:
        parts.append(f"{fleet.idle_gpus} idle or spare")
    text = " + ".join(parts) + f" = {total}" if parts else total
    if fleet.serving == "colocated":
        text += " for prefill and decoding"
    elif fleet.decode is None:
        text += " for prefill only"
    if fleet.total_cost_per_hour is None:
        return text
    return f"{text}, {fleet.total_cost_per_hour:.4g} $/h, {month_words(fleet.total_cost_per_hour)} a month"


def month_words(cost_per_hour: float) -> str:
    """The price of a month: "850 $", "12.8 k$"."""
    month = cost_per_hour * _HOURS_A_MONTH
    if month < 1e3:
        return f"{month:.0f} $"
    return f"{month / 1e3:.3g} k$"


def signature(plan: CapacityPlan) -> str:
    """What the fleet does, what it costs, at the ends of the model's error, and with more requests.

    "Serves 99.4 % of the requests within 3 s: 7 H100, 12.8 k$ a month (7 to 9 at the ends of the interval); at 3 times
    the requests: 12."
    """
    fleet = plan.first
    gpu = plan.cluster.gpu.name.upper()
    text = f"Serves {format_share(fleet.in_time)} of the requests within {format_seconds(plan.slo_ttft_s)}"
    if fleet.target_tpot_s is not None and plan.request.target.tpot_s is not None:
        text += f", {format_seconds(plan.request.target.tpot_s)} a token"
    text += f": {fleet.total_gpus} {gpu}"
    if fleet.total_cost_per_hour is not None:
        text += f", {month_words(fleet.total_cost_per_hour)} a month"
    sizes = fleet.size_interval
    if sizes is not None:
        ends = [str(gpus or "none") for gpus in (sizes.low_gpus, sizes.high_gpus)]
        text += f" ({' to '.join(dict.fromkeys(ends))} at the ends of the interval)"
    if plan.growth:
        last = plan.growth[-1]
        text += f"; at {last.times:g} times the requests: {last.num_gpus or 'more than allowed'}"
    return text + "."


def price_words(plan: CapacityPlan) -> str | None:
    """The price of the answer with its interval, or its size where there is no price; None: no interval."""
    fleet = plan.first
    sizes = fleet.size_interval
    if sizes is None:
        return None
    words: list[str] = []
    for gpus, cost in ((sizes.low_gpus, sizes.low_cost_per_hour), (sizes.high_gpus, sizes.high_cost_per_hour)):
        text = "no fleet within the limits"
        if gpus is not None:
            text = format_count(gpus, "GPU")
            if cost is not None:
                text += f", {cost:.4g} $/h"
        words.append(text)
    low, high = words
    return f"{low} if all times are at the lower end of their error, {high} at the upper end"


def withstands_words(plan: CapacityPlan) -> str | None:
    """How much more traffic, and which losses, the answer withstands; None: not simulated."""
    fleet = plan.first
    if fleet.withstands is None:
        return None
    text = f"up to {fleet.withstands:.3g} times the requests; with more, it must grow"
    if fleet.withstands == 1:
        text = "no more requests than these"
    spare = plan.request.limits.spare
    if spare:
        unit = "node" if plan.request.limits.node_gpus > 1 else "group"
        text += f"; the loss of {format_count(spare, unit)}"
    return text


def cluster_words(plan: CapacityPlan) -> str | None:
    """The answers on all clusters that were compared; None: only one."""
    parts: list[str] = []
    for found in plan.by_cluster:
        text = f"{found.cluster}: no fleet meets the target"
        if found.answer is not None:
            text = f"{found.cluster}: {format_count(found.answer.total_gpus, 'GPU')}"
            if found.answer.total_cost_per_hour is not None:
                text += f", {found.answer.total_cost_per_hour:.4g} $/h"
            if found.growth:
                last = found.growth[-1]
                text += f" (at {last.times:g} times the requests {last.num_gpus or 'more than allowed'}"
                text += f", {last.cost_per_hour:.4g} $/h)" if last.cost_per_hour is not None else ")"
        parts.append(text)
    return "; ".join(parts) or None


def _alternative_words(fleet: FleetAnswer) -> str:
    """The share that a fleet serves, its GPUs and price, and its groups."""
    gpus = f"{fleet.total_gpus} GPUs"
    if fleet.total_cost_per_hour is not None:
        gpus += f", {fleet.total_cost_per_hour:.4g} $/h"
    return f"{format_share(fleet.served_share)} of the requests with {gpus}: {fleet.describe()}"


def _transfer_words(transfer: KvTransfer) -> str:
    """The mean size of a cache, and the rate of all transfers: "754 MiB per request, 4.77 GB/s in all"."""
    text = f"{format_bytes(transfer.mean_bytes)} per request"
    if transfer.mean_bytes_per_s is not None:
        text += f", {format_bandwidth(transfer.mean_bytes_per_s)} in all"
    return text


def _decoder_words(decoders: DecodeFleet) -> str:
    """The groups that decode: "2 GPUs: 1 × 2 (tp), 82% busy; at most 65 sequences at once in a group"."""
    groups = f"{format_count(decoders.num_gpus, 'GPU')}: {decoders.replicas} × {decoders.gpus_per_group}"
    load = f"{decoders.utilisation:.0%} busy; at most {decoders.batch} sequences at once in a group"
    return f"{groups} ({decoders.strategy}), {load}"


def details(plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """Labels and lines about the answer: its interval, lost requests, transfers, the fleet that decodes."""
    fleet = plan.first
    if plan.answer is not None:
        yield from _purchase(plan)
    if fleet.interval is not None:
        yield "interval", _interval_words(fleet.interval, plan.slo_ttft_s)
    if fleet.target_tpot_s is not None and fleet.p50_tpot_s is not None:
        tpot = f"{format_seconds(fleet.p50_tpot_s)} (p50), {format_seconds(fleet.target_tpot_s)}"
        yield "TPOT", f"{tpot} ({ordinal(plan.percentile)} percentile)"
    yield from _session_lines(plan)
    if plan.answer is not None:
        yield "engines", fleet.engine or "no engine has all of these strategies (--only-deployable vllm|sglang|trtllm)"
    if plan.growth:
        yield "traffic", growth_words(plan)
    for change in plan.would_meet:
        yield "would meet", change
    if fleet.unserved:
        share = format_share(fleet.unserved / fleet.requests)
        yield "unserved", f"{share} of the requests are never served; they count as late"
    if plan.serves_more is not None:
        yield "serves more", _alternative_words(plan.serves_more)
    if plan.kv_transfer is not None and fleet.p50_kv_transfer_s is not None and fleet.p99_kv_transfer_s is not None:
        after = f"{format_seconds(fleet.p50_kv_transfer_s)} (p50) and {format_seconds(fleet.p99_kv_transfer_s)} (p99)"
        yield "KV-cache", f"{_transfer_words(plan.kv_transfer)}; gone {after} after the first token"
    if plan.decode_fleet is not None:
        yield "decodes", _decoder_words(plan.decode_fleet)
    yield "requests", _workload_words(plan)


def _session_lines(plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """Labels and lines about sessions: the hits of their prefixes, and the TTFT by turn."""
    fleet = plan.first
    if fleet.prefix_cache is not None:
        yield "prefix cache", hit_words(fleet.prefix_cache)
    if fleet.by_turn:
        yield "by turn", f"TTFT ({ordinal(plan.percentile)} percentile): {', '.join(map(turn_words, fleet.by_turn))}"


def hit_words(hits: CacheHits) -> str:
    """The share of the prompts in prefix caches: "71 % of prompt tokens hit, 64 % on the GPU, 7 % in the host"."""
    text = f"{format_share(hits.hit_rate)} of prompt tokens hit"
    if hits.host or hits.remote:
        text += f", {format_share(hits.gpu)} on the GPU"
    if hits.host:
        text += f", {format_share(hits.host)} in the memory of the host"
    if hits.remote:
        text += f", {format_share(hits.remote)} in the store"
    return f"{text}; {format_share(hits.unlimited)} with a cache without limit"


def turn_words(times: TurnTimes) -> str:
    """The TTFT of some turns: "turns 3 to 4 310 ms"."""
    turns = f"turn {times.first}"
    if times.last > times.first:
        turns = f"turns {times.first} to {times.last}"
    return f"{turns} {format_seconds(times.target_ttft_s)}"


def _purchase(plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """Labels and lines about what to buy."""
    rows = {"price": price_words(plan), "withstands": withstands_words(plan), "clusters": cluster_words(plan)}
    for label, words in rows.items():
        if words is not None:
            yield label, words
    if plan.request.serving is None:
        yield "split or not", serving_words(plan)


def serving_words(plan: CapacityPlan) -> str:
    """The cheapest fleet that prefills and decodes on the same GPUs, against the cheapest that splits them."""
    texts = {"colocated": "on the same GPUs", "split": "on different GPUs"}
    parts: list[str] = []
    for serving in sorted(texts, key=lambda serving: serving != plan.first.serving):
        fleet = plan.best_of(serving)
        words = "no fleet meets the target"
        if fleet is not None:
            words = format_count(fleet.total_gpus, "GPU")
            if fleet.total_cost_per_hour is not None:
                words += f", {fleet.total_cost_per_hour:.4g} $/h"
            words += f" ({fleet.describe()})"
        parts.append(f"prefill and decoding {texts[serving]}: {words}")
    return "; ".join(parts)


def _interval_words(interval: FleetInterval, target_s: float) -> str:
    high_s = math.inf
    if interval.high_s is not None:
        high_s = interval.high_s
    safe = "NOT safe: it ends above"
    if interval.safe:
        safe = "safe: it ends below"
    ends = f"{format_time(interval.low_s)} to {format_time(high_s)}"
    return f"80 % from {ends}, model and sampling together; {safe} the target of {format_seconds(target_s)}"


def _workload_words(plan: CapacityPlan) -> str:
    workload = plan.workload
    lengths = workload["context_tokens"]
    counts = f"{workload['requests']} in {workload['duration_s']:.6g} s"
    if workload["rate_per_s"] is not None:
        counts += f", {workload['rate_per_s']:.3g} a second"
    if len(plan.first.runs) > 1:
        counts += f", in each of {len(plan.first.runs)} random samples"
    contexts = f"contexts of {lengths['p50']} (p50), {lengths['p99']} (p99) and at most {lengths['max']} tokens"
    share = f"{workload['cached_share']:.0%} of them"
    if plan.request.has_turns:
        return f"{counts}; {contexts}, {share} in earlier prompts and answers"
    return f"{counts}; {contexts}, {share} cached"


def growth_words(plan: CapacityPlan) -> str:
    """The GPUs for more requests: "1.5 times the requests need 8 GPUs, as now; 2 times 12 GPUs"."""
    texts: list[str] = []
    need = " the requests need"  # said once
    for growth in plan.growth:
        gpus = "more GPUs than --max-gpus"
        if growth.num_gpus is not None:
            gpus = format_count(growth.num_gpus, "GPU")
            if growth.num_gpus == plan.first.total_gpus:
                gpus += ", as now"
            elif growth.cost_per_hour is not None:
                gpus += f", {growth.cost_per_hour:.4g} $/h"
        texts.append(f"{growth.times:g} times{need} {gpus}")
        need = ""
    text = "; ".join(texts)
    if plan.first.target_tpot_s is not None:
        text += " (decoding included)"
    return text


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
    rows = Table(columns=[column for column, _ in _columns_of(fleets)])
    for fleet in fleets:
        style = None
        if fleet is plan.answer:
            style = "bold"
        rows.add_row(*(cell(fleet) for _, cell in _columns_of(fleets)), style=style)
    return rows


def _columns_of(fleets: Sequence[FleetAnswer]) -> Iterator[tuple[Column, Callable[[FleetAnswer], str | Cell]]]:
    """Yield each column of the table of fleets, and the function that returns its cell for a fleet.

    Narrow screens leave out the columns of the highest ranks first.
    """
    both = ""
    decodes = any(fleet.target_tpot_s is not None for fleet in fleets)
    if decodes:
        both = "Prefill and decoding"
    yield Column(title="fleet"), FleetAnswer.describe
    if decodes:
        yield Column(title="decodes on", hint="GPUs that decode"), _decodes_on
    yield Column(title="engine"), lambda fleet: fleet.engine or "none"
    yield Column(title="GPUs", number=True, hint=both), lambda fleet: str(fleet.total_gpus)
    yield Column(title="p50", number=True, rank=3), lambda fleet: _time_cell(fleet.p50_ttft_s)
    yield Column(title="p95", number=True, rank=2), lambda fleet: _time_cell(fleet.p95_ttft_s)
    yield Column(title="p99", number=True), lambda fleet: _time_cell(fleet.p99_ttft_s)
    yield Column(title="max", number=True, rank=4), lambda fleet: _time_cell(fleet.max_ttft_s)
    yield (
        Column(title="in target", number=True),
        lambda fleet: Cell(shown=f"{fleet.in_time:.2%}", value=fleet.in_time),
    )
    if any(fleet.unserved for fleet in fleets):
        yield (
            Column(title="served", number=True, hint="Share of requests ever served"),
            lambda fleet: Cell(shown=format_share(fleet.served_share), value=fleet.served_share),
        )
    yield (
        Column(title="utilised", number=True, rank=5, hint="Busy share of the time of the GPUs that prefill"),
        lambda fleet: Cell(shown=f"{fleet.utilisation:.0%}", value=fleet.utilisation),
    )
    if any(fleet.cost_per_hour is not None for fleet in fleets):
        yield Column(title="$/hour", number=True, hint=both), _cost_cell


def _decodes_on(fleet: FleetAnswer) -> str:
    if fleet.serving == "colocated":
        return "the same"
    if fleet.decode is None:
        return "none"
    return f"{fleet.decode.replicas} × {format_count(fleet.decode.gpus_per_group, 'GPU')}"


def _time_cell(seconds: float) -> Cell:
    if math.isfinite(seconds):
        return seconds_cell(seconds)
    return Cell(shown=format_time(seconds))


def _cost_cell(fleet: FleetAnswer) -> Cell:
    cost = fleet.total_cost_per_hour
    if cost is None:
        return Cell(shown="")
    return Cell(shown=f"{cost:.2f}", value=cost)


def format_time(seconds: float) -> str:
    """Formatted seconds; "unserved" if the percentile is that of an unserved request."""
    if not math.isfinite(seconds):
        return "unserved"
    return format_seconds(seconds)


def figure(plan: CapacityPlan) -> Figure:
    """The fleets that no cheaper one beats: the requested percentile of TTFT over cost or GPUs, prefill and decoding.

    Fleets whose interval of TTFT ends above the target, or whose TPOT is above its own, are marked as not safe.
    """
    front = plan.pareto()
    fleet = plan.first
    priced = fleet.total_cost_per_hour is not None
    unsafe = [tried for tried in plan.tried if tried.is_safe is False]
    head = _head(plan)
    with chart_style():
        panes = drawing(_WIDTH, _HEIGHT + head.height)
        height = _HEIGHT / (_HEIGHT + head.height)
        axes = panes.add_axes((0.11, 0.15 * height, 0.86, 0.82 * height))
        axes.plot(*_places(front), "o-", color=_BLUE, drawstyle="steps-post", label="no cheaper fleet is as fast")
        if unsafe:
            label = "not safe (target or TPOT)"
            axes.plot(*_places(unsafe), "x", color=DIM, label=label)
        axes.axhline(plan.slo_ttft_s, color=_ORANGE, label=f"target {format_seconds(plan.slo_ttft_s)}")
        if math.isfinite(fleet.target_ttft_s):
            label = "the nearest miss" if plan.answer is None else "the answer"
            axes.plot(*_places([fleet]), "o", label=label, color=_ORANGE, markersize=9, fillstyle="none")
        axes.set_yscale("log")
        low_s, high_s = axes.get_ylim()
        ticks_s = _log_ticks(low_s, high_s)
        axes.set_yticks(ticks_s, [f"{tick_s:g}" for tick_s in ticks_s])
        axes.set_yticks([], minor=True)
        axes.set_ylim(min(low_s, ticks_s[0]), max(high_s, ticks_s[-1]))
        scope = "for prefill only" if fleet.decode is None and fleet.serving == "split" else "prefill and decoding"
        unit = "$ per hour" if priced else "GPUs"
        axes.set_xlabel(f"{unit}, {scope}", color=DIM)
        axes.set_ylabel(f"{ordinal(plan.percentile)} percentile of TTFT, s", color=DIM)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, labelcolor=INK)
        head.draw(panes)
    return panes


def _head(plan: CapacityPlan) -> Head:
    fleet = plan.first
    if plan.answer is None:
        return Head(title="No fleet meets the target", subtitle=f"{verdict(plan)} {_question(plan)}", width=_WIDTH)
    reached = format_time(fleet.target_ttft_s)
    title = f"{size_and_price(plan)}: {ordinal(plan.percentile)} percentile {reached}"
    if fleet.unserved:
        title += f", {format_share(fleet.served_share)} of the requests served"
    return Head(title=title, subtitle=f"{fleet.describe()} · {_question(plan)}", width=_WIDTH)


def _places(fleets: Sequence[FleetAnswer]) -> tuple[list[float], list[float]]:
    """Cost or GPUs, and TTFT, of each fleet that serves enough requests to have one."""
    costs: list[float] = []
    ttft_s: list[float] = []
    for fleet in fleets:
        if not math.isfinite(fleet.target_ttft_s):
            continue
        ttft_s.append(fleet.target_ttft_s)
        if fleet.total_cost_per_hour is None:
            costs.append(float(fleet.total_gpus))
        else:
            costs.append(fleet.total_cost_per_hour)
    return costs, ttft_s


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks 1, 2, 5, 10, ... that enclose a range; over more than two decades, powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [1.0, 2.0, 5.0]
    if high > 100 * low:
        steps = [1.0]
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    first = max(0, bisect.bisect_right(ticks, low) - 1)
    last = bisect.bisect_left(ticks, high)
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
    sections: list[Section] = []
    data: dict[str, Any] = {}
    scripts: tuple[str, ...] = ()
    if plan.first.unserved < plan.first.requests:
        sections += _pictures(plan)
        data = page_data(plan)
        scripts = (*CHARTS, "controls.js", "fleets.js", "queue.js")
    sections.append(Section(title="Fleets", body=join(_fleets(plan))))
    if plan.infeasible:
        sections.append(Section(title="What does not meet the target", body=items(plan.reasons())))
    return Page(
        title=f"{plan.percentile:g} % of the requests with a TTFT of at most {format_seconds(plan.slo_ttft_s)}",
        answer=verdict(plan),
        facts=_facts(plan),
        sections=sections,
        notes=[*plan.assumptions().values(), *plan.warnings],
        data=data,
        scripts=scripts,
        strategies=[name for group in plan.first.groups for name in group.strategies],
    )


def _pictures(plan: CapacityPlan) -> list[Section]:
    """The sections with charts."""
    fleet = plan.first.describe()
    if plan.answer is None:
        fleet += ", the nearest miss"
    return [
        Section(
            title="Fleets by cost and TTFT",
            lead="Drag the target and the price, or move the sliders. Every point is a fleet that was simulated, groups"
            " × GPUs.",
            body=tag("div", id="fleets"),
        ),
        Section(
            title="Queue over time",
            lead=f"{fleet}. Drag to zoom in, double-click to see all.",
            body=tag("div", id="queue"),
        ),
        Section(title="TTFT by length", lead="The same requests, by their new tokens.", body=tag("div", id="lengths")),
    ]


def page_data(plan: CapacityPlan) -> dict[str, Any]:
    """Plain JSON values; null: the request is never served."""
    return {
        "slo_s": plan.slo_ttft_s,
        "percentile": plan.percentile,
        "percentiles": list(plan.first.ttft_s),
        "priced": plan.first.cost_per_hour is not None,
        "sure": plan.request.sure,
        "decodes": plan.first.target_tpot_s is not None,
        "samples": len(plan.first.runs),
        "price_per_gpu_hour": _price_of_all(plan.tried),
        "tried": list(map(_fleet_data, plan.tried)),
        "requests": _requests(plan),
    }


def _price_of_all(fleets: Sequence[FleetAnswer]) -> float | None:
    """The price of a GPU, if all have the same one."""
    prices = set()
    for fleet in fleets:
        if fleet.total_cost_per_hour is not None:
            prices.add(round(fleet.total_cost_per_hour / fleet.total_gpus, 9))
    if len(prices) != 1:
        return None
    return prices.pop()


def _fleet_data(fleet: FleetAnswer) -> dict[str, Any]:
    return {
        "gpus": fleet.total_gpus,
        "cost": fleet.total_cost_per_hour,
        "fleet": _whole(fleet),
        "safe": fleet.is_safe,
        "served": fleet.served_share,
        "ttft_s": _short(fleet.ttft_s.values()),
        "utilisation": round(fleet.utilisation, 3),
        "requests": fleet.requests,
    }


def _whole(fleet: FleetAnswer) -> str:
    """The groups of a fleet, with those that decode."""
    decoders = fleet.decode
    if decoders is None:
        return fleet.describe()
    groups = f"{decoders.replicas} × {format_count(decoders.gpus_per_group, 'GPU')}"
    return f"{fleet.describe()}; {groups} to decode"


def _requests(plan: CapacityPlan) -> dict[str, Any]:
    """Chart data: TTFTs over time and length, percentiles by length, and the queue."""
    run = plan.first.runs[0]
    served = np.flatnonzero(np.isfinite(run.ttft_s))
    step = -(-len(served) // _MOST_DOTS)
    drawn = served[::step]
    times_s, prompts = waiting(run, _MOST_STEPS, _BINS)
    by_length = []
    for percentile in dict.fromkeys((50.0, plan.percentile)):
        lengths, values = _percentile_by_length(run, served, percentile)
        by_length.append({"percentile": percentile, "new_tokens": _short(lengths), "ttft_s": _short(values)})
    return {
        "count": len(run.workload),
        "every": step,
        "arrival_s": np.round(run.workload.arrival_s[drawn], 3).tolist(),
        "ttft_s": _short(run.ttft_s[drawn]),
        "new_tokens": run.workload.new_tokens[drawn].tolist(),
        "by_length": by_length,
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
    values = [percentile_of(run.ttft_s[served[half_octave == number]], percentile) for number in bins]
    return 2.0 ** ((bins + 0.5) / 2), np.array(values)


def _short(values: Iterable[float]) -> list[float | None]:
    """The values, rounded; None for infinite ones."""
    rounded: list[float | None] = []
    for value in values:
        if math.isfinite(value):
            rounded.append(float(f"{value:.{_DIGITS}g}"))
        else:
            rounded.append(None)
    return rounded


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
