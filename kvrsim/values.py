"""`dataclass` for values (frozen data classes), which compiles `__init__` on first use and no other method.

`dataclasses.dataclass` compiles six methods per class. For the 120 values that `kvrsim plan` declares, of which it uses
two thirds, this takes half as long as importing numpy.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["dataclass"]

if TYPE_CHECKING:  # type checkers know the methods of this decorator alone
    from dataclasses import dataclass
else:

    def dataclass(*, frozen, kw_only=False, slots=False, eq=True, repr=True):
        """Decorate a class as `dataclasses.dataclass` does; `frozen` must be true."""
        assert frozen, "data classes that change are those of the standard library"
        decorate = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)

        def value(own):
            cls = decorate(own)
            methods = {"__init__": _Init(cls), "__setattr__": _refuse, "__delattr__": _refuse}
            methods |= {"__repr__": _repr} if repr else {}
            methods |= _by_fields(cls) if eq else {}
            methods |= {"__getstate__": _state, "__setstate__": _restore} if slots else {}
            for name in methods.keys() - vars(own).keys():
                setattr(cls, name, methods[name])
            return cls

        return value


class _Factory:
    """A default in signatures, as in the standard library."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


class _Init:
    """The `__init__` of a class until its first use."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __get__(self, instance: object, owner: type) -> Any:
        self.cls.__init__ = _compiled_init(self.cls)
        return self.cls.__init__.__get__(instance, owner)


def _compiled_init(cls: Any) -> Callable[..., None]:
    """The `__init__` that `dataclasses.dataclass` makes for a frozen class."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_unset": _FACTORY}
    positional, keywords, lines = ["self"], list[str](), list[str]()
    parameters = [one for one in fields(cls) if one.init]
    for one in parameters:
        default, value = "", one.name
        if one.default is not MISSING:
            known[f"_{one.name}"], default = one.default, f"=_{one.name}"
        elif one.default_factory is not MISSING:
            known[f"_{one.name}"], default = one.default_factory, "=_unset"
            value = f"_{one.name}() if {one.name} is _unset else {one.name}"
        (keywords if one.kw_only else positional).append(one.name + default)
        lines.append(f"_set(self, {one.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    takes = ", ".join(positional + ["*"] * bool(keywords) + keywords)
    body = "\n  ".join(lines or ["pass"])
    text = f"def make({', '.join(known)}):\n def __init__({takes}):\n  {body}\n return __init__"
    made: dict[str, Callable[..., Any]] = {}
    exec(text, vars(sys.modules[cls.__module__]), made)  # the names of that module resolve the annotations
    init = made["make"](**known)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {one.name: one.type for one in parameters} | {"return": None}
    return init  # type: ignore[no-any-return]


def _refuse(self: object, name: str, *_: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _repr(self: Any) -> str:
    values = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"


def _by_fields(cls: Any) -> dict[str, Callable[..., Any]]:
    """`__eq__` and `__hash__` by the values of the fields."""
    values: Callable[[Any], Any] = attrgetter(*(one.name for one in fields(cls) if one.compare))

    def equal(self: object, other: object) -> Any:
        return values(self) == values(other) if type(self) is type(other) else NotImplemented

    def hash_of(self: object) -> int:
        return hash(values(self))

    return {"__eq__": equal, "__hash__": hash_of}


def _state(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
