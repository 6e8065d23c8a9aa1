"""Answers of `kvrsim plan`, `simulate` and `confirm` with --json side by side, as tables and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject, read
from kvrsim.results.results import Prediction
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.page import Page, Section, in_words, interval_cell, label_of, span_of, strategy_name, table
from kvrsim.views.table import INTERVAL_TITLES, Cell, Column, Table, format_interval, seconds_cell


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStrategy(Prediction):
    """One strategy in an answer."""

    strategy: str
    peak_bytes: tuple[float, ...] = ()  # peak memory of each GPU
    engines: Mapping[str, str] = field(default_factory=dict)  # engines that have the strategy

    @classmethod
    def of(cls, data: JsonObject) -> SavedStrategy:
        return read(cls, replace(data, fields={one.name: data.fields.get(one.name) for one in fields(cls)}))


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedAnswer:
    """A plan, a simulation or a confirmation, read from its JSON."""

    name: str
    question: Mapping[str, str]  # parts of the question in words, by label
    strategies: tuple[SavedStrategy, ...]
    best: SavedStrategy | None  # best strategy; None: nothing fits
    limits: Mapping[str, float]  # shares of the best strategy's TTFT by kind of operation

    @classmethod
    def of(cls, name: str, data: JsonObject) -> SavedAnswer:
        """Read the object that `--json` prints; a launch (`--emit`) contains its plan."""
        try:
            json.dumps(data.fields, allow_nan=False)
        except ValueError:
            raise InputError(data.where, "NaN or Infinity", "valid JSON, whose numbers are finite") from None
        if data.has("candidates"):
            return cls.of_confirmation(name, data)
        data = data.child("plan") if data.has("plan") else data
        question = data.child("question")
        if data.has("strategy"):  # the answer is a simulation
            ranks = [rank.number("peak_bytes", allow_zero=True) for rank in data.children("per_rank")]
            strategies = [SavedStrategy.of(replace(data, fields={**data.fields, "peak_bytes": ranks}))]
            best = strategies[0].strategy
        else:
            if not data.children("strategies"):
                raise data.error("strategies", "those of kvrsim plan --json or simulate --json")
            strategies = [SavedStrategy.of(one) for one in data.children("strategies")]
            best = data.child("best").text("strategy") if data.has("best") else ""
        return cls(
            name=name,
            question=question_parts(question) | {"TTFTs": "predicted"},
            strategies=tuple(strategies),
            best=next((one for one in strategies if one.strategy == best), None),
            limits={one.text("operation"): one.number("share") for one in data.children("limits")},
        )

    @classmethod
    def of_confirmation(cls, name: str, data: JsonObject) -> SavedAnswer:
        """Read what `confirm` measured: medians, with the shortest and the longest sample as interval."""
        measured = []
        for entry in data.children("candidates"):
            samples_s = entry.numbers("samples_s")
            median_s = entry.number("measured_ttft_s")
            measured.append(
                SavedStrategy(
                    strategy=entry.text("strategy"),
                    ttft_s=median_s,
                    ttft_low_s=min(samples_s, default=median_s),
                    ttft_high_s=max(samples_s, default=median_s),
                    fits=True,
                )
            )
        measured.sort(key=lambda strategy: strategy.ttft_s)
        if not measured:
            raise data.error("candidates", "those of kvrsim confirm --json")
        return cls(
            name=name,
            question=question_parts(data.child("question")) | {"TTFTs": "measured"},
            strategies=tuple(measured),
            best=measured[0],
            limits={},
        )


def question_parts(question: JsonObject) -> dict[str, str]:
    """The parts of a question in words, by label."""
    return dict(_parts(question.fields))


def _parts(question: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Label and words of each part of a question."""
    for key, value in question.items():
        if isinstance(value, Mapping):
            yield from _parts({name: one for name, one in value.items() if name != "num_gpus"}, f"{before}{key} ")
        elif value is not None:
            yield before + label_of(key), in_words(value, key)


def headline(answers: Sequence[SavedAnswer]) -> str:
    """Name the fastest answer and its lead over the others."""
    best_plans = [(answer.name, answer.best) for answer in answers if answer.best is not None]
    if not best_plans:
        return "Nothing fits in any of the answers."
    best_plans.sort(key=lambda named: named[1].ttft_s)
    fastest_name, fastest = best_plans[0]
    sentences = [f"{fastest_name} is the fastest: {_strategy_and_ttft(fastest)}."]
    for name, best in best_plans[1:]:
        ratio = best.ttft_s / fastest.ttft_s
        sentences.append(f"{name}: {_strategy_and_ttft(best)}, {ratio:.2f} times as long.")
    return " ".join(sentences)


def _strategy_and_ttft(best: SavedStrategy) -> str:
    return f"{best.strategy} in {format_seconds(best.ttft_s)}"


