"""Prompts on the same GPUs: behind each other, so that early ranks begin the next while the last is busy, or packed.

Host and device begin a prompt together, since a serving loop fetches the token of the one before. On links that nobody
shares the batch executor gives the recurrence of planner/packing/serve.py; under noise and on a bus the event executor
runs prompts one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.hardware import Cluster
from kvrsim.noise import NoiseDraw
from kvrsim.program import Program
from kvrsim.results.stream import Packed, Prompts, StreamResult
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.access import placed_for
from planner.evaluate import Evaluator
from planner.packing.memory import most_held
from planner.packing.rule import PackingRule, check_packs
from planner.packing.serve import Launch, Served, serve_packed, serve_whole, steady_s
from planner.packing.steps import StepPrograms
from planner.partitions import best_pieces, settled, with_dear_steps

MOST_STEPS = 2048  # that a prompt is cut into: each is simulated, in about 2 ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Prompts and how the ranks of a cluster run them; made by one of the functions below."""

    cluster: Cluster  # as the strategy sees it
    prompts: Prompts
    serve: Callable[[Sequence[float]], Served]  # prompts that arrive at these times, on links that nobody shares
    program_of: Callable[[int], Program] | None  # of a prompt by itself; None: prompts are packed
    pack_tokens: int | None = None  # most new tokens of a step; None: prompts are not packed

    def run(self, busy_of: Callable[[Program], Sequence[float]], noise: NoiseDraw | None = None) -> StreamResult:
        """TTFT of every prompt, throughput and utilisation.

        busy_of: device time of each rank's own operations in a program.
        """
        prompts, times_s = self.prompts, self.prompts.arrivals_s
        served, steady = self._served(noise)
        busy: dict[int, Sequence[float]] = {}
        sums = [0.0] * len(busy_of(served.launches[0].program))
        for launch in served.launches:
            of_ranks = busy.setdefault(id(launch.program), busy_of(launch.program))
            sums = [so_far + more for so_far, more in zip(sums, of_ranks, strict=True)]
        count = len(times_s)
        return StreamResult(
            arrivals=prompts.arrivals,
            arrivals_s=times_s,
            context_lens=prompts.context_lens,
            queue_s=_since(served.begin_s, times_s),
            ttft_s=_since(served.first_token_s, times_s),
            throughput_per_s=count / served.end_s,
            steady_per_s=count / steady if steady else None,
            busy_s=tuple(one / count for one in sums),
            utilisation=tuple(one / served.end_s for one in sums),
            packed=None if self.pack_tokens is None else _packed(served.launches, self.pack_tokens),
        )

    def timeline(self, noise: NoiseDraw | None = None) -> Timeline:
        """What happens when, by the event executor."""
        from kvrsim.executors.event import EventSimulation  # SimPy, only where it is needed

        times_s, programs = self.prompts.arrivals_s, self._programs()
        ends: Sequence[int] = range(len(times_s))
        if self.program_of is None:
            served = self.serve(times_s)
            programs = [launch.program for launch in served.launches]
            times_s = tuple(launch.release_s for launch in served.launches)
            ends = [number for number, launch in enumerate(served.launches) for _ in launch.ends]
        simulation = EventSimulation(programs[0], self.cluster, noise=noise, arrivals_s=times_s, programs=programs)
        return replace(simulation.timeline, first_tokens_s=tuple(simulation.finishes_s[-1][end] for end in ends))

    def first(self, count: int) -> Stream:
        """The first prompts alone."""
        return replace(self, prompts=self.prompts.first(count))

    def _programs(self) -> list[Program]:
        """One a prompt, the same for prompts that are alike; none where prompts are packed."""
        if self.program_of is None:
            return []
        known: dict[Hashable, Program] = {}
        keys = _keys(self.prompts)
        return [
            known[key] if key in known else known.setdefault(key, self.program_of(prompt))
            for prompt, key in enumerate(keys)
        ]

    def _served(self, noise: NoiseDraw | None) -> tuple[Served, float | None]:
        """What happened, and seconds of all prompts in the long run."""
        times_s = self.prompts.arrivals_s
        if noise is not None or self.cluster.shares_bandwidth:
            return _simulated(self._programs(), self.cluster, times_s, noise), None
        served = self.serve(times_s)
        at_once = served if self.pack_tokens is None else self.serve((0.0,) * len(times_s))
        return served, steady_s(at_once.launches)


