"""What the simulator says of the cases that the figures show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrsim.noise.parse import parse_noise
from kvrsim.noise.statistics import Distribution
from kvrsim.results import Plan, SimResult
from kvrsim.scenario import Scenario
from kvrsim.setup import make_scenario
from planner.plan import make_plan
from planner.simulate import run_simulation
from planner.uncertainty.disturbed import Disturbance
from validate.published.compare import scenario_of
from validate.published.reference import Row

PROFILE = "a100-eager"
_Result = TypeVar("_Result")


class Predictions:
    """Simulates each case once and remembers it; `on_new` is called after each simulation.

    NVLink as the profile has it, save where a published row says otherwise.
    """

    def __init__(self, on_new: Callable[[], None] = lambda: None) -> None:
        self._on_new = on_new
        self._results: dict[tuple[str, int, int, str], SimResult] = {}
        self._of_rows: dict[Row, SimResult] = {}
        self._noisy: dict[tuple[str, int, int, str, str, int], Distribution] = {}
        self._plans: dict[tuple[str, int, int], Plan] = {}

    def of(self, model: str, context_len: int, num_gpus: int, strategy: str) -> SimResult:
        """A strategy with its own partition: kvr-s searches."""
        key = (model, context_len, num_gpus, strategy)
        if key not in self._results:
            self._results[key] = self._new(run_simulation(_scenario(model, context_len, num_gpus), strategy=strategy))
        return self._results[key]

    def of_row(self, row: Row) -> SimResult:
        """A published row, read as on the accuracy page."""
        if row not in self._of_rows:
            scenario, strategy = scenario_of(row)
            self._of_rows[row] = self._new(run_simulation(scenario, strategy=strategy))
        return self._of_rows[row]

    def with_partition(self, model: str, context_len: int, chunk_lens: Sequence[int]) -> SimResult:
        """KVR with that partition."""
        scenario = _scenario(model, context_len, len(chunk_lens))
        return self._new(run_simulation(scenario, strategy="kvr-s", partition=chunk_lens))

    def noisy(
        self, model: str, context_len: int, num_gpus: int, strategy: str, *, noise: str, samples: int
    ) -> Distribution:
        """TTFTs of a strategy with its quiet partition under a noise."""
        key = (model, context_len, num_gpus, strategy, noise, samples)
        if key not in self._noisy:
            result = run_simulation(
                _scenario(model, context_len, num_gpus),
                strategy=strategy,
                partition=self.of(model, context_len, num_gpus, strategy).partition,
                disturbance=Disturbance(noise=parse_noise(noise), num_samples=samples),
            )
            assert result.noisy is not None
            self._noisy[key] = result.noisy
            self._on_new()
        return self._noisy[key]

    def plan(self, model: str, context_len: int, num_gpus: int) -> Plan:
        """The paper's strategies and the bounds."""
        key = (model, context_len, num_gpus)
        if key not in self._plans:
            self._plans[key] = self._new(make_plan(_scenario(model, context_len, num_gpus), strategies=_PAPERS))
        return self._plans[key]

    def _new(self, result: _Result) -> _Result:
        self._on_new()
        return result


_PAPERS = ("single", "tsp", "kvr-e", "kvr-s")


def _scenario(model: str, context_len: int, num_gpus: int) -> Scenario:
    return make_scenario(ctx=context_len, gpus=num_gpus, model=model, profile=PROFILE)[0]
