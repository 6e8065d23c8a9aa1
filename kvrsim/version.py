"""The version, the digest of the shipped data, and the command line that runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path, PurePath

__version__ = "0.1.0"

DATA_FOLDER = Path(__file__).parent / "data"
_DIGEST_CHARS = 12
_PROGRAMS = ("kvrsim", "kvrsim.exe", "__main__.py")


def command_line() -> str | None:
    """The running command, quoted for a shell; None if kvrsim is used from Python."""
    if not sys.argv or PurePath(sys.argv[0]).name not in _PROGRAMS:
        return None
    return shlex.join(["kvrsim", *sys.argv[1:]])


def data_digest() -> str:
    """The first hexadecimal digits of the SHA-256 of all files in kvrsim/data: their names, sizes and contents.

    Two installations with the same version and the same digest predict the same times.
    """
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(filter(Path.is_file, DATA_FOLDER.rglob("*")), key=Path.as_posix):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(DATA_FOLDER).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_DIGEST_CHARS]
