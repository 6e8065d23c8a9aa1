"""Service times: strategies per group, times close to a full search, overlapping prompts, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.program import Compute, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.candidates import partition_of
from planner.capacity.fleet import WHOLE, GroupType
from planner.capacity.times import GridPoints, Prefills, ServiceTimes, StrategyPolicy, service_times, weights_of
from planner.capacity.work import Work
from planner.capacity.workload import Workload
from planner.search.search import search
from tests.building import executed

CHAINS = StrategyPolicy(names=("single", "tsp", "kvr-s"))
KVR = STRATEGIES["kvr-s"]


def scenario(profile: str, gpus: int = 1, ctx: int = 1024, cached: int = 0) -> Scenario:
    model = "llama-3-8b" if profile == "h100-flash" else "llama-7b"
    cluster = "h100-nvlink" if profile == "h100-flash" else None
    made, _ = make_scenario(ctx=ctx, gpus=gpus, model=model, profile=profile, cluster=cluster, cached_prefix=cached)
    return made


def best_s(profile: str, gpus: int, new: int, cached: int) -> float:
    """TTFT of the fastest strategy with its best partition."""
    options = scenario(profile, gpus, new + cached, cached)
    result = [search(executed(options, KVR)).ttft_s] if gpus > 1 else []
    for name, count in (("single", 1), ("tsp", gpus)):
        placed, strategy = options.on_gpus(count), STRATEGIES[name]
        result.append(run_partition(executed(placed, strategy), partition_of(executed(placed, strategy), None)).ttft_s)
    return min(result)


@pytest.mark.parametrize("profile", ["a100-eager", "h100-flash"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_times_are_near_those_of_a_full_search(profile: str, gpus: int) -> None:
    times = ServiceTimes(scenario(profile), GridPoints.up_to(8192, 4096), CHAINS)
    rng = np.random.default_rng(3)
    new = np.exp2(rng.uniform(5, 12.9, 12)).astype(np.int64)
    cached = np.where(rng.random(12) < 0.5, 0, rng.integers(1, 4096, 12))
    errors = times.seconds(GroupType(gpus), new, cached) / [
        best_s(profile, gpus, n, c) for n, c in zip(new.tolist(), cached.tolist(), strict=True)
    ]
    assert np.median(np.abs(errors - 1)) < 0.01
    assert np.abs(errors - 1).max() < 0.15


def delayed(program: Program, delays_s: np.ndarray) -> Program:
    """The program with a delay before each rank's first operation, on host and device."""
    waits = [Compute(name="before", device_s=np.array([delay]), host_s=float(delay)) for delay in delays_s]
    prologue = tuple((wait, *ops) for wait, ops in zip(waits, program.prologue, strict=True))
    return replace(program, prologue=prologue)


@pytest.mark.parametrize("profile", ["a100-eager", "h100-flash"])
@pytest.mark.parametrize(("new", "cached"), [(600, 0), (5000, 0), (3000, 8192)])
def test_ranks_that_begin_within_their_slack_end_no_later(profile: str, new: int, cached: int) -> None:
    prefills = Prefills(place(scenario(profile, 4), KVR))
    knots = np.array([new], dtype=np.int64)
    chunks, finish_s = prefills.chains(knots, cached)
    slack_s = prefills.slack_s(chunks, finish_s, cached)[0]
    assert slack_s[0] == 0
    assert (slack_s[1:] > 0).any()
    options = prefills.at(cached, new)
    program = build_program(options, [np.array([chunk]) for chunk in chunks[0]])
    late = delayed(program, slack_s)
    assert run_batch(late, options.cluster)[:, 0] == pytest.approx(finish_s[0], rel=1e-6)
    assert EventSimulation(late, options.cluster, record=False).finish_s == pytest.approx(
        finish_s[0].tolist(), rel=1e-6
    )
    too_late = delayed(program, slack_s + 0.05 * finish_s[0, -1])
    assert run_batch(too_late, options.cluster)[-1, 0] > finish_s[0, -1] * 1.01


def test_contexts_that_do_not_fit_in_memory_take_forever() -> None:
    times = ServiceTimes(scenario("a100-eager"), GridPoints.up_to(32768, 0), CHAINS)
    most = int(times.most_tokens(GroupType(1)))
    seconds = times.seconds(GroupType(1), np.array([1000, most, most + 1, 32768]), np.zeros(4, dtype=np.int64))
    assert np.isfinite(seconds).tolist() == [True, True, False, False]
    assert times.most_tokens(GroupType(4)) > most


def test_two_policies_share_the_simulations() -> None:
    times = ServiceTimes(scenario("a100-eager"), GridPoints.up_to(512, 0), CHAINS)
    reports: list[float] = []
    work = Work(report=lambda done, total, text: reports.append(done))
    times.fill((1, 2), work)
    assert reports == sorted(reports)
    count = len(reports)
    assert (reports[0], reports[-1]) == (0, count - 1)  # one report per strategy and group size
    other = times.under(StrategyPolicy(names=("tsp",)))
    other.fill((1, 2), work)
    assert len(reports) == count  # nothing is left to simulate
    assert {one for grid in other.grids(GroupType(2)) for one in grid.strategy} == {"tsp"}


