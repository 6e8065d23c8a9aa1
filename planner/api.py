"""The functions of the Python API, by keyword: from what a user writes to a Scenario, and on to the planner.

`kvrsim` offers them under its own name. Each loads its part of the planner when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from kvrsim.arguments import checked, named, wholes
from kvrsim.builder import ScenarioArgs, make_scenario, make_scenarios
from kvrsim.choices import MAP_STRATEGIES

if TYPE_CHECKING:
    from kvrsim.kernels.profile import CalibrationProfile
    from kvrsim.noise import Noise
    from kvrsim.results.results import Plan, SimResult
    from kvrsim.strategies import Strategy
    from planner.capacity.result import CapacityPlan
    from planner.confirm.result import Confirmation
    from planner.map.map import StrategyMap
    from planner.predictor.predictor import TtftPredictor
    from planner.table.table import PartitionTable


@checked()
def plan(
    *,
    ctx: int | str,
    strategies: Sequence[str | Strategy] | None = None,
    method: str = "auto",
    stride: int | str | None = None,
    table: str | PathLike[str] | PartitionTable | None = None,
    on_progress: Callable[[int, int | None, float], None] | None = None,
    on_stage: Callable[[str, int, int], None] | None = None,
    timeline: bool = False,
    noise: str | Noise | None = None,
    samples: int = 200,
    seed: int = 0,
    **scenario: Unpack[ScenarioArgs],
) -> Plan:
    """Compare strategies for one prefill, each with its best partition, and bound what is possible at all.

    strategies: names, such as "tp8+kvr-s", "./mine.py:STRATEGY" (a file's variable), "all", or Strategy objects; None:
        KVR-S and all that need no search.
    method: how partitions over single GPUs are searched: "grid" (the paper's), "analytical", or "auto".
    stride: tokens; every searched chunk boundary is a multiple of it; None: chosen for the context.
    table: where "kvr-p" looks up its partition: a file of build_table, or a PartitionTable.
    on_progress: called with partitions simulated, the most there will be (None: unknown), best TTFT so far in seconds.
    on_stage: called before each strategy with its name, its number from 1 and the number of strategies.
    timeline: whether the plan carries the timelines of all strategies; without, `plot` compares their TTFTs.
    noise: a spec as after --noise, or a Noise. Strategies are then ranked by their mean TTFT over `samples` samples of
        this `seed`.
    scenario: the other arguments of make_scenario (gpus, model, profile, ...).

    Raises InputError naming the parameter. Where nothing fits in memory, the plan's `feasible` is False.
    """
    from planner.candidates import Search
    from planner.plan import make_plan
    from planner.uncertainty.noise import Disturbance

    asked, warnings = make_scenario(ctx=ctx, **scenario)
    return make_plan(
        asked,
        strategies=strategies,
        search=Search(
            method=method,
            stride=stride,  # type: ignore[arg-type]  # parsed by `checked`
            table=_table(table),
            on_progress=on_progress,
        ),
        disturbance=Disturbance.of(noise, samples, seed),
        timelines="all" if timeline else None,
        warnings=warnings,
        seed=seed,
        on_stage=on_stage,
    )


@checked()
def simulate(
    *,
    strategy: str | Strategy,
    ctx: int | str,
    partition: Sequence[int] | None = None,
    table: str | PathLike[str] | PartitionTable | None = None,
    executor: str | None = None,
    timeline: bool = False,
    breakdown: bool = False,
    noise: str | Noise | None = None,
    samples: int = 200,
    seed: int = 0,
    **scenario: Unpack[ScenarioArgs],
) -> SimResult:
    """Simulate one strategy's prefill.

    strategy: a name, such as "tsp", "kvr-s", "zigzag" or "tp8+kvr-s" (see docs/explanation/strategies.md),
        "./mine.py:STRATEGY" (a file's variable), or a Strategy.
    partition: new tokens of each rank, summing to the context less the cached prefix; None: the strategy's own
        ("kvr-s" searches it first, "kvr-p" looks it up).
    table: where "kvr-p" looks it up: a file of build_table, or a PartitionTable.
    executor: "batch", "event" (simulates the queue of every link), or None: chosen automatically.
    timeline, breakdown: whether the result carries a timeline, and the seconds of every operation, its share of the
        roofline and whether it was measured (result.breakdown.to_frame()); both need the event executor.
    noise: a spec as after --noise, or a Noise; result.noisy is the distribution of TTFT over `samples` samples.
    seed: of the noise.
    scenario: the other arguments of make_scenario (gpus, model, profile, ...).

    Raises InputError naming the parameter.
    """
    from planner.candidates import Search
    from planner.simulate import run_simulation
    from planner.uncertainty.noise import Disturbance

    asked, warnings = make_scenario(ctx=ctx, **scenario)
    return run_simulation(
        asked,
        strategy=strategy,
        search=Search(partition=partition, table=_table(table)),
        executor=executor,
        record=[name for name, wanted in (("timeline", timeline), ("breakdown", breakdown)) if wanted],
        disturbance=Disturbance.of(noise, samples, seed),
        warnings=warnings,
        seed=seed,
    )


@checked(ctx=wholes, gpus=wholes)
def build_table(
    *,
    ctx: Sequence[int | str] | str,
    gpus: Sequence[int | str] | str | None = None,
    strategy: str | Strategy = "kvr-s",
    jobs: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
    **scenario: Any,
) -> PartitionTable:
    """Search the best partition for many contexts and numbers of GPUs: a lookup table for "kvr-p".

    ctx: contexts in tokens, or text such as "1k:32k:1k" (both ends included) or "4k,8k".
    gpus: numbers of GPUs, or text such as "2,4,8"; None: 2, 4, 8, ... up to those of the cluster.
    strategy: its partitions are searched; as in simulate.
    jobs: processes; more than one needs a script with `if __name__ == "__main__"` on some systems.
    on_progress: called with entries searched and entries in all.
    scenario: the other arguments of make_scenario.

    Raises InputError naming the parameter.
    """
    from planner.processes import Pool
    from planner.table.build import make_table

    base, _, lengths, counts = make_scenarios(ctx=ctx, gpus=gpus, **scenario)
    with Pool(jobs=jobs) as pool:
        return make_table(base, counts, lengths, strategy=strategy, pool=pool, on_progress=on_progress)


@checked()
def build_predictor(
    *,
    ctx: int | str = "128k",
    batch: int | str = 1,
    strategy: str | Strategy = "best",
    jobs: int = 1,
    on_progress: Callable[[int, int, str], None] | None = None,
    **scenario: Any,
) -> TtftPredictor:
    """Simulate a grid of new tokens, cached prefixes and batches: what a router needs to predict TTFT without kvrsim.

    ctx, batch: the longest context in tokens, cached prefix included, and the largest batch.
    strategy: as in simulate; "best": the fastest that fits, of those that plan compares by default.
    jobs: as in build_table. on_progress: called with parts done, parts in all, and what they are.
    scenario: the other arguments of make_scenario, but for cached_prefix: every prefix is answered for.

    Raises InputError naming the parameter, also where no strategy fits in memory.
    """
    from planner.predictor.build import make_predictor
    from planner.processes import Pool

    asked, _ = make_scenario(ctx=ctx, batch=batch, **scenario)
    with Pool(jobs=jobs) as pool:
        return make_predictor(asked, strategy=strategy, pool=pool, on_part=on_progress)


@checked(ctx=wholes, gpus=wholes)
def map_strategies(
    *,
    ctx: Sequence[int | str] | str,
    gpus: Sequence[int | str] | str | None = None,
    link_bandwidths: Sequence[float | str] | None = None,
    strategies: Sequence[str | Strategy] = MAP_STRATEGIES,
    on_place: Callable[[int, int], None] | None = None,
    **scenario: Any,
) -> StrategyMap:
    """Find which strategy on how many GPUs is the fastest, and from which context on each is faster than one GPU.

    ctx, gpus: as those of build_table.
    link_bandwidths: bytes per second and direction, or text such as "10GB/s"; None: the cluster's own.
    strategies: as those of plan; one GPU is always compared.
    on_place: called with the combinations done and their total number.
    scenario: the other arguments of make_scenario.

    Raises InputError naming the parameter.
    """
    from planner.map.map import make_map

    base, warnings, lengths, counts = make_scenarios(ctx=ctx, gpus=gpus, **scenario)
    return make_map(
        base,
        lengths=lengths,
        gpu_counts=counts,
        bandwidths=link_bandwidths,  # type: ignore[arg-type]  # parsed by `checked`
        strategies=strategies,
        warnings=warnings,
        on_place=on_place,
    )


@checked(requests=named())
def capacity(
    *,
    requests: str | PathLike[str],
    slo_ttft: float | str,
    strategies: Sequence[str | Strategy] | None = None,
    table: str | PathLike[str] | PartitionTable | None = None,
    on_progress: Callable[[str], None] | None = None,
    **options: Any,
) -> CapacityPlan:
    """Find the smallest or cheapest fleet whose TTFT is within the target for a percentile of the requests.

    requests: a trace, or "synthetic:...". slo_ttft: seconds, or text such as "2s".
    strategies: what groups may run, as in plan; None: all that take no long search.
    on_progress: called with what is being worked on.
    options: the other options of `kvrsim capacity`, with _ for -.

    Raises InputError naming the parameter; where nothing meets the target, the plan's `feasible` is False.
    """
    from planner.capacity.plan import plan_capacity
    from planner.capacity.request import make_request
    from planner.capacity.times import StrategyPolicy

    about = {name: options.pop(name) for name in ScenarioArgs.__annotations__.keys() & options}
    scenario, warnings = make_scenario(ctx=1, gpus=1, **about)
    nodes = {"gpus_per_node": scenario.cluster.gpus_per_node}
    request = make_request(requests=str(requests), slo_ttft=slo_ttft, **nodes | options)
    policy = StrategyPolicy(names=None if strategies is None else tuple(strategies), table=_table(table))
    on_stage = None if on_progress is None else lambda stage: on_progress(stage())
    return plan_capacity(scenario, request, policy, warnings=warnings, on_stage=on_stage)


@checked()
def confirm(
    *,
    ctx: int | str,
    model: str | PathLike[str],
    profile: str | PathLike[str] | CalibrationProfile,
    gpus: int | str = 2,
    strategies: Sequence[str] | None = None,
    top: int = 3,
    virtual: bool | None = None,
    hardware: dict[str, Any] | None = None,
    **scenario: Any,
) -> Confirmation:
    """Run a plan's candidates on this machine, interleaved, and report the errors of the predictions.

    profile: of this machine, as `kvrsim calibrate all` makes one.
    strategies: names, or ["all"]; None: the paper's. top: partitions: the plan's, and the top - 1 best further ones.
    virtual: replay all ranks on one device, with modelled messages; None: only where there are too few devices.
    hardware: device, backend, threads, repeats and the other fields of planner.confirm.hardware.Hardware.
    scenario: the other arguments of make_scenario; links given here are emulated.

    It starts processes: a script needs `if __name__ == "__main__"`. Raises InputError naming the parameter, RankError.
    """
    from planner.confirm.confirm import confirm as run
    from planner.confirm.hardware import Hardware

    asked, warnings = make_scenario(ctx=ctx, gpus=gpus, model=model, profile=profile, **scenario)
    emulated = scenario.get("link_bandwidth") is not None or scenario.get("link_latency") is not None
    about: dict[str, Any] = {"config": str(model), "emulated": emulated} | (hardware or {})
    here = Hardware(**about)
    return run(asked, here, strategies=strategies, top=top, virtual=virtual, warnings=warnings)


def _table(value: str | PathLike[str] | PartitionTable | None) -> PartitionTable | None:
    """A table, read where it is named by its file."""
    from planner.table.table import load_table

    return load_table(value) if isinstance(value, str) else value  # type: ignore[return-value]