def alike(program: Program, cluster: Cluster, prompts: Prompts) -> Stream:
    """Equal prompts, each run by the same program."""

    def serve(times_s: Sequence[float]) -> Served:
        return serve_whole(cluster, times_s, [0] * len(times_s), lambda _: program)

    return Stream(cluster=cluster, prompts=prompts, serve=serve, program_of=lambda _: program)


def of_lengths(scenario: Scenario, strategy: Strategy, prompts: Prompts) -> Stream:
    """Prompts of different lengths, each with the strategy's own partition of it.

    scenario: with the GPUs that there are. strategy: of a pipeline with the layers of its stages, which all prompts
    share.
    """

    def program_of(prompt: int) -> Program:
        asked = replace(
            scenario.request, context_len=prompts.context_lens[prompt], cached_prefix=prompts.cached_prefix[prompt]
        )
        placed = placed_for(replace(scenario, request=asked), strategy)
        if strategy.pipeline is not None:
            cut = best_pieces(Evaluator(with_dear_steps(placed), strategy, None))
        else:
            _, cut = settled(placed, strategy)
        return build_program(placed, strategy, columns(cut.chunk_lens))

    cluster = placed_for(scenario, strategy).cluster

    def serve(times_s: Sequence[float]) -> Served:
        return serve_whole(cluster, times_s, _keys(prompts)[: len(times_s)], program_of)

    return Stream(cluster=cluster, prompts=prompts, serve=serve, program_of=program_of)


def packed(placed: Scenario, strategy: Strategy, prompts: Prompts, pack_tokens: int) -> Stream:
    """Prompts in steps of at most `pack_tokens` new tokens.

    placed: as the strategy sees it; the clock is that of its request. Raises InputError where prompts cannot share
    steps.
    """
    check_packs(placed, strategy)
    if placed.cluster.shares_bandwidth:
        raise InputError("pack_tokens", pack_tokens, "links that flows do not share: `topology` switch or chain")
    if placed.request.batch != 1:
        raise InputError("batch", placed.request.batch, "1 with `pack_tokens`, which makes batches itself")
    longest = max(prompts.new_tokens)
    if longest > MOST_STEPS * pack_tokens:
        least, accepted = -(-longest // MOST_STEPS), f"a prompt of {longest} new tokens in at most {MOST_STEPS} steps"
        raise InputError("pack_tokens", pack_tokens, f"at least {least} tokens: {accepted}")
    programs = StepPrograms(placed, strategy)
    everything = sum(prompts.context_lens)
    held = most_held(placed, strategy, pack_tokens, everything)
    rule = PackingRule(prompts.new_tokens, prompts.cached_prefix, pack_tokens, held)

    def serve(times_s: Sequence[float]) -> Served:
        return serve_packed(programs, rule, times_s)

    return Stream(cluster=placed.cluster, prompts=prompts, serve=serve, program_of=None, pack_tokens=pack_tokens)


def _simulated(
    programs: Sequence[Program], cluster: Cluster, arrivals_s: Sequence[float], noise: NoiseDraw | None
) -> Served:
    """By the event executor; `programs`: one a prompt."""
    from kvrsim.executors.event import EventSimulation  # SimPy, only where it is needed

    simulation = EventSimulation(
        programs[0], cluster, record=False, noise=noise, arrivals_s=arrivals_s, programs=programs
    )
    free_s = (0.0, *simulation.finishes_s[0][:-1])
    launches = [
        Launch(release_s=time_s, program=program, recurrence=None, begins=(prompt,), ends=(prompt,), tokens=0)
        for prompt, (time_s, program) in enumerate(zip(arrivals_s, programs, strict=True))
    ]
    return Served(
        launches=tuple(launches),
        begin_s=tuple(max(pair) for pair in zip(free_s, arrivals_s, strict=True)),
        first_token_s=simulation.finishes_s[-1],
        end_s=max(simulation.finish_s),
    )


def _packed(launches: Sequence[Launch], pack_tokens: int) -> Packed:
    count = len(launches)
    return Packed(
        pack_tokens=pack_tokens,
        steps=count,
        mean_tokens=sum(launch.tokens for launch in launches) / count,
        mean_prompts=sum(launch.prompts for launch in launches) / count,
    )


def _keys(prompts: Prompts) -> list[Hashable]:
    """The same for prompts that are alike."""
    return list(zip(prompts.context_lens, prompts.cached_prefix, strict=True))


def _since(times_s: Sequence[float], begin_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(time_s - begin for time_s, begin in zip(times_s, begin_s, strict=True))
