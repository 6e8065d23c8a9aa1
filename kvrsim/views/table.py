"""Tables and sentences as plain values; terminal, notebooks and pages share them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Self

from kvrsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvrsim.results.results import Plan, Promise, PromptShare, SimResult, StrategyResult

INTERVAL_TITLES = ("80 %\ninterval", "prediction\ninterval")
ROUGH = "*"  # mark of a strategy whose partition was not searched
TIED = "≈"  # mark of a strategy that the prediction cannot distinguish from the best
_CLAIMED = 0.7, 0.9  # intervals with a coverage in this range are called 80 % intervals
_FEW = 8  # largest number of chunks that are all written out
_ROUNDING_S = 1e-12  # smaller differences are rounding errors


class Text(str):
    """A text with a style, such as "bold" or "red"."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str = "") -> Self:
        self = super().__new__(cls, text)
        self.style = style
        return self


class Cell(NamedTuple):
    """A cell with a value to sort by."""

    shown: str
    value: float | str | None = None  # value to sort by; None: the cell is sorted last


class Column(NamedTuple):
    """A column of a table."""

    title: str  # may have two lines
    number: bool = False  # whether cells are numbers: aligned to the right, sorted from the smallest
    wraps: bool = False  # whether cells are prose, which may take several lines
    hint: str = ""  # meaning of the column; a page shows it as a tooltip
    rank: int = 1  # columns above rank 1 are hidden on phones; narrow terminals hide the highest rank first

    @property
    def label(self) -> str:
        """The title on one line."""
        return " ".join(self.title.split())


@dataclasses.dataclass(slots=True)
class Table:
    """Rows of text under titles."""

    columns: list[Column] = field(default_factory=list)
    rows: list[tuple[str | Cell, ...]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)  # style of each row, such as "bold"

    def add_row(self, *cells: str | Cell, style: str | None = None) -> None:
        """Add a row: a cell for each column."""
        self.rows.append(cells)
        self.styles.append(style or "")

    def texts(self) -> list[tuple[str, ...]]:
        """The rows as plain texts, as people read them."""
        return [tuple(cell.shown if isinstance(cell, Cell) else cell for cell in row) for row in self.rows]

    def without(self, rank: int) -> Table:
        """The table without the columns of a rank."""
        places = [place for place, column in enumerate(self.columns) if column.rank != rank]
        rows = [tuple(row[place] for place in places) for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)


def columns(*titles: str) -> Table:
    """Make a table with these columns. ">" before a title marks numbers, "~" marks prose that may wrap."""
    return Table(columns=[Column(title=one.lstrip(">~"), number=one[0] == ">", wraps=one[0] == "~") for one in titles])


def narrowing(table: Table, *optional: str) -> Table:
    """Choose the columns that a narrow terminal hides, in this order, by the beginnings of their titles."""
    ranks = {title: 1 + len(optional) - place for place, title in enumerate(optional)}

    def rank(column: Column) -> Column:
        rank = next((rank for title, rank in ranks.items() if column.title.startswith(title)), column.rank)
        return column._replace(rank=rank)

    return replace(table, columns=list(map(rank, table.columns)))


def interval_title(coverage: float | None) -> str:
    """Column title of prediction intervals: "80 %" if they held 70 to 90 % of the held-out TTFTs.

    coverage: the measured share; None: not measured.
    """
    claimed = coverage is not None and _CLAIMED[0] <= coverage <= _CLAIMED[1]
    return INTERVAL_TITLES[0] if claimed else INTERVAL_TITLES[1]


def format_interval(low_s: float, high_s: float) -> str:
    """Format both ends in the unit of the upper end: "612–771 ms", "0.819–1.05 s"."""
    low = format_seconds(low_s)
    high = format_seconds(high_s)
    number, unit = low.split(" ")
    if not high.endswith(f" {unit}"):
        number = f"{low_s / high_s * float(high.split(' ')[0]):.3g}"
    return f"{number}–{high}"


