"""Terms of an engine from measured seconds: the most probable values under log-normal priors, and their errors.

log(predicted / measured) of each row follows Student's t, so that outliers count little. The scale of Student's t, the
noise, is the one with which the rows are most probable, integrated over the terms. Each term has a log-normal prior: a
handful of rows suffices, and a term that the rows do not determine keeps its prior. Predictions have kinks (the slower
of host and device), so the search starts at several points.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvrsim.progress import OnProgress

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]  # maps values of the terms, shape (terms,), to seconds of all rows, shape (rows,)

LEAST_NOISE = 0.014 / 0.6745  # log sd: medians of repeated serving runs differ by 1.4 % (see planner.uncertainty)
_NOISES = tuple(LEAST_NOISE * 1.4**power for power in range(8))  # noise scales to try; errors above 0.22 are outliers
_USUAL_NOISE = 0.03  # prior median of the noise: the usual error of predicted prefills
_NOISE_LOG_SD = 0.8  # log standard deviation of the noise's prior
_FIRST_NOISE = 0.05
_TAIL = 4.0  # degrees of freedom of Student's t: a few outliers among many rows
# Standard deviation of the normal distribution with the same central 80 %, divided by Student's scale.
_AS_NORMAL = 1.533 / 1.2816
_STEP = 0.02  # step of numerical derivatives, in prior standard deviations
_STARTS = (-2.0, -1.0, 1.0, 2.0, 3.0)  # moves of one term, in prior standard deviations, for further starts
_HIDDEN = 0.9  # a term that stays wider than this share of its prior may be hidden by another term
_MOST_STEPS = 20
_MOST_MOVE = 2.0  # maximum change of a term in one step, in prior standard deviations
_MOST_DAMPING = 1e4
_SMALL_GAIN = 0.01  # gain of twice the log-probability below which the search ends
_SMALL_MOVE = 0.5  # if no term moves by more prior standard deviations, a refit keeps the derivatives
MOST_FOLDS = 60  # maximum number of groups of cases that are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """Prior of a term."""

    name: str
    median: float  # median of the term, above 0
    log_sd: float  # standard deviation of the term's logarithm, above 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Result of the fit of terms to rows."""

    values: Array  # (terms,): most probable values
    log_sd: Array  # (terms,): standard deviations of the logarithms, given the rows
    narrowed: Array  # (terms,): log_sd divided by the prior's; 1: the rows say nothing about the term
    noise_log_sd: float  # standard deviation of the normal distribution with the same central 80 % as a row's noise
    before_s: Array  # (rows,): seconds at the prior's medians
    after_s: Array  # (rows,): seconds with the fitted terms
    left_out_s: Array  # (rows,): seconds of each row with terms fitted without its case


def solve(
    predict: Predict,
    measured_s: Array,
    priors: Sequence[Prior],
    cases: Sequence[Hashable],
    on_progress: OnProgress | None = None,
) -> Solution:
    """Fit terms to all rows, then to the rows without each case.

    measured_s: (rows,). cases: name of each row's case; rows of one case are left out together.
    """
    problem = _Problem(predict, np.asarray(measured_s, dtype=float), tuple(priors))
    report = on_progress or (lambda done, total, text: None)
    everyone = np.ones(len(measured_s), dtype=bool)
    before = problem.errors(np.zeros(len(priors)))
    report(0, None, f"fitting {len(priors)} terms to {len(measured_s)} rows")
    point, noise = problem.fit(everyone)
    errors = problem.errors(point)
    slopes = problem.slopes(point, errors)
    left_out = np.empty_like(errors)
    folds = _folds(cases)
    for number, fold in enumerate(folds, start=1):
        report(number, len(folds), "fits without one case")
        left_out[fold] = problem.errors(problem.refit(point, errors, slopes, ~fold, noise))[fold]
    sd = np.sqrt(np.diag(problem.covariance(errors, slopes, everyone, noise)))
    widths = np.array([prior.log_sd for prior in priors])
    return Solution(
        values=problem.values(point),
        log_sd=sd * widths,
        narrowed=sd,
        noise_log_sd=noise * _AS_NORMAL,
        before_s=problem.measured_s * np.exp(before),
        after_s=problem.measured_s * np.exp(errors),
        left_out_s=problem.measured_s * np.exp(left_out),
    )


def _folds(cases: Sequence[Hashable]) -> list[NDArray[np.bool_]]:
    """A mask of the rows of each group; a group is left out as a whole."""
    numbers = {case: number for number, case in enumerate(dict.fromkeys(cases))}
    count = min(len(numbers), MOST_FOLDS)
    groups = np.array([numbers[case] % count for case in cases])
    return [groups == group for group in range(count)]


