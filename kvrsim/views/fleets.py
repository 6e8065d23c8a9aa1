"""Answers of `kvrsim capacity --json` side by side, as tables and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrsim.io.schema import JsonObject
from kvrsim.units import format_seconds
from kvrsim.views.compare import by_answer, page_of, question_parts
from kvrsim.views.page import Page
from kvrsim.views.table import Cell, Column, Table, seconds_cell

_CLOSE = 0.05  # relative difference in price or GPUs below which fleets are called about equal


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFleet:
    """The fleet of a capacity plan, read from its JSON."""

    name: str
    question: Mapping[str, str]  # parts of the question in words, by label
    is_answer: bool  # False: no fleet meets the target, and this is the nearest miss
    prefill_gpus: int
    total_gpus: int  # prefill and decoding
    cost_per_hour: float | None  # price of all GPUs; None: no price was given
    groups: str  # description of the groups that prefill
    target_ttft_s: float | None  # TTFT at the requested percentile; None: never served
    high_s: float | None  # upper end of its interval
    served_share: float
    growth: Mapping[float, int | None]  # GPUs by multiple of the requests; None: no fleet within the limits

    @classmethod
    def of(cls, name: str, data: JsonObject) -> SavedFleet:
        """Read the object that `kvrsim capacity --json` prints; raises InputError naming the missing key."""
        is_answer = data.has("answer")
        fleet = data.child("answer" if is_answer else "nearest_miss")
        groups = [
            f"{group.integer('replicas')} × {group.integer('gpus_per_group')} ({group.text('strategy')})"
            for group in fleet.children("groups")
        ]
        interval = fleet.child("interval") if fleet.has("interval") else None
        return cls(
            name=name,
            question=question_parts(data.child("question")),
            is_answer=is_answer,
            prefill_gpus=fleet.integer("num_gpus"),
            total_gpus=fleet.integer("total_gpus"),
            cost_per_hour=fleet.number("total_cost_per_hour") if fleet.has("total_cost_per_hour") else None,
            groups=", ".join(groups),
            target_ttft_s=fleet.number("target_ttft_s") if fleet.has("target_ttft_s") else None,
            high_s=interval.number("high_s") if interval is not None and interval.has("high_s") else None,
            served_share=fleet.number("served_share", allow_zero=True),
            growth={
                one.number("times"): one.integer("num_gpus") if one.has("num_gpus") else None
                for one in data.children("growth")
            },
        )


def is_fleet(data: JsonObject) -> bool:
    """Whether the object is a capacity plan's."""
    return data.has("answer") or data.has("nearest_miss")


def headline(fleets: Sequence[SavedFleet]) -> str:
    """Name the cheapest fleet that meets its target, or the smallest if some have no price, and the others over it."""
    meeting = [fleet for fleet in fleets if fleet.is_answer]
    if not meeting:
        return "In none of the answers does a fleet meet its target."
    priced = all(fleet.cost_per_hour is not None for fleet in meeting)

    def price(fleet: SavedFleet) -> float:
        return fleet.cost_per_hour if priced and fleet.cost_per_hour is not None else float(fleet.total_gpus)

    def words(fleet: SavedFleet) -> str:
        gpus = f"{fleet.total_gpus} GPU{'s' * (fleet.total_gpus > 1)}"
        return f"{gpus}, {fleet.cost_per_hour:.4g} $/h" if priced else gpus

    best, *others = sorted(meeting, key=price)
    texts = [f"{best.name} is the {'cheapest' if priced else 'smallest'}: {words(best)}"]
    for fleet in others:
        ratio = price(fleet) / price(best)
        equal = ", about equal" if ratio < 1 + _CLOSE else ""
        texts.append(f"{fleet.name}: {words(fleet)}, {ratio:.2f}×{equal}")
    texts += [f"{fleet.name}: no fleet meets the target" for fleet in fleets if not fleet.is_answer]
    return "; ".join(texts) + "."


def bests(fleets: Sequence[SavedFleet]) -> Table:
    """The fleet of each answer."""
    titles = {"answer": False, "groups that prefill": False, "prefill": True, "decode": True, "GPUs": True}
    titles |= {"$/hour": True, "TTFT": True, "upper end": True, "served": True}
    rows = Table(columns=[Column(title=title, number=number) for title, number in titles.items()])
    for fleet in fleets:
        cost = fleet.cost_per_hour
        reached_s = fleet.target_ttft_s
        high_s = fleet.high_s
        rows.add_row(
            fleet.name if fleet.is_answer else f"{fleet.name} (nearest miss)",
            fleet.groups,
            Cell(shown=str(fleet.prefill_gpus), value=fleet.prefill_gpus),
            Cell(shown=str(fleet.total_gpus - fleet.prefill_gpus), value=fleet.total_gpus - fleet.prefill_gpus),
            Cell(shown=str(fleet.total_gpus), value=fleet.total_gpus),
            "" if cost is None else Cell(shown=f"{cost:.2f}", value=cost),
            "unserved" if reached_s is None else seconds_cell(reached_s),
            "" if high_s is None else Cell(shown=format_seconds(high_s), value=high_s),
            Cell(shown=f"{100 * fleet.served_share:.4g} %", value=fleet.served_share),
        )
    return rows


def growth(fleets: Sequence[SavedFleet]) -> Table:
    """GPUs of each answer for more requests."""
    rows = by_answer("requests", fleets, number=True)
    for times in sorted({times for fleet in fleets for times in fleet.growth}):
        cells: list[str | Cell] = []
        for fleet in fleets:
            gpus = fleet.growth.get(times)
            without = "none" if times in fleet.growth else ""
            cells.append(without if gpus is None else Cell(shown=f"{gpus} GPUs", value=gpus))
        rows.add_row(f"{times:g} times", *cells)
    return rows


def page(fleets: Sequence[SavedFleet], differences: Table) -> Page:
    """The page of all tables; differences: the parts of the questions that differ."""
    same = "" if differences.rows else "The questions are the same."
    tables = {
        "Fleets": ("TTFT at the percentile of each question, and the upper end of its 80 % interval.", bests(fleets)),
        "Questions": (same, differences),
        "More requests": ("GPUs for prefill and decoding.", growth(fleets)),
    }
    return page_of([fleet.name for fleet in fleets], headline(fleets), tables, strategies=[])