def format_partition(chunks: Sequence[int], room: int = 14) -> str:
    """Format the chunks: "8 × 2048" if they are equal, all of them if there is room, or the first and the last."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    full = ", ".join(map(str, chunks))
    return full if len(full) <= room else f"{chunks[0]} … {chunks[-1]}"


def format_wait(seconds: float) -> str:
    """Format a difference of two times; a rounding error prints as 0."""
    return format_seconds(seconds if seconds > _ROUNDING_S else 0.0)


def fits_text(fits: bool) -> Text:
    """Return "yes", or "NO" in red."""
    return Text("yes") if fits else Text("NO", style="red")


def seconds_cell(seconds: float | None) -> Cell:
    """Make a cell of seconds; the column is sorted by the number of seconds."""
    return Cell(shown="" if seconds is None else format_wait(seconds), value=seconds)


def bytes_cell(size: float) -> Cell:
    """Make a cell of bytes; the column is sorted by the number of bytes."""
    return Cell(shown=format_bytes(size), value=size)


def baseline_title(strategy: str) -> str:
    """Label of a baseline."""
    return "1 GPU" if strategy == "single" else strategy.upper()


MOST_ROWS = 5  # largest number of rows on the first screen


def strategies_table(plan: Plan, *, short: bool = False) -> Table:
    """Table of strategies in the plan's order, the best in bold.

    short: at most five strategies that fit, each explained. All TTFTs have the unit of these rows.
    """
    rows = first_rows(plan) if short else list(plan.strategies)
    unit = format_seconds(max(one.ttft_high_s for one in first_rows(plan))).split(" ")[1]
    over = None if plan.yardstick is None else baseline_title(plan.yardstick)
    columns = {  # columns, and whether each is shown
        Column(title="strategy\n"): True,
        Column(title="partition\n(tokens)", rank=4, hint="tokens of each rank or piece"): not short,
        Column(title="TTFT\n", number=True, hint="time to first token"): True,
        Column(title=interval_title(plan.interval_coverage), number=True, rank=2, hint="of the TTFT"): any(
            one.ttft_low_s < one.ttft_high_s for one in rows
        ),
        Column(title=f"vs {over}\n", number=True, hint=f"TTFT of {plan.yardstick} divided by this TTFT"): over
        is not None,
        Column(title="exposed\ncomm.", number=True, rank=5, hint="TTFT minus TTFT with free communication"): not short,
        Column(title="longest\nwait", number=True, rank=6, hint="of the rank that waits longest"): not short,
        Column(title="peak\nmemory", number=True, rank=7, hint="of the rank that needs the most"): True,
        Column(title="fits\n", hint=plan.memory_limit.describe()): not short,
        Column(title="engines\n", rank=4): short,
        Column(title="what it is\n", rank=3, wraps=True): short,
    }
    columns_here = [one._replace(title=one.label) if short else one for one, is_shown in columns.items() if is_shown]
    table = Table(columns=columns_here)
    for one in rows:
        cells = (
            _marked(plan, one),
            format_partition(one.partition),
            Cell(shown=_in_unit(unit, one.ttft_s), value=one.ttft_s),
            Cell(shown=_in_unit(unit, one.ttft_low_s, one.ttft_high_s), value=one.ttft_high_s),
            "" if one.speedup is None else Cell(shown=f"{one.speedup:.2f}×", value=one.speedup),
            "" if short else seconds_cell(one.exposed_comm_s),  # both columns take time to compute
            "" if short else seconds_cell(max(one.wait_s)),
            bytes_cell(max(rank.total for rank in one.memory)),
            fits_text(one.fits),
            ", ".join(one.engines) or "none",
            one.title,
        )
        table.add_row(*compress(cells, columns.values()), style="bold" if one is plan.first else None)
    return table


def first_rows(plan: Plan) -> list[StrategyResult]:
    """The rows of the first screen: the fastest that fit, the best included.

    With an engine: the fastest of all and the fastest that the engine launches.
    """
    fitting = [one for one in plan.strategies if one.fits]
    if plan.engine is not None and plan.deployable is not None:
        fitting = [one for one in fitting if plan.engine in one.engines or one is plan.fastest]
    rows = fitting[:MOST_ROWS]
    return rows if any(one is plan.first for one in rows) else [*rows[: MOST_ROWS - 1], plan.first]


def tie_text(plan: Plan, rows: Sequence[StrategyResult]) -> str | None:
    """What the mark of ties means, if one of these rows has it; and why a row that is nearer to the best has none."""
    best = plan.first
    tied = [one for one in rows if one.is_tied]
    if not plan.feasible or not tied:
        return None
    meaning = f"{TIED} ties with {best.strategy}: the error of the prediction can explain the difference."
    largest_s = max(abs(one.ttft_s - best.ttft_s) for one in tied)
    others = [one for one in rows if one is not best and not one.is_tied]
    nearer = [one.strategy for one in others if abs(one.ttft_s - best.ttft_s) < largest_s]
    if not nearer:
        return meaning
    names = " and ".join(nearer)
    certain = f"The smaller difference to {names} is certain, because it shares more of that error"
    if len(nearer) > 1:
        certain = f"The smaller differences to {names} are certain, because these share more of that error"
    return f"{meaning} {certain} with {best.strategy}."


def _marked(plan: Plan, one: StrategyResult) -> str:
    """The strategy's name with its marks."""
    tied = f" {TIED}" if plan.feasible and one.is_tied else ""
    rough = "" if one.searched else f" {ROUGH}"
    return f"{one.strategy}{tied}{rough}"


