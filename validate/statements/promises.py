"""Statements of a promise: what to expect of prompts on idle GPUs, at a rate, and under noise; and what would help."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

import kvrsim
from validate.statements.claims import Claim, arguments_of, with_change
from validate.statements.fleets import queue_ttft_s
from validate.statements.plans import NEAR, PlannedCase
from validate.statements.questions import LARGE, choose

CONFIDENCE = 0.9
_DEVIATE = 1.2815515655446004  # standard deviations of a normal distribution below which 90 % of it lies
_REQUESTS = 2_000  # prompts of an own queue
_REPEATS = 24  # own queues, whose spread is the sampling error
_SPREADS = 5.0  # standard errors within which two values agree
_ERROR = 0.01  # relative difference within which two values agree, whatever their sampling error
_SAMPLES = 400  # own samples under noise
_PLAN_SAMPLES = 200  # samples of a plan under noise, by default
_SHARE_ERROR = 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) * (1 / _SAMPLES + 1 / _PLAN_SAMPLES))  # of a share kept
_WAITING = ("single", "tp", "tsp")  # strategies whose GPUs prefill one prompt at a time
_MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "llama-7b")
_CLUSTERS = ("h100", "a100-80gb", "b200")
Floats = npt.NDArray[np.float64]


def draw_rate(rng: Generator) -> dict[str, str]:
    """Draw the options of a plan with a rate of prompts, near the rate that the GPUs prefill."""
    options = {
        "model": choose(rng, _MODELS),
        "cluster": f"{choose(rng, (1, 2, 4, 8))}x{choose(rng, _CLUSTERS)}",
        "ctx": choose(rng, ("1k", "3000", "8k", "16k", "32k")),
        "strategies": ",".join(_WAITING),
    }
    alone_s = kvrsim.plan(**arguments_of(options)).first.ttft_s
    options["rate"] = f"{choose(rng, (0.1, 0.4, 0.6, 0.8, 0.9, 1.3)) / alone_s:.4g}"
    options["percentile"] = choose(rng, ("50", "90", "95", "99"))
    return options


def draw_noise(rng: Generator) -> dict[str, str]:
    """Draw the options of a plan under noise."""
    return {
        "model": choose(rng, _MODELS),
        "cluster": f"{choose(rng, (2, 4, 8))}x{choose(rng, _CLUSTERS)}",
        "ctx": choose(rng, ("1k", "4k", "8k")),
        "strategies": choose(rng, ("kvr-s,tsp", "tsp,ring", "kvr-e,ulysses")),
        "noise": choose(rng, ("paper", "jitter:0.05", "jitter:0.5", "slow-gpu:1x1.3", "slow-gpu:0x1.2+jitter:0.1")),
    }


def check_idle(case: PlannedCase) -> Iterator[Claim]:
    """The promise for idle GPUs: the TTFT and the upper end of the interval that `simulate` predicts."""
    promise = case.said.get("promise")
    if case.best is None or promise is None or "expected_s" not in promise or "noise" in case.options:
        return
    again = case.simulate_entry(case.best)
    for name, found_s in (("expected_s", again.ttft_s), ("high_s", again.ttft_high_s)):
        yield Claim(
            kind="promise",
            said=f"{name} {promise[name]:.6g} s",
            found=f"simulated: {found_s:.6g} s",
            holds=math.isclose(promise[name], found_s, rel_tol=1e-6),
        )
    yield Claim(
        kind="promise",
        said=f"confidence {promise['confidence']}",
        found=f"the upper end of an 80 % interval has {CONFIDENCE}",
        holds=promise["confidence"] == CONFIDENCE and promise["expected_s"] <= promise["high_s"],
    )


def check_rate(case: PlannedCase) -> Iterator[Claim]:
    """The percentile of prompts at a rate, by own queues of prompts that take the expected and the longest time."""
    promise = case.said.get("promise")
    if case.best is None or promise is None or not promise.get("at_rate"):
        return
    if case.best["strategy"] not in _WAITING:
        return
    rate = float(case.options["rate"])
    percentile = float(case.options["percentile"])
    again = case.simulate_entry(case.best)
    for name, prefill_s in (("expected_s", again.ttft_s), ("high_s", again.ttft_high_s)):
        said_s = promise["at_rate"][name]
        if rate * prefill_s >= 1:
            yield Claim(
                kind="at rate",
                said=f"p{percentile:g} {name} {said_s} s",
                found=f"{rate * prefill_s:.3f} prompts arrive while one is prefilled: the queue grows for ever",
                holds=said_s is None,
            )
            continue
        found_s, error_s = _queue_percentile_s(case.rng, rate, prefill_s, percentile)
        agrees = said_s is not None and abs(said_s - found_s) <= max(_SPREADS * error_s, _ERROR * found_s)
        yield Claim(
            kind="at rate",
            said=f"p{percentile:g} {name} {said_s} s",
            found=f"own queue: {found_s:.6g} s, standard error {error_s:.2g} s",
            holds=agrees,
        )


def _queue_percentile_s(rng: Generator, rate: float, prefill_s: float, percentile: float) -> tuple[float, float]:
    """The percentile of TTFT of one server with random arrivals, and the spread of this percentile between queues."""
    values = []
    for _ in range(_REPEATS):
        arrivals = np.cumsum(rng.exponential(1 / rate, size=_REQUESTS))
        ttft_s = queue_ttft_s(arrivals.tolist(), [prefill_s] * _REQUESTS, 1)
        values.append(float(np.quantile(ttft_s, percentile / 100)))
    return float(np.mean(values)), float(np.std(values, ddof=1))


def check_noise(case: PlannedCase) -> Iterator[Claim]:
    """The promise under noise, by own samples of `simulate --noise`, times random errors of the prediction."""
    promise = case.said.get("promise")
    if case.best is None or promise is None or "expected_s" not in promise:
        return
    samples_s = _samples_s(case)
    mean_s = float(samples_s.mean())
    error_s = float(samples_s.std()) * math.sqrt(1 / _SAMPLES + 1 / _PLAN_SAMPLES)
    yield Claim(
        kind="under noise",
        said=f"expect {promise['expected_s']:.6g} s",
        found=f"own samples: {mean_s:.6g} s, standard error {error_s:.2g} s",
        holds=abs(promise["expected_s"] - mean_s) <= max(_SPREADS * error_s, _ERROR * mean_s),
    )
    best = case.best
    deviates = case.rng.standard_normal((_SAMPLES, 64)) / _DEVIATE
    above = math.log(best["ttft_high_s"] / best["ttft_s"])
    below = math.log(best["ttft_s"] / best["ttft_low_s"])
    errors = np.exp(np.where(deviates > 0, deviates * above, deviates * below))
    kept = float((errors * samples_s[:, None] <= promise["high_s"]).mean())
    yield Claim(
        kind="under noise",
        said=f"{promise['confidence']:.0%} of prompts take at most {promise['high_s']:.6g} s",
        found=f"own samples and errors: {kept:.1%}",
        holds=abs(kept - promise["confidence"]) <= _SHARE_ERROR,
    )


def _samples_s(case: PlannedCase) -> Floats:
    """Own samples of the best strategy's TTFT under the question's noise."""
    assert case.best is not None
    result = case.simulate_entry(case.best, seed=int(case.rng.integers(1, 2**31)), samples=_SAMPLES)
    assert result.noisy is not None
    return np.array(result.noisy.samples_s)


def check_advice(case: PlannedCase) -> Iterator[Claim]:
    """One change of the advice: the question with this change is faster than before, and not slower than said."""
    advice = case.said.get("advice")
    if case.best is None or not advice or case.num_gpus > LARGE:
        return
    change = advice[int(case.rng.integers(len(advice)))]
    again = kvrsim.plan(**arguments_of(with_change(case.options, shlex.split(change["change"]))))
    found_s = again.first.ttft_s if again.feasible else math.inf
    yield Claim(
        kind="advice",
        said=f"{change['change']}: {change['ttft_s']:.4g} s instead of {case.best['ttft_s']:.4g} s",
        found=f"planned with this change: {found_s:.4g} s",
        holds=found_s <= NEAR * change["ttft_s"] and found_s < case.best["ttft_s"],
    )
