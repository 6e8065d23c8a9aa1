"""Terms of an engine from measured seconds: the most probable ones under log-normal priors, and their errors.

log(predicted / measured) of each row has a spread that is estimated with the terms; rows far off count less (a
pseudo-Huber loss). Each term has a log-normal prior, so a handful of rows suffices and a term that the rows say nothing
of stays where the prior has it. Predictions may have kinks (the slower of host and device), so the search starts at
several points.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]  # values of the terms, shape (terms,), to seconds of every row, shape (rows,)
Progress = Callable[[str], None]

_MEDIAN_OF_NORMAL = 0.6745  # of the size of a standard normal
LEAST_NOISE = (
    0.014 / _MEDIAN_OF_NORMAL
)  # log sd: medians of repeated serving runs differ by 1.4 % (see planner.uncertainty)
_MOST_NOISE = 0.3  # a row that is off by more is an outlier, whatever the others are
_FIRST_NOISE = 0.05
_HUBER = 2.0  # in standard deviations: beyond, a row's weight falls
_STEP = 0.02  # of a prior's standard deviation, for derivatives
_STARTS = (-2.0, -1.0, 1.0, 2.0, 3.0)  # prior standard deviations at which each term alone is tried first
_ENOUGH = 3  # rows more than terms that they identify, for a spread from the median error
_ROUNDS = 4  # of fitting terms and estimating the noise
_MOST_STEPS = 20
_MOST_MOVE = 2.0  # prior standard deviations in one step
_MOST_DAMPING = 1e4
_SMALL_GAIN = 0.01  # of twice the log-probability: nothing that matters is won any more
_SMALL_MOVE = (
    0.5  # prior standard deviations: terms that move less without some rows are refitted with the same derivatives
)
MOST_FOLDS = 60  # more cases are left out in so many groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What is known of a term before the rows."""

    name: str
    median: float  # above 0
    log_sd: float  # standard deviation of its logarithm, above 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Terms fitted to rows."""

    values: Array  # (terms,): the most probable
    log_sd: Array  # (terms,): their uncertainty after the rows
    narrowed: Array  # (terms,): the same over the prior's, 1 where the rows say nothing
    noise_log_sd: float  # of a row
    before_s: Array  # (rows,): seconds at the prior's medians
    after_s: Array  # (rows,): with the terms
    left_out_s: Array  # (rows,): each with the terms fitted without its case


def solve(
    predict: Predict,
    measured_s: Array,
    priors: Sequence[Prior],
    cases: Sequence[Hashable],
    on_progress: Progress | None = None,
) -> Solution:
    """Fit terms to rows, and again without each case.

    measured_s: (rows,). cases: of each row what was measured; rows of one case are left out together.
    """
    problem = _Problem(predict, np.asarray(measured_s, dtype=float), tuple(priors))
    tell = on_progress or (lambda text: None)
    everyone = np.ones(len(measured_s), dtype=bool)
    before = problem.errors(np.zeros(len(priors)))
    tell(f"fitting {len(priors)} terms to {len(measured_s)} rows")
    point, noise = problem.best_start(everyone, _FIRST_NOISE), _FIRST_NOISE
    for _ in range(_ROUNDS):
        point = problem.minimise(point, everyone, noise)
        found = problem.noise(point, everyone, noise)
        settled = abs(np.log(found / noise)) < 0.1
        noise = found
        if settled:
            break
    errors = problem.errors(point)
    slopes = problem.slopes(point, errors)
    left_out = np.empty_like(errors)
    folds = _folds(cases)
    for number, fold in enumerate(folds, start=1):
        tell(f"refitting without case {number} of {len(folds)}")
        left_out[fold] = problem.errors(problem.refit(point, errors, slopes, ~fold, noise))[fold]
    sd = np.sqrt(np.diag(problem.covariance(errors, slopes, everyone, noise)))
    widths = np.array([prior.log_sd for prior in priors])
    return Solution(
        values=problem.values(point),
        log_sd=sd * widths,
        narrowed=sd,
        noise_log_sd=noise,
        before_s=problem.measured_s * np.exp(before),
        after_s=problem.measured_s * np.exp(errors),
        left_out_s=problem.measured_s * np.exp(left_out),
    )


def _folds(cases: Sequence[Hashable]) -> list[NDArray[np.bool_]]:
    """For each group that is left out together, which rows it has."""
    numbers = {case: number for number, case in enumerate(dict.fromkeys(cases))}
    count = min(len(numbers), MOST_FOLDS)
    groups = np.array([numbers[case] % count for case in cases])
    return [groups == group for group in range(count)]


