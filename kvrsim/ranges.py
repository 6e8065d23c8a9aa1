"""Lists of lengths and counts, as `4k,8k` or `1k:32k:1k`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvrsim.errors import InputError
from kvrsim.units import parse_count, parse_tokens

MOST_VALUES = 10_000  # that one list may stand for
MOST_PLACES = 20_000  # contexts times numbers of GPUs, and whatever else is crossed with them
_ACCEPTED = (
    "lengths with commas between, or FIRST:LAST:STEP or FIRST:LAST:xFACTOR with both ends, such as 4k,8k or 1k:32k:1k"
    " or 1k:64k:x2"
)


def parse_lengths(text: str, argument: str) -> tuple[int, ...]:
    """Tokens, rising, each once; InputError names the argument.

    >>> parse_lengths("1k:2k:512,4k", "ctx")
    (1024, 1536, 2048, 4096)
    >>> parse_lengths("1k:6k:x2", "ctx")
    (1024, 2048, 4096, 6144)
    """
    return _parse_list(text, argument, _ACCEPTED, lambda part: _lengths_of(part, text, argument))


def parse_counts(text: str, argument: str) -> tuple[int, ...]:
    """Whole numbers with commas between, rising, each once; InputError names the argument."""
    accepted = "whole numbers with commas between, such as 2,4,8"
    return _parse_list(text, argument, accepted, lambda part: range(first := parse_count(part, argument), first + 1))


def lengths_of(values: str | Iterable[int | str], argument: str) -> tuple[int, ...]:
    """The same of a text, or of several numbers and texts; at least one."""
    return parse_lengths(values if isinstance(values, str) else _joined(values, argument), argument)


def counts_of(values: str | Iterable[int | str], argument: str) -> tuple[int, ...]:
    """The same of a text, or of several numbers and texts; at least one."""
    return parse_counts(values if isinstance(values, str) else _joined(values, argument), argument)


def check_places(argument: str, *lists: Sequence[object]) -> None:
    """Refuse more combinations of the lists' values than MOST_PLACES; InputError names the argument."""
    places = math.prod(len(values) for values in lists)
    if places > MOST_PLACES:
        sizes = " x ".join(str(len(values)) for values in lists)
        raise InputError(argument, f"{sizes} values", f"at most {MOST_PLACES} combinations in all, not {places}")


def _joined(values: Iterable[int | str], argument: str) -> str:
    if not (parts := [str(value) for value in values]):
        raise InputError(argument, "nothing", "at least one")
    return ",".join(parts)


def _parse_list(
    text: str, argument: str, accepted: str, values_of: Callable[[str], range | list[int]]
) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        if not part.strip():
            raise InputError(argument, text, accepted)
        found.update(values_of(part.strip()))
        if len(found) > MOST_VALUES:
            raise InputError(argument, text, f"at most {MOST_VALUES} values")
    return tuple(sorted(found))


def _lengths_of(part: str, text: str, argument: str) -> range | list[int]:
    """One length, or all of a range; its last is in it, whether or not a step ends there."""
    parts = part.split(":")
    if len(parts) not in (1, 3):
        raise InputError(argument, text, _ACCEPTED)
    times = len(parts) == 3 and parts[2].strip().startswith("x")
    numbers = [parse_tokens(number, argument) for number in (parts[:2] if times else parts)]
    if len(numbers) == 1:
        return numbers
    first, last = numbers[:2]
    if first > last:
        raise InputError(argument, text, "a range whose first length is not above its last")
    if times:
        return _times(first, last, parse_count(parts[2].strip()[1:], argument), text, argument)
    step = numbers[2]
    if (last - first) // step >= MOST_VALUES:
        raise InputError(argument, text, f"at most {MOST_VALUES} values")
    return [*range(first, last, step), last]


def _times(first: int, last: int, factor: int, text: str, argument: str) -> list[int]:
    """Each so many times as long as the one before, and the last."""
    if factor < 2:
        raise InputError(argument, text, _ACCEPTED)
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return [*found, last]


def counts_up_to(num_gpus: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the number itself: what is compared where nobody says on how many GPUs."""
    powers = (2**power for power in range(1, num_gpus.bit_length()))
    return tuple(dict.fromkeys((*(one for one in powers if one <= num_gpus), num_gpus)))