def _in_unit(unit: str, *ends_s: float) -> str:
    """Seconds, or both ends of an interval, with three significant digits in a unit."""
    values = [seconds / {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] for seconds in ends_s]
    digits = [f"{one:.{max(0, 2 - math.floor(math.log10(one)))}f}" if one > 0 else "0" for one in values]
    return f"{'–'.join(digits)} {unit}"


def pieces_text(tokens: Sequence[int], is_pipeline: bool) -> str:
    """Pieces of a pipeline, or chunks by rank, in short: "342 pieces, 29440 falling to 1024 tokens"."""
    count = f"{len(tokens)} {'pieces' if is_pipeline else 'chunks'}"
    if len(set(tokens)) == 1:
        return f"{count} of {tokens[0]} tokens"
    if len(tokens) <= _FEW:
        return f"{', '.join(map(str, tokens))} tokens"
    order = "falling" if tokens[0] >= tokens[-1] else "rising"
    return f"{count}, {tokens[0]} {order} to {tokens[-1]} tokens"


def ranks_table(result: SimResult) -> Table:
    """Table of each rank's computing, waiting, messages and memory."""
    is_gpu = result.timeline is not None and result.timeline.gpus_per_rank > 1
    ranks = {"tokens": 2, "compute": 3, "wait": 4, "sent": 5}
    titles = ("GPU" if is_gpu else "rank", "tokens", "compute", "wait", "sent", "peak memory")
    columns = [Column(title=title, number=True, rank=ranks.get(title, 1)) for title in titles]
    table = Table(columns=[*columns, Column(title="fits")])
    for rank in result.per_rank:
        table.add_row(
            str(rank.rank),
            str(rank.chunk_len),
            seconds_cell(rank.compute_s),
            seconds_cell(rank.wait_s),
            bytes_cell(rank.sent_bytes),
            bytes_cell(rank.memory.total),
            fits_text(rank.memory.total <= result.memory_limit.nbytes),
        )
    return table


# The first screen of a plan in sentences


def sentences(plan: Plan) -> Iterator[str]:
    """Sentences: what to run, what its engine lacks, which TTFT the plan promises, what limits it, and what helps."""
    promise = plan.promise
    if promise is None:
        yield f"{plan.misfit[0].upper()}{plan.misfit[1:]}."
        yield from _would_fit(plan)
        return
    yield f"{_run_text(plan)}."
    yield from _beyond_the_engine(plan)
    yield from promise_sentences(plan, promise)
    if plan.limits:
        top = plan.limits[0]
        verb = "limit" if top.operation.endswith("s") else "limits"
        helps = "; ".join(f"{one.change}: {format_seconds(one.ttft_s)}" for one in plan.advice)
        faster = f" Faster, simulated: {helps}." if helps else ""
        yield f"Because {top.operation} {verb} it ({top.share * 100:.0f} % of the critical path).{faster}"
    yield from _launchers(plan)


def promise_sentences(plan: Plan, promise: Promise) -> Iterator[str]:
    """Sentences on the TTFT: expected and sure on idle GPUs, of most prompts under noise and in a queue, and a target.

    The first half of each sentence is about the estimate, and "90 % sure" about the error of the prediction.
    """
    best = plan.first
    coverage = plan.interval_coverage
    is_kept = coverage is None or coverage >= _CLAIMED[0]
    sure = f"{promise.confidence * 100:g} % sure" if is_kept else "at the upper end of the interval"
    noise = "" if promise.under_noise is None else ", on average under the noise"
    faster = ""
    if plan.yardstick is not None and best.speedup is not None and round(best.speedup, 2) != 1:
        faster = f", {best.speedup:.2f}× as fast as {baseline_title(plan.yardstick)}"
    expected = f"Expect {format_seconds(promise.expected_s)} idle{noise}{faster}"
    if coverage is None or is_kept:
        yield f"{expected}; {sure} that it is below {format_seconds(promise.high_s)}."
    else:
        held = f"such intervals held only {coverage * 100:.0f} % of published TTFTs"
        yield f"{expected}; {sure} {format_seconds(promise.high_s)}, but {held}."
    if (noisy := promise.under_noise) is not None:
        yield f"{_share_text(noisy)} under the noise; {_sure_text(noisy, sure)}."
    if (rated := promise.at_rate) is not None:
        rate = f"{rated.rate_per_s:g} a second"
        if rated.expected_s is None:
            yield f"At {rate}, prompts arrive faster than one group prefills them: the queue grows for ever."
        else:
            yield f"{_share_text(rated)} at {rate}; {_sure_text(rated, sure)}."
    if promise.slo_s is not None:
        yield f"{_target_text(promise, sure)}."


