"""What the functions of the Python API are given, checked at one place: by the parameter's name.

`checked` wraps a function of the facade. Each argument becomes a plain Python value (numbers of NumPy as Python's,
paths as text, a generator as a list), or an InputError names the parameter. Text is left for the parser that knows its
unit. Arguments without a check here, such as those in `**options`, go on as they are.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from kvrsim.errors import InputError

STRATEGY = "kvrsim.strategies.base:Strategy"
MOST_VALUES = 2**16  # in one list
MOST_SEED = 2**32 - 1

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
Check = Callable[[object, str], Any]  # value, parameter -> the value to use


def checked(**others: Check) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Check keyword arguments by CHECKS, or by `others` where a name means something else in this function.

    None is left as it is where it is the parameter's default.
    """
    checks = CHECKS | others

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}

        @functools.wraps(function)
        def called(*args: _Parameters.args, **given: _Parameters.kwargs) -> _Result:
            for name, value in given.items():
                if name in checks and not (value is None and defaults.get(name) is None):
                    given[name] = checks[name](value, name)
            return function(*args, **given)

        return called

    return decorate


def whole(value: object, parameter: str) -> int | str:
    """A whole number of Python or NumPy, or text; whether it is in range is for others to say."""
    if isinstance(value, str):
        return str(value)
    found = _index(value)
    if found is None:
        raise _refusal(parameter, value, "a whole number")
    return found


def tokens(value: object, parameter: str) -> int:
    """A number of tokens: a whole number, or text such as "4k"."""
    from kvrsim.units import parse_tokens

    found = whole(value, parameter)
    return parse_tokens(found, parameter) if isinstance(found, str) else found


def bandwidths(value: object, parameter: str) -> list[float]:
    """Several bandwidths in bytes per second, or texts such as "10GB/s"."""
    from kvrsim.units import parse_bandwidth

    found = [number(one, parameter) for one in _list(value, parameter, "a list of numbers or texts with units")]
    return [parse_bandwidth(one, parameter) if isinstance(one, str) else one for one in found]


def count(most: int) -> Check:
    """A whole number from 1 to `most`, as a number or as text."""

    def check(value: object, parameter: str) -> int:
        found = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else _index(value)
        if found is None or not 1 <= found <= most:
            raise _refusal(parameter, value, f"a whole number from 1 to {most}")
        return found

    return check


def seed(value: object, parameter: str) -> int:
    """A whole number from 0 to 2**32 - 1."""
    found = _index(value)
    if found is None or not 0 <= found <= MOST_SEED:
        raise _refusal(parameter, value, f"a whole number from 0 to {MOST_SEED}")
    return found


def number(value: object, parameter: str) -> float | str:
    """A real number, or text with its unit."""
    if isinstance(value, str):
        return str(value)
    found = None if _is_flag(value) or isinstance(value, bytes | bytearray) else _real(value)
    if found is None:
        raise _refusal(parameter, value, "a number, or text with its unit")
    return found


