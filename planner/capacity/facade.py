"""`kvrsim.capacity` as Python calls it: options of the machine and options of the request, told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrsim.setup import make_scenario
from planner.capacity.answer import CapacityPlan
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.table.table import PartitionTable, load_table

_ABOUT_MACHINE = (
    *("model", "profile", "cluster", "link_bandwidth", "link_latency", "topology", "attention", "dtype"),
    "memory_fraction",
)


def ask(
    *,
    on_progress: Callable[[str], None] | None = None,
    table: PartitionTable | str | None = None,
    **options: Any,
) -> CapacityPlan:
    """The plan. Raises TypeError for an option that there is not."""
    about = {name: options.pop(name) for name in _ABOUT_MACHINE if name in options}
    scenario, warnings = make_scenario(ctx=1, gpus=1, **about)
    looked_up = table if table is None or isinstance(table, PartitionTable) else load_table(str(table))
    request = make_request(**options | {"requests": str(options["requests"])})
    return plan_capacity(scenario, request, table=looked_up, warnings=warnings, on_progress=on_progress)