def _share_text(share: PromptShare) -> str:
    assert share.expected_s is not None, "the queue grows for ever"
    return f"{share.percentile:g} % of prompts within {format_seconds(share.expected_s)}"


def _sure_text(share: PromptShare, sure: str) -> str:
    if share.high_s is None:
        return f"not {sure}: if the machine is as slow as the interval's upper end, the queue grows for ever"
    return f"{sure}: within {format_seconds(share.high_s)}"


def _target_text(promise: Promise, sure: str) -> str:
    """Whether a target is met: for sure, only as expected, or not; and up to which rates."""
    assert promise.slo_s is not None
    assert promise.most_rate_per_s is not None
    assert promise.expected_most_rate_per_s is not None
    target = f"the target of {format_seconds(promise.slo_s)}"
    if promise.meets:
        verdict = f"This meets {target}, {sure}"
    elif promise.expected_meets:
        verdict = f"This is expected to meet {target}, but not {sure}"
    else:
        verdict = f"This misses {target}"
    if not promise.expected_most_rate_per_s:
        return f"{verdict} at any rate"
    rates = f"expected up to {promise.expected_most_rate_per_s:.3g} prompts a second"
    most = promise.most_rate_per_s
    rates += f", {sure} up to {most:.3g}" if most else f", {sure} at no rate"
    return f"{verdict}; {rates}"


def named(one: StrategyResult) -> str:
    """A strategy's name with its title: "tp2 (tensor parallelism by 2)"."""
    return f"{one.strategy} ({one.title})"


def _run_text(plan: Plan) -> str:
    """What to run; if no engine has it, also the fastest that engines launch."""
    best = plan.first
    gpus = f"{best.layout.num_gpus} GPU{'s' * (best.layout.num_gpus != 1)}"
    chunks = f": {pieces_text(best.partition, best.layers is not None)}" if len(best.partition) > 1 else ""
    run = f"Run {named(best)} on {gpus}{chunks}"
    if plan.engine is not None and plan.deployable is None:
        return f"{run}; {plan.engine} launches none of the compared strategies that fit"
    if best.engines:
        return run
    if plan.deployable is None:
        return f"{run}; no engine launches it"
    fastest = f"{named(plan.deployable)}, {format_seconds(plan.deployable.ttft_s)}"
    return f"{run}; no engine launches it, and the fastest that engines launch is {fastest}"


def _beyond_the_engine(plan: Plan) -> Iterator[str]:
    """What would be faster than the best that the plan's engine launches."""
    fastest = plan.passed_over
    if fastest is None:
        return
    others = ", ".join(fastest.engines) or "no engine"
    verb = "have" if len(fastest.engines) > 1 else "has"
    yield f"{plan.engine} lacks the fastest, {named(fastest)}: {format_seconds(fastest.ttft_s)}; {others} {verb} it."


def _launchers(plan: Plan) -> Iterator[str]:
    """The engines that launch the plan, or the fastest strategy that one of them has."""
    launched = plan.deployable
    if launched is None:
        return
    engines = {name: version for name, version in launched.engines.items() if plan.engine in (None, name)}
    versions = ", ".join(f"{name} {version.split()[0]}" for name, version in engines.items())
    which = "" if launched is plan.first else f" with {launched.strategy}"
    yield f"Engines today{which}: {versions} (--emit {'|'.join(engines)} prints the launch)."


def _would_fit(plan: Plan) -> Iterator[str]:
    """One line per change of the question after which a strategy fits."""
    assert plan.shortfall is not None
    for one in plan.shortfall.would_fit:
        gpus = f"{one.num_gpus} GPU{'s' * (one.num_gpus != 1)}"
        yield f"Would fit: {one.strategy} on {gpus}, {one.dtype}, {format_bytes(one.peak_bytes)} per GPU: {one.change}"
    if not plan.shortfall.would_fit:
        tried = plan.shortfall.most_gpus_tried
        yield f"No strategy fits on up to {tried} GPUs." if tried > plan.num_gpus else "More GPUs were not tried."
