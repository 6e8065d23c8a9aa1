"""Workload: arrival time, context length and output length of each request; RequestSource: a trace or a specification.

A source is a trace (described below in this file) or a specification of synthetic requests:

    synthetic:poisson,rate=4,requests=20000,context=lognormal:2k:1.1,output=200

The specification begins with the arrivals: poisson, bursty or diurnal. These keys follow:

rate      requests per second, on average
requests  number of requests; or duration=3600s
cv        bursty: standard deviation of the gaps between arrivals over their mean (gamma-distributed gaps)
period    diurnal: seconds from peak to peak;  peak the highest rate over the lowest (the rate is a sine)
context   LEN, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, or file:TRACE (drawn from the contexts of a trace)
output    LEN, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, or file:TRACE
turns     turns of a session (1); `rate` and `requests` then count sessions, `context` has the first prompts
prompt    tokens that each later turn adds to the prompts and answers before it
cached    share of every context that is in a prefix cache;  max  the longest context
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt

from kvrsim.errors import InputError
from kvrsim.io.columns import CACHED_TOKENS, OUTPUT_TOKENS, PROMPT_TOKENS, RoleColumn, find_columns, parse_columns
from kvrsim.io.files import open_regular
from kvrsim.io.schema import parse_json
from kvrsim.program import Array
from kvrsim.units import MAX_TOKENS, parse_count, parse_number, parse_seconds, parse_share, parse_tokens
from planner.capacity.prefixes import BLOCK_TOKENS, Turns
from planner.capacity.sessions import Pace, grow
from planner.percentile import percentile_of

if TYPE_CHECKING:
    import pandas

Lengths = npt.NDArray[np.int64]
MAX_REQUESTS = 5_000_000  # about 1 GiB with all derived arrays
ARRIVALS = ("poisson", "bursty", "diurnal")
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}  # percentiles of a summary
_Draw = Callable[[int, "np.random.Generator"], Lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in the order of their arrival; all arrays of shape (N,)."""

    name: str  # name of the file, or the specification
    kind: str  # "csv", "mooncake" or "synthetic"
    arrival_s: Array  # seconds since the first arrival
    context_len: Lengths  # tokens, cached prefix included; each at least 1
    cached_prefix: Lengths  # leading tokens whose KV a prefix cache holds; each less than the context
    output_tokens: Lengths
    turns: Turns | None = None  # turns of sessions; `cached_prefix` is then that of an unlimited cache; None: no turns
    notes: tuple[str, ...] = ()  # texts about repaired and omitted requests

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def new_tokens(self) -> Lengths:
        """Tokens that the prefill of each request computes."""
        return self.context_len - self.cached_prefix

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of the arrivals, per second; None: all requests arrive at once."""
        return (len(self) - 1) / self.duration_s if self.duration_s else None

    def select(self, index: npt.NDArray[Any] | slice, arrival_s: Array | None = None) -> Workload:
        """The requests with these indices, at their own arrival times or at the given ones."""
        lengths = {name: getattr(self, name)[index] for name in ("context_len", "cached_prefix", "output_tokens")}
        if arrival_s is None:
            arrival_s = self.arrival_s[index]
        turns = None if self.turns is None else self.turns.select(index)
        return replace(self, arrival_s=arrival_s, turns=turns, **lengths)

    def paced(self, pace: Pace, rng: np.random.Generator) -> Workload:
        """The requests in the order of their arrivals; pace: the times that a trace of sessions leaves out."""
        if self.turns is None:
            return self
        arrival_s, turns = pace.fill(self.arrival_s, self.turns, rng)
        order = np.argsort(arrival_s, kind="stable")
        return replace(self, turns=turns).select(order, arrival_s[order] - arrival_s[order[0]])

    def busiest(self, count: int) -> Workload:
        """The `count` successive requests with the most new tokens per second."""
        work = np.concatenate([[0.0], np.cumsum(self.new_tokens, dtype=float)])
        spans_s = self.arrival_s[count - 1 :] - self.arrival_s[: len(self) - count + 1]
        begin = int(((work[count:] - work[:-count]) / np.maximum(spans_s, 1e-9)).argmax())
        return self.select(slice(begin, begin + count))

    def faster(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast."""
        turns = None if self.turns is None else self.turns.faster(factor)
        return replace(self, arrival_s=self.arrival_s / factor, turns=turns)

    def scaled(self, factor: float, rng: np.random.Generator) -> Workload:
        """`factor` times as many requests in the same time.

        Whole copies are shifted cyclically in time by a random offset, so that bursts keep their shape but do not
        coincide; the fractional part of the factor is a random sample of one more copy. Sessions are copied as a whole.
        """
        if factor == 1:
            return self
        if len(self) * factor > MAX_REQUESTS:
            raise InputError("rate_scale", f"{factor:g}", f"at most {MAX_REQUESTS} requests in all")
        copies = int(factor)
        rest = factor - int(factor)
        period_s = self.duration_s * (1 + 1 / max(1, len(self) - 1))  # adds a mean gap after the last request
        session = np.arange(len(self)) if self.turns is None else self.turns.session
        _, first, session = np.unique(session, return_index=True, return_inverse=True)
        start_s = self.arrival_s[first]
        after_start_s = self.arrival_s - start_s[session]
        arrivals_of_copies: list[Array] = []
        picks: list[Lengths] = []
        for copy in range(copies + (rest > 0)):
            pick = np.arange(len(self))
            if copy == copies:
                pick = pick[(rng.random(len(first)) < rest)[session]]
            arrival_s = self.arrival_s[pick]
            if copy and period_s:
                arrival_s = ((start_s + rng.uniform(0, period_s)) % period_s)[session[pick]] + after_start_s[pick]
            arrivals_of_copies.append(arrival_s)
            picks.append(pick)
        arrival_s = np.concatenate(arrivals_of_copies)
        pick = np.concatenate(picks)
        if not len(pick):
            raise InputError("rate_scale", f"{factor:g}", "a factor that leaves at least one request")
        order = np.argsort(arrival_s, kind="stable")
        note = f"{factor:g} times the requests in the same time: a random sample"
        if factor > 1:
            note = f"{factor:g} times the requests in the same time: copies shifted in time by random offsets"
        scaled = self.select(pick[order], arrival_s[order] - arrival_s[order[0]])
        if scaled.turns is not None:
            copy_of = np.repeat(np.arange(len(picks)), list(map(len, picks)))
            scaled = replace(scaled, turns=scaled.turns.renumbered(copy_of[order]))
        return replace(scaled, notes=(*self.notes, note))

    def summary(self) -> dict[str, Any]:
        """Summary statistics as plain JSON values."""
        gaps = np.diff(self.arrival_s)
        gap_variation = None
        if len(gaps) and gaps.mean() > 0:
            gap_variation = float(gaps.std() / gaps.mean())
        columns = {"context": self.context_len, "new": self.new_tokens, "output": self.output_tokens}
        return {
            "name": self.name,
            "kind": self.kind,
            "requests": len(self),
            "duration_s": self.duration_s,
            "rate_per_s": self.rate_per_s,
            "gap_variation": gap_variation,  # 1 for a Poisson process
            **{f"{name}_tokens": _length_summary(tokens) for name, tokens in columns.items()},
            "cached_share": float(self.cached_prefix.sum() / self.context_len.sum()),
            "sessions": None if self.turns is None else len(np.unique(self.turns.session)),
            "notes": list(self.notes),
        }


