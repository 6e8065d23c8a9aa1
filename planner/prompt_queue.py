"""The queue of prompts at one group of GPUs, for the promise of a plan: the model of planner.capacity.

A capacity plan has prompts of many lengths and chooses strategies. Here all prompts are alike, and the strategy and its
partition are those of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.program import Array
from planner.capacity.fleet import GroupPool, Overlap, Service, run_pool
from planner.capacity.times import overlaps, slack_of
from planner.capacity.workload import RequestSource, Workload
from planner.percentile import percentile_of

if TYPE_CHECKING:
    from kvrsim.noise import Distribution
    from planner.candidates import Candidate

_DRAWS = 5  # independent draws of the arrivals, as many as a capacity plan has by default
_HALVINGS = 12  # steps of the bisection over loads
_SAMPLES = 2  # number of the random generators that draw samples of noise for prompts


@dataclass(frozen=True, kw_only=True)
class PromptQueue:
    """Prompts of one length that arrive at random times at one group of GPUs: the queue of planner.capacity.

    The next prompt starts as soon as the first rank is free, so a pipeline works on several prompts.
    """

    arrivals: tuple[Workload, ...]  # independent draws of arrivals, one prompt per second on average
    services: tuple[Service, ...]  # service times of each draw
    prompts_together: int  # prompts that arrive and are prefilled together

    @cached_property
    def busy_s(self) -> float:
        """Seconds for which a prefill occupies the busiest rank: the reciprocal of the largest rate of prefills."""
        period = self.services[0].overlap.periods[0]
        return period * float(np.mean([service.ttft_s.mean() for service in self.services]))

    def percentile_s(self, rate_per_s: float, percent: float, slower: float = 1.0) -> float | None:
        """The TTFT, with its wait, that `percent` percent of the prompts do not exceed; None: the queue grows for ever.

        slower: factor on the time of every prefill.
        """
        rate = rate_per_s * slower / self.prompts_together
        if rate * self.busy_s >= 1:
            return None
        runs = [self._ttft_s(*pair, rate) for pair in zip(self.arrivals, self.services, strict=True)]
        return slower * percentile_of(np.concatenate(runs), percent)

    def _ttft_s(self, arrivals: Workload, service: Service, rate_per_s: float) -> Array:
        arrival_s = arrivals.faster(rate_per_s).arrival_s
        return run_pool(GroupPool(arrival_s=arrival_s, service=service, replicas=1)).end_s - arrival_s

    def most_rate_per_s(self, most_s: float, percent: float, slower: float = 1.0) -> float:
        """The largest rate at which `percent` percent of the prompts have a TTFT of at most `most_s`; 0: none."""
        service = self.services[0]
        if slower * percentile_of(service.ttft_s, percent) > most_s:
            return 0.0
        largest = self.prompts_together / (slower * self.busy_s)
        low = 0.0
        high = 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            taken_s = self.percentile_s(middle * largest, percent, slower)
            if taken_s is not None and taken_s <= most_s:
                low = middle
            else:
                high = middle
        return low * largest


def queue_of(candidate: Candidate, noisy: Distribution | None = None, *, seed: int = 0) -> PromptQueue:
    """The queue of prompts like that of the candidate; under noise, each takes one of the samples."""
    per_rank = candidate.execution.placed
    request = per_rank.request
    overlap = _overlap_of(candidate)
    # Ranks that work on different prompts of different times are simulated prompt by prompt, which takes long.
    draws = 1 if noisy is not None and overlap.num_ranks > 1 else _DRAWS
    source = RequestSource.of(f"synthetic:poisson,rate=1,context={request.context_len},max={request.context_len}")
    arrivals = tuple(source.workload(seed, number) for number in range(draws))
    services = []
    for number, workload in enumerate(arrivals):
        ttft_s = np.full(len(workload), candidate.ttft_s)
        if noisy is not None:
            ttft_s = np.random.default_rng([seed, number, _SAMPLES]).choice(noisy.samples_s, len(workload))
        services.append(replace(Service.plain(ttft_s), overlap=overlap, strategies=(candidate.strategy.name,)))
    return PromptQueue(arrivals=arrivals, services=tuple(services), prompts_together=candidate.scenario.request.batch)


def _overlap_of(candidate: Candidate) -> Overlap:
    """Times at which the ranks are free for the next prompt; the ranks of a gathered context are free together."""
    if not overlaps(candidate.strategy) or candidate.execution.cluster.num_gpus == 1:
        return Overlap.whole()
    finish_s = np.array([candidate.finish_s])
    slack_s = slack_of(candidate.program, candidate.execution.cluster, finish_s)
    return Overlap(
        finish=(tuple(finish_s[0] / candidate.ttft_s),),
        slack=(tuple(slack_s[0] / candidate.ttft_s),),
        holds=not candidate.execution.placed.sends_overlap,
    )
