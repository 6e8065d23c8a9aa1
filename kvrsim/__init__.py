"""kvrsim simulates and plans the prefill of large language models over several GPUs.

>>> import kvrsim
>>> plan = kvrsim.plan(ctx="16k", gpus=8)
>>> plan.best.strategy, plan.best.partition, plan.best.ttft_s  # doctest: +SKIP

Everything in `__all__` is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvrsim.version import __version__ as __version__

_HOMES = {  # of each lazy name
    "kvrsim.errors": ("InputError", "KvrsimError", "NothingFits"),
    "kvrsim.hardware": ("Cluster", "GpuSpec", "LinkSpec", "load_cluster"),
    "kvrsim.engine": ("Engine", "load_engine"),
    "kvrsim.model.load": ("load_model",),
    "kvrsim.model.spec": ("ModelSpec",),
    "kvrsim.kernels.profile": ("CalibrationProfile", "load_profile"),
    "kvrsim.results.results": ("Plan", "SimResult"),
    "kvrsim.scenario": ("Partition", "Request", "Scenario"),
    "kvrsim.builder": ("make_scenario",),
    "kvrsim.results.timeline": ("Span", "Timeline"),
    "kvrsim.strategies.base": ("Strategy",),
    "kvrsim.prefills": ("calibrate",),
    "calibrate.prefills.fit": ("PrefillFit",),
    "planner.api": ("build_predictor", "build_table", "capacity", "confirm", "map_strategies", "plan", "simulate"),
    "planner.capacity.result": ("CapacityPlan",),
    "planner.confirm.result": ("Confirmation",),
    "planner.map.map": ("StrategyMap",),
    "planner.predictor.predictor": ("TtftPredictor", "load_predictor"),
    "planner.table.table": ("PartitionTable", "load_table"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_BUILT_IN = ("clusters", "engines", "models", "profiles")
__all__ = sorted(("__version__", *_BUILT_IN, *_HOME_OF))

if TYPE_CHECKING:  # the same table for type checkers; a test compares them
    from calibrate.prefills.fit import PrefillFit as PrefillFit
    from kvrsim.builder import make_scenario as make_scenario
    from kvrsim.engine import Engine as Engine
    from kvrsim.engine import load_engine as load_engine
    from kvrsim.errors import InputError as InputError
    from kvrsim.errors import KvrsimError as KvrsimError
    from kvrsim.errors import NothingFits as NothingFits
    from kvrsim.hardware import Cluster as Cluster
    from kvrsim.hardware import GpuSpec as GpuSpec
    from kvrsim.hardware import LinkSpec as LinkSpec
    from kvrsim.hardware import load_cluster as load_cluster
    from kvrsim.kernels.profile import CalibrationProfile as CalibrationProfile
    from kvrsim.kernels.profile import load_profile as load_profile
    from kvrsim.model.load import load_model as load_model
    from kvrsim.model.spec import ModelSpec as ModelSpec
    from kvrsim.prefills import calibrate as calibrate
    from kvrsim.results.results import Plan as Plan
    from kvrsim.results.results import SimResult as SimResult
    from kvrsim.results.timeline import Span as Span
    from kvrsim.results.timeline import Timeline as Timeline
    from kvrsim.scenario import Partition as Partition
    from kvrsim.scenario import Request as Request
    from kvrsim.scenario import Scenario as Scenario
    from kvrsim.strategies.base import Strategy as Strategy
    from planner.api import build_predictor as build_predictor
    from planner.api import build_table as build_table
    from planner.api import capacity as capacity
    from planner.api import confirm as confirm
    from planner.api import map_strategies as map_strategies
    from planner.api import plan as plan
    from planner.api import simulate as simulate
    from planner.capacity.result import CapacityPlan as CapacityPlan
    from planner.confirm.result import Confirmation as Confirmation
    from planner.map.map import StrategyMap as StrategyMap
    from planner.predictor.predictor import TtftPredictor as TtftPredictor
    from planner.predictor.predictor import load_predictor as load_predictor
    from planner.table.table import PartitionTable as PartitionTable
    from planner.table.table import load_table as load_table
else:

    def __getattr__(name: str) -> Any:
        """Load a name when it is first used (PEP 562)."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'kvrsim' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value


def models() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    from kvrsim.model.load import builtin_models

    return builtin_models()


def clusters() -> tuple[str, ...]:
    """Return the names of the built-in clusters."""
    from kvrsim.hardware import builtin_clusters

    return builtin_clusters()


def profiles() -> tuple[str, ...]:
    """Return the names of the built-in calibration profiles."""
    from kvrsim.kernels.profile import builtin_profiles

    return builtin_profiles()


def engines() -> tuple[str, ...]:
    """Return the names of the built-in engines."""
    from kvrsim.engine import builtin_engines

    return builtin_engines()


def __dir__() -> list[str]:
    return __all__