def _length_summary(tokens: Lengths) -> dict[str, float]:
    """Mean and percentiles of lengths, as plain JSON values."""
    summary: dict[str, float] = {"mean": float(tokens.mean())}
    for name, percent in _PERCENTILES.items():
        summary[name] = int(percentile_of(tokens, percent))
    return summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """A checked specification of synthetic requests; other fields than `text` and `arrivals` are its keys."""

    text: str
    arrivals: str  # one of ARRIVALS
    rate: float  # requests per second
    requests: int
    cv: float
    period: float  # seconds from peak to peak
    peak: float  # highest rate over lowest rate
    context: _Draw
    output: _Draw
    cached: float  # cached share of every context
    max: int  # tokens of the longest context; a session ends before a longer one
    turns: _Draw  # turns of each session
    prompt: _Draw  # tokens that a later turn adds
    has_turns: bool  # whether the requests are turns of sessions
    defaults: str = ""  # keys that the text leaves out, with their values

    @classmethod
    def parse(cls, text: str, argument: str = "requests") -> Synthetic:
        """Read a specification such as "poisson,rate=4,requests=20000,context=lognormal:2k:1.1"."""
        arrivals, *pairs = [part.strip() for part in text.split(",")]
        if arrivals not in ARRIVALS:
            raise InputError(argument, arrivals, f"synthetic: and one of {', '.join(ARRIVALS)}, then key=value")
        by_key: dict[str, str] = {}
        for pair in pairs:
            key, mark, value = pair.partition("=")
            if not mark or key not in (*_KEYS, "duration") or key in by_key:
                keys = ", ".join((*_KEYS, "duration"))
                raise InputError(argument, pair, f"key=value with commas between, once each: {keys}")
            by_key[key] = value
        duration = by_key.pop("duration", None)
        values = {key: parse(by_key.get(key, default), f"{argument}: {key}") for key, (default, parse) in _KEYS.items()}
        if duration is not None:
            if "requests" in by_key:
                raise InputError(f"{argument}: duration", duration, "requests or duration, not both")
            expected = values["rate"] * parse_seconds(duration, f"{argument}: duration")
            if not 1 <= expected <= MAX_REQUESTS:
                raise InputError(f"{argument}: duration", duration, f"1 to {MAX_REQUESTS} requests in all")
            values["requests"] = round(expected)
        given = set(by_key)
        if duration is not None:
            given.add("requests")
        if "turns" not in given:
            given |= {"turns", "prompt"}
        elif "cached" in given:
            raise InputError(f"{argument}: cached", by_key["cached"], "turns or cached, not both")
        else:
            given.add("cached")
        used = [key for key in _KEYS if key not in given and _ARRIVALS_OF.get(key, arrivals) == arrivals]
        defaults = ", ".join(f"{key}={_KEYS[key][0]}" for key in used)
        return cls(text=text, arrivals=arrivals, defaults=defaults, has_turns="turns" in by_key, **values)

    def scaled(self, factor: float) -> Synthetic:
        """`factor` times as many requests in the same time."""
        requests = round(self.requests * factor)
        if not 1 <= requests <= MAX_REQUESTS:
            raise InputError("rate_scale", f"{factor:g}", f"a factor that makes it 1 to {MAX_REQUESTS} requests")
        return replace(self, rate=self.rate * factor, requests=requests)

    @property
    def mean_turns(self) -> float:
        """Mean number of turns of a session, from a sample; 1 without sessions."""
        if not self.has_turns:
            return 1.0
        return float(self.turns(1000, np.random.default_rng(0)).mean())

    def draw(self, rng: np.random.Generator) -> Workload:
        """Draw the requests with a random generator."""
        context = np.minimum(self.context(self.requests, rng), self.max)
        cached = np.floor(self.cached * context).astype(np.int64)
        workload = Workload(
            name=f"synthetic:{self.text}",
            kind="synthetic",
            arrival_s=self._arrivals_s(rng),
            context_len=context,
            cached_prefix=np.minimum(cached, context - 1),
            output_tokens=self.output(self.requests, rng),
            notes=(f"by default {self.defaults}",) if self.defaults else (),
        )
        if not self.has_turns:
            return workload
        return self._in_sessions(workload, rng)

    def _in_sessions(self, first: Workload, rng: np.random.Generator) -> Workload:
        """Sessions that begin with these requests; later turns have no times yet."""
        turns = self.turns(self.requests, rng)
        if turns.sum() > MAX_REQUESTS:
            raise InputError("requests: turns", f"{turns.sum()} turns", f"at most {MAX_REQUESTS} turns in all")
        session = np.repeat(np.arange(self.requests), turns)
        is_first = np.diff(session, prepend=-1) > 0
        later = first.select(session)
        none_s = np.full(len(session), np.nan)
        requests = replace(
            later,
            arrival_s=np.where(is_first, later.arrival_s, np.nan),
            context_len=np.where(is_first, later.context_len, self.prompt(len(session), rng)),
            output_tokens=np.where(is_first, later.output_tokens, self.output(len(session), rng)),
        )
        workload, _ = _in_sessions(requests, session, none_s, np.ones(len(session), dtype=bool))
        return workload.select(workload.context_len <= self.max)

    def _arrivals_s(self, rng: np.random.Generator) -> Array:
        """Draw arrival times; for diurnal arrivals, the integral of the rate is inverted."""
        shape = 1.0
        if self.arrivals == "bursty":
            shape = 1.0 / self.cv**2
        times = np.cumsum(rng.gamma(shape, 1.0 / shape, size=self.requests)) / self.rate
        if self.arrivals == "diurnal":
            # The rate is proportional to 1 - a cos(2 pi t / period) with a = swing, because peak = (1 + a) / (1 - a).
            swing = (self.peak - 1) / (self.peak + 1)
            grid = np.linspace(0.0, 1.0, 4097)
            integral = grid - swing * np.sin(2 * math.pi * grid) / (2 * math.pi)
            cycles, phase = np.divmod(times / self.period, 1.0)
            times = self.period * (cycles + np.interp(phase, integral, grid))
        return np.asarray(times - times[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSource:
    """A trace or a specification, and the factor on its rate."""

    requests: Workload | Synthetic
    rate_scale: float = 1.0  # factor on the number of requests in the same time
    pace: Pace = field(default_factory=Pace)  # times of sessions that the requests leave out
    simulates_cache: bool = True  # whether caches of turns are simulated; otherwise, all share one without limit

    @classmethod
    def of(
        cls, source: object, *, columns: str | None = None, rate_scale: float = 1.0, pace: Pace | None = None
    ) -> RequestSource:
        """Read the requests of FILE, synthetic:SPEC or a data frame; columns: see `parse_columns`.

        Raises InputError where `pace` lacks times that the requests need.
        """
        names = {} if columns is None else parse_columns(columns, _ROLES)
        requests: Workload | Synthetic
        if not isinstance(source, str):
            requests = read_frame(source, names)
        elif source.startswith("synthetic:"):
            requests = Synthetic.parse(source.removeprefix("synthetic:"))
        else:
            requests = read_trace(source, names=names)
        return cls(requests=requests, rate_scale=rate_scale, pace=pace or Pace())

    def times(self, factor: float) -> RequestSource:
        """`factor` times as many requests in the same time, as with that factor on `rate_scale`."""
        return replace(self, rate_scale=self.rate_scale * factor)

    @property
    def name(self) -> str:
        """Name of the trace, or the specification."""
        if isinstance(self.requests, Synthetic):
            return f"synthetic:{self.requests.text}"
        return self.requests.name

    @property
    def num_requests(self) -> float:
        """Expected number of requests of a workload."""
        if isinstance(self.requests, Synthetic):
            return self.rate_scale * self.requests.requests * self.requests.mean_turns
        return self.rate_scale * len(self.requests)

    @property
    def has_turns(self) -> bool:
        """Whether the hits of prefix caches follow from the requests: they are turns of sessions, or have hashes."""
        if isinstance(self.requests, Synthetic):
            return self.requests.has_turns
        return self.requests.turns is not None

    @property
    def is_random(self) -> bool:
        """Whether requests depend on the seed."""
        return isinstance(self.requests, Synthetic)

    def workload(self, seed: int, replication: int = 0) -> Workload:
        """The requests; synthetic requests differ between replications."""
        rng = np.random.default_rng([seed, replication])
        if isinstance(self.requests, Synthetic):
            workload = self.requests.scaled(self.rate_scale).draw(rng).paced(self.pace, rng)
        else:
            workload = self.requests.paced(self.pace, rng).scaled(self.rate_scale, rng)
        return workload if self.simulates_cache else replace(workload, turns=None)


def _in_sessions(
    requests: Workload, session: Lengths, think_s: Array, is_delta: npt.NDArray[np.bool_]
) -> tuple[Workload, int]:
    """The requests as turns of sessions, and the number of prompts that are new texts; see `grow`."""
    context, turns, restarts = grow(session, think_s, requests.context_len, requests.output_tokens, is_delta)
    return replace(requests, context_len=context, cached_prefix=turns.reusable, turns=turns), restarts


def _lengths(text: str, argument: str) -> _Draw:
    """Return a function that draws lengths."""
    kind, _, rest = text.partition(":")
    if kind == "lognormal":
        median, mark, sigma = rest.partition(":")
        if not mark:
            raise InputError(argument, text, "lognormal:MEDIAN:SIGMA, such as lognormal:2k:1.1")
        mean = math.log(parse_tokens(median, argument))
        log_sd = parse_number(sigma, argument, above=0, most=10)

        def lognormal(count: int, rng: np.random.Generator) -> Lengths:
            lengths = np.exp(mean + log_sd * rng.standard_normal(count))
            return np.clip(np.rint(np.minimum(lengths, MAX_TOKENS)), 1, MAX_TOKENS).astype(np.int64)

        return lognormal
    if kind == "uniform":
        low_text, mark, high_text = rest.partition(":")
        if not mark:
            raise InputError(argument, text, "uniform:LOW:HIGH, such as uniform:32k:128k")
        low = parse_tokens(low_text, argument)
        high = parse_tokens(high_text, argument)
        if low > high:
            raise InputError(argument, text, "uniform:LOW:HIGH, with LOW no more than HIGH")
        return lambda count, rng: rng.integers(low, high, size=count, endpoint=True)
    if kind == "file":
        trace = read_trace(rest, argument=argument)
        values = trace.output_tokens if argument.endswith("output") else trace.context_len
        return lambda count, rng: np.asarray(rng.choice(values, size=count))
    try:
        length = parse_tokens(text, argument)
    except InputError:
        accepted = "a number of tokens such as 16k, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH or file:TRACE"
        raise InputError(argument, text, accepted) from None
    return lambda count, rng: np.full(count, length, dtype=np.int64)


_KEYS: dict[str, tuple[str, Callable[[str, str], Any]]] = {  # key: (default, parser)
    "rate": ("", partial(parse_number, above=0, most=1e6)),
    "requests": ("20000", partial(parse_count, maximum=MAX_REQUESTS)),
    "cv": ("3", partial(parse_number, above=0, most=100)),
    "period": ("86400s", parse_seconds),
    "peak": ("3", partial(parse_number, least=1, most=1e6)),
    "context": ("lognormal:1k:1", _lengths),
    "output": ("200", _lengths),
    "cached": ("0", partial(parse_share, below=1)),
    "max": ("128k", parse_tokens),
    "turns": ("1", _lengths),
    "prompt": ("lognormal:200:1", _lengths),
}
_ARRIVALS_OF = {"cv": "bursty", "period": "diurnal", "peak": "diurnal"}  # keys of one kind of arrivals


# -- Traces: CSV or JSON lines.
#
#     arrival_s,context_tokens,output_tokens[,cached_tokens]     seconds, tokens; or other names of _ROLES,
#                                                                and times in milliseconds since 1970 or ISO dates
#     TIMESTAMP,ContextTokens,GeneratedTokens                    Azure LLM inference traces, 2023 and 2024
#     {"timestamp", "input_length", "output_length", "hash_ids"} Mooncake: milliseconds; a hash is a block of 512 tokens
#     {"session_id", "input_length", "output_length", "delay"}   AIPerf: a turn, which adds input_length tokens to those
#                                                                before it; delay or timestamp in milliseconds
#     {"session_id", "turns": [{"text", "delay"}, ...]}          AIPerf: a session; 4 characters of text are a token
#
# A table with a column of sessions has whole prompts. In traces with hashes or sessions, cached_prefix is that of an
# unlimited prefix cache that all GPUs share.

MAX_LINE = 2**17  # characters per line; also the limit of a field in Python's csv
MAX_BLOCKS = 5_000_000  # largest number of distinct hash_ids
_MAX_HASH = 64  # characters of a hash, if the hash is a text
_MAX_ARRIVAL_S = 1e10  # largest arrival in seconds; a larger number of a table is in milliseconds
_MOONCAKE = ("timestamp", "input_length", "output_length")  # fields of every line of a Mooncake trace
_AIPERF = ("session_id", "turn", "delay")  # further fields of a turn
_JSON_LINE = f"a JSON object with {', '.join(_MOONCAKE)}, or with session_id and input_length or turns"
_TEXT_PER_TOKEN = 4  # characters
_WHOLE_PROMPTS = "message_array_with_responses"  # AIPerf's context_mode of turns that have the prompts before them
_COLUMNS = 9  # of the array in which a trace is read
_ROLES = {  # usual names of columns, by role
    "timestamp": ("arrival_s", "arrival", "timestamp", "time", "ts", "created_at", "start_time", "request_time"),
    "context": PROMPT_TOKENS,
    "output": OUTPUT_TOKENS,
    "cached": CACHED_TOKENS,
    "session": ("session_id", "session", "conversation_id", "conversation", "chat_id", "thread_id", "dialog_id"),
    "turn": ("turn", "turn_id", "turn_index", "turn_number", "round"),
    "think_s": ("think_time", "delay", "pause"),
}
_ACCEPTED = (
    "a header line with a column of arrivals and one of context tokens (arrival_s or timestamp; context_tokens,"
    " prompt_tokens or input_tokens), or their names: `columns`"
    " timestamp=COLUMN,context=COLUMN[,output=COLUMN,cached=COLUMN]"
)
_Record = Mapping[str, Any]  # values of one line, by column


def read_frame(frame: pandas.DataFrame, names: Mapping[str, RoleColumn]) -> Workload:
    """The requests of a pandas DataFrame with the columns of a CSV file; arrivals may be datetimes.

    Raises InputError naming the argument, the row and the column.
    """
    lines = io.StringIO(frame.to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S.%f"))
    return _read_lines(lines, "data frame", "requests DataFrame", names)


def read_trace(path: str, argument: str = "requests", names: Mapping[str, RoleColumn] | None = None) -> Workload:
    """Read a trace line by line, so that the whole text is never in memory.

    Empty contexts are left out, arrivals are sorted, and in fully cached contexts one token is computed; notes report
    these repairs. Raises InputError naming the argument, the file and the line.
    """
    source = f"{argument} {' '.join(path.split())}"
    try:
        content = open_regular(path, argument, what="a trace")
        with io.TextIOWrapper(content, encoding="utf-8-sig", newline=None) as file:
            return _read_lines(file, Path(path).name, source, names or {})
    except (OSError, ValueError) as error:
        reason: str | None = "not UTF-8 text, or not a path"
        if isinstance(error, OSError):
            reason = error.strerror
        raise InputError(argument, path, f"a trace that can be read ({reason})") from None


def _read_lines(file: TextIO, name: str, source: str, names: Mapping[str, RoleColumn]) -> Workload:
    lines = _limit_lines(file, source)
    first = next(lines, "")
    reader = _csv_records
    if first.lstrip().startswith("{"):
        reader = _json_records
    header, records = reader(itertools.chain((first,), lines), source)
    columns = _roles(header, names, source)
    trace = _TraceRows(columns, is_mooncake=not names and set(_MOONCAKE) <= set(header))
    count = 0
    for count, (line, record) in enumerate(records, start=1):
        if count > MAX_REQUESTS:
            break
        trace.add(line, record, f"{source}: line {line}")
    if count == 0:
        raise InputError(source, "0 requests", f"1 to {MAX_REQUESTS} requests")
    if count > MAX_REQUESTS:
        raise InputError(source, f"more than {MAX_REQUESTS} requests", f"1 to {MAX_REQUESTS} requests")
    return trace.workload(name, source)


class _TraceRows:
    """The requests of a trace as rows of numbers."""

    def __init__(self, columns: Mapping[str, RoleColumn], *, is_mooncake: bool) -> None:
        self.is_mooncake = is_mooncake
        self.column_of = dict.fromkeys(_ROLES, "") | {role: column.name for role, column in columns.items()}
        self.pause_unit_s = 1e-3 if is_mooncake else 1.0
        if "think_s" in columns:
            self.pause_unit_s = columns["think_s"].unit_s or self.pause_unit_s
        # line number, arrival in seconds, tokens of context, output and cached prefix; session, turn, pause and whether
        # the context lacks the turns before. Without these: nan, and -1 for no session.
        self.rows = array("d")
        self.blocks: dict[int | str, int] = {}  # numbers of blocks by hash
        self.sequences: list[list[int]] = []  # blocks of each request with hashes
        self.sessions: dict[str, int] = {}  # numbers of sessions by name
        self.estimated = 0  # turns whose tokens are estimated

    def add(self, line: int, record: _Record, where: str) -> None:
        """Add a request; raises InputError that begins with `where`."""
        column_of = self.column_of
        context = _tokens_in(record, column_of["context"], where)
        output = _tokens_in(record, column_of["output"], where)
        cached = _tokens_in(record, column_of["cached"], where)
        if hashes := record.get("hash_ids"):
            leading, sequence = _leading_blocks(hashes, self.blocks, f"{where}: hash_ids")
            cached = min(BLOCK_TOKENS * leading, context)
            self.sequences.append(sequence)
        session = -1
        name = record.get(column_of["session"])
        if name not in (None, ""):
            session = self.sessions.setdefault(str(name), len(self.sessions))
        arrival_s = math.nan
        time = record.get(column_of["timestamp"], "")
        if session < 0 or time not in (None, ""):
            column = column_of["timestamp"] or "timestamp"
            arrival_s = _arrival_s(time, f"{where}: {column}", is_ms=self.is_mooncake)
        turn = _optional(record, column_of["turn"], where)
        think_s = self.pause_unit_s * _optional(record, column_of["think_s"], where)
        is_delta = self.is_mooncake and record.get("context_mode") != _WHOLE_PROMPTS
        self.estimated += bool(record.get("is_estimate"))
        self.rows.extend((line, arrival_s, context, output, cached, session, turn, think_s, is_delta))

    def workload(self, name: str, source: str) -> Workload:
        """The requests that were added, with notes on repairs."""
        kind = "mooncake" if self.is_mooncake else "csv"
        workload = _workload(name, kind, np.array(self.rows).reshape(-1, _COLUMNS), self.sequences, source)
        if not self.estimated:
            return workload
        note = f"tokens of {self.estimated} turns are counted as {_TEXT_PER_TOKEN} characters each"
        return replace(workload, notes=(*workload.notes, note))


def _limit_lines(file: TextIO, source: str) -> Iterator[str]:
    """The lines of a file, each of at most MAX_LINE characters."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise InputError(f"{source}: line {number}", line[:40], f"lines of at most {MAX_LINE} characters")
        yield line.rstrip("\n")


def _csv_records(lines: Iterator[str], source: str) -> tuple[Sequence[str], Iterator[tuple[int, _Record]]]:
    """The columns of the header, and an iterator over the other lines: line number and values by column."""
    reader = csv.reader(lines)

    def rows() -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            where = f"{source}: line {reader.line_num + 1}"
            raise InputError(where, str(error), "a line of comma-separated values") from None

    header = [name.strip() for name in next(rows(), ())]
    if len(set(header)) < len(header):
        raise InputError(f"{source}: line 1", ",".join(header), "each column once")

    def records() -> Iterator[tuple[int, _Record]]:
        for row in filter(None, rows()):
            if len(row) != len(header):
                accepted = f"{len(header)} values, as in the header"
                raise InputError(f"{source}: line {reader.line_num}", ",".join(row), accepted)
            record = dict(zip(header, row, strict=True))
            record.pop("hash_ids", None)
            yield reader.line_num, record

    return header, records()


def _json_records(lines: Iterator[str], source: str) -> tuple[Sequence[str], Iterator[tuple[int, _Record]]]:
    """The columns of Mooncake's JSON lines, and an iterator over the lines: line number and values by column."""

    def records() -> Iterator[tuple[int, _Record]]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not _is_request(record):
                raise InputError(f"{source}: line {number}", line, _JSON_LINE)
            if not isinstance(record.get("turns"), list):
                yield number, record
                continue
            session = record.get("session_id") or f"line {number}"
            for turn in record["turns"]:
                tokens = turn.get("input_length", math.ceil(_characters(turn) / _TEXT_PER_TOKEN))
                counted = {"input_length": tokens, "session_id": session, "is_estimate": "input_length" not in turn}
                yield number, {"output_length": 0, **turn, **counted}

    return (*_MOONCAKE, *_AIPERF, "cached_tokens"), records()


def _is_request(record: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a request of Mooncake, or a turn or a session of AIPerf."""
    turns = record.get("turns")
    if isinstance(turns, list):
        return all(isinstance(turn, dict) and ("input_length" in turn or _characters(turn)) for turn in turns)
    if record.get("session_id") in (None, ""):
        return set(_MOONCAKE) <= set(record)
    return "input_length" in record


def _characters(turn: Mapping[str, Any]) -> int:
    """Characters of a turn's text; 0 without a text."""
    texts = turn.get("texts", [turn.get("text", "")])
    return len("".join(texts)) if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else 0


def _roles(header: Sequence[str], names: Mapping[str, RoleColumn], source: str) -> dict[str, RoleColumn]:
    """The columns of the roles that the file has, named by the user or listed in _ROLES."""
    columns = find_columns(header, _ROLES, names)
    if not {"timestamp", "session"} & set(columns) or "context" not in columns:
        raise InputError(f"{source}: line 1", ",".join(header), _ACCEPTED)
    return columns


def _leading_blocks(hashes: object, blocks: dict[int | str, int], where: str) -> tuple[int, list[int]]:
    """The number of leading hashes that are in `blocks`, and the numbers of all; adds all hashes to `blocks`."""
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        raise InputError(where, hashes, f"a list of numbers of 64 bits or texts of at most {_MAX_HASH} characters")
    leading = len(list(itertools.takewhile(blocks.__contains__, hashes)))
    sequence = [blocks.setdefault(value, len(blocks)) for value in hashes]
    if len(blocks) > MAX_BLOCKS:
        raise InputError(where, f"{len(blocks)} blocks", f"at most {MAX_BLOCKS} blocks in all")
    return leading, sequence


def _is_hash(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64
    return isinstance(value, str) and len(value) <= _MAX_HASH


def _number(value: object) -> float:
    """The value as a number; nan if the value is not a number."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # any object may be a number
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _arrival_s(value: object, where: str, *, is_ms: bool) -> float:
    """Arrival time in seconds, from a number or a date such as "2023-11-16 18:15:46.6805900".

    Numbers are in seconds; they are in milliseconds with `is_ms` or above _MAX_ARRIVAL_S. A date without a time zone is
    in UTC.
    """
    number = _number(value)
    if is_ms or number > _MAX_ARRIVAL_S:
        number *= 1e-3
    if not math.isnan(number):
        return number
    if not isinstance(value, str):
        raise InputError(where, value, "a date and time, or a number")
    try:
        moment = datetime.fromisoformat(value.strip())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise InputError(where, value, "a date and time, or a number") from None


def _tokens_in(record: _Record, column: str, where: str) -> float:
    """The tokens of a record in a column; 0 if the record has no such column."""
    if column not in record:
        return 0.0
    return _tokens(record[column], f"{where}: {column}")


def _optional(record: _Record, column: str, where: str) -> float:
    """The value of a record, at least 0; nan if the record has no such value."""
    value = record.get(column)
    if value in (None, ""):
        return math.nan
    number = _number(value)
    if not 0 <= number <= _MAX_ARRIVAL_S:
        raise InputError(f"{where}: {column}", value, f"a number from 0 to {_MAX_ARRIVAL_S:g}")
    return number


def _tokens(value: object, where: str) -> float:
    """The value as a whole number of tokens, at least 0; raises InputError for other values."""
    number = _number(value)
    if not 0 <= number <= MAX_TOKENS or number != math.floor(number):
        raise InputError(where, value, f"a whole number of tokens from 0 to {MAX_TOKENS}")
    return number


def _workload(name: str, kind: str, rows: Array, sequences: Sequence[list[int]], source: str) -> Workload:
    """Repair the rows of _read_lines, and return the requests with notes on the repairs.

    sequences: the blocks of each request, where all have hashes.
    """
    notes = list[str]()
    has_sessions = bool((rows[:, 5] >= 0).any())
    is_valid = np.isnan(rows[:, 1]) | (rows[:, 1] >= 0) & (rows[:, 1] <= _MAX_ARRIVAL_S)
    if not is_valid.all():
        line, arrival_s = rows[int(is_valid.argmin()), :2]
        accepted = f"seconds from 0 to {_MAX_ARRIVAL_S:g}"
        raise InputError(f"{source}: line {line:.0f}", f"arrival {arrival_s:g} s", accepted)
    empty = rows[:, 2] < 1
    if empty.all():
        raise InputError(source, "no context of at least 1 token", "requests with a context")
    if empty.any():
        line = rows[int(empty.argmax()), 0]
        notes.append(f"{int(empty.sum())} requests with a context of 0 tokens left out (the first in line {line:.0f})")
    kept = np.flatnonzero(~empty)
    if has_sessions:
        return _of_sessions(name, kind, rows[kept], notes, has_hashes=bool(sequences))
    if (np.diff(rows[kept, 1]) < 0).any():
        kept = kept[np.argsort(rows[kept, 1], kind="stable")]
        notes.append("arrivals were not in order and have been sorted")
    turns = None
    if 0 < len(sequences) < len(rows):
        notes.append("not all requests have hash_ids: one prefix cache without limit is assumed")
    elif sequences:
        context = rows[kept, 2].astype(np.int64)
        turns = Turns(
            session=np.arange(len(kept)),
            think_s=np.zeros(len(kept)),
            reusable=context - 1,
            blocks=[sequences[row] for row in kept.tolist()],
        )
    rows = rows[kept]
    context, output, prefix = rows[:, 2:5].T.astype(np.int64)
    fully_cached = int((prefix >= context).sum())
    if fully_cached:
        notes.append(f"{fully_cached} fully cached contexts: their last token is computed anyway")
    return Workload(
        name=name,
        kind=kind,
        arrival_s=rows[:, 1] - rows[0, 1],
        context_len=context,
        cached_prefix=np.minimum(prefix, context - 1),
        output_tokens=output,
        turns=turns,
        notes=tuple(notes),
    )


def _of_sessions(name: str, kind: str, rows: Array, notes: list[str], *, has_hashes: bool) -> Workload:
    """The turns of sessions next to each other, with the arrivals of the trace; nan: not in the trace."""
    session = rows[:, 5].astype(np.int64)
    alone = session < 0
    session[alone] = session.max() + 1 + np.arange(alone.sum())
    order = np.lexsort((np.nan_to_num(rows[:, 1], nan=np.inf), np.nan_to_num(rows[:, 6]), session))
    rows = rows[order]
    arrival_s, context, output, cached = rows[:, 1:5].T
    requests = Workload(
        name=name,
        kind=kind,
        arrival_s=arrival_s - np.fmin.reduce(arrival_s),
        context_len=context.astype(np.int64),
        cached_prefix=cached.astype(np.int64),
        output_tokens=output.astype(np.int64),
    )
    workload, restarts = _in_sessions(requests, session[order], rows[:, 7], rows[:, 8] > 0)
    if cached.any():
        notes.append("the cached tokens of the trace are not used: the prefix cache of its sessions is simulated")
    if has_hashes:
        notes.append("hash_ids are not used, because the requests have sessions")
    if restarts:
        notes.append(f"{restarts} prompts are shorter than those before them in their sessions: none of them is cached")
    return replace(workload, notes=tuple(notes))
