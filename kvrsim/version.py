"""What is running: the version, apart from the facade so that results can carry it, and the command."""

from __future__ import annotations

import shlex
import sys
from pathlib import PurePath

__version__ = "0.1.0"

_PROGRAMS = ("kvrsim", "kvrsim.exe", "__main__.py")


def command_line() -> str | None:
    """The command that is running, as a shell takes it; None: kvrsim is used from Python."""
    if not sys.argv or PurePath(sys.argv[0]).name not in _PROGRAMS:
        return None
    return shlex.join(["kvrsim", *sys.argv[1:]])