@dataclass(frozen=True, slots=True)
class _Problem:
    """The fit of terms. A point has a number per term: its distance from the prior's median in standard deviations."""

    predict: Predict
    measured_s: Array
    priors: tuple[Prior, ...]
    known: dict[bytes, Array] = field(default_factory=dict)  # errors of all points predicted so far

    def values(self, point: Array) -> Array:
        return np.array(
            [prior.median * np.exp(prior.log_sd * one) for prior, one in zip(self.priors, point, strict=True)]
        )

    def errors(self, point: Array) -> Array:
        """log(predicted / measured) of each row."""
        key = np.asarray(point, dtype=float).tobytes()
        if key not in self.known:
            self.known[key] = np.log(self.predict(self.values(point)) / self.measured_s)
        return self.known[key]

    def slopes(self, point: Array, errors: Array) -> Array:
        """Derivatives of each row's error by the terms, shape (rows, terms); `errors` are those at the point."""
        steps = np.eye(len(point)) * _STEP
        return np.array([(self.errors(point + step) - errors) / _STEP for step in steps]).T

    def cost(self, point: Array, errors: Array, rows: NDArray[np.bool_], noise: float) -> float:
        """Minus twice the logarithm of the probability, without constants."""
        loss = (_TAIL + 1) * np.log1p((errors[rows] / noise) ** 2 / _TAIL)
        return float(np.sum(loss) + point @ point)

    def fit(self, rows: NDArray[np.bool_]) -> tuple[Array, float]:
        """The most probable terms, with the noise that makes the rows most probable."""
        point = self.search(rows, _FIRST_NOISE)
        points = []
        for noise in _NOISES:
            point = self.minimise(point, rows, noise)
            points.append((self.evidence(point, rows, noise), noise, point))
        _, noise, point = min(points, key=lambda one: one[:2])
        return point, noise

    def search(self, rows: NDArray[np.bool_], noise: float) -> Array:
        """The most probable point from several starts: the best of those with one term away from the prior's median.

        A term that the rows do not narrow at that point may be hidden (such as the host's time behind the device's):
        the best start of the term is tried, too.
        """
        count = len(self.priors)
        alone = {term: [np.eye(count)[term] * size for size in _STARTS] for term in range(count)}

        def costs(point: Array) -> float:
            return self.cost(point, self.errors(point), rows, noise)

        best_alone = {term: min(starts, key=costs) for term, starts in alone.items()}
        minima = [self.minimise(min([np.zeros(count), *best_alone.values()], key=costs), rows, noise)]
        errors = self.errors(minima[0])
        narrowed = np.sqrt(np.diag(self.covariance(errors, self.slopes(minima[0], errors), rows, noise)))
        minima += [self.minimise(best_alone[term], rows, noise) for term in alone if narrowed[term] > _HIDDEN]
        return min(minima, key=costs)

    def minimise(self, start: Array, rows: NDArray[np.bool_], noise: float) -> Array:
        """The most probable point near a start, by damped Gauss-Newton steps."""
        point = start
        errors = self.errors(start)
        cost = self.cost(point, errors, rows, noise)
        damping = 0.0
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
            point = point + move
            errors = then
            cost = cost - less
            damping = damping / 10
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
        """The most probable point for some of the rows, starting at the point for all rows."""
        now = point
        at = errors
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
        """Covariance of the point after these rows, at most the prior's."""
        weighted = slopes[rows] * _weights(errors[rows] / noise)[:, None]
        return np.asarray(np.linalg.inv(slopes[rows].T @ weighted / noise**2 + np.eye(len(self.priors))))

    def evidence(self, point: Array, rows: NDArray[np.bool_], noise: float) -> float:
        """Minus twice the log-probability of the rows with this noise, integrated over the terms (Laplace)."""
        errors = self.errors(point)
        covariance = self.covariance(errors, self.slopes(point, errors), rows, noise)
        width = float(np.linalg.slogdet(covariance)[1])
        prior = (np.log(noise / _USUAL_NOISE) / _NOISE_LOG_SD) ** 2
        scale = 2 * float(np.count_nonzero(rows) * np.log(noise))
        return self.cost(point, errors, rows, noise) + scale - width + float(prior)


def _weights(sizes: Array) -> Array:
    """Weight of a row in a least-squares step; sizes: errors in units of the noise."""
    return (_TAIL + 1) / (_TAIL + sizes**2)
