"""The version and the command line that runs; results contain both."""

from __future__ import annotations

import shlex
import sys
from pathlib import PurePath

__version__ = "0.1.0"

_PROGRAMS = ("kvrsim", "kvrsim.exe", "__main__.py")


def command_line() -> str | None:
    """The running command, quoted for a shell; None if kvrsim is used from Python."""
    if not sys.argv or PurePath(sys.argv[0]).name not in _PROGRAMS:
        return None
    return shlex.join(["kvrsim", *sys.argv[1:]])
