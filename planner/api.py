"""The functions of the Python API: they turn their arguments into a Scenario and call the planner.

The package `kvrsim` exports them. Arguments are declared in kvrsim/arguments.py; all are keyword arguments. Each
function imports its part of the planner when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import kvrsim
from kvrsim.arguments import (
    OF_REQUESTS,
    Count,
    DeploymentArgs,
    FleetArgs,
    MapArgs,
    MeasuredArgs,
    NoiseArgs,
    NumJobs,
    PlanArgs,
    PredictorArgs,
    ProgressFunction,
    ScenarioArgs,
    ScenariosArgs,
    SimulateArgs,
    StrategyList,
    StrategySource,
    UsersArgs,
    named,
    takes,
)
from kvrsim.builder import build_scenario, build_scenarios
from kvrsim.errors import InputError
from kvrsim.progress import OnProgress

if TYPE_CHECKING:
    from planner.candidates import Search
    from planner.processes import Pool
    from planner.uncertainty.noise import Disturbance

_Result = TypeVar("_Result", "kvrsim.Plan", "kvrsim.SimResult")
_WITHOUT_PREFIX = {"cached_prefix": 0, "prefix_placement": "all"}


@takes(timeline=bool, on_progress=ProgressFunction | None)
def plan(
    args: ScenarioArgs,
    options: PlanArgs,
    noise: NoiseArgs,
    users: UsersArgs,
    *,
    timeline: bool = False,
    on_progress: OnProgress | None = None,
) -> kvrsim.Plan:
    """Compare strategies for one prefill, each with its best partition, and prove a lower bound of TTFT.

    Strategies may be names in a list or a text, or Strategy objects. With noise, strategies are ranked by mean TTFT.

    Parameters
    ----------
    timeline : bool
        Record the timelines of all strategies; without timelines, `plot` compares TTFTs.
    on_progress : callable
        Called with the amount done, the total (None: unknown), and the name of the work.

    Returns
    -------
    Plan
        Its `feasible` is False if no strategy fits in memory.

    Raises
    ------
    InputError
        An argument is invalid; the error names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> plan = kvrsim.plan(ctx="16k", gpus=8)
    >>> plan.best.strategy, plan.best.partition
    ('kvr-b', (4403, 2656, 2064, 1742, 1534, 1373, 1272, 1340))
    """
    from planner.candidates import Search

    search = Search(on_progress=on_progress)
    return plan_of(args, options, noise, users, timelines="all" if timeline else None, search=search)[1]


def plan_of(
    args: ScenarioArgs,
    compared: PlanArgs,
    noise: NoiseArgs,
    users: UsersArgs,
    *,
    timelines: Literal["best", "all"] | None = None,
    search: Search | None = None,
    pool: Pool | None = None,
) -> tuple[kvrsim.Scenario, kvrsim.Plan]:
    """Return the scenario and the result of `plan`; timelines are recorded for `timelines`; `pool` simulates noise.

    search: callbacks for progress, and the engine of the plan's launch; `compared` replaces its options.
    """
    from planner.candidates import Search
    from planner.plan import make_plan

    disturbance = disturbance_of(noise)
    search = replace(
        search or Search(), options=compared, table=table_of(compared.table), cluster_gpus=_gpus_of_cluster(args)
    )
    scenario, warnings = build_scenario(args)
    result = make_plan(
        scenario,
        strategies=compared.strategies,
        search=search,
        disturbance=None if disturbance is None else replace(disturbance, pool=pool),
        timelines=timelines,
        warnings=warnings,
        seed=noise.seed,
        target=compared,
    )
    if compared.confirmed is not None:
        from planner.confirm.saved import SavedConfirmation  # imported only if a file is named

        result = replace(result, measured_s=SavedConfirmation.read(compared.confirmed).of_plan(result))
    return scenario, _with_users(result, scenario, users)


def _gpus_of_cluster(args: ScenarioArgs) -> int | None:
    """Number of GPUs of the whole cluster; None: all take part, or the question cannot be asked for all."""
    if args.gpus is None:
        return None
    try:
        return build_scenario(ScenarioArgs(**vars(args) | {"gpus": None}))[0].num_gpus
    except InputError:
        return None


@takes(timeline=bool)
def simulate(
    args: ScenarioArgs, run: SimulateArgs, noise: NoiseArgs, users: UsersArgs, *, timeline: bool = False
) -> kvrsim.SimResult:
    """Simulate one strategy's prefill.

    The strategy may be a Strategy object. Under noise, the field `noisy` of the result is the distribution of TTFT.

    Parameters
    ----------
    timeline : bool
        Record the timeline. The timeline and `breakdown` need the event executor.

    Returns
    -------
    SimResult

    Raises
    ------
    InputError
        An argument is invalid; the error names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> result = kvrsim.simulate(strategy="kvr-e", ctx="4k", gpus=2)
    >>> result.partition
    (2048, 2048)
    """
    return simulation_of(args, run, noise, users, timeline=timeline)


def simulation_of(
    args: ScenarioArgs,
    run: SimulateArgs,
    noise: NoiseArgs,
    users: UsersArgs,
    *,
    timeline: bool = False,
    on_progress: OnProgress | None = None,
) -> kvrsim.SimResult:
    """The result of `simulate`."""
    from planner.candidates import Search
    from planner.simulate import run_simulation

    disturbance = disturbance_of(noise)
    search = Search(partition=run.partition, table=table_of(run.table), on_progress=on_progress)
    scenario, warnings = build_scenario(args)
    result = run_simulation(
        scenario,
        strategy=run.strategy,
        search=search,
        executor=run.executor,
        record=[*["timeline"] * timeline, *["breakdown"] * run.breakdown],
        disturbance=disturbance,
        warnings=warnings,
        seed=noise.seed,
    )
    if run.explain:
        from planner.simulate import with_counts  # imported only if it is asked for

        result = with_counts(result, scenario)
    return _with_users(result, scenario, users)


def _with_users(result: _Result, scenario: kvrsim.Scenario, users: UsersArgs) -> _Result:
    if users.users is None:  # the default plan does not import planner.decode
        return result
    from planner.decode import with_users

    return with_users(result, scenario, users)


@takes(strategy=StrategySource, jobs=NumJobs, on_progress=ProgressFunction | None)
def build_table(
    args: ScenariosArgs,
    *,
    strategy: str | kvrsim.Strategy = "kvr-s",
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> kvrsim.PartitionTable:
    """Build the lookup table of "kvr-p": the best partition for each of many contexts and numbers of GPUs.

    Parameters
    ----------
    strategy : str or Strategy
        A strategy whose ranks are single GPUs and whose chunks are searched.
    jobs : int
        Number of processes; more than one needs a script with `if __name__ == "__main__"` on some systems.
    on_progress : callable
        As in `plan`.

    Returns
    -------
    PartitionTable

    Raises
    ------
    InputError
        An argument is invalid; the error names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> table = kvrsim.build_table(ctx="1k,2k", gpus=2)
    >>> [sum(entry.partition) for entry in table.entries]
    [1024, 2048]
    """
    from planner.processes import Pool
    from planner.table.build import make_table

    base, _, lengths, counts = build_scenarios(args)
    with Pool(jobs=jobs) as pool:
        return make_table(base, counts, lengths, strategy=strategy, pool=pool, on_progress=on_progress)


@takes(fixed=_WITHOUT_PREFIX, strategy=StrategySource, jobs=NumJobs, on_progress=ProgressFunction | None)
def build_predictor(
    args: PredictorArgs,
    *,
    strategy: str | kvrsim.Strategy = "best",
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> kvrsim.TtftPredictor:
    """Simulate a grid of new tokens, cached prefixes and batches: a router can then predict TTFT without kvrsim.

    Parameters
    ----------
    strategy : str or Strategy
        As in `simulate`; "best": the fastest one that fits in memory and that some engine has.
    jobs : int
        As in `build_table`.
    on_progress : callable
        As in `plan`.

    Returns
    -------
    TtftPredictor

    Raises
    ------
    InputError
        An argument is invalid, or no strategy fits in memory; the error names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> predictor = kvrsim.build_predictor(model="llama-3.1-8b", cluster="2xh100", ctx="2k", strategy="tp")
    >>> predictor.predict(ctx=1500).strategy
    'tp'
    """
    from planner.predictor.build import make_predictor
    from planner.processes import Pool

    scenario, _ = build_scenario(args)
    with Pool(jobs=jobs) as pool:
        return make_predictor(scenario, strategy=strategy, pool=pool, on_progress=on_progress)


@takes(on_progress=ProgressFunction | None)
def map_strategies(
    args: ScenariosArgs, options: MapArgs, *, on_progress: OnProgress | None = None
) -> kvrsim.StrategyMap:
    """Find the fastest strategy for each number of GPUs, and the context from which each beats one GPU.

    One GPU is always compared.

    Parameters
    ----------
    on_progress : callable
        As in `plan`.

    Returns
    -------
    StrategyMap

    Raises
    ------
    InputError
        An argument is invalid; the error names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> strategies = kvrsim.map_strategies(ctx="1k,4k", gpus=2, strategies=["tsp", "tp"])
    >>> len(strategies.points)
    6
    """
    return map_of(args, options, on_progress=on_progress)


def map_of(
    args: ScenariosArgs, options: MapArgs, *, pool: Pool | None = None, on_progress: OnProgress | None = None
) -> kvrsim.StrategyMap:
    """The result of `map_strategies`; pool: processes that simulate."""
    from planner.map.map import make_map

    base, warnings, lengths, counts = build_scenarios(args)
    return make_map(
        base,
        lengths=lengths,
        gpu_counts=counts,
        bandwidths=options.link_bandwidths,
        strategies=options.strategies,
        warnings=warnings,
        pool=pool,
        on_progress=on_progress,
    )


@takes(fixed=OF_REQUESTS, strategies=StrategyList | None, on_progress=ProgressFunction | None)
def capacity(
    args: DeploymentArgs,
    fleet: FleetArgs,
    *,
    strategies: Sequence[str | kvrsim.Strategy] | None = None,
    on_progress: OnProgress | None = None,
) -> kvrsim.CapacityPlan:
    """Find the smallest or cheapest fleet whose TTFT is within the target for a percentile of the requests.

    Parameters
    ----------
    strategies : sequence of str or Strategy
        Strategies that groups may run, as in `plan`; None: all those without a long search.
    on_progress : callable
        As in `plan`.

    Returns
    -------
    CapacityPlan
        Its `feasible` is False if no fleet meets the target.

    Raises
    ------
    InputError
        An argument is invalid; the error names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> requests = "synthetic:poisson,rate=1,requests=50,context=1k"
    >>> on = {"model": "llama-3.1-8b", "cluster": "8xh100", "group_sizes": "1"}
    >>> plan = kvrsim.capacity(requests=requests, slo_ttft="2s", replications=1, **on)
    >>> plan.feasible
    True
    """
    return capacity_of(args, fleet, strategies=strategies, on_progress=on_progress)


def capacity_of(
    args: DeploymentArgs,
    fleet: FleetArgs,
    *,
    strategies: Sequence[str | kvrsim.Strategy] | None = None,
    engines: Sequence[str] = (),
    emit: str | None = None,
    pool: Pool | None = None,
    on_progress: OnProgress | None = None,
) -> kvrsim.CapacityPlan:
    """The result of `capacity`; engines: engines that must have the strategies. pool: processes that simulate.

    emit: the engine that will launch the fleet; raises InputError before the search if it cannot.
    """
    from planner.capacity.plan import cheapest_of, plan_capacity
    from planner.capacity.request import make_request, on_each_cluster
    from planner.capacity.times import StrategyPolicy
    from planner.deploy_engines import deploy_engine

    questions = on_each_cluster(args, fleet)
    if len(questions) > 1:
        if emit is not None:
            raise InputError("emit", emit, "one cluster")
        plans = [
            capacity_of(*question, strategies=strategies, engines=engines, pool=pool, on_progress=on_progress)
            for question in questions
        ]
        return cheapest_of([str(question[0].cluster) for question in questions], plans)
    scenario, warnings = build_scenario(args)
    request = make_request(fleet, scenario)
    if emit is not None:
        from planner.capacity.deployment import check_deployment

        check_deployment(scenario, request, emit)
    names = None if strategies is None else tuple(strategies)
    policy = StrategyPolicy(names=names, engines=tuple(map(deploy_engine, engines)))
    return plan_capacity(scenario, request, policy, warnings=warnings, pool=pool, on_progress=on_progress)


@takes(strategies=StrategyList | None, top=Count | None, virtual=bool | None)
def confirm(
    args: MeasuredArgs,
    *,
    strategies: Sequence[str] | None = None,
    top: int | None = None,
    plan: str | PathLike[str] | None = None,
    virtual: bool | None = None,
    hardware: dict[str, Any] | None = None,
) -> kvrsim.Confirmation:
    """Run a plan's candidates on this machine, interleaved, and report the errors of the predictions.

    `model` must be given by name or path, `profile` describes this machine (`kvrsim calibrate all` makes one), and
    `gpus` is the number of ranks. Links given here are emulated. This function starts processes: a script needs `if
    __name__ == "__main__"`.

    Parameters
    ----------
    strategies : sequence of str
        Names, or ["all"]; None: the strategies of the paper, or the fastest of `plan`.
    top : int
        Number of KVR partitions: the plan's partition, and the top - 1 next best ones (3). With `plan`: number of its
        fastest strategies (5); kvr-s, tsp and single are measured as well.
    plan : path
        A file of `kvrsim plan -o FILE` with the same model, context and number of GPUs: its strategies are measured
        with its partitions.
    virtual : bool
        Replay all ranks on one device, with modelled messages; None: only if there are too few devices.
    hardware : dict
        Device, backend, threads, repeats and the other fields of planner.confirm.hardware.Hardware.

    Returns
    -------
    Confirmation

    Raises
    ------
    InputError
        An argument is invalid; the error names the parameter.
    RankError
        A rank failed.

    Examples
    --------
    >>> import kvrsim
    >>> found = kvrsim.confirm(ctx="1k", gpus=2, model="tiny.json", profile="here.json")  # doctest: +SKIP
    >>> found.ok  # doctest: +SKIP
    True
    """
    from planner.confirm.confirm import Choice
    from planner.confirm.confirm import confirm as run
    from planner.confirm.hardware import Hardware
    from planner.confirm.saved import PLAN_FILE, SavedPlan

    scenario, warnings = build_scenario(args)
    emulated = args.link_bandwidth is not None or args.link_latency is not None
    about: dict[str, Any] = {"config": str(args.model), "emulated": emulated} | (hardware or {})
    saved = None
    if plan is not None:
        saved = SavedPlan.read(str(plan), "plan")
        if saved is None:
            raise InputError("plan", plan, PLAN_FILE.partition(",")[0])
    choice = Choice(strategies=strategies, top=top, plan=saved)
    return run(scenario, Hardware(**about), choice=choice, virtual=virtual, warnings=warnings)


def table_of(source: str | PathLike[str] | kvrsim.PartitionTable | None) -> kvrsim.PartitionTable | None:
    """A partition table; if a file is named, the table is read from it."""
    if source is None:
        return None
    table: str | kvrsim.PartitionTable = named("planner.table.table:PartitionTable")(source, "table")
    if not isinstance(table, str):
        return table
    from planner.table.table import load_table  # imported only if a file is named

    return load_table(table)


def disturbance_of(args: NoiseArgs) -> Disturbance | None:
    """The noise that the arguments describe, and its number of samples; None without noise."""
    if args.noise is None:
        return None
    from planner.uncertainty.noise import DEFAULT_SAMPLES, Disturbance  # imported only if noise is given

    return Disturbance.of(args.noise, args.samples or DEFAULT_SAMPLES, args.seed)
