"""What a test may not leave changed in its process, because later tests of the same process would see it."""

from __future__ import annotations

import locale
import os
import resource
import signal
import sys
from typing import Any

import numpy as np

_LIMITS = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGPROF", "SIGXCPU")
# Variables that the libraries and kvrsim set once for the whole process, and that of pytest.
_SET_ONCE = ("PYTEST_CURRENT_TEST",)


def process_state() -> dict[str, Any]:
    """Everything that is compared, by name."""
    state: dict[str, Any] = {
        "folder": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in _SET_ONCE},
        "search path": tuple(sys.path),
        "locale": locale.setlocale(locale.LC_ALL),
        "numpy errors": np.geterr(),
    }
    for name in _LIMITS:
        state[name] = resource.getrlimit(getattr(resource, name))
    for name in _SIGNALS:
        state[name] = signal.getsignal(getattr(signal, name))
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        state["open figures"] = tuple(pyplot.get_fignums())
    if (matplotlib := sys.modules.get("matplotlib")) is not None:
        state["matplotlib settings"] = dict(matplotlib.rcParams)
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two states; a library that was loaded between them has no state before."""
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
