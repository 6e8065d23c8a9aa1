"""The terms that an engine adds to kernels, fitted to measured settings.

A prefill takes request_s + token_s × tokens + launch_s × launches + kernel_scale × kernels, plus transfer_s if another
server decodes. Each engine's constants are shrunk towards the common mean of all engines: the record `serving` has this
mean. Each model_type then has a factor on the seconds of a launch, common to all engines, and one per engine that is
shrunk towards the common one. Each version then has a factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from calibrate.engines.settings import Settings
from kvrsim.program import Array, Flags

ENGINES = ("vllm", "sglang", "trtllm")
TERMS = ("request_s", "token_s", "launch_s", "kernel_scale")
SPLITS = ("setting", "model", "gpu", "version")  # groups that are left out; setting: a model on a GPU with an engine

# Prior of the logarithms of the engines' mean TERMS; kernel times of the profiles are assumed to be right.
PRIOR = np.log([6e-3, 1.2e-6, 9e-6, 1.0])
_PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.03])
_ENGINE_SD = np.array([0.3, 0.2, 0.6, 0.05])  # prior spread of an engine's terms around the mean
# Prior standard deviation of the log factor of a model type: of the common factor from 0, and of an engine's factor
# from the common factor.
_MODEL_SD = 1.5
_VERSION_ROWS = 5.0  # prior rows that shrink a version's factor towards 1
_NOISE = 0.25  # scale of log(predicted / measured); settings with larger errors have less weight
# Prior of Engine.transfer_s: a handshake, 0.5 to 2.4 GB of K and V at 50 GB/s, and a step of the server that decodes.
_TRANSFER = math.log(0.05)
_TRANSFER_SD = 0.5
_DISAGGREGATED = 0.7  # weight of settings with disaggregated servers, which scatter 1.4 times as far around the fit
_HALVES = 8


@dataclass(frozen=True, kw_only=True)
class EngineConstants:
    """Constants of all engines."""

    mean: Array  # logarithms of the engines' mean TERMS, shape (4,)
    by_engine: dict[str, Array]  # logarithms of TERMS by engine
    transfer_s: float  # see Engine.transfer_s
    shared_types: dict[str, float] = field(default_factory=dict)  # log factors on launch_s by model_type
    model_types: dict[tuple[str, str], float] = field(default_factory=dict)  # log factors by engine and model_type
    versions: dict[tuple[str, str], float] = field(default_factory=dict)  # log factors on all seconds

    def seconds(self, settings: Settings, rows: Flags) -> Array:
        """Predict the prefills of some settings."""
        own, launches_s = self._without_models(settings, rows)
        frame = settings.rows[rows]
        pairs = zip(frame.engine, frame.model_type, frame.engine_version, strict=True)
        factors = np.array([(self.type_factor(e, m), self.versions.get((e, v), 0.0)) for e, m, v in pairs])
        models, versions = factors.reshape(-1, 2).T
        return np.asarray((own + launches_s * np.expm1(models)) * np.exp(versions))

    def type_factor(self, engine: str, model_type: str) -> float:
        """Log factor on launch_s for an engine and a model_type."""
        return self.model_types.get((engine, model_type), self.shared_types.get(model_type, 0.0))

    def _without_models(self, settings: Settings, rows: Flags) -> tuple[Array, Array]:
        logs = np.array([self.by_engine.get(name, self.mean) for name in settings.rows.engine[rows]])
        return _predict(np.exp(logs), self.transfer_s, settings, rows)


def _predict(terms: Array, transfer_s: float, settings: Settings, rows: Flags) -> tuple[Array, Array]:
    """Predicted seconds of settings, and their seconds of launches; `terms` has shape (settings, 4)."""
    request_s, token_s, launch_s, scale = terms.T
    launches_s = launch_s * settings.launches[rows]
    request_s = request_s + transfer_s * (settings.of("mode")[rows] == "disagg")
    whole = request_s + token_s * settings.of("context_tokens")[rows] + scale * settings.kernels_s[rows]
    return whole + launches_s + launch_s * settings.collectives[rows], launches_s


def fit(settings: Settings, rows: Flags) -> EngineConstants:
    """Fit constants to some of the settings; `rows` is a mask."""
    from scipy.optimize import least_squares

    log_s = np.log(settings.of("prefill_s")[rows])
    weights = np.where(settings.of("mode")[rows] == "disagg", _DISAGGREGATED, 1.0)
    engines = settings.rows.engine[rows].to_numpy()
    names = [name for name in dict.fromkeys(settings.rows.engine) if name in engines]
    index = np.array([names.index(name) for name in engines])

    def errors(point: Array) -> Array:
        transfer = point[:1]
        mean = point[1:5]
        apart = point[5:].reshape(-1, 4)
        seconds, _ = _predict(np.exp(mean + apart[index]), float(np.exp(transfer[0])), settings, rows)
        priors = (transfer - _TRANSFER) / _TRANSFER_SD, (mean - PRIOR) / _PRIOR_SD, (apart / _ENGINE_SD).ravel()
        return np.concatenate([weights * (np.log(seconds) - log_s) / _NOISE, *priors])

    start = np.concatenate([[_TRANSFER], PRIOR, np.zeros(4 * len(names))])
    (transfer, *mean), apart = np.split(least_squares(errors, start, loss="soft_l1").x, [5])
    by_engine = {name: mean + one for name, one in zip(names, apart.reshape(-1, 4), strict=True)}
    constants = EngineConstants(mean=np.array(mean), by_engine=by_engine, transfer_s=float(np.exp(transfer)))
    seconds, launches_s = constants._without_models(settings, rows)
    model_types = settings.rows.model_type[rows].to_numpy()

    def factor_of(own: Flags, around: float) -> float:
        def off(factor: Array) -> Array:
            logs = np.log(seconds[own] + launches_s[own] * np.expm1(factor[0])) - log_s[own]
            return np.append(weights[own] * logs / _NOISE, (factor[0] - around) / _MODEL_SD)

        return float(least_squares(off, [around], loss="soft_l1").x[0])

    shared = {one: factor_of(model_types == one, 0.0) for one in dict.fromkeys(model_types)}
    pairs = dict.fromkeys(zip(engines, model_types, strict=True))
    factors = {(e, m): factor_of((engines == e) & (model_types == m), shared[m]) for e, m in pairs}
    constants = replace(constants, shared_types=shared, model_types=factors)
    rest = weights * (log_s - np.log(constants.seconds(settings, rows)))
    versions = settings.rows.engine_version[rows].to_numpy()
    of_version = {}
    for engine, version in dict.fromkeys(zip(engines, versions, strict=True)):
        own = (engines == engine) & (versions == version)
        if version[:1].isdigit():
            of_version[engine, version] = float(rest[own].sum() / (weights[own].sum() + _VERSION_ROWS))
    return replace(constants, versions=of_version)


def left_out(settings: Settings, split: str) -> Array:
    """Predictions for each setting by fits without its group; for "engine", by the mean of the other engines."""
    groups = settings.group(split)
    seconds = np.zeros(len(settings))
    for group in np.unique(groups):
        own = groups == group
        seconds[own] = fit(settings, ~own).seconds(settings, own)
    return seconds


def half_left_out(settings: Settings, seed: int = 0) -> Array:
    """Log errors of settings by fits to the other half of the settings, over several random halves."""
    columns = ["model", "gpu", "engine", "engine_version", "precision", "tp", "moe_ep"]
    groups = settings.rows.groupby(columns).ngroup().to_numpy()
    rng = np.random.default_rng(seed)
    logs = []
    for _ in range(_HALVES // 2):
        order = rng.permutation(groups.max() + 1)
        first = np.isin(groups, order[: len(order) // 2])
        logs += [log_errors(settings, fit(settings, ~half).seconds(settings, half), half) for half in (first, ~first)]
    return np.concatenate(logs)


def log_errors(settings: Settings, seconds: Array, rows: Flags | slice = slice(None)) -> Array:
    """Log errors: log(predicted / measured)."""
    return np.asarray(np.log(seconds) - np.log(settings.of("prefill_s")[rows]))
