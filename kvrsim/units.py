"""Parse what a user writes into SI units, and format values for people.

`parse_*` read a value or a list of lengths such as `4k,8k` or `1k:32k:1k`, or raise InputError naming the argument.
`scale` reads units from the names of fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from kvrsim.errors import ABSENT, InputError

T = TypeVar("T")
MAX_TOKENS = 2**40  # largest accepted context
MAX_BYTES = 2**60
MAX_BYTES_PER_S = 1e18
MAX_SECONDS = 1e9

# ASCII digits and a short exponent, so that every text converts quickly to a small value.
_LONGEST_QUANTITY = 80  # characters; longer texts are not read
_QUANTITY = re.compile(r"([0-9]{1,24}(?:\.[0-9]{0,24})?(?:[eE][+-]?[0-9]{1,2})?) ?([A-Za-zµμ/]*)", re.ASCII)
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TOKENS = {"": 1, "k": 2**10, "K": 2**10, "m": 2**20, "M": 2**20}
_SECONDS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    **dict.fromkeys(("us", "µs", "μs"), Fraction(1, 10**6)),  # the micro sign and the Greek letter
    "ns": Fraction(1, 10**9),
}
_BYTES = {prefix + "B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
_BYTES_PER_S = {
    **{unit + "/s": Fraction(scale) for unit, scale in _BYTES.items()},
    **{prefix + "b/s": Fraction(scale, 8) for prefix, scale in _DECIMAL.items()},
    **{prefix + "bps": Fraction(scale, 8) for prefix, scale in _DECIMAL.items()},
}


def _quantity(text: str, units: Mapping[str, int | Fraction]) -> Fraction | None:
    """The exact value of "<number><unit>"; None if the text is not of this form."""
    if len(text) > _LONGEST_QUANTITY:
        return None
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        return None
    return Fraction(match[1]) * units[match[2]]


def parse_tokens(text: str, argument: str) -> int:
    """A length in tokens: "16k" is 16384, "1m" is 1048576, "16000" is 16000."""
    tokens = _quantity(text, _TOKENS)
    if tokens is None or tokens.denominator != 1 or not 1 <= tokens <= MAX_TOKENS:
        raise InputError(argument, text, "a whole number of tokens of at least 1, such as 16000, 16k or 1M")
    return int(tokens)


def parse_count(text: str, argument: str, *, minimum: int = 1, maximum: int = 2**20) -> int:
    """A whole number from `minimum` to `maximum`, without a unit."""
    count = _quantity(text, {"": 1})
    if count is None or count.denominator != 1 or not minimum <= count <= maximum:
        raise InputError(argument, text, f"a whole number from {minimum} to {maximum}")
    return int(count)


def parse_number(
    value: float | str,
    argument: str,
    *,
    above: float | None = None,
    least: float = 0.0,
    most: float = math.inf,
    below: float | None = None,
) -> float:
    """A number without a unit from `least` (or above `above`) to `most` (or below `below`)."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    is_high = number >= least if above is None else number > above
    is_low = number <= most if below is None else number < below
    if not (is_high and is_low and math.isfinite(number)):
        low = f"of at least {least:g}" if above is None else f"above {above:g}"
        high = f"and at most {most:g}" if below is None else f"and below {below:g}"
        accepted = f"a number {low}" if below is None and math.isinf(most) else f"a number {low} {high}"
        raise InputError(argument, ABSENT if value == "" else value, accepted)
    return number


def parse_share(text: str, argument: str, *, below: float = math.inf) -> float:
    """A share of at least 0 and less than `below`, such as "3%" or "0.03"."""
    number, scale = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        share = float(number) * scale
    except ValueError:
        share = math.nan
    if not 0 <= share < below:
        limit = "" if math.isinf(below) else f" and below {below:g}"
        raise InputError(argument, text, f"a share of at least 0{limit}, such as 3% or 0.03")
    return share


