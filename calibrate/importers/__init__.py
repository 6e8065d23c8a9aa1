"""read_source: published measurements of several formats as Measurements.

SOURCE is one of

    aisimulate:[WHEEL:]SYSTEM[/FRAMEWORK[/VERSION]]   NVIDIA's tables, see calibrate.importers.aiconfigurator
    aiconfigurator:[WHEEL:]SYSTEM[/...]               their older package
    PATH                                              a CSV file; its header identifies the kind among LAYOUTS

and may end in a filter, ?KEY=TEXT[&KEY=TEXT ...], which keeps a row if its device (gpu=), kernel (kernel=) or source
(model=, because a source usually names the model) contains the text, in upper or lower case:

    attention.csv?gpu=a100&kernel=flash_attention

To read one more kind of CSV, add its Layout to LAYOUTS.
"""

from __future__ import annotations

from calibrate.data import LAYOUT, OPERATIONS, CsvFormat, CsvTable, Measurement
from calibrate.importers import aiconfigurator, vidur
from kvrsim.errors import InputError

LAYOUTS: tuple[CsvFormat, ...] = (LAYOUT, *vidur.LAYOUTS)

# Field of Measurement by the key of a filter.
_FILTERS = {"gpu": "device", "kernel": "kernel", "model": "source"}
_MAX_SHOWN = 6


def read_source(text: str, argument: str = "measurements") -> list[Measurement]:
    """Read the measurements of one SOURCE, in its order; at least one.

    Raises InputError naming `argument` where the source is unknown, cannot be read or has no usable rows.
    """
    place, _, query = text.partition("?")
    filters: dict[str, str] = {}
    if "?" in text:
        filters = _parse_filter(query, text, argument)
    if place.partition(":")[0] in aiconfigurator.PACKAGES:
        rows = aiconfigurator.read_aiconfigurator(place, argument)
    else:
        table = CsvTable.read(place, argument)
        rows = layout_of(table).read(table)
    if not rows:
        raise InputError(argument, text, f"a source with rows of {', '.join(OPERATIONS)}")
    return _filter(rows, filters, text, argument)


def layout_of(table: CsvTable) -> CsvFormat:
    """The kind of a CSV, from its header; InputError lists the kinds, and the missing columns of the nearest kind."""
    columns = set(table.columns)
    for layout in LAYOUTS:
        if columns.issuperset(layout.signature):
            return layout
    nearest = max(LAYOUTS, key=lambda layout: len(columns.intersection(layout.signature)) / len(layout.signature))
    missing = [name for name in nearest.signature if name not in columns]
    accepted = "the columns of one of: " + ", ".join(layout.name for layout in LAYOUTS)
    if 2 * len(missing) <= len(nearest.signature):
        accepted += f" (nearest is {nearest.name}, which has {', '.join(missing)} too)"
    raise InputError(f"{table.where}: header", ", ".join(table.columns), accepted)


def _parse_filter(query: str, text: str, argument: str) -> dict[str, str]:
    """Parse a filter: the wanted text in lower case, by field of Measurement."""
    filters: dict[str, str] = {}
    for part in query.split("&"):
        key, _, value = part.partition("=")
        if key not in _FILTERS or not value or _FILTERS[key] in filters:
            keys = ", ".join(f"{field}=TEXT" for field in _FILTERS)
            raise InputError(argument, text, f"after the ? each of {keys} at most once, joined by &")
        filters[_FILTERS[key]] = value.lower()
    return filters


def _filter(rows: list[Measurement], filters: dict[str, str], text: str, argument: str) -> list[Measurement]:
    """The rows that contain all wanted texts. If there are none, InputError lists the values of the field."""
    for field, value in filters.items():
        matching = [row for row in rows if value in getattr(row, field).lower()]
        if not matching:
            values = sorted({getattr(row, field) for row in rows})
            examples = values[:_MAX_SHOWN]
            if len(values) > _MAX_SHOWN:
                examples.append("...")
            raise InputError(argument, text, f"a filter that keeps some rows; what there is: {'; '.join(examples)}")
        rows = matching
    return rows
