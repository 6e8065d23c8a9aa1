"""Strategies of users: a Python file and the name of a variable in it, such as "./mine.py:STRATEGY"."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

from kvrsim.errors import InputError
from kvrsim.io.files import open_regular
from kvrsim.strategies.base import Strategy

_FILE = re.compile(r"(.+\.py)(?::(.*))?", re.S)


def is_file(text: str) -> bool:
    """Whether a text is the name of a strategy in a file."""
    return _FILE.fullmatch(text) is not None


def from_file(text: str, parameter: str) -> Strategy:
    """Load the strategy of "FILE.py:NAME". Raises InputError if the file or name is missing or is not a Strategy.

    The file runs once, and again after each change.
    """
    matched = _FILE.fullmatch(text)
    assert matched is not None, "see is_file"
    path = Path(matched[1]).expanduser()
    try:
        status = path.stat()
        with open_regular(path, parameter, what="FILE.py:NAME") as file:
            code = file.read()
    except OSError as error:
        raise InputError(parameter, text, f"FILE.py:NAME with a file to read ({error.strerror})") from None
    key = (path.resolve(), status.st_mtime_ns, status.st_size)
    if key not in _modules:
        _modules[key] = _run(path, code, text, parameter)
    module = _modules[key]
    if not matched[2] or not hasattr(module, matched[2]):
        names = [name for name, value in vars(module).items() if isinstance(value, Strategy)]
        names_text = ", ".join(names) or "none"
        raise InputError(parameter, text, f"FILE.py:NAME with the name of a Strategy; {path.name} has {names_text}")
    value = getattr(module, matched[2])
    if not isinstance(value, Strategy):
        raise InputError(parameter, text, f"the name of a kvrsim Strategy, which a {type(value).__name__} is not")
    return value


_modules: dict[tuple[Path, int, int], ModuleType] = {}  # modules by file, time of change and size


def _run(path: Path, code: bytes, text: str, parameter: str) -> ModuleType:
    """Run the file as a module that cannot be imported by name: other processes get its functions by value."""
    module = ModuleType(f"kvrsim_strategy_file_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module while it runs
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise InputError(parameter, text, f"a file that Python can run ({where(error)})") from error
    finally:
        del sys.modules[module.__name__]
    return module


def where(error: BaseException) -> str:
    """One line for an error in a user's file: "line 3 of mine.py: NameError: name 'x' is not defined"."""
    import traceback  # imported only for errors

    if isinstance(error, SyntaxError):
        return f"line {error.lineno} of {Path(error.filename or '').name}: SyntaxError: {error.msg}"
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not _is_library(path):
            return f"line {frame.lineno} of {path.name}: {text}"
    return text


def _is_library(path: Path) -> bool:
    return Path(__file__).parents[1] in path.parents or "site-packages" in path.parts or str(path).startswith("<")
