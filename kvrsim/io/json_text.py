"""Reading JSON that somebody else wrote: never deeper than what kvrsim writes itself."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 50  # arrays and objects inside each other; nothing that kvrsim reads comes near


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError where it is none, or is more than MAX_DEPTH levels deep.

    The json module gives up at Python's recursion limit, and what it has read just below of that limit cannot be
    compared or written again.
    """
    too_deep = f"more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(too_deep)