def large(gpus: int, ctx: int = 1024) -> Scenario:
    made, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-3.1-70b", cluster="h100-nvlink", profile="h100-flash")
    return made


def test_strategies_that_need_the_same_weights_share_a_layout() -> None:
    layouts = StrategyPolicy().layouts(large(8))
    assert {weights: {weights_of(one, 8) for one in strategies} for weights, strategies in layouts.items()} == {
        weights: {weights} for weights in layouts
    }
    assert {"whole", "tp8", "pp8", "tp2", "tp4", "tp2+pp4", "tp4+pp2"} <= set(layouts)
    assert {"single", "tsp", "kvr-s"} <= {one.name for one in layouts[WHOLE]}
    assert "tp4+kvr-s" in {one.name for one in layouts["tp4"]}
    assert list(StrategyPolicy().layouts(large(1))) == [WHOLE]
    sizes = StrategyPolicy(names=("tp2+pp2+cp2", "tp4+pp2", "tp4+cp2")).layouts(large(8, ctx=1))
    assert {weights: [one.name for one in some] for weights, some in sizes.items()} == {
        "tp2+pp2": ["tp2+pp2+cp2"],
        "tp4+pp2": ["tp4+pp2"],
        "tp4": ["tp4+cp2"],
    }


@pytest.mark.parametrize("names", [(), ("tq",), ("kvr-p",)])
def test_what_cannot_be_run_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"^strategies"):
        StrategyPolicy(names=names)


@pytest.mark.parametrize("name", ["tp", "pp", "tp2+pp", "tp2+kvr-s", "tp4+kvr-s"])
def test_times_at_a_power_of_two_are_those_of_a_plan(name: str) -> None:
    strategy = get_strategy(name)
    knots = np.array([300, 512, 2048, 4096], dtype=np.int64)
    times = Prefills(place(large(8), strategy)).times(0, knots, 0, 4096)
    assert times is not None
    for knot, ttft_s in zip(knots.tolist(), times.ttft_s.tolist(), strict=True):
        placed = place(large(8, knot), strategy).placed
        planned_s = run_partition(executed(placed, strategy), partition_of(executed(placed, strategy))).ttft_s
        if knot.bit_count() == 1:  # other lengths use the clock and the partition of a longer prompt
            assert ttft_s == pytest.approx(planned_s, rel=0.015)
        assert ttft_s == pytest.approx(planned_s, rel=0.05)


def test_prompts_behind_each_other_in_a_pipeline_take_as_long_as_alone() -> None:
    """Stages that start later, within their slack, end at the same time, so prompts can overlap."""
    strategy = get_strategy("pp")
    prefills = Prefills(place(large(4), strategy))
    times = prefills.times(0, np.array([4096], dtype=np.int64), 0, 4096)
    assert times is not None
    assert times.finish[0, 0] < 0.8
    pieces = prefills.pieces(np.array([4096]), 0)[0]
    assert pieces > 1
    placed = prefills.at(0, 4096)
    program = build_program(placed, columns(np.full(pieces, 4096 / pieces)))
    slack_s = times.slack_s[0]
    assert (np.diff(slack_s) > 0).all()
    ends_s = EventSimulation(delayed(program, slack_s), placed.cluster, record=False).finish_s
    assert ends_s[-1] == pytest.approx(times.ttft_s[0], rel=1e-6)


def test_the_longest_prompt_that_fits_is_the_plans() -> None:
    strategy = get_strategy("tp")
    times = Prefills(place(large(2), strategy)).times(0, np.array([1, 65536], dtype=np.int64), 0, 65536)
    assert times is not None
    most = times.most_new_tokens
    assert 1 < most < 65536
    for tokens, fit in ((most, True), (most + 1, False)):
        placed = place(large(2, tokens), strategy).placed
        assert fits(placed, memory_of(executed(placed, strategy), partition_of(executed(placed, strategy)))) is fit