@dataclass(frozen=True, slots=True)
class _Problem:
    """Points are terms in prior standard deviations: 0 is the prior's median, their prior is a standard normal."""

    predict: Predict
    measured_s: Array
    priors: tuple[Prior, ...]

    def values(self, point: Array) -> Array:
        return np.array(
            [prior.median * np.exp(prior.log_sd * one) for prior, one in zip(self.priors, point, strict=True)]
        )

    def errors(self, point: Array) -> Array:
        """log(predicted / measured) of each row."""
        return np.log(self.predict(self.values(point)) / self.measured_s)

    def slopes(self, point: Array, errors: Array) -> Array:
        """How each row's error moves with each term, shape (rows, terms); `errors`: those at the point."""
        steps = np.eye(len(point)) * _STEP
        return np.array([(self.errors(point + step) - errors) / _STEP for step in steps]).T

    def cost(self, point: Array, errors: Array, rows: NDArray[np.bool_], noise: float) -> float:
        """Twice the negative logarithm of the probability, but for constants."""
        loss = 2 * _HUBER**2 * (np.sqrt(1 + (errors[rows] / noise / _HUBER) ** 2) - 1)
        return float(np.sum(loss) + point @ point)

    def best_start(self, rows: NDArray[np.bool_], noise: float) -> Array:
        """The prior's medians, or one term away from them."""
        count = len(self.priors)
        starts = [np.zeros(count), *(np.eye(count)[term] * size for term in range(count) for size in _STARTS)]
        return min(starts, key=lambda start: self.cost(start, self.errors(start), rows, noise))

    def minimise(self, start: Array, rows: NDArray[np.bool_], noise: float) -> Array:
        """The most probable point near a start, by damped Gauss-Newton steps."""
        point, errors = start, self.errors(start)
        cost, damping = self.cost(point, errors, rows, noise), 0.0
        for _ in range(_MOST_STEPS):
            slopes = self.slopes(point, errors)
            while True:
                move = self.step(point, errors, slopes, rows, noise, damping)
                then = self.errors(point + move)
                less = cost - self.cost(point + move, then, rows, noise)
                if less >= 0 or damping > _MOST_DAMPING:
                    break
                damping = max(10 * damping, 0.1)
            if less < 0:
                break
            point, errors, cost, damping = point + move, then, cost - less, damping / 10
            if less < _SMALL_GAIN:
                break
        return point

    def step(
        self, point: Array, errors: Array, slopes: Array, rows: NDArray[np.bool_], noise: float, damping: float = 0.0
    ) -> Array:
        """A Gauss-Newton step towards the most probable point, of at most _MOST_MOVE in each term."""
        weights = _weights(errors[rows] / noise) / noise**2
        bend = slopes[rows].T @ (slopes[rows] * weights[:, None]) + np.eye(len(point))
        slope = slopes[rows].T @ (weights * errors[rows]) + point
        return np.clip(-np.linalg.solve(bend + damping * np.diag(np.diag(bend)), slope), -_MOST_MOVE, _MOST_MOVE)

    def refit(self, point: Array, errors: Array, slopes: Array, rows: NDArray[np.bool_], noise: float) -> Array:
        """The most probable point for some of the rows, from that for all of them."""
        now, at = point, errors
        for _ in range(3):
            move = self.step(now, at, slopes, rows, noise)
            now = now + move
            if np.max(np.abs(now - point)) > _SMALL_MOVE:
                return self.minimise(point, rows, noise)
            at = self.errors(now)
            if np.max(np.abs(move)) < 0.01:
                break
        return now

    def covariance(self, errors: Array, slopes: Array, rows: NDArray[np.bool_], noise: float) -> Array:
        """Of the point, after these rows; at most the prior's."""
        weighted = slopes[rows] * _weights(errors[rows] / noise)[:, None]
        return np.asarray(np.linalg.inv(slopes[rows].T @ weighted / noise**2 + np.eye(len(self.priors))))

    def noise(self, point: Array, rows: NDArray[np.bool_], noise: float) -> float:
        """The rows' spread around the fit, for as many degrees of freedom as the terms leave.

        From the median error where there are rows enough, which outliers do not move; else from the mean square.
        """
        errors = self.errors(point)
        slopes = self.slopes(point, errors)
        used = len(point) - float(np.trace(self.covariance(errors, slopes, rows, noise)))
        count = float(np.count_nonzero(rows))
        left = max(1.0, count - used)
        if left >= _ENOUGH:
            spread = float(np.median(np.abs(errors[rows]))) / _MEDIAN_OF_NORMAL * np.sqrt(count / left)
        else:
            spread = np.sqrt(np.sum(errors[rows] ** 2) / left)
        return float(np.clip(spread, LEAST_NOISE, _MOST_NOISE))


def _weights(sizes: Array) -> Array:
    """What a row counts in a weighted least-squares step: 1 near the fit, less far off."""
    return 1 / np.sqrt(1 + (sizes / _HUBER) ** 2)
