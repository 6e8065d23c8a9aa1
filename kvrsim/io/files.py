"""Read a file of any content, and write files atomically.

Neither a kill nor a power cut leaves a file that is half written.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from kvrsim.errors import InputError

_NAME_CHARS = 40  # characters of the file's name that the temporary name repeats; long names may be refused


def open_regular(path: str | Path, argument: str, *, what: str) -> BinaryIO:
    """Open a regular file to read its bytes.

    A pipe or a device is refused without waiting for a writer. what: the file, for messages, such as "a CSV file".
    Raises InputError naming `argument`.
    """
    name = " ".join(str(path).split())
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise InputError(argument, name, f"{what} that can be read ({reason})") from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise InputError(argument, name, f"{what}: a regular file, not {kind}")


def read_text(path: str | Path, argument: str, *, what: str, most_bytes: int) -> str:
    """Read the text of a file in UTF-8, without a byte order mark.

    what: the file, for messages, such as "a CSV file". Raises InputError naming `argument` where the file cannot be
    read, is not a regular file, has more than `most_bytes`, or is not text.
    """
    name = " ".join(str(path).split())
    try:
        with open_regular(path, argument, what=what) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise InputError(argument, name, f"{what} that can be read ({error.strerror})") from None
    if len(content) > most_bytes:
        raise InputError(argument, name, f"{what} of at most {most_bytes // 2**20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(argument, name, f"{what}, as text in UTF-8") from None


def use_no_compiler_cache() -> None:
    """Prevent torch from making a folder for compiled code when transformers is imported.

    kvrsim compiles nothing: unless the environment names a folder, it is the one for temporary files, which exists.
    """
    import tempfile

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())


def write_atomically(path: str | Path, data: bytes, *, argument: str) -> None:
    """Write to a temporary file in the same folder, then rename: a reader sees the old file or the new one.

    Through a symbolic link, its target is written. An existing file keeps its mode; a new
    one gets the mode 0666 minus the umask. When this returns, the content is on the disk. Raises InputError naming
    `argument` where the folder is missing or not writable, or the path is a folder, a pipe or a device.
    """
    target, mode = _target(path, argument)
    temporary = target.with_name(f".{target.name[:_NAME_CHARS]}.{os.urandom(4).hex()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(argument, path, f"a file in a folder that can be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(target.parent)


def check_writable(path: str | Path, argument: str) -> None:
    """Raise the InputError that write_atomically would raise, before the work instead of after it."""
    target, _ = _target(path, argument)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(argument, path, "a file in a folder that can be written")


def sync_folder(folder: Path) -> None:
    """Write a folder's list of files to the disk; does nothing on file systems without this operation."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _target(path: str | Path, argument: str) -> tuple[Path, int | None]:
    """Resolve a path through symbolic links; return the file and its mode, None if the file does not exist yet."""
    if not str(path).strip():
        raise InputError(argument, path, "a file name")
    try:
        try:
            target = Path(os.path.realpath(path))
        except FileNotFoundError:
            raise InputError(argument, path, "a file in a folder that exists, which the working one does not") from None
        if not target.parent.is_dir():
            raise InputError(argument, path, "a file in a folder that exists")
        status = target.stat()
    except FileNotFoundError:
        return target, None
    except (OSError, ValueError) as error:  # a name that is too long, circular links, or a null byte
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise InputError(argument, path, f"a file that can be written ({reason})") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(argument, path, "a regular file, or one that does not exist yet")
    if not os.access(target, os.W_OK):
        raise InputError(argument, path, "a file that can be written (it is write-protected)")
    return target, stat.S_IMODE(status.st_mode)


def is_first_rank() -> bool:
    """Whether this process reports and writes the files: torchrun's first process, or the only one."""
    return os.environ.get("RANK", "0") == "0"
