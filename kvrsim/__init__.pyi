"""The names of `import kvrsim` and where each is defined: type checkers read this file, and so does __init__.py."""

from calibrate.prefills.fit import PrefillFit as PrefillFit
from kvrsim.builder import make_scenario as make_scenario
from kvrsim.engine import Engine as Engine
from kvrsim.engine import builtin_engines as engines
from kvrsim.engine import load_engine as load_engine
from kvrsim.errors import InputError as InputError
from kvrsim.errors import KvrsimError as KvrsimError
from kvrsim.errors import NothingFits as NothingFits
from kvrsim.hardware import Cluster as Cluster
from kvrsim.hardware import GpuSpec as GpuSpec
from kvrsim.hardware import LinkSpec as LinkSpec
from kvrsim.hardware import builtin_clusters as clusters
from kvrsim.hardware import load_cluster as load_cluster
from kvrsim.kernels.profile import CalibrationProfile as CalibrationProfile
from kvrsim.kernels.profile import builtin_profiles as profiles
from kvrsim.kernels.profile import load_profile as load_profile
from kvrsim.model.load import builtin_models as models
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
from kvrsim.version import __version__ as __version__
from kvrsim.views import View
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

def view_of(result: object) -> View: ...

__all__ = ["clusters", "engines", "models", "profiles"]  # the others are exported by `as` with their own name
