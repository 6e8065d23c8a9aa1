"""What a key that a config.json leaves out is: the default of transformers' configuration class, of types in a table."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvrsim.io.json_text import JsonObject, parse_json

DEFAULTS = Path(__file__).parents[1] / "data" / "config_defaults.json"


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = parse_json(DEFAULTS.read_bytes())
    return table


def with_defaults(config: JsonObject, model_type: str) -> JsonObject:
    """The same with the keys that it leaves out, as transformers completes it; null is what the file says."""
    told = _table().get(model_type)
    if told is None:
        return config
    fields = {**told["keys"], **config.fields}
    for one, other in told["names"]:
        key = next((key for key in (other, one) if key in config.fields), None)
        if key is not None:
            fields[one] = fields[other] = config.fields[key]
    return replace(config, fields=fields)
