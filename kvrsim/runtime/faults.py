"""Errors of ranks: RankError for the process that started them, LinkError inside a rank."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvrsim.errors import InputError, KvrsimError

# Kinds in order of likelihood as a cause: if a rank runs out of memory, its neighbours only lose their connection.
FaultKind = Literal["died", "memory", "mismatch", "input", "error", "silent", "link"]
_KINDS: tuple[FaultKind, ...] = ("died", "memory", "mismatch", "input", "error", "silent", "link")

# Messages of gloo, NCCL and torch's stores, with their meaning; the first matching pattern is used.
_MEANINGS = (
    (r"[Cc]onnection (?:was )?(?:closed|reset)|Broken pipe|pair closure|GLHF", "the connection was closed"),
    (r"[Tt]im(?:ed out|eout)\D*?(\d+) ?ms", "no answer within {seconds:g} s"),
    (r"[Ss]ocket [Tt]imeout|timed out", "no answer in time"),
    (r"Unable to find (?:interface|address)", "no network interface that can be used; is the loopback interface up?"),
    (r"Address already in use|EADDRINUSE", "the port is in use"),
    (r"[Cc]onnection refused|failed to connect", "nobody listens there"),
)
_MOST_CHARACTERS = 200  # largest number of characters of an unknown message


class LinkError(KvrsimError):
    """A message did not arrive or leave in time; `peer`: the other rank."""

    def __init__(self, peer: int | None, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An error on one rank."""

    rank: int
    kind: FaultKind
    message: str  # error message without the rank and layer
    layer: int | None = None  # decoder layer that the rank had reached; None: outside the layers
    peer: int | None = None  # rank that this rank waited for; None: no single rank
    parameter: str | None = None  # parameter that an InputError on the rank names

    def __str__(self) -> str:
        place = f"rank {self.rank}"
        if self.layer is not None:
            place = f"{place}, layer {self.layer}"
        return f"{place}: {self.message}"


class RankError(KvrsimError):
    """A rank died, hung, was late, ran out of memory, or had other plans than the other ranks."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        waited_for = {fault.peer for fault in faults}

        def likelihood(fault: Fault) -> tuple[int, bool, int]:
            return _KINDS.index(fault.kind), fault.rank not in waited_for, fault.rank

        self.faults = tuple(sorted(faults, key=likelihood))
        self.exit_code = 1
        if self.faults[0].kind == "input":
            self.exit_code = 2
        super().__init__("; ".join(_texts(self.faults)))


def _texts(faults: Sequence[Fault]) -> list[str]:
    """Describe faults; a mistake in the input that several ranks report is said once, without a rank."""
    texts = []
    for fault in faults:
        text = str(fault)
        if fault.kind == "input" and sum(other.message == fault.message for other in faults) > 1:
            text = fault.message
        if text not in texts:
            texts.append(text)
    return texts


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory; torch raises a plain RuntimeError for the host's memory."""
    words = re.search("out of memory|can't allocate memory|not enough memory", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and words is not None)


def meaning(error: BaseException) -> str:
    """Return the meaning of a message of gloo, NCCL or torch's stores; other messages lose their C++ locations."""
    text = " ".join(str(error).split())
    for pattern, words in _MEANINGS:
        if match := re.search(pattern, text):
            seconds = 0.0
            if match.groups():
                seconds = int(match[1]) / 1e3
            return words.format(seconds=seconds)
    plain = re.sub(r"\[[^\]]*\]", "", text).encode("ascii", "ignore").decode()
    plain = " ".join(plain.split()).strip(" .:")
    return plain[:_MOST_CHARACTERS] or type(error).__name__


def faults_of(error: BaseException, rank: int, layer: int | None) -> list[Fault]:
    """Return the faults that a rank reports for an error that ended its work."""
    if isinstance(error, RankError):
        return list(error.faults)
    if isinstance(error, LinkError):
        return [Fault(rank=rank, kind="link", message=error.reason, layer=layer, peer=error.peer)]
    if is_out_of_memory(error):
        return [Fault(rank=rank, kind="memory", message="out of memory", layer=layer)]
    if isinstance(error, InputError):
        return [Fault(rank=rank, kind="input", message=str(error), parameter=error.parameter)]
    if isinstance(error, KvrsimError):
        return [Fault(rank=rank, kind="input", message=str(error))]
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}, line {where.lineno})"
    return [Fault(rank=rank, kind="error", message=message, layer=layer)]
