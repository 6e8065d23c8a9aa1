"""Stubs of the functions of the facade: `python -m tests.building.stubs` writes them into kvrsim/__init__.pyi.

A function of the facade takes groups of arguments, whose fields are its keywords. Type checkers and editors cannot see
these; the stub has them, with the types that a caller may give.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from kvrsim.arguments import Arguments, Read, groups_of
from kvrsim.io.annotations import AnnotationParts

PATH = Path(__file__).parents[2] / "kvrsim" / "__init__.pyi"
START = "# Functions, written by `python -m tests.building.stubs`. The comment says which module defines a function.\n"
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "kvrsim.builder": ("make_scenario",),
    "kvrsim.prefills": ("calibrate",),
    "planner.api": (*("build_predictor", "build_table", "capacity", "confirm", "map_strategies", "plan", "simulate"),),
}


def accepted_type(annotation: object) -> str:
    """The type of what a caller may give for an annotated argument, as source text."""
    kind = AnnotationParts(annotation)
    accepted = _accepted_text(kind)
    if kind.optional:
        accepted += " | None"
    return accepted


def _accepted_text(kind: AnnotationParts) -> str:
    for extra in kind.extras:
        if isinstance(extra, Read) and extra.accepts:
            return extra.accepts
    if get_origin(kind.base) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind.base)))}]"
    texts: dict[object, str] = {bool: "bool", str: "str", int: "int | str", float: "float | str"}
    return texts[kind.base]


def _fields(group: type[Arguments]) -> dict[str, str]:
    """The accepted type of each field of a group, those of its base classes first."""
    types: dict[str, str] = {}
    for base in reversed(group.__mro__):
        for name, annotation in inspect.get_annotations(base, eval_str=True).items():
            if get_origin(annotation) is Annotated:
                types[name] = accepted_type(annotation)
    return types


def stub(function: Callable[..., object]) -> str:
    """The text of the stub of a facade function, whose arguments `takes` declares."""
    types: dict[str, str] = {}
    for group in groups_of(inspect.unwrap(function)):
        types |= _fields(group)
    types |= {name: accepted_type(kind) for name, kind in vars(function)["kinds"].items()}
    signature = inspect.signature(function)
    lines = [f"def {function.__name__}(  # {function.__module__}", "    *,"]
    for parameter in signature.parameters.values():
        accepted = types.get(parameter.name) or _plain(parameter.annotation)
        lines.append(f"    {parameter.name}: {accepted}{_default(parameter)},")
    return "\n".join([*lines, f") -> {_plain(signature.return_annotation)}: ..."])


def _default(parameter: Parameter) -> str:
    if parameter.default is Parameter.empty:
        return ""
    return f" = {parameter.default!r}"


def _plain(annotation: Any) -> str:
    """An annotation of the source, with names as the facade has them."""
    assert isinstance(annotation, str)
    return annotation.replace("kvrsim.", "")


def stubs() -> Iterator[str]:
    """The stubs of all functions."""
    for module, names in FUNCTIONS.items():
        for name in names:
            yield stub(getattr(importlib.import_module(module), name))


def stub_file() -> str:
    """The text of the file, with stubs as the code has them now."""
    names, start, _ = PATH.read_text("utf-8").partition(START)
    assert start, f"{PATH} lacks the line {START}"
    text = "\n".join([names + START.rstrip("\n"), *stubs(), ""])
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(PATH), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    PATH.write_text(stub_file(), encoding="utf-8")
