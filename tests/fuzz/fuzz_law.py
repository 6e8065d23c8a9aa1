"""The law of every command and call: a result or a one-line error about a parameter, in limited time and memory."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kvrsim
from kvrsim.cli.main import main

CODES = (0, 1, 2, 74)
MOST_CPU_S = 300.0  # limit of a case: processor time of this process, since a busy machine takes longer by the clock
MOST_BYTES = 3 * 2**30  # in addition to the memory at the start
_ERROR = re.compile(r"kvrsim: error: (\S.*?)(: got |: no such option| is missing, accepted: )")

_NO_NUMBER = re.compile(r"(?<!got ')\b(?:nan|inf) ?(?:s|ms|us|%|GiB|GB/s)(?![\w'])")  # where a number is expected


class TooLong(BaseException):
    """Raised after MOST_CPU_S; not a subclass of Exception, so that no command catches it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise TooLong after MOST_CPU_S, and MemoryError beyond MOST_BYTES."""

    def stop(*_: object) -> None:
        raise TooLong(f"more than {MOST_CPU_S:g} s of processor time")

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGPROF, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = used + MOST_BYTES if limits[1] == resource.RLIM_INFINITY else min(limits[1], used + MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


class Silence(io.StringIO):
    """A stream that records the longest CPU time between two outputs, in seconds."""

    last_s, longest_s = 0.0, 0.0  # shared by all streams

    def write(self, text: str) -> int:
        self.note()
        return super().write(text)

    @classmethod
    def note(cls) -> None:
        """Record an output or the end of the command."""
        now_s = time.process_time()
        cls.longest_s, cls.last_s = max(cls.longest_s, now_s - cls.last_s), now_s


def check_command(words: Sequence[str]) -> int:
    """Run a command line in this process and return its exit code; raises AssertionError if it breaks the law."""
    out, err = Silence(), Silence()
    Silence.last_s = time.process_time()
    said = "kvrsim " + " ".join(map(repr, words))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with bounded():
                code = main(words)
                Silence.note()
        except TooLong as late:
            raise AssertionError(f"{late}: {said}") from None
    text = err.getvalue()
    assert code in CODES, f"exit {code}: {said}\n{text[-2000:]}"
    assert "Traceback" not in text, f"{said}\n{text[-2000:]}"
    assert not _NO_NUMBER.search(out.getvalue() + text), f"no number: {said}\n{out.getvalue()[-2000:]}{text[-500:]}"
    if code == 2:
        lines = [line for line in text.splitlines() if not line.startswith(("kvrsim: note:", "kvrsim: warning:"))]
        assert len(lines) == 1, f"{len(lines)} lines: {said}\n{text[-2000:]}"
        assert _ERROR.match(lines[0]), f"no parameter is named: {said}\n{lines[0][:500]}"
        assert len(lines[0]) < 1500, f"a line of {len(lines[0])} characters: {said}"
        assert lines[0].isprintable(), f"control characters: {said}\n{lines[0]!r}"
    elif "--json" in words and not {"--help", "--version"} & set(words):
        try:
            json.loads(out.getvalue(), parse_constant=_refuse)
        except ValueError as error:
            raise AssertionError(f"no JSON ({error}): {said}") from None
    return code


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} in JSON")


def check_call(function: Callable[..., Any], arguments: dict[str, Any], said: str) -> bool:
    """Call a function of the facade; return whether it succeeded. Any error but KvrsimError breaks the law."""
    try:
        with bounded():
            found = function(**arguments)
            if hasattr(found, "to_dict"):
                json.dumps(found.to_dict(), allow_nan=False)
    except TooLong as late:
        raise AssertionError(f"{late}: {said}") from None
    except kvrsim.InputError as error:
        if not re.match(r"[a-z][a-z0-9_]*([ :]|$)", error.parameter) or "\n" in str(error):
            raise AssertionError(f"{error}: names no parameter: {said}") from None
        return False
    except kvrsim.KvrsimError:
        return False
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}: {said}") from error
    return True
