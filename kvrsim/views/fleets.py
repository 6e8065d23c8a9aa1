"""Answers of `kvrsim capacity --json` side by side, as tables and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrsim.io.schema import JsonObject
from kvrsim.units import format_count, format_seconds
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
        groups = []
        for group in fleet.children("groups"):
            size = f"{group.integer('replicas')} × {group.integer('gpus_per_group')}"
            groups.append(f"{size} ({group.text('strategy')})")
        high_s = None
        if fleet.has("interval"):
            high_s = _number_or_none(fleet.child("interval"), "high_s")
        growth: dict[float, int | None] = {}
        for step in data.children("growth"):
            growth[step.number("times")] = None
            if step.has("num_gpus"):
                growth[step.number("times")] = step.integer("num_gpus")
        return cls(
            name=name,
            question=question_parts(data.child("question")),
            is_answer=is_answer,
            prefill_gpus=fleet.integer("num_gpus"),
            total_gpus=fleet.integer("total_gpus"),
            cost_per_hour=_number_or_none(fleet, "total_cost_per_hour"),
            groups=", ".join(groups),
            target_ttft_s=_number_or_none(fleet, "target_ttft_s"),
            high_s=high_s,
            served_share=fleet.number("served_share", allow_zero=True),
            growth=growth,
        )


def _number_or_none(data: JsonObject, key: str) -> float | None:
    if not data.has(key):
        return None
    return data.number(key)


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
        if priced and fleet.cost_per_hour is not None:
            return fleet.cost_per_hour
        return float(fleet.total_gpus)

    def words(fleet: SavedFleet) -> str:
        gpus = format_count(fleet.total_gpus, "GPU")
        if not priced:
            return gpus
        return f"{gpus}, {fleet.cost_per_hour:.4g} $/h"

    best, *others = sorted(meeting, key=price)
    superlative = "cheapest" if priced else "smallest"
    texts = [f"{best.name} is the {superlative}: {words(best)}"]
    for fleet in others:
        ratio = price(fleet) / price(best)
        text = f"{fleet.name}: {words(fleet)}, {ratio:.2f}×"
        if ratio < 1 + _CLOSE:
            text += ", about equal"
        texts.append(text)
    texts += [f"{fleet.name}: no fleet meets the target" for fleet in fleets if not fleet.is_answer]
    return "; ".join(texts) + "."


def bests(fleets: Sequence[SavedFleet]) -> Table:
    """The fleet of each answer."""
    titles = {"answer": False, "groups that prefill": False, "prefill": True, "decode": True, "GPUs": True}
    titles |= {"$/hour": True, "TTFT": True, "upper end": True, "served": True}
    rows = Table(columns=[Column(title=title, number=number) for title, number in titles.items()])
    for fleet in fleets:
        name = fleet.name
        if not fleet.is_answer:
            name += " (nearest miss)"
        cost: str | Cell = ""
        if fleet.cost_per_hour is not None:
            cost = Cell(shown=f"{fleet.cost_per_hour:.2f}", value=fleet.cost_per_hour)
        reached: str | Cell = "unserved"
        if fleet.target_ttft_s is not None:
            reached = seconds_cell(fleet.target_ttft_s)
        high: str | Cell = ""
        if fleet.high_s is not None:
            high = Cell(shown=format_seconds(fleet.high_s), value=fleet.high_s)
        rows.add_row(
            name,
            fleet.groups,
            _number_cell(fleet.prefill_gpus),
            _number_cell(fleet.total_gpus - fleet.prefill_gpus),
            _number_cell(fleet.total_gpus),
            cost,
            reached,
            high,
            Cell(shown=f"{100 * fleet.served_share:.4g} %", value=fleet.served_share),
        )
    return rows


def _number_cell(number: int) -> Cell:
    return Cell(shown=str(number), value=number)


def growth(fleets: Sequence[SavedFleet]) -> Table:
    """GPUs of each answer for more requests."""
    rows = by_answer("requests", fleets, number=True)
    for times in sorted({times for fleet in fleets for times in fleet.growth}):
        cells: list[str | Cell] = []
        for fleet in fleets:
            gpus = fleet.growth.get(times)
            if gpus is not None:
                cells.append(Cell(shown=f"{gpus} GPUs", value=gpus))
            elif times in fleet.growth:
                cells.append("none")
            else:
                cells.append("")
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
