"""What ranks tell each other besides tensors: JSON, which unlike a pickle cannot run code where it is read."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvrsim.errors import KvrsimError

MAX_BYTES = 2**28  # of one rank's value


class WireError(KvrsimError):
    """What another rank has sent is not what was expected."""


def encoded(value: Any) -> bytes:
    """Dataclasses, mappings, sequences, text, numbers and None as UTF-8 JSON; TypeError for anything else."""
    return json.dumps(_plain(value)).encode()


def decoded(content: bytes, kind: Any = Any) -> Any:
    """The value of an annotation, such as a dataclass or tuple[int, ...]; raises WireError where it does not fit.

    Any: plain JSON values, as they are.
    """
    try:
        return _typed(json.loads(content), kind)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvrsimError) as error:
        text = " ".join(str(error).split())[:120]
        raise WireError(f"no {getattr(kind, '__name__', kind)} ({type(error).__name__}: {text})") from None


def result_kind(function: Callable[..., Any]) -> Any:
    """The annotation of what a function returns; Any where it has none."""
    told = getattr(function, "__annotations__", {})
    # Its parameters' types may be names for type checkers alone.
    only = types.SimpleNamespace(__annotations__={"return": told.get("return", Any)})
    return get_type_hints(only, getattr(function, "__globals__", {}))["return"]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(one) for key, one in value.items()}
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return value


def _typed(value: Any, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    kinds: Any
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _of_union(value, arguments)
    if origin is Literal:
        return _checked(value, value in arguments, kind)
    if origin is tuple:
        _checked(value, isinstance(value, list), kind)
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(_typed(one, of) for one, of in zip(value, kinds, strict=True))
    if origin in (list, Sequence):
        return [_typed(one, arguments[0]) for one in _checked(value, isinstance(value, list), kind)]
    if origin in (dict, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        return {_typed(key, arguments[0]): _typed(one, arguments[1]) for key, one in pairs}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        kinds = get_type_hints(kind)
        return kind(**{name: _typed(one, kinds[name]) for name, one in value.items()})
    if kind is float:
        return float(_checked(value, isinstance(value, int | float) and not isinstance(value, bool), kind))
    if kind is int:
        return _checked(value, isinstance(value, int) and not isinstance(value, bool), kind)
    if kind is None or kind is type(None):
        return _checked(value, value is None, kind)
    return _checked(value, isinstance(value, kind), kind)


def _of_union(value: Any, kinds: Sequence[Any]) -> Any:
    """The first kind that fits."""
    for kind in kinds:
        try:
            return _typed(value, kind)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    raise TypeError(f"{str(value)[:40]!r} is none of {kinds}")


def _checked(value: Any, fits: bool, kind: Any) -> Any:
    if not fits:
        raise TypeError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    return value
