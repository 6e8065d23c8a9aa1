"""Rows of scalars: a result as a pandas DataFrame and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

_LARGEST = ("wait_s", "peak_bytes")  # lists per GPU that are replaced by their largest value


def to_frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """One row per mapping, with scalar cells; see `scalars`."""
    import pandas

    return pandas.DataFrame([scalars(row) for row in rows])


def scalars(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values as scalars: nested ones by names such as "link.latency_s", a list as text with commas between.

    Waits and memory per GPU become their largest value. Lists of mappings are omitted.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": one for inner, one in scalars(value).items()}
        elif not isinstance(value, list | tuple):
            flat[name] = value
        elif name in _LARGEST:
            flat[name] = max(value, default=None)
        elif not any(isinstance(one, Mapping) for one in value):
            flat[name] = ",".join("" if one is None else str(one) for one in value)
    return flat
