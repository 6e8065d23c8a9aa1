"""Exceptions that kvrsim raises on purpose.

KvrsimError                 any error that a caller may want to catch
├── InputError              the user's input is wrong: names the parameter, the value, what is accepted (exit 2)
├── RankError               of kvrsim.runtime: a rank died, hung, lacked memory or disagrees; names the rank (exit 1)
├── LinkError               of kvrsim.runtime, inside a rank: a message was not received or not sent (exit 1)
└── NothingFits             `plan.best` was read, and no strategy fits in memory (exit 1)

It is not an error if nothing fits or a target is missed: the answer's `feasible` is False.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_NOT_WRITTEN = 74  # exit code: the answer is complete, but a file was not written


class KvrsimError(Exception):
    """Base of every error that kvrsim raises on purpose."""

    exit_code = 1


class _Absent:
    """The value of a missing parameter."""

    def __str__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class InputError(KvrsimError):
    """A value from the user cannot be used, or is missing.

    parameter: the name in the Python API, such as "link_bandwidth"; a file and a key may follow.
    value: the given value, any object; ABSENT if there is none.
    accepted: what would be accepted; names of other parameters are in backticks.
    guess: the value that the user probably means; None: unknown.

    The command line shows the same names as options: `kvrsim.cli.mistakes`.

    >>> str(InputError("gpus", 0, "a whole number of at least 1"))
    "gpus: got '0', accepted: a whole number of at least 1"
    >>> str(InputError("ctx", ABSENT, "a number of tokens"))
    'ctx is missing, accepted: a number of tokens'
    """

    exit_code = 2

    def __init__(self, parameter: str, value: object, accepted: str, guess: str | None = None) -> None:
        self.parameter = parameter
        self.value = value
        self.accepted = accepted
        self.guess = guess
        problem = " is missing" if isinstance(value, _Absent) else f": got '{_excerpt(value, 80)}'"
        hint = "" if guess is None else f"; did you mean {_excerpt(guess, 80)}?"
        super().__init__(f"{_excerpt(parameter, 300)}{problem}, accepted: {_excerpt(accepted, 1000)}{hint}")


def _excerpt(value: object, most: int) -> str:
    """The value on one line, in at most `most` characters, with control characters escaped."""
    text = " ".join(str(value).split())
    text = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def check_whole(parameter: str, value: object, least: int, most: int, unit: str = "") -> None:
    """Raise InputError unless the value is a whole number from `least` to `most`; `unit` ends the message."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(parameter, value, f"a whole number from {least} to {most}{unit}")


def check_rising(parameter: str, points: Sequence[float], other: str, values: Sequence[object]) -> None:
    """Raise InputError unless the points of a table are ascending, and `other` holds one value per point."""
    if not points or len(points) != len(values) or sorted(set(points)) != list(points):
        raise InputError(parameter, list(points), f"at least one number, rising, as many as {other}")


class NothingFits(KvrsimError):  # noqa: N818 - the name says what is wrong
    """No strategy fits in memory, so there is no best one.

    shortfall: the nearest strategy's missing memory, and settings that would fit (kvrsim.results.results.Shortfall).
    """

    def __init__(self, message: str, shortfall: object) -> None:
        self.shortfall = shortfall
        super().__init__(message)

    def __reduce__(self) -> tuple[type[NothingFits], tuple[str, object]]:
        return type(self), (str(self), self.shortfall)