def parse_bandwidth(text: str, argument: str) -> float:
    """Bytes per second of "10GB/s", "400Gb/s" (bits) or "1.5TB/s"; a number without a unit is refused."""
    bandwidth = _quantity(text, _BYTES_PER_S)
    if bandwidth is None or not 1 <= bandwidth <= MAX_BYTES_PER_S:
        raise InputError(argument, text, "a bandwidth with its unit, such as 10GB/s (bytes) or 400Gb/s (bits)")
    return float(bandwidth)


def parse_seconds(text: str, argument: str, *, allow_zero: bool = False) -> float:
    """Seconds of "5us", "2ms", "1.5s" or "300ns"; a number without a unit is refused."""
    seconds = _quantity(text, _SECONDS)
    too_small = seconds is not None and (seconds < 0 if allow_zero else seconds <= 0)
    if seconds is None or too_small or seconds > MAX_SECONDS:
        least = "at least 0" if allow_zero else "more than 0"
        raise InputError(argument, text, f"a time of {least} with its unit, such as 5us, 2ms or 1s")
    return float(seconds)


def parse_bytes(text: str, argument: str) -> int:
    """Bytes of "80GB" (10**9) or "1MiB" (2**20); a number without a unit is refused."""
    size = _quantity(text, _BYTES)
    if size is None or size.denominator != 1 or not 1 <= size <= MAX_BYTES:
        raise InputError(argument, text, "a size with its unit, such as 80GB or 1MiB")
    return int(size)


def format_tokens(tokens: int) -> str:
    """The shortest text that parse_tokens reads back: 16384 is "16k", 2**20 is "1M", 16000 is "16000"."""
    if tokens and tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    if tokens >= 2**10 and tokens % 2**9 == 0:
        return f"{tokens / 2**10:g}k" if tokens < 2**20 else str(tokens)
    return str(tokens)


