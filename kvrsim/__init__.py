"""kvrsim simulates and plans the prefill of large language models over several GPUs.

>>> import kvrsim
>>> plan = kvrsim.plan(ctx="16k", gpus=8)
>>> plan.best.strategy, plan.best.partition, plan.best.ttft_s  # doctest: +SKIP

__init__.pyi lists the names and the modules that define them. A module is loaded when one of its names is first used.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrsim.views import View

_IMPORT = re.compile(r"^from (?P<home>\S+) import (?P<name>\w+) as (?P<alias>\w+)$", re.MULTILINE)
_FUNCTION = re.compile(r"^def (?P<alias>(?P<name>\w+))\(  # (?P<home>\S+)$", re.MULTILINE)
_NAMES = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_HOMES = {match["alias"]: match for pattern in (_IMPORT, _FUNCTION) for match in pattern.finditer(_NAMES)}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrsim' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]["home"]), _HOMES[name]["name"])
    return value


def view_of(result: object) -> View:
    """Return the view of a result.

    Views import results, so results cannot import views: `plot` and the forms for notebooks ask here.
    """
    view: View = import_module("kvrsim.views").View(result)
    return view


def __dir__() -> list[str]:
    return __all__
