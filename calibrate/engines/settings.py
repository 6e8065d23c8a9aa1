"""The measured settings of engines: prefills of 2025 and 2026 whose kernels and launches kvrsim counts.

A file of settings has the columns model, config, system, cluster, engine, engine_version, precision, mode,
context_tokens, tp, moe_ep and prefill_s; a folder has each configuration as NAME_config.json. kvrsim ships neither.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.engine import NO_HOST, Engine
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.program import Array, Flags
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy

if TYPE_CHECKING:
    import pandas

_PROBE_S = 1e-6  # seconds of a launch in the run that counts launches
_NO_ENGINE = Engine(name="none", title="", description="", not_covered="", host=NO_HOST)
_NEEDED = ("config", "cluster", "engine", "engine_version", "mode", "context_tokens", "tp", "moe_ep", "prefill_s")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The measured settings, with kvrsim's seconds of kernels and launches for each; arrays of shape (settings,)."""

    rows: pandas.DataFrame
    kernels_s: Array
    launches: Array  # number of launches in the decoder layers
    collectives: Array  # number of collectives of tensor parallelism

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, name: str) -> Array:
        """One column of all settings."""
        return np.asarray(self.rows[name])

    def group(self, split: str) -> Array:
        """The group of each setting; groups are left out as a whole."""
        if split == "version":
            return np.asarray(self.rows.engine + "@" + self.rows.engine_version.astype(str))
        if split == "setting":
            return np.asarray(self.rows.model + " " + self.rows.gpu + " " + self.rows.engine)
        if split == "model":
            return np.asarray(self.rows.model.str.lower())  # sources differ in capitals
        return self.of(split)

    def where(self, rows: Flags) -> Settings:
        """Some of the settings."""
        return Settings(
            rows=self.rows[rows].reset_index(drop=True),
            kernels_s=self.kernels_s[rows],
            launches=self.launches[rows],
            collectives=self.collectives[rows],
        )

    def joined(self, other: Settings) -> Settings:
        """These settings and then others; a column that the others lack has no value there."""
        import pandas

        return Settings(
            rows=pandas.concat([self.rows, other.rows], ignore_index=True),
            kernels_s=np.concatenate([self.kernels_s, other.kernels_s]),
            launches=np.concatenate([self.launches, other.launches]),
            collectives=np.concatenate([self.collectives, other.collectives]),
        )


def read_settings(path: Path, configs: Path) -> Settings:
    """Read settings, and compute seconds of kernels and numbers of launches.

    Raises InputError for a missing column, and for a configuration that the folder lacks.
    """
    import pandas

    rows = pandas.read_csv(path)
    missing = sorted(set(_NEEDED) - set(rows.columns))
    if missing:
        raise InputError("SETTINGS.csv", ", ".join(rows.columns), f"a file with columns {', '.join(missing)}")
    counts: dict[tuple[Any, ...], _Counts] = {}
    keys = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows.itertuples():
            dtype = "fp8" if getattr(row, "precision", "") == "fp8" else None  # some configurations name no dtype
            key = (row.config, row.cluster, row.context_tokens, row.tp, row.moe_ep, dtype)
            keys.append(key)
            if key not in counts:
                model = model_folder(Path(folder), configs, row.config)
                counts[key] = _Counts.of(row, model, dtype)
    by_row = [counts[key] for key in keys]
    rows = rows.assign(
        model_type=[row.model_type for row in by_row],
        gpu=[row.gpu for row in by_row],
        kind=[row.kind for row in by_row],
    )
    return Settings(
        rows=rows,
        kernels_s=np.array([row.kernels_s for row in by_row]),
        launches=np.array([row.launches for row in by_row]),
        collectives=np.array([row.collectives for row in by_row]),
    )


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What kvrsim computes for a setting, without an engine."""

    kernels_s: float
    launches: float
    collectives: float
    model_type: str
    gpu: str
    kind: str  # mixture or dense

    @classmethod
    def of(cls, row: Any, model: Path, dtype: str | None) -> _Counts:
        """Simulate the setting without an engine, with a time per launch, and with a time per collective."""
        asked: dict[str, Any] = {"ctx": row.context_tokens, "gpus": row.tp, "model": str(model)}
        asked |= {"cluster": row.cluster, "dtype": dtype, "expert_parallel": row.moe_ep > 1}
        scenario = make_scenario(**asked, engine=_NO_ENGINE)[0]
        kernels_s, launches, collectives = work_of(asked, "single" if row.tp == 1 else "tp")
        return cls(
            kernels_s=kernels_s,
            launches=launches,
            collectives=collectives,
            model_type=scenario.model.model_type,
            gpu=scenario.cluster.gpu.name,
            kind="mixture" if scenario.model.is_mixture else "dense",
        )


def work_of(asked: Mapping[str, Any], strategy: str, pieces: Sequence[int] | None = None) -> tuple[float, float, float]:
    """Seconds of the kernels of a prefill without an engine, and its numbers of launches and of collectives.

    asked: arguments of make_scenario, without an engine. The prefill is simulated without an engine, with a time per
    launch, and with a time per collective.
    """
    launching = replace(_NO_ENGINE, host=replace(NO_HOST, launch_s=_PROBE_S))
    summing = replace(_NO_ENGINE, host=replace(NO_HOST, collective_s=_PROBE_S))
    engines = (_NO_ENGINE, launching, summing)
    kernels_s, launching_s, summing_s = (
        _ttft_s(make_scenario(**asked, engine=engine)[0], strategy, pieces) for engine in engines
    )
    return kernels_s, (launching_s - kernels_s) / _PROBE_S, (summing_s - kernels_s) / _PROBE_S


def _ttft_s(scenario: Scenario, name: str, pieces: Sequence[int] | None = None) -> float:
    """TTFT of a strategy with these pieces, or with one chunk per rank."""
    execution = place(scenario, get_strategy(name))
    partition = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
    if pieces is not None:
        partition = Partition(chunk_lens=tuple(pieces))
    return run_partition(execution, partition).ttft_s


def model_folder(folder: Path, configs: Path, name: str) -> Path:
    """Make the folder of a model from the files of its configuration."""
    model = folder / name
    if not model.exists():
        model.mkdir()
        folders = sorted(configs.glob(f"{name}_*"))
        if not folders:
            raise InputError("--configs", str(configs), f"a folder with {name}_config.json")
        for path in folders:
            shutil.copy(path, model / path.name.removeprefix(f"{name}_"))
    return model
