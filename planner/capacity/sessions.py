"""Sessions of a trace: turns in order, prompts that grow, and times that the trace leaves out.

The prompt of a turn begins with the prompt and the answer of the turn before, unless it is shorter than that prompt:
then it is a new text. A turn arrives at its time in the trace; without one, a pause after the answer before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvrsim.errors import ABSENT, InputError
from kvrsim.program import Array
from kvrsim.units import parse_number, parse_seconds
from planner.capacity.prefixes import BLOCK_TOKENS, Numbers, Turns

_MOST_BLOCKS = 2**24  # blocks of one text; the numbers of its blocks are successive
_Draw = Callable[[int, np.random.Generator], Array]
_TIMES = "a time such as 5s, lognormal:MEDIAN:SIGMA, exponential:MEAN or uniform:LOW:HIGH"


def grow(
    session: Numbers, think_s: Array, prompt: Numbers, output: Numbers, is_delta: npt.NDArray[np.bool_]
) -> tuple[Numbers, Turns, int]:
    """The tokens of each whole prompt, the turns, and the number of prompts that are new texts; arrays of shape (N,).

    The turns of a session are next to each other and in order. prompt: tokens of the whole prompt or, where is_delta,
    those after the answer before. output: tokens of the answer.
    """
    context: list[int] = []
    reusable: list[int] = []
    blocks: list[range] = []
    restarts = 0
    text = -1
    last_session = -1
    before = 0  # tokens of the prompt of the turn before
    sequence = 0  # tokens of this prompt and its answer
    rows = (column.tolist() for column in (session, prompt, output, is_delta))
    for number, tokens, answer, adds in zip(*rows, strict=True):
        restarts += number == last_session and not adds and tokens < before
        if number != last_session or (not adds and tokens < before):
            text += 1
            before = 0
            sequence = 0
        shared = sequence
        if adds:
            tokens += sequence
        elif tokens < sequence:  # a part of the answer is not in the prompt
            shared = before
        last_session = number
        before = tokens
        sequence = tokens + answer
        context.append(tokens)
        reusable.append(max(0, min(shared, tokens - 1)))
        first = text * _MOST_BLOCKS
        blocks.append(range(first, first + math.ceil(sequence / BLOCK_TOKENS)))
    turns = Turns(session=session, think_s=think_s, reusable=np.array(reusable, dtype=np.int64), blocks=blocks)
    return np.array(context, dtype=np.int64), turns, restarts


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Times for traces that have none, drawn at random."""

    think: _Draw | None = None  # pauses between an answer and the next turn, seconds
    sessions_per_s: float | None = None  # mean rate of sessions, which arrive at random

    @classmethod
    def parse(cls, think_time: str | float | None, session_rate: float | None) -> Pace:
        """Read the arguments; raises InputError naming the parameter."""
        think = None
        if think_time is not None:
            think = _times(str(think_time), "think_time")
        return cls(think=think, sessions_per_s=session_rate)

    def fill(self, arrival_s: Array, turns: Turns, rng: np.random.Generator) -> tuple[Array, Turns]:
        """Arrivals of all turns, and turns with all pauses. A turn without a time has its earliest possible arrival.

        Turns of a session are next to each other. Raises InputError naming the argument whose times are needed.
        """
        is_first = turns.numbers() == 1
        think_s = turns.think_s.copy()
        arrival_s = arrival_s.copy()
        has_none = np.isnan(arrival_s)
        starts = np.flatnonzero(is_first & has_none)
        if len(starts):
            if self.sessions_per_s is None:
                accepted = "the mean number of sessions that begin per second: the trace has no times of first turns"
                raise InputError("session_rate", ABSENT, accepted)
            arrival_s[starts] = np.cumsum(rng.exponential(1 / self.sessions_per_s, len(starts)))
        pauses = np.flatnonzero(~is_first & has_none & np.isnan(think_s))
        if len(pauses):
            if self.think is None:
                accepted = f"{_TIMES}: the trace has no times between the turns of a session"
                raise InputError("think_time", ABSENT, accepted)
            think_s[pauses] = self.think(len(pauses), rng)
        think_s = np.nan_to_num(think_s)
        for turn in np.flatnonzero(~is_first & has_none).tolist():
            arrival_s[turn] = arrival_s[turn - 1] + think_s[turn]
        return arrival_s, replace(turns, think_s=think_s)


def _times(text: str, argument: str) -> _Draw:
    """Return a function that draws times in seconds."""
    kind, *values = text.split(":")
    seconds = partial(parse_seconds, argument=argument)
    if kind == "lognormal" and len(values) == 2:
        mean = float(np.log(seconds(values[0])))
        log_sd = parse_number(values[1], argument, above=0, most=10)
        return lambda count, rng: rng.lognormal(mean, log_sd, count)
    if kind == "exponential" and len(values) == 1:
        scale_s = seconds(values[0])
        return lambda count, rng: rng.exponential(scale_s, count)
    if kind == "uniform" and len(values) == 2 and seconds(values[0]) <= seconds(values[1]):
        low_s = seconds(values[0])
        high_s = seconds(values[1])
        return lambda count, rng: rng.uniform(low_s, high_s, count)
    try:
        fixed_s = parse_seconds(text, argument, allow_zero=True)
    except InputError:
        raise InputError(argument, text, _TIMES) from None
    return lambda count, _: np.full(count, fixed_s)