@pytest.mark.parametrize(("model", "gpus", "name"), [("llama-2-7b", 8, "tp8"), ("llama-3.1-70b", 8, "pp8")])
def test_groups_whose_memory_ends_within_the_cached_prefixes(model: str, gpus: int, name: str) -> None:
    """The longest prompt after a prefix between two simulated ones fits in memory; its time is near its simulation."""
    options, _ = make_scenario(ctx=1024, gpus=8, model=model, cluster="a100-nvlink", profile="a100-flash")
    times = ServiceTimes(options, GridPoints.up_to(4096, 3_000_000), StrategyPolicy())
    group = GroupType(gpus, name)
    prefills = Prefills(place(options, get_strategy(name.removesuffix("8"))))
    grids = times.grids(group)
    assert grids[0].most_new_tokens
    assert not grids[-1].most_new_tokens  # no prompt fits after the longest prefix
    longest = int(times._longest_contexts(group, np.array([2_900_000]))[0])
    assert len({grid.finish.shape for grid in grids}) == 1
    prefix = np.array([longest // 2, longest - 9000, longest - 4100, longest - 3000, longest, 3_000_000])
    seconds = times.seconds(group, np.full(6, 4096), prefix)
    assert np.isfinite(seconds).tolist() == [True, True, True, False, False, False]
    for index in range(3):
        execution = prefills.at(int(prefix[index]), 4096)
        partition = partition_of(execution)
        assert fits(execution.placed, memory_of(execution, partition))
        assert seconds[index] == pytest.approx(run_partition(execution, partition).ttft_s, rel=0.05)


@pytest.mark.parametrize(("cluster", "gpus", "name"), [("l40s-pcie", 1, "single"), ("h100-nvlink", 4, "tsp")])
def test_times_between_tiles_of_kernels_are_those_of_a_simulation(cluster: str, gpus: int, name: str) -> None:
    """One token more than a whole tile takes up to a tenth longer; interpolated over the step it would not."""
    options, _ = make_scenario(ctx=1024, gpus=gpus, model="llama-3.1-8b", cluster=cluster)
    times = ServiceTimes(options, GridPoints.up_to(8192, 0), StrategyPolicy(names=(name,)))
    lengths = np.array([129, 600, 1023, 1025, 1100, 1500, 2050, 3001, 4097, 4101, 6000, 8192])
    simulated = Prefills(place(options, get_strategy(name)))
    errors = times.seconds(GroupType(gpus), lengths, np.zeros_like(lengths))
    for index, tokens in enumerate(lengths.tolist()):
        execution = simulated.at(0, tokens)
        errors[index] /= run_partition(execution, partition_of(execution)).ttft_s
    assert errors == pytest.approx(np.ones(len(lengths)), abs=0.03)
    assert abs(np.median(errors) - 1) < 0.02  # the clock is that of the next power of two


@pytest.mark.parametrize(("prefixes", "is_exact"), [((0, 300), True), (tuple(range(0, 3000, 100)), False)])
def test_requests_of_few_lengths_take_as_long_as_in_a_simulation(prefixes: tuple[int, ...], is_exact: bool) -> None:
    lengths = (1500, 2100, 3001)
    pairs = np.array([(new, prefix) for new in lengths for prefix in prefixes])
    workload = Workload(
        name="few lengths",
        kind="csv",
        arrival_s=np.arange(len(pairs), dtype=float),
        context_len=pairs.sum(axis=1),
        cached_prefix=pairs[:, 1],
        output_tokens=np.ones(len(pairs), dtype=np.int64),
    )
    options, _ = make_scenario(ctx=1024, gpus=4, model="llama-3.1-8b", cluster="h100-nvlink")
    times = service_times(options, [workload], StrategyPolicy(names=("tsp",)))
    assert times.points.exact is is_exact
    service = times.service(GroupType(4), workload)
    strategy = get_strategy("tsp")
    simulated_s = []
    for new, prefix in pairs.tolist():
        prompt = Prefills(place(options, strategy)).at(prefix, new)
        simulated_s.append(run_partition(prompt, partition_of(prompt)).ttft_s)
    assert service.ttft_s == pytest.approx(simulated_s, rel=1e-9 if is_exact else 0.05)
    assert {service.strategies[index] for index in service.length_class} == {"tsp"}


@pytest.mark.parametrize("name", ["kvr-s", "pp"])
def test_each_of_few_lengths_has_the_overlap_of_its_own_simulation(name: str) -> None:
    lengths = np.array([1500, 6000], dtype=np.int64)
    workload = Workload(
        name="two lengths",
        kind="csv",
        arrival_s=np.zeros(2),
        context_len=lengths,
        cached_prefix=np.zeros(2, dtype=np.int64),
        output_tokens=np.ones(2, dtype=np.int64),
    )
    options, _ = make_scenario(ctx=1024, gpus=4, model="llama-3.1-8b", cluster="h100-nvlink")
    times = service_times(options, [workload], StrategyPolicy(names=(name,)))
    (group,) = times.types(4)
    service = times.service(group, workload)
    for index, tokens in enumerate(lengths.tolist()):
        alone = Prefills(place(options, get_strategy(name)), exact=True).times(0, lengths[[index]], 0, tokens)
        assert alone is not None
        length_class = service.length_class[index]
        assert service.ttft_s[index] == pytest.approx(alone.ttft_s[0], rel=1e-9)
        assert service.overlap.finish[length_class] == pytest.approx(alone.finish[0].tolist(), rel=1e-9)
        slack = alone.slack_s[0] / alone.ttft_s[0]
        assert service.overlap.slack[length_class] == pytest.approx(slack.tolist(), rel=1e-6, abs=1e-9)
