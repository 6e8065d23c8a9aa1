"""Figures, partitions and memory in words, shared by the renderers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvrsim.engine import NO_ENGINE
from kvrsim.kernels.profile import builtin_profiles
from kvrsim.scenario import ROOFLINE
from kvrsim.units import format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.hardware import Cluster, MemoryLimit
    from kvrsim.memory import RankMemory
    from kvrsim.noise import Distribution
    from kvrsim.results.question import Question

MAX_IN_FULL = 4  # lines with every part
MAX_IN_SHORT = 12  # ranks with their total only
INTERVAL_TITLES = ("80 %\ninterval", "prediction\ninterval")
TIED = "≈"  # beside a strategy that no prediction can tell from the best
_CLAIMED = 0.7, 0.9  # coverage, within which an interval is called an 80 % interval
_ROUNDING_S = 1e-12  # less than this is rounding


def subtitle(model: str, context_len: int, setting: Iterable[str]) -> str:
    """What was measured, in one line, for a chart."""
    return " · ".join((model, f"{format_tokens(context_len)} tokens", *setting))


def interval_title(coverage: float | None) -> str:
    """Of a column of prediction intervals; "80 %" where 70 to 90 % of held-out TTFTs were inside.

    coverage: the share that was; None: nobody checked it.
    """
    claimed = coverage is not None and _CLAIMED[0] <= coverage <= _CLAIMED[1]
    return INTERVAL_TITLES[0] if claimed else INTERVAL_TITLES[1]


def format_interval(low_s: float, high_s: float) -> str:
    """Both ends, in the unit of the upper: "612–771 ms", "0.819–1.05 s"."""
    low, high = format_seconds(low_s), format_seconds(high_s)
    number, unit = low.split(" ")
    if not high.endswith(f" {unit}"):
        number = f"{low_s / high_s * float(high.split(' ')[0]):.3g}"
    return f"{number}–{high}"


def format_partition(chunks: Sequence[int], room: int = 14) -> str:
    """All chunks where there is room, "8 × 2048" where they are equal, else the first and the last."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    full = ", ".join(map(str, chunks))
    return full if len(full) <= room else f"{chunks[0]} … {chunks[-1]}"


def blocks_text(query_blocks: Sequence[int]) -> str:
    """Calls of attention by rank: "8, 8, 4, 4 calls of attention on ranks 0 to 3"."""
    return f"{', '.join(map(str, query_blocks))} calls of attention on ranks 0 to {len(query_blocks) - 1}"


def stages_text(pieces: Sequence[int], layers: Sequence[int]) -> str:
    """Pieces and stages of a pipeline: "12 pieces of 14784, 8448, ... tokens; stages of 8 × 4 layers"."""
    runs = [(piece, len(list(same))) for piece, same in groupby(pieces)]
    shown = ", ".join(f"{count} × {piece}" if count > 1 else str(piece) for piece, count in runs)
    held = format_partition(layers, room=4 * len(layers))
    return f"{len(pieces)} piece{'s' * (len(pieces) != 1)} of {shown} tokens; stages of {held} layers"


def round_up_percent(share: float) -> str:
    """A share in percent with two decimals, never less than it is: it is part of a proof."""
    return f"{math.ceil(max(0.0, share) * 1e4 - 1e-9) / 100:.2f}"


def format_wait(seconds: float) -> str:
    """Seconds that are a difference of two times: what rounding leaves of nothing is nothing."""
    return format_seconds(seconds if seconds > _ROUNDING_S else 0.0)


def fits_text(fits: bool) -> Text:
    """Whether it fits in memory."""
    return Text("yes") if fits else Text("NO", style="red")


def header(question: Question, cluster: Cluster, what: str | None = None) -> tuple[Text, Text]:
    """The question in two lines. cluster: the simulated one. what: names the task; default: one prefill."""
    request, cached = question.request(), question.cached()
    one = f"Prefill of {request}{',' * bool(cached)} by {question.model}"
    first = (one,) if what is None else (what, *cached)
    first = (*first, *question.settings())
    second = (cluster.describe(), f"profile {question.profile}", *question.served())
    return Text(" · ".join(first)), Text(" · ".join(second), style="dim")


def measured_header(question: Question, conditions: Mapping[str, str]) -> tuple[Text, Text]:
    """What was measured on this machine, in two lines; the profile is of the prediction, if there is one."""
    first, _ = header(question, question.cluster)
    predicted = () if question.profile == ROOFLINE else (f"predicted by profile {question.profile}", *question.served())
    return first, Text(" · ".join((f"measured on {conditions['device']}", *predicted)), style="dim")


