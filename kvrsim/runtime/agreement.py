"""Agreement of the ranks before they start: same task, same plan, same model, same libraries."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch
import transformers

from kvrsim.runtime.ranks.faults import Fault, RankError
from kvrsim.runtime.ranks.transport import Transport
from kvrsim.version import __version__


def versions() -> dict[str, str]:
    """What measured times and messages depend on: Python and the libraries, CUDA where there is one."""
    return {
        "kvrsim": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "CUDA": str(torch.version.cuda or "none"),
    }


def agree(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compare facts with all ranks; raises RankError, on every rank, naming what differs from rank 0's."""
    everyone: list[Mapping[str, str]] = transport.exchange(dict(facts), dict[str, str])
    faults = []
    for rank, theirs in enumerate(everyone):
        for fact in sorted({*everyone[0], *theirs}):
            own, first = theirs.get(fact, "nothing"), everyone[0].get(fact, "nothing")
            if own != first:
                message = f"{fact} is {own}, but {first} on rank 0"
                faults.append(Fault(rank=rank, kind="mismatch", message=message))
    if faults:
        raise RankError(faults)
