"""Predicted and real timelines of every candidate in one trace for Perfetto, the plan's choice first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrsim.io.files import write_atomically
from kvrsim.timeline import Timeline
from planner.confirm.result import Confirmation

_ROOM = 1000  # process numbers of one timeline


def write_traces(confirmation: Confirmation, path: str | Path) -> None:
    """Write trace events; the file appears whole or not at all."""
    events: list[dict[str, Any]] = []
    for number, (name, timeline) in enumerate(_timelines(confirmation)):
        for event in timeline.chrome_events():
            shifted = event | {"pid": event["pid"] + number * _ROOM}
            if event["ph"] == "M" and event["name"] == "process_name":
                shifted["args"] = {"name": f"{name}, {event['args']['name']}"}
            events.append(shifted)
    content = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_atomically(path, json.dumps(content).encode(), argument="trace")


def _timelines(confirmation: Confirmation) -> Iterator[tuple[str, Timeline]]:
    real = "measured" if confirmation.mode == "ranks" else "composed of measured parts"
    for one in sorted(confirmation.candidates, key=lambda one: one is not confirmation.choice):
        label = f"{one.strategy} {','.join(map(str, one.partition))}"
        yield f"{label}, predicted", one.predicted
        if one.measured is not None:
            yield f"{label}, {real}", one.measured
