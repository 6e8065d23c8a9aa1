"""Build a predictor: choose strategies and knots, simulate all of them, and find what fits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

import numpy as np

from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.memory import fits, memory_of
from kvrsim.program import Array
from kvrsim.results.question import Question
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.version import __version__
from planner.candidates import strategies_to_compare
from planner.predictor.grid import StrategyTimes, TtftPredictor
from planner.predictor.points import Row, at, marked, refined, row_at, simulated
from planner.processes import Pool

OnPart = Callable[[int, int, str], None]  # parts done, parts in all, and what they are
BEST = "best"
_Result = TypeVar("_Result")
_PER_DOUBLING = 4  # knots of new tokens; more where a straight line between them misses
_CONTENDS = 1.01  # a strategy is kept that is somewhere this near to the fastest
_PREFIX_SHARES = (0, 64, 16, 4, 2, 1)  # knots of the prefix: none, and these parts of the longest


def make_predictor(
    scenario: Scenario,
    *,
    strategy: str | Strategy = BEST,
    pool: Pool | None = None,
    on_part: OnPart | None = None,
) -> TtftPredictor:
    """The predictor of a scenario, whose context and batch are the largest that it answers for.

    strategy: "best", the fastest of those that `plan` compares by default and that fit, or one by name.
    pool: who works; None: this process. Raises InputError where no strategy fits in memory.
    """
    pool = pool or Pool()
    longest, batches = scenario.request.context_len, _batches(scenario.request.batch)
    prefixes = tuple(sorted({longest // share if share else 0 for share in _PREFIX_SHARES}))
    least = 2 * scenario.num_gpus
    if longest < 2 * least:
        raise InputError("ctx", longest, f"at least {2 * least} tokens, four a GPU")
    kept = _kept(scenario, strategy, least, batches, pool, on_part)
    knots = _knots(scenario, kept, least, pool, on_part)
    places = [(number, row, column) for number in range(len(kept)) for row, column in _places(batches, prefixes)]
    ends = {(row, column) for row in (0, len(batches) - 1) for column in (0, len(prefixes) - 1)}
    work = [
        ((number, row, column), kept[number], scenario, knots, prefixes[column], batches[row], (row, column) in ends)
        for number, row, column in places
    ]
    rows = dict(_told(pool, row_at, work, on_part, "rows"))
    return TtftPredictor(
        kvrsim_version=__version__,
        longest_context=longest,
        new_tokens=knots,
        cached_prefix=prefixes,
        batch=batches,
        strategies=tuple(
            _times(one, {key[1:]: row for key, row in rows.items() if key[0] == number}, knots, prefixes, batches)
            for number, one in enumerate(kept)
        ),
        question=Question.of(scenario, strategy=strategy if isinstance(strategy, str) else strategy.name).to_dict(),
    )


def _batches(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length())), most}))


def _places(batches: Sequence[int], prefixes: Sequence[int]) -> list[tuple[int, int]]:
    return list(product(range(len(batches)), range(len(prefixes))))


def _told(
    pool: Pool, call: Callable[..., _Result], work: Sequence[tuple[Any, ...]], on_part: OnPart | None, what: str
) -> Iterator[_Result]:
    """Results as they come, counted."""
    if on_part is not None:
        on_part(0, len(work), what)
    for done, result in enumerate(pool.run(call, work), start=1):
        if on_part is not None:
            on_part(done, len(work), what)
        yield result


def _kept(
    scenario: Scenario,
    strategy: str | Strategy,
    least: int,
    batches: Sequence[int],
    pool: Pool,
    on_part: OnPart | None,
) -> tuple[Strategy, ...]:
    """The strategy asked for, or all that are about the fastest in some of a few places."""
    if strategy != BEST:
        one = get_strategy(strategy)
        if one.partition_rule == "table":
            raise InputError("strategy", one.name, "a strategy that needs no table")
        for_strategy(scenario, one)  # refuses what the machine or the model does not allow
        return (one,)
    contending = tuple(one for one in strategies_to_compare(scenario, None).strategies if one.approximate is None)
    longest = scenario.request.context_len
    lengths = sorted({int(length) for length in np.geomspace(least, longest, 5)})
    samples = list(product(lengths, (0, longest // 2), (batches[0], batches[-1])))
    work = [(at(scenario, *sample), contending) for sample in samples]
    wanted = {name for names in _told(pool, _near_the_best, work, on_part, "samples") for name in names}
    if not wanted:
        raise InputError("model", scenario.model.name, f"a model that fits in the memory of {scenario.num_gpus} GPUs")
    return tuple(one for one in contending if one.name in wanted)


def _near_the_best(scenario: Scenario, contending: Sequence[Strategy]) -> list[str]:
    """Names of the strategies that fit and are about as fast as the fastest of them; none may fit."""
    found = {}
    for one in contending:
        ttft_s, partition, placed = simulated(scenario, one)
        if fits(placed, memory_of(placed, one, partition)):
            found[one.name] = ttft_s
    return [name for name, ttft_s in found.items() if ttft_s <= _CONTENDS * min(found.values())]


def _knots(
    scenario: Scenario, kept: Sequence[Strategy], least: int, pool: Pool, on_part: OnPart | None
) -> tuple[int, ...]:
    """New tokens, from the least to the longest context, so dense that TTFT between them is about linear."""
    first, last = np.log2([least, scenario.request.context_len])
    even = np.rint(2.0 ** np.linspace(first, last, int(np.ceil((last - first) * _PER_DOUBLING)) + 1))
    start = tuple(sorted({int(length) for length in even}))
    batches = (1, scenario.request.batch) if scenario.request.batch > 1 else (1,)
    work = [(one, scenario, start, batch) for one in kept for batch in batches]
    found = {knot for knots in _told(pool, refined, work, on_part, "refinements") for knot in knots}
    return tuple(sorted(found))


def _times(
    strategy: Strategy,
    rows: dict[tuple[int, int], Row],
    knots: Sequence[int],
    prefixes: Sequence[int],
    batches: Sequence[int],
) -> StrategyTimes:
    places = _places(batches, prefixes)
    known = np.log([knots[index] for index in marked(len(knots))])
    corners = {place: np.log(row.ends) for place, row in rows.items() if row.ends}

    def ends(row: int, column: int) -> Array:
        """Logarithms of low and high over TTFT at every knot, shape (2, knots)."""
        across = 0.0 if len(batches) == 1 else np.log(batches[row]) / np.log(batches[-1])
        along = prefixes[column] / prefixes[-1]
        last = (len(batches) - 1, len(prefixes) - 1)
        mixed = sum(
            (across if at_row else 1 - across) * (along if at_column else 1 - along) * corners[at_row, at_column]
            for at_row, at_column in product(*({0, end} for end in last))
        )
        return np.array([np.interp(np.log(knots), known, side) for side in np.asarray(mixed).T])

    found = {place: (np.array(rows[place].ttft_s), np.exp(ends(*place))) for place in places}

    def by_place(values: Callable[[tuple[int, int]], Array]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        shown = {place: tuple(float(f"{value:.6g}") for value in values(place)) for place in places}
        return tuple(tuple(shown[row, column] for column in range(len(prefixes))) for row in range(len(batches)))

    return StrategyTimes(
        strategy=strategy.name,
        most_new_tokens=tuple(
            tuple(rows[row, column].most_new_tokens for column in range(len(prefixes))) for row in range(len(batches))
        ),
        ttft_s=by_place(lambda place: found[place][0]),
        ttft_low_s=by_place(lambda place: found[place][0] * found[place][1][0]),
        ttft_high_s=by_place(lambda place: found[place][0] * found[place][1][1]),
    )