def text(value: object, parameter: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise _refusal(parameter, value, "a text")
    return str(value)


def flag(value: object, parameter: str) -> bool:
    """True or False."""
    if not _is_flag(value):
        raise _refusal(parameter, value, "True or False")
    return bool(value)


def function(value: object, parameter: str) -> object:
    """Something to call."""
    if not callable(value):
        raise _refusal(parameter, value, "a function")
    return value


def strategies(value: object, parameter: str) -> list[object]:
    """Names or Strategies in a list, names in a text with commas between, or one Strategy."""
    given: list[object]
    if isinstance(value, str):
        given = [name.strip() for name in value.split(",")]
    elif _is_one_of(value, (STRATEGY,)):
        given = [value]
    else:
        given = _list(value, parameter, "names, such as ['tsp', 'kvr-s'], or Strategies")
    return [CHECKS["strategy"](one.strip() if isinstance(one, str) else one, parameter) for one in given]


def chunk_lens(value: object, parameter: str) -> list[int]:
    """Whole numbers of tokens in a list, tuple or array of one dimension."""
    accepted = "whole numbers of tokens, such as [5000, 3192]"
    found = [_index(one) for one in _list(value, parameter, accepted)]
    if None in found:
        raise _refusal(parameter, value, accepted)
    return [one for one in found if one is not None]


def wholes(value: object, parameter: str) -> list[int | str] | str:
    """A text such as "2,4,8", or several whole numbers."""
    if isinstance(value, str):
        return str(value)
    return [whole(one, parameter) for one in _list(value, parameter, "whole numbers, such as [2, 4, 8]")]


def listed(value: object, parameter: str) -> str:
    """Several whole numbers as a text with commas between."""
    found = wholes(value, parameter)
    return found if isinstance(found, str) else ",".join(map(str, found))


def named(*kinds: str, what: str = "a name or path") -> Check:
    """Text, or an object of one of these classes ("module:Class"), imported where they are needed.

    what: the text, in words for users.
    """

    def check(value: object, parameter: str) -> object:
        if isinstance(value, str):
            return str(value)
        if hasattr(type(value), "__fspath__"):
            return str(value)
        if not _is_one_of(value, kinds):
            classes = " or ".join(f"a {kind.partition(':')[2]}" for kind in kinds)
            raise _refusal(parameter, value, f"{what}{', or ' if classes else ''}{classes}")
        return value

    return check


def number_or_path(value: object, parameter: str) -> int | str:
    """A whole number, or a text or path."""
    if isinstance(value, str) or hasattr(type(value), "__fspath__"):
        return str(value)
    found = _index(value)
    if found is None:
        raise _refusal(parameter, value, "a whole number, a text or a path")
    return found


def price(value: object, parameter: str) -> object:
    """One number, a text, or a mapping from group sizes to numbers."""
    if isinstance(value, Mapping):
        return {whole(size, parameter): number(one, parameter) for size, one in value.items()}
    return number(value, parameter)


def _is_one_of(value: object, kinds: Iterable[str]) -> bool:
    """Whether it is an object of one of these classes ("module:Class"), which are not imported."""
    return any(f"{base.__module__}:{base.__qualname__}" in kinds for base in type(value).__mro__)


def _index(value: object) -> int | None:
    try:
        return None if _is_flag(value) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _real(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's has had both names


def _list(value: object, parameter: str, accepted: str) -> list[object]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise _refusal(parameter, value, accepted)
    try:
        found = list(itertools.islice(value, MOST_VALUES + 1))
    except TypeError:  # an array without dimensions
        raise _refusal(parameter, value, accepted) from None
    if len(found) > MOST_VALUES:
        raise InputError(parameter, f"more than {MOST_VALUES} values", f"at most {MOST_VALUES} values")
    return found


def _refusal(parameter: str, value: object, accepted: str) -> InputError:
    if value is None or isinstance(value, str):
        return InputError(parameter, value, accepted)
    return InputError(parameter, f"{type(value).__name__} {value!r}", accepted)


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("ctx", "gpus", "batch", "cached_prefix", "pack_tokens"), whole),
    **dict.fromkeys(("samples", "max_gpus", "replications", "top"), count(2**20)),
    "jobs": count(4096),
    **dict.fromkeys(("link_bandwidth", "link_latency", "memory_fraction", "slo_ttft", "percentile"), number),
    **dict.fromkeys(("rate_scale", "tpot", "expert_imbalance"), number),
    **dict.fromkeys(("topology", "attention", "dtype", "method", "executor", "objective"), text),
    **dict.fromkeys(("decode", "order"), text),
    **dict.fromkeys(("timeline", "breakdown", "sure", "uniform_only", "virtual", "expert_parallel"), flag),
    **dict.fromkeys(("on_progress", "on_stage", "on_place"), function),
    "strategies": strategies,
    "strategy": named(STRATEGY),
    "partition": chunk_lens,
    "link_bandwidths": bandwidths,
    "stride": tokens,
    "group_sizes": listed,
    "price_per_gpu_hour": price,
    "seed": seed,
    "model": named("kvrsim.model.spec:ModelSpec"),
    "profile": named("kvrsim.kernels.profile:CalibrationProfile"),
    "cluster": named("kvrsim.hardware:Cluster"),
    "prefix_placement": named("kvrsim.kernels.prefix:PrefixPlacement", what="a text"),
    "engine": named("kvrsim.engine:Engine"),
    "table": named("planner.table.table:PartitionTable"),
    "noise": named("kvrsim.noise:Noise"),
}
