"""What transformers takes where a config.json leaves a key out: the default of its configuration class.

`python -m calibrate.reference` writes the table of types, kvrsim/data/config_defaults.json.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvrsim.io.schema import JsonObject, parse_json

DEFAULTS = Path(__file__).parents[2] / "data" / "config_defaults.json"


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = parse_json(DEFAULTS.read_bytes())
    return table


def filled(config: JsonObject, model_type: str) -> JsonObject:
    """The configuration with the defaults of a model type, if in the table, for keys that it leaves out.

    null stays null. Of two names of a key that transformers knows, either counts.
    """
    told = _table().get(model_type)
    if told is None:
        return config
    fields = {**told["keys"], **config.fields}
    for one, other in told["names"]:
        key = next((key for key in (other, one) if key in config.fields), None)
        if key is not None:
            fields[one] = fields[other] = config.fields[key]
    return replace(config, fields=fields)
