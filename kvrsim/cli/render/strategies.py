"""Strategies as a table, and one of them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrsim.cli.render.layout import columns, facts, show

_RULES = {
    "whole": "one rank computes the whole context",
    "even": "even shares of the context",
    "search": "searched shares of the context",
    "table": "shares of the context, looked up in a partition table",
    "pieces": "even pieces of the context, one after another",
    "searched-pieces": "searched pieces of the context, one after another",
}


def show_strategies(found: Sequence[Mapping[str, Any]]) -> None:
    """One row per strategy."""
    table = columns("strategy", "runs here", "engines")
    table.add_column("what it is")
    for one in found:
        table.add_row(one["name"], "yes" if one["runs_here"] else "", ", ".join(one["engines"]), one["title"])
    show(
        table,
        "",
        "runs here: kvrsim run and confirm run it on real ranks; engines: some model can be launched with it there",
        "hybrids: tpN+NAME, and sizes such as tp4+pp2+cp2; kvrsim strategies show NAME says more",
    )


def show_strategy(one: Mapping[str, Any]) -> None:
    """What each rank computes, sends and holds, and who can run it."""
    rows = {
        "partition": _RULES[one["partition_rule"]],
        "each rank": one["each_rank"],
        "communication": one["communication"],
        "a rank holds": one["holds"],
        "result": one["approximate"] or "the same as of one GPU",
        "kvrsim plan": "compares it by default" if one["planned_by_default"] else "compares it by --strategies",
        "kvrsim run": "runs it" if one["runs_here"] else "does not run it",
        "engines": ", ".join(one["engines"]) or "none that was looked at",
        "source": one["source"],
        "more": one["docs"],
    }
    table = facts()
    for label, text in rows.items():
        if text:
            table.add_row(label, text)
    show(f"{one['name']}: {one['title']}", "", table)
