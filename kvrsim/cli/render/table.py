"""A table and what was looked up in it, for people; imported only where no JSON is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvrsim.cli.render.format import format_partition, round_up_percent
from kvrsim.cli.render.layout import columns, facts, show
from kvrsim.units import format_bandwidth, format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.table.lookup import LookedUp
    from planner.table.setting import TableSetting
    from planner.table.table import PartitionTable


def show_lookup(found: LookedUp) -> None:
    """The partition and where it is from."""
    table = facts()
    table.add_row("partition:", ", ".join(map(str, found.partition)))
    table.add_row("shares:", " ".join(f"{share:.3f}" for share in found.fractions))
    between = " and ".join(map(format_tokens, found.between))
    told = {"exact": "an entry of the table", "interpolated": f"interpolated between {between}"}
    table.add_row("from:", told.get(found.source, f"extrapolated from the shares of {between}"))
    for warning in found.warnings:
        table.add_row(Text("warning:", style="yellow"), warning)
    gpus = f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    show(Text(f"{format_tokens(found.context_len)} tokens on {gpus}", style="bold"), table)


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
    title = Text(f"{len(table.entries)} partitions for {table.setting.model}", style="bold")
    notes = facts()
    if any(entry.gap is not None for entry in table.entries):
        notes.add_row(
            "gap:", "at most how much slower than the best partition of KV-Runahead (from a proven lower bound)"
        )
    notes.add_row("built by:", f"kvrsim {table.kvrsim_version}; times are simulated")
    show(title, Text(" · ".join(_setting(table.setting)), style="dim"), "", rows, "", notes)


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
