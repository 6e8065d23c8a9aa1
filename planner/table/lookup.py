"""The scenario of a table, from the names in its setting, and lookups that simulations of this scenario refine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from kvrsim.arguments import ScenarioArgs
from kvrsim.builder import build_scenario
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.notes import note
from kvrsim.strategies import searched_strategy
from planner.table.table import PartitionTable, TableLookup, TableSetting, look_up, refined_lookup


def best_lookup(table: PartitionTable, num_gpus: int, context_len: int) -> TableLookup:
    """The refined lookup for the table's own scenario; if it cannot be built here, look_up's, with a warning.

    Raises the same InputErrors as look_up.
    """
    lookup = look_up(table, num_gpus, context_len)
    if lookup.source == "exact" or num_gpus == 1:
        return lookup
    try:
        execution = table_execution(table.setting, num_gpus, context_len)
    except InputError as error:
        why = f"{error.parameter}: {error.value}"
        return replace(lookup, warnings=(*lookup.warnings, note("not refined", why=why)))
    return refined_lookup(table, execution)


def table_execution(setting: TableSetting, num_gpus: int, context_len: int) -> Execution:
    """The execution for which a table was built, on these GPUs with this context.

    Raises InputError if the table's model, profile, cluster, engine or strategy is not one of a name here, or has other
    figures than those of the table.
    """
    strategy = searched_strategy(setting.strategy, "TABLE")
    args = ScenarioArgs(
        ctx=context_len,
        gpus=num_gpus,
        model=setting.model,
        batch=setting.batch,
        cached_prefix=setting.cached_prefix,
        prefix_placement=setting.prefix_placement,
        dtype=setting.dtype,
        cluster=setting.cluster,
        engine=setting.engine,
        attention=setting.attention,
        topology=setting.topology,
        expert_parallel=setting.expert_parallel != "off",
        expert_imbalance=_imbalance(setting.expert_parallel),
    )
    links = {"link_bandwidth": setting.link_bandwidth_bytes_per_s, "link_latency": setting.link_latency_s}
    # A profile that is chosen by default may be scaled to the GPU; the same profile is not scaled if it is named.
    profiles: tuple[dict[str, Any], ...] = ({"profile": None}, {"profile": setting.profile})
    reason: InputError | None = None
    for profile, own_links in product(profiles, (links, {})):
        try:
            scenario, _ = build_scenario(ScenarioArgs(**vars(args) | profile | own_links))
        except InputError as error:
            reason = error
            continue
        differences = "; ".join(setting.differences(scenario, strategy.name))
        if not differences:
            return execution_of(scenario, strategy)
        reason = InputError("TABLE", differences, "a table of the figures that kvrsim has under these names")
    assert reason is not None
    raise reason


def _imbalance(expert_parallel: str) -> float | None:
    """The imbalance of the experts in a table's setting; None: that of a power law, or no expert parallelism."""
    _, separator, value = expert_parallel.partition("imbalance ")
    if not separator or value == "of a power law":
        return None
    try:
        return float(value)
    except ValueError:
        raise InputError("expert_parallel", expert_parallel, "off, or on with an imbalance") from None
