"""The promise for a prompt: what TTFT to expect, and what is sure in spite of the prediction's error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.arguments import TargetArgs
from kvrsim.engine import DEVIATES_OF_80_PERCENT
from kvrsim.results.results import Promise, PromptShare
from planner.candidates import Candidate
from planner.percentile import percentile_of

if TYPE_CHECKING:  # noise and queues are imported on use, because each import slows down every start
    from kvrsim.noise import Distribution

CONFIDENCE = 0.9  # one-sided: probability that TTFT is below the upper end of an 80 % interval
_ERRORS = 1000  # quantiles of the prediction's error that are combined with the samples of noise


def promise_of(
    candidate: Candidate, target: TargetArgs, noisy: Distribution | None = None, *, seed: int = 0
) -> Promise:
    """What to expect of a candidate's TTFT, and what is 90 % sure: on idle GPUs, under noise, and at a rate of prompts.

    The error of the prediction is that of the machine, so it is the same for all prompts: `high_s` has every prompt at
    the upper end of the candidate's interval. Noise and the queue differ between prompts.

    noisy: TTFTs under noise; None: without noise. seed: seed of the arrivals.
    """
    slower = candidate.interval.high_s / candidate.ttft_s
    expected_s = candidate.ttft_s
    high_s = candidate.interval.high_s
    if noisy is not None:
        expected_s = noisy.mean.value_s
        high_s = _sure_of_one_s(candidate, noisy)
    percent = target.percentile
    under_noise = None
    if noisy is not None and noisy.samples_s[0] < noisy.samples_s[-1]:  # a slow GPU is slow in all runs
        under_noise = _noise_share(noisy, percent, slower)
    at_rate = None
    queue = None
    if target.rate is not None or target.slo is not None:
        from planner.prompt_queue import queue_of

        queue = queue_of(candidate, noisy, seed=seed)
    if target.rate is not None and queue is not None:
        at_rate = PromptShare(
            percentile=percent,
            expected_s=queue.percentile_s(target.rate, percent),
            high_s=queue.percentile_s(target.rate, percent, slower),
            rate_per_s=target.rate,
        )
    promise = Promise(
        expected_s=expected_s, high_s=high_s, confidence=CONFIDENCE, under_noise=under_noise, at_rate=at_rate
    )
    if target.slo is None or queue is None:
        return promise
    values: PromptShare | Promise = promise.decisive or promise
    return replace(
        promise,
        slo_s=target.slo,
        meets=values.high_s is not None and values.high_s <= target.slo,
        most_rate_per_s=queue.most_rate_per_s(target.slo, percent, slower),
        expected_meets=values.expected_s is not None and values.expected_s <= target.slo,
        expected_most_rate_per_s=queue.most_rate_per_s(target.slo, percent),
    )


def _noise_share(noisy: Distribution, percent: float, slower: float) -> PromptShare:
    percentile_s = percentile_of(noisy.samples_s, percent)
    return PromptShare(percentile=percent, expected_s=percentile_s, high_s=slower * percentile_s)


def _sure_of_one_s(candidate: Candidate, noisy: Distribution) -> float:
    """The TTFT that one prompt under noise does not exceed with probability CONFIDENCE.

    A prompt takes a sample of the noise times the error of the prediction. The logarithm of the error has two halves of
    normal distributions, whose 80 % interval is that of the candidate.
    """
    from scipy.special import ndtri

    low_s = candidate.interval.low_s
    ttft_s = candidate.ttft_s
    high_s = candidate.interval.high_s
    deviates = ndtri((np.arange(_ERRORS) + 0.5) / _ERRORS) / DEVIATES_OF_80_PERCENT
    half_widths = np.where(deviates < 0, math.log(ttft_s / low_s), math.log(high_s / ttft_s))
    errors = np.exp(deviates * half_widths)
    return percentile_of(np.outer(errors, noisy.samples_s).ravel(), 100 * CONFIDENCE)
