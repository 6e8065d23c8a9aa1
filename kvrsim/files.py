"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kvrsim.errors import InputError


def write_atomically(path: str | Path, data: bytes, *, argument: str) -> None:
    """Write to a temporary neighbour, then rename: a reader sees the old file or the new one.

    Raises InputError naming `argument` where the folder is missing or not writable.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        raise InputError(argument, path, "a regular file, or one that does not exist yet")
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(argument, path, f"a file in a folder that can be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        raise InputError(argument, path, f"a file that can be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
