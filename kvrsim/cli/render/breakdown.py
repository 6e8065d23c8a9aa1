"""The breakdown of a simulation as a table: what the last rank spends its time on, with all ranks' shares."""

from __future__ import annotations

from rich.table import Table

from kvrsim.breakdown import Breakdown, BreakdownRow
from kvrsim.cli.render.tables import columns
from kvrsim.units import format_seconds


def breakdown_table(breakdown: Breakdown) -> Table:
    """One row a part of the work; seconds of the first and the last rank, and the share of all ranks' time."""
    last = max(row.rank for row in breakdown.rows)
    ranks = (0, last) if last else (0,)
    table = columns("operation", "what")
    columns(*(f"rank {rank}" for rank in ranks), "share", "roofline", numbers=True, into=table)
    columns("known", into=table)
    kinds = list(dict.fromkeys(row.kind for row in breakdown.rows))
    keys = dict.fromkeys((row.kind, row.what) for row in breakdown.rows)
    for key in sorted(keys, key=lambda key: kinds.index(key[0])):
        rows = {row.rank: row for row in breakdown.rows if (row.kind, row.what) == key}
        seconds = [format_seconds(rows[rank].seconds) if rank in rows else "" for rank in ranks]
        share = sum(row.share for row in rows.values()) / (last + 1)
        table.add_row(*key, *seconds, f"{share:.1%}", _roofline(list(rows.values())), _known(list(rows.values())))
    return table


def _roofline(rows: list[BreakdownRow]) -> str:
    """Least seconds over seconds, all ranks together."""
    if any(row.roofline_share is None for row in rows):
        return ""
    least_s = sum((row.roofline_share or 0.0) * row.seconds for row in rows)
    return f"{least_s / sum(row.seconds for row in rows):.0%}"


def _known(rows: list[BreakdownRow]) -> str:
    """One word, or for each the ranks that it holds for."""
    kinds = dict.fromkeys(row.basis for row in rows)
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} ({sum(row.basis == kind for row in rows)})" for kind in kinds)
