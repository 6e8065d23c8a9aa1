"""Building a PartitionTable: every entry searched on its own, on as many processes as there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, Strategy, searched
from kvrsim.units import check_places
from kvrsim.version import __version__
from planner.backends.pool import Pool
from planner.candidates import per_rank_scenario
from planner.table.entry import Draft, draft_of, entry_of
from planner.table.partial import Partial
from planner.table.quantization import quantization_steps
from planner.table.setting import TableSetting
from planner.table.table import PartitionTable

TableProgress = Callable[[int, int], None]  # entries done, entries in all
Around = tuple[Draft, Draft] | None


def make_table(
    scenario: Scenario,
    gpu_counts: Sequence[int],
    context_lens: Sequence[int],
    *,
    strategy: str | Strategy = KVR_S,
    pool: Pool | None = None,
    partial: Partial | None = None,
    on_progress: TableProgress | None = None,
) -> PartitionTable:
    """The table of these numbers of GPUs and lengths for a scenario, whose own do not count.

    strategy: whose partitions are searched; a name, "FILE.py:NAME" or a Strategy.
    Entries are searched apart, so that the result does not depend on the order or the process; then each is compared
    with what its neighbours predict for it. pool: who works; None: this process. partial: holds entries searched
    before, and keeps those searched now. Raises InputError for more GPUs than tokens.
    """
    pool, chosen = pool or Pool(), searched(strategy)
    scenarios = _scenarios(scenario, chosen, gpu_counts, context_lens)
    setting = TableSetting.of(scenario, chosen.name)
    kept = partial or Partial(None, setting)
    drafts = {key: draft for key, draft in kept.drafts.items() if key in scenarios}
    missing = [key for key in scenarios if key not in drafts]
    total = len(scenarios)
    if on_progress is not None:
        on_progress(len(drafts), total)
    missing.sort(key=lambda key: (-key[0], key[1]))  # the longest searches first: many GPUs, short contexts
    for draft in pool.run(draft_of, [(scenarios[key], chosen) for key in missing]):
        drafts[draft.key] = draft
        kept.add(draft)
        if on_progress is not None:
            on_progress(len(drafts), total)
    longest = replace(scenario.request, context_len=max(context_lens))
    steps = quantization_steps(replace(scenario, request=longest))
    work = [(scenarios[key], chosen, drafts[key], around, steps) for key, around in _beside(drafts).items()]
    entries = sorted(pool.run(entry_of, work), key=lambda entry: (entry.num_gpus, entry.context_len))
    return PartitionTable(setting=setting, kvrsim_version=__version__, steps=steps, entries=tuple(entries))


def _scenarios(
    scenario: Scenario, strategy: Strategy, gpu_counts: Sequence[int], context_lens: Sequence[int]
) -> dict[tuple[int, int], Scenario]:
    """One for each entry, by number of GPUs and context."""
    check_places("ctx", context_lens, gpu_counts)
    most, least = max(gpu_counts), min(context_lens) - scenario.request.cached_prefix
    if most > least:
        raise InputError("gpus", most, f"at most one GPU a new token, here {least}")

    def at(gpus: int, length: int) -> Scenario:
        asked = replace(scenario.on_gpus(gpus), request=replace(scenario.request, context_len=length))
        return per_rank_scenario(asked, strategy)

    return {
        (gpus, length): at(gpus, length) for gpus in sorted(set(gpu_counts)) for length in sorted(set(context_lens))
    }


def _beside(drafts: dict[tuple[int, int], Draft]) -> dict[tuple[int, int], Around]:
    """For each entry the two beside it, None at either end."""
    found: dict[tuple[int, int], Around] = {}
    for _, group in groupby(sorted(drafts), key=lambda key: key[0]):
        keys = list(group)
        for index, key in enumerate(keys):
            inside = 0 < index < len(keys) - 1
            found[key] = (drafts[keys[index - 1]], drafts[keys[index + 1]]) if inside else None
    return found