class Saved(Protocol):
    """A saved answer of any command."""

    @property
    def name(self) -> str:
        """Name of the answer."""

    @property
    def question(self) -> Mapping[str, str]:
        """Parts of the question in words, by label."""


def differences(answers: Sequence[Saved]) -> Table:
    """The parts of the question in which the answers differ."""
    rows = by_answer("question", answers)
    labels = dict.fromkeys(label for answer in answers for label in answer.question)
    for label in labels:
        words = [answer.question.get(label, "none") for answer in answers]
        if len(set(words)) > 1:
            rows.add_row(label, *words)
    return rows


def bests(answers: Sequence[SavedAnswer], *, drawn: bool = False) -> Table:
    """The best strategy of each answer; `drawn`: with its colour, and its interval as a bar."""
    ranks = {"answer": 1, "best": 1, "TTFT": 1, " ".join(INTERVAL_TITLES[1].split()): 1, "peak memory": 2, "engines": 3}
    texts = ("answer", "best", "engines")
    rows = Table(columns=[Column(title=one, number=one not in texts, rank=rank) for one, rank in ranks.items()])
    span = span_of([(one.best.ttft_low_s, one.best.ttft_high_s) for one in answers if one.best] or [(0.0, 1.0)])
    for answer in answers:
        one = answer.best
        if one is None:
            rows.add_row(answer.name, "nothing fits", "", "", "", "")
            continue
        most = max(one.peak_bytes, default=0.0)
        interval = Cell(shown=format_interval(one.ttft_low_s, one.ttft_high_s), value=one.ttft_high_s)
        rows.add_row(
            answer.name,
            strategy_name(one.strategy) if drawn else one.strategy,
            seconds_cell(one.ttft_s),
            interval_cell(one, one.strategy, span) if drawn else interval,
            Cell(shown=format_bytes(most) if most else "", value=most),
            ", ".join(one.engines) or "none",
        )
    return rows


def strategies(answers: Sequence[SavedAnswer], most: int | None = None) -> Table:
    """TTFT of each answer's first `most` strategies, and its ratio to that in the first answer."""
    rows = by_answer("strategy", answers, number=True)
    every = [{one.strategy: one for one in answer.strategies} for answer in answers]
    for name in dict.fromkeys(name for by_name in every for name in [*by_name][:most]):
        first = every[0].get(name)
        cells = list[str | Cell]()
        for one in (by_name.get(name) for by_name in every):
            ratio = "" if one is None or first is None or one is first else f" ({one.ttft_s / first.ttft_s:.2f}×)"
            misfit = "" if one is None or one.fits else ", does not fit"
            cells.append(
                "" if one is None else Cell(shown=f"{format_seconds(one.ttft_s)}{ratio}{misfit}", value=one.ttft_s)
            )
        rows.add_row(name, *cells)
    return rows


def limits(answers: Sequence[SavedAnswer]) -> Table:
    """Table of the best strategies' time: seconds on the critical path, and their share."""
    rows = by_answer("critical path", answers, number=True)
    for label in dict.fromkeys(label for one in answers for label in one.limits):
        rows.add_row(label, *(_limit(one, label) for one in answers))
    return rows


def _limit(answer: SavedAnswer, label: str) -> str | Cell:
    share = answer.limits.get(label)
    if share is None or answer.best is None:
        return ""
    seconds = share * answer.best.ttft_s
    return Cell(shown=f"{format_seconds(seconds)} ({share:.0%})", value=seconds)


def by_answer(title: str, answers: Sequence[Saved], *, number: bool = False) -> Table:
    """An empty table with a column for each answer."""
    return Table(columns=[Column(title=title), *(Column(title=one.name, number=number) for one in answers)])


def page(answers: Sequence[SavedAnswer]) -> Page:
    """The page of all tables; the best strategies have their intervals as bars."""
    tables = {
        "Best": ("", bests(answers, drawn=True)),
        "Questions": ("" if differences(answers).rows else "The questions are the same.", differences(answers)),
        "Strategies": (f"In brackets: the TTFT over that in {answers[0].name}.", strategies(answers)),
        "Where the time goes": ("Of the best strategies, on the critical path.", limits(answers)),
    }
    best = [one.best.strategy for one in answers if one.best]
    return page_of([one.name for one in answers], headline(answers), tables, strategies=best)


def page_of(
    names: Sequence[str], answer: str, tables: Mapping[str, tuple[str, Table]], *, strategies: Sequence[str]
) -> Page:
    """The page of tables, each with its title and its lead; strategies: those with a colour."""
    return Page(
        title=f"{', '.join(names[:-1])} and {names[-1]} compared",
        answer=answer,
        sections=[
            Section(title=title, lead=lead, body=table(rows.columns, rows.rows, caption=title))
            for title, (lead, rows) in tables.items()
            if rows.rows or lead
        ],
        strategies=list(strategies),
    )