def _format(value: float, units: Iterable[tuple[float, str]]) -> str:
    """Three significant digits in the first (largest) unit that leaves at least 1 before the point."""
    names = list(units)
    scale, unit = next((pair for pair in names if abs(value) >= 0.9995 * pair[0]), names[-1])
    scaled = value / scale
    size = abs(scaled)
    digits = 0 if size >= 99.95 or not math.isfinite(size) else 1 if size >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Three significant digits in s, ms, us or ns."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    return _format(seconds, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_bytes(size: float) -> str:
    """Three significant digits in the largest of GiB, MiB and KiB that gives at least 1; whole bytes below 1 KiB."""
    if abs(size) < 2**10:
        return f"{size:.0f} B"
    return _format(size, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")))


def format_count(number: int, noun: str) -> str:
    """A number with its noun, in the plural with "s" where it is not 1."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def format_bandwidth(bytes_per_s: float) -> str:
    """Three significant digits in TB/s, GB/s, MB/s, KB/s or B/s (powers of ten, as datasheets print)."""
    return _format(bytes_per_s, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s"), (1, "B/s")))


def scale(value: T, factor: float, *, only_rates: bool = False) -> T:
    """Multiply every time of a dataclass and divide every rate by a factor; `only_rates` leaves times unchanged.

    Fields that end in `_s` or `seconds` are times, those that end in `_per_s` rates; a field whose name has no unit
    may have one in its metadata. Values inside tuples, mappings and other dataclasses are scaled, too;
    values without a unit stay the same objects.
    """

    def change(unit: str, old: Any) -> Any:
        is_rate = unit.endswith("_per_s")
        if not is_rate and (only_rates or not unit.endswith(("_s", "seconds"))):
            return old
        new = [one / factor if is_rate else one * factor for one in (old if isinstance(old, tuple) else (old,))]
        return tuple(new) if isinstance(old, tuple) else new[0]

    return map_fields(value, change)


def map_fields(value: T, change: Callable[[str, Any], Any]) -> T:
    """Replace fields of a dataclass by `change(unit, value)`; the unit is in the field's metadata, or the field's name.

    Where `change` returns the same object, dataclasses inside it are changed, also in tuples and mappings. Fields that
    are None stay None. An object without any change stays the same object.
    """
    if isinstance(value, Mapping):
        return {key: map_fields(one, change) for key, one in value.items()}  # type: ignore[return-value]
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        parts = tuple(map_fields(one, change) for one in value)
        return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value  # type: ignore[return-value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes: dict[str, Any] = {}
    for field in fields(value):
        old = getattr(value, field.name)
        if old is None or not field.init:
            continue
        new = change(field.metadata.get("unit", field.name), old)
        new = map_fields(old, change) if new is old else new
        changes |= {} if new is old else {field.name: new}
    return replace(value, **changes) if changes else value


MOST_VALUES = 10_000  # most values of one list
MOST_PLACES = 20_000  # most combinations of contexts, numbers of GPUs and bandwidths
_ACCEPTED = (
    "lengths with commas between, or FIRST:LAST:STEP or FIRST:LAST:xFACTOR with both ends, such as 4k,8k or 1k:32k:1k"
    " or 1k:64k:x2"
)


class LengthRange(NamedTuple):
    """Lengths between two ends, such as 4k:64k."""

    first: int  # tokens
    last: int  # tokens, more than `first` or equal
    text: str  # as the user wrote it


def parse_range(text: str, argument: str) -> LengthRange:
    """Parse two lengths joined by a colon, or one length. InputError names the argument.

    >>> parse_range("4k:64k", "ctx")[:2]
    (4096, 65536)
    """
    ends = [parse_tokens(end, argument) for end in text.split(":")]
    if len(ends) > 2 or ends[0] > ends[-1]:
        raise InputError(argument, text, "a range of lengths, such as 4k:64k, or one length, such as 16k")
    return LengthRange(first=ends[0], last=ends[-1], text=text)


def parse_lengths(text: str, argument: str) -> tuple[int, ...]:
    """Parse lengths in tokens into ascending order, each once. InputError names the argument.

    >>> parse_lengths("1k:2k:512,4k", "ctx")
    (1024, 1536, 2048, 4096)
    >>> parse_lengths("1k:6k:x2", "ctx")
    (1024, 2048, 4096, 6144)
    """
    lengths: set[int] = set()
    for part in text.split(","):
        lengths.update(_lengths_of(part, text, argument))
        if len(lengths) > MOST_VALUES:
            raise InputError(argument, text, f"at most {MOST_VALUES} values")
    return tuple(sorted(lengths))


def check_places(argument: str, *lists: Sequence[object]) -> None:
    """Raise InputError, which names the argument, if the lists have more than MOST_PLACES combinations."""
    places = math.prod(len(values) for values in lists)
    if places > MOST_PLACES:
        sizes = " x ".join(str(len(values)) for values in lists)
        raise InputError(argument, f"{sizes} values", f"at most {MOST_PLACES} combinations in all, not {places}")


def _lengths_of(part: str, text: str, argument: str) -> list[int]:
    """One length, or all lengths of a range, which includes its last length."""
    numbers = part.split(":")
    if len(numbers) == 1:
        return [parse_tokens(part, argument)]
    if len(numbers) != 3:
        raise InputError(argument, text, _ACCEPTED)
    first, last = (parse_tokens(number, argument) for number in numbers[:2])
    if first > last:
        raise InputError(argument, text, "a range whose first length is not above its last")
    if (step := numbers[2].strip()).startswith("x"):
        factor = parse_count(step[1:], argument, minimum=2)
        lengths = [first]
        while lengths[-1] * factor < last:
            lengths.append(lengths[-1] * factor)
        return [*lengths, last]
    every = parse_tokens(step, argument)
    if (last - first) // every >= MOST_VALUES:
        raise InputError(argument, text, f"at most {MOST_VALUES} values")
    return [*range(first, last, every), last]


def counts_up_to(num_gpus: int) -> tuple[int, ...]:
    """Default numbers of GPUs to compare: 2, 4, 8, ... below num_gpus, and num_gpus."""
    powers = (2**power for power in range(1, num_gpus.bit_length()))
    return tuple(dict.fromkeys((*(one for one in powers if one <= num_gpus), num_gpus)))
