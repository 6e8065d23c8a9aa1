"""What may stand after an option, as far as it can be listed: for completion, and for suggestions after a mistake."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parents[2] / "data"
# What ships by name: under kvrsim/data a folder with a file each, or one file with a key each.
_KINDS = {
    **{"--model": "models", "--cluster": "clusters", "--profile": "profiles", "--engine": "engines"},
    **{"--strategy": "strategies", "--strategies": "strategies", "--gpu": "gpus", "--link": "links"},
}
_BESIDES = {"profiles": ("roofline",), "engines": ("none",)}
_WORD = re.compile(r"([a-z][a-z0-9-]*)(\[.*\])?")


@cache
def shipped(kind: str) -> tuple[str, ...]:
    """Names of the "models", "clusters", "profiles", "engines", "strategies", "gpus" or "links" that ship."""
    if (folder := _DATA / kind).is_dir():
        return tuple(sorted(path.stem for path in folder.glob("*.json")))
    return tuple(name for name in json.loads((_DATA / f"{kind}.json").read_text("utf-8")) if not name.startswith("_"))


def kind_of(param: Any, command_path: str) -> str | None:
    """What a parameter of a command (its path without `kvrsim`) names of the things that ship; None: none of them."""
    if param.param_type_name == "option":
        return _KINDS.get(param.opts[0])
    group = command_path.partition(" ")[0]
    return group if group in _KINDS.values() and command_path != group else None


def values_of(param: Any, command_path: str) -> tuple[str, ...]:
    """Names that ship, and the words that a parameter's metavar lists, such as fp16|bf16."""
    kind = kind_of(param, command_path)
    parts = (_WORD.fullmatch(part) for part in (param.metavar or "").split("|"))
    words = tuple(part[1] for part in parts if part)
    return (*(() if kind is None else shipped(kind)), *_BESIDES.get(kind or "", ()), *words)
