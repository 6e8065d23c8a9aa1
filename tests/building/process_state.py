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


def process_state() -> dict[str, Any]:
    """Everything that is compared, by name."""
    state: dict[str, Any] = {
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "numpy errors": np.geterr(),
    }
    for name, value in os.environ.items():
        if name != "PYTEST_CURRENT_TEST":
            state[f"environment {name}"] = value
    for name in _LIMITS:
        state[name] = resource.getrlimit(getattr(resource, name))
    for name in _SIGNALS:
        state[name] = signal.getsignal(getattr(signal, name))
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        state["open figures"] = tuple(pyplot.get_fignums())
        for name, value in pyplot.rcParams.items():
            state[f"matplotlib {name}"] = value
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What has changed or is gone. A library that a test loads first may add to the state: torch sets a variable."""
    return [f"{name}: {value} -> {after.get(name)}" for name, value in before.items() if after.get(name) != value]
