"""A table and what was looked up in it, for people; imported only where no JSON is asked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvrsim.cli.render.format import format_partition, headline, round_up_percent
from kvrsim.cli.render.layout import Hint, Shrinkable, columns, facts, show
from kvrsim.units import format_bandwidth, format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.table.lookup import LookedUp
    from planner.table.setting import TableSetting
    from planner.table.table import PartitionTable


def show_lookup(found: LookedUp) -> None:
    """The partition and where it is from."""
    table = facts()
    table.add_row("partition:", headline(", ".join(map(str, found.partition))))
    table.add_row("shares:", " ".join(f"{share:.3f}" for share in found.fractions))
    between = " and ".join(map(format_tokens, found.between))
    told = {"exact": "an entry of the table", "interpolated": f"interpolated between {between}"}
    table.add_row("from:", told.get(found.source, f"extrapolated from the shares of {between}"))
    for warning in found.warnings:
        table.add_row(Text("warning:", style="yellow"), warning)
    gpus = f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    table.add_row("question:", f"{format_tokens(found.context_len)} tokens on {gpus}")
    show(table)


def show_table(table: PartitionTable) -> None:
    """What it was built for, and one row per entry."""
    rows = columns("GPUs", "context", numbers=True)
    columns("partition", into=rows)
    columns("TTFT", "vs TSP", "vs even", "gap", numbers=True, into=rows)
    columns("fits", into=rows)
    for entry in table.entries:
        rows.add_row(
            str(entry.num_gpus),
            format_tokens(entry.context_len),
            format_partition(entry.partition, room=30),
            format_seconds(entry.ttft_s),
            f"{entry.speedup_over_tsp:.2f}×",
            f"{entry.speedup_over_even:.2f}×",
            "" if entry.gap is None else f"{round_up_percent(entry.gap)} %",
            "yes" if entry.fits else Text("NO", style="red"),
        )
    notes = facts()
    if any(entry.gap is not None for entry in table.entries):
        notes.add_row(
            "gap:", "at most how much slower than the best partition of KV-Runahead (from a proven lower bound)"
        )
    notes.add_row("built by:", f"kvrsim {table.kvrsim_version}; times are simulated")
    asked = Text(" · ".join((table.setting.model, *_setting(table.setting))), style="dim")
    show(summary_of(table), "", asked, "", Shrinkable(rows, ("vs even", "gap", "partition")), "", notes)


def show_built(table: PartitionTable, output: str) -> None:
    """What a new table has and gains, and where it is."""
    found, last = summary_of(table), table.entries[-1]
    found.add_row("written:", output)
    show(found, Hint(f"kvrsim table lookup {shlex.quote(output)} --gpus {last.num_gpus} --ctx {last.context_len}"))


def summary_of(table: PartitionTable) -> Table:
    """What the table has and gains, in three lines."""
    entries, found = table.entries, facts()
    lengths, counts = [one.context_len for one in entries], sorted({one.num_gpus for one in entries})
    contexts = _span([format_tokens(min(lengths)), format_tokens(max(lengths))])
    count, gpus = f"{len(entries)} partition{'s' * (len(entries) != 1)}", ", ".join(map(str, counts))
    found.add_row("table:", headline(f"{count} of {table.setting.strategy}: {contexts} tokens on {gpus} GPUs"))
    over = {
        "TSP": sorted(one.speedup_over_tsp for one in entries),
        "even chunks": sorted(one.speedup_over_even for one in entries),
    }
    speed = (f"{_span([f'{all_of[0]:.2f}', f'{all_of[-1]:.2f}'])}× as fast as {name}" for name, all_of in over.items())
    found.add_row("speed-up:", ", ".join(speed))
    unfit = sum(not one.fits for one in entries)
    found.add_row("memory:", f"{unfit} of them do not fit" if unfit else "all of them fit")
    return found


def _span(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _setting(setting: TableSetting) -> tuple[str, ...]:
    bandwidth, latency = format_bandwidth(setting.link_bandwidth_bytes_per_s), format_seconds(setting.link_latency_s)
    link = f"{setting.cluster}: {setting.gpu}, {setting.topology} ({setting.link}, {bandwidth}, {latency})"
    told = [
        f"strategy {setting.strategy}",
        link,
        f"{setting.attention} attention",
        f"profile {setting.profile}",
        setting.dtype,
    ]
    told += [f"batch {setting.batch}"] * (setting.batch > 1)
    told += [f"{format_tokens(setting.cached_prefix)} tokens cached"] * (setting.cached_prefix > 0)
    return tuple(told)
