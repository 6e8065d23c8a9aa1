"""PrefillCase: a measured prefill with the scenario, strategy and partition by which it is predicted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.prefills.rows import PrefillRow
from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.executors.run import ttft_s
from kvrsim.hardware import Cluster, builtin_clusters, builtin_gpus, load_cluster
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy

# The partition that a strategy runs with: planner.partitions.partition_of, which this package does not import.
Cut = Callable[[Scenario, Strategy], Partition]
Change = Callable[[Scenario], Scenario]

_OF_A_ROW = ("model", "gpus", "ctx", "batch", "cached_prefix", "dtype", "strategy", "strategies", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCase:
    """One measured prefill, ready to be predicted."""

    row: PrefillRow
    scenario: Scenario  # as the strategy sees it (see for_strategy)
    strategy: Strategy
    partition: Partition

    def ttft_s(self, change: Change | None = None) -> float:
        """Predicted seconds, of the scenario or of a changed one."""
        scenario = self.scenario if change is None else change(self.scenario)
        return float(ttft_s(scenario, self.strategy, np.array([self.partition.chunk_lens], dtype=float))[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCases:
    """All cases, and what has to be said of them."""

    cases: tuple[PrefillCase, ...]
    notes: tuple[str, ...]
    cluster: Cluster | None  # that all cases are on; None: the profile's own, or a default

    @property
    def measured_s(self) -> list[float]:
        """Seconds of each case."""
        return [case.row.ttft_s for case in self.cases]


def make_cases(
    rows: Sequence[PrefillRow],
    profile: CalibrationProfile,
    cut: Cut,
    setting: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> PrefillCases:
    """The rows as cases of one profile.

    setting: further arguments of make_scenario, the same for all rows, such as cluster, engine or link_bandwidth.

    Rows of another built-in GPU than the profile's are left out; those of a GPU that kvrsim does not know are taken to
    be of the profile's; each with a note. Raises InputError where no row is left, and naming the file and line of a row
    that cannot be simulated.
    """
    given = {key: value for key, value in (setting or {}).items() if value is not None}
    cluster = given.pop("cluster", None)
    if cluster is None:
        cluster = _cluster_of(profile) if profile.cluster is None else None
    elif not isinstance(cluster, Cluster):
        cluster = load_cluster(str(cluster))
    if cluster is not None:
        given["cluster"] = cluster
    cases, notes = [], dict[str, str]()
    kept, gpu_notes = _of_gpu(rows, profile)
    for number, row in enumerate(kept, start=1):
        if on_progress is not None:
            on_progress(f"preparing row {number} of {len(kept)}")
        scenario, about = _scenario_of(row, profile, given)
        for note in about:
            notes.setdefault(getattr(note, "code", re.sub(r"[0-9]+", "", note)), note)  # rows differ in figures alone
        cases.append(_case(row, scenario, cut))
    return PrefillCases(cases=tuple(cases), notes=(*gpu_notes, *notes.values()), cluster=cluster)


def _case(row: PrefillRow, scenario: Scenario, cut: Cut) -> PrefillCase:
    try:
        strategy = get_strategy(row.strategy_name)
        placed = for_strategy(scenario, strategy)
        partition = cut(placed, strategy)
    except InputError as error:
        raise _placed(error, row) from None
    return PrefillCase(row=row, scenario=placed, strategy=strategy, partition=partition)


def _scenario_of(
    row: PrefillRow, profile: CalibrationProfile, given: Mapping[str, Any]
) -> tuple[Scenario, tuple[str, ...]]:
    try:
        return make_scenario(
            ctx=row.context_len or 0,
            gpus=row.num_gpus,
            model=row.model or "",
            profile=profile,
            batch=row.batch or 1,
            cached_prefix=row.cached_prefix or 0,
            dtype=row.dtype,
            **given,
        )
    except InputError as error:
        raise _placed(error, row) from None


def _placed(error: InputError, row: PrefillRow) -> InputError:
    """The same error, saying in which row, where it is the row's."""
    if error.parameter.split(":")[0] not in _OF_A_ROW:
        return error
    return InputError(f"{row.where}: {error.parameter}", error.value, error.accepted)


def _cluster_of(profile: CalibrationProfile) -> Cluster | None:
    """The built-in cluster of the profile's GPU, one without a bus if there are both; None: there is none."""
    known = [cluster for cluster in map(load_cluster, builtin_clusters()) if cluster.gpu.name == profile.gpu]
    return min(known, key=lambda cluster: (cluster.topology != "switch", cluster.topology == "bus"), default=None)


def _of_gpu(rows: Sequence[PrefillRow], profile: CalibrationProfile) -> tuple[list[PrefillRow], list[str]]:
    """The rows of the profile's GPU, and what to say of the others."""
    kept, others, unknown = [], Counter[str](), dict[str, None]()
    for row in rows:
        if row.gpu is None or _is_named(profile.gpu, row.gpu):
            kept.append(row)
        elif profile.gpu in (known := _chips(row.gpu)) or not known:
            unknown[row.gpu] = None
            kept.append(row)
        else:
            others[row.gpu] += 1
    if not kept:
        first = rows[0]
        accepted = f"{profile.gpu}, the GPU of profile {profile.name}; other GPUs have profiles of their own"
        raise InputError(f"{first.where}: gpu", first.gpu, accepted)
    notes = [
        f"{count} row{'s' * (count > 1)} of {gpu} left out: profile {profile.name} is of {profile.gpu}"
        for gpu, count in others.items()
    ]
    notes += [f"GPU {gpu} is taken to be {profile.gpu}, the GPU of profile {profile.name}" for gpu in unknown]
    return kept, notes


def _chips(text: str) -> list[str]:
    """The built-in GPUs that a name may mean; A800 and H800 are A100 and H100 with slower links."""
    plain = re.sub("[ah]800", lambda found: f"{found[0][0]}100", text.lower())
    return [gpu for gpu in builtin_gpus() if _is_named(gpu, plain)]


def _is_named(gpu: str, text: str) -> bool:
    """Whether a GPU's name and a text have the same parts, as far as the shorter goes: "A100-SXM-80GB", "H100"."""
    ours, theirs = (set(re.findall(r"[a-z0-9]+", name.lower())) for name in (gpu, text))
    return bool(ours) and bool(theirs) and (ours <= theirs or theirs <= ours)