def headline(text: str) -> Text:
    """The answer itself, which stands out."""
    return Text(text, style="bold")


def likely(low_s: float, ttft_s: float, high_s: float, coverage: float | None) -> str:
    """A TTFT and its interval: "602 ms (80 % interval 568–638 ms)"."""
    if low_s == high_s:
        return format_seconds(ttft_s)
    return f"{format_seconds(ttft_s)} ({' '.join(interval_title(coverage).split())} {format_interval(low_s, high_s)})"


def rests_on_line(question: Question, *more: str) -> str:
    """What a prediction rests on, in one line, and where more is said."""
    if question.profile == ROOFLINE:
        return f"the datasheet of {question.cluster.gpu.name}, no measurement: TTFTs are lower limits"
    engine = "" if question.engine == NO_ENGINE else f", engine {question.engine}"
    shipped = question.profile in builtin_profiles()
    details = f"kvrsim profiles show {question.profile}" if shipped else "details: --json"
    return f"{'; '.join((f'profile {question.profile}{engine}', *more))} ({details})"


def held_text(coverage: float | None) -> str:
    """How far 80 % intervals were right; coverage: as of interval_title."""
    held = "were not checked on whole prefills" if coverage is None else f"held {coverage:.0%} of held-out TTFTs"
    return f"intervals made to hold 80 % {held}"


def limit_text(limit: MemoryLimit) -> str:
    """The memory limit, and the option that changes it."""
    return f"{limit.describe()} (--memory-fraction)"


def add_notes(table: Table, notes: Iterable[str]) -> None:
    """One row per note."""
    for note in notes:
        table.add_row(Text("note:", style="yellow"), note)


def add_misfits(table: Table, strategy: str, memory: Sequence[RankMemory], limit: int) -> None:
    """What does not fit in memory."""
    for line in over_memory(memory, limit):
        table.add_row("", f"{strategy}, {line}")


def over_memory(memory: Sequence[RankMemory], limit_bytes: int) -> Iterator[str]:
    """Lines about the ranks whose peak is over the limit: largest parts first, like ranks together.

    Where that takes too many lines: the worst rank in full, the others by their total.
    """
    groups = _groups(memory, limit_bytes)
    if len(groups) <= MAX_IN_FULL:
        for ranks, held in groups:
            yield _in_full(ranks, held, limit_bytes)
        return
    worst = max(groups, key=lambda group: group[1].total)
    yield _in_full(worst[0], worst[1], limit_bytes)
    others = [group for group in groups if group is not worst]
    shown = ", ".join(f"{_name(ranks)} {format_bytes(held.total)}" for ranks, held in others[:MAX_IN_SHORT])
    left = sum(len(ranks) for ranks, _ in others[MAX_IN_SHORT:])
    yield f"also {shown}" + (f", and {left} more" if left else "")


def _groups(memory: Sequence[RankMemory], limit_bytes: int) -> list[tuple[list[int], RankMemory]]:
    """Neighbouring ranks over the limit that hold the same."""
    over = [rank for rank, held in enumerate(memory) if held.total > limit_bytes]
    grouped = groupby(over, key=lambda rank: _parts(memory[rank]))
    ranks = [list(group) for _, group in grouped]
    return [(group, memory[group[0]]) for group in ranks]


def _in_full(ranks: list[int], held: RankMemory, limit_bytes: int) -> str:
    verb = "needs" if len(ranks) == 1 else "need"
    need = f"{_name(ranks)} {verb} {format_bytes(held.total)} of {format_bytes(limit_bytes)}"
    return f"{need}: {', '.join(_parts(held))}"


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _parts(held: RankMemory) -> list[str]:
    """What is alive at the peak; of scores, activations and logits only the largest is."""
    moments = {"scores": held.scores, "activations": held.activations, "logits": held.logits}
    largest = max(moments, key=lambda name: moments[name])
    parts = {
        "weights": held.weights,
        "KV cache": held.kv_cache,
        "KV in flight": held.gathered,
        largest: moments[largest],
        "runtime": held.runtime,
    }
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return [f"{name} {format_bytes(size)}" for name, size in ranked if size]


def mean_change(noisy: Distribution) -> str:
    """How much longer the mean TTFT is under noise."""
    more = round(noisy.mean.value_s / noisy.quiet_s - 1, 4) + 0.0  # no "-0.0%"
    return f"mean {more:+.1%} over noise-free"
