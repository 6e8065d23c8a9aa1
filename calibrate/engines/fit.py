"""The terms that an engine adds to kernels, fitted to measured settings.

A prefill takes request_s + token_s × tokens + launch_s × (launches + collectives) + kernel_scale × kernels, plus
transfer_s if another server decodes. In the newest builds the shorter of launches and kernels is hidden. Each engine's
constants are shrunk towards the common mean of all engines: the record `serving` has this mean. Launches of mixtures of
experts have a factor. Then each model_type has a factor on the seconds of a launch, common to all engines, and one per
engine; each GPU has one, because hosts differ by system. Then each version has a factor on all seconds. All factors are
shrunk towards 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.engines.settings import Settings
from kvrsim.engine import is_before
from kvrsim.program import Array, Flags

ENGINES = ("vllm", "sglang", "trtllm")
TERMS = ("request_s", "token_s", "launch_s", "kernel_scale")
SPLITS = ("setting", "model", "gpu", "version")  # groups that are left out; setting: a model on a GPU with an engine

# Prior of the logarithms of the engines' mean TERMS; kernel times of the profiles are assumed to be right.
PRIOR = np.log([6e-3, 1.2e-6, 9e-6, 1.0])
_PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.03])
_ENGINE_SD = np.array([0.3, 0.2, 0.6, 0.05])  # prior spread of an engine's terms around the mean
_MIXTURE_SD = 1.0  # prior standard deviation of the log factor on launches of mixtures
# Prior standard deviations of log factors on launches: of a model type on all engines, of a model type on an engine,
# and of a GPU's systems.
_TYPE_SD = 0.5
_PAIR_SD = 0.3
_SYSTEM_SD = 0.3
_VERSION_ROWS = 5.0  # prior rows that shrink a version's factor towards 1
_NOISE = 0.25  # scale of log(predicted / measured); settings with larger errors have less weight
# Prior of Engine.transfer_s: a handshake, 0.5 to 2.4 GB of K and V at 50 GB/s, and a step of the server that decodes.
_TRANSFER = math.log(0.05)
_TRANSFER_SD = 0.5
_DISAGGREGATED = 0.7  # weight of settings with disaggregated servers, which scatter 1.4 times as far around the fit
_HALVES = 8

# The first version of an engine's newest builds: SGLang has piecewise CUDA graphs since then.
NEW_BUILDS = {"sglang": "0.5.10"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """Which of the terms the fit has; those of FORM are kept because they gain (validate.silicon)."""

    mixtures: bool = True  # a factor on launches of mixtures
    shrinks_types: bool = True  # standard deviations of types' factors are _TYPE_SD and _PAIR_SD, not 1.5
    systems: bool = True  # a factor on launches by GPU
    hidden_share: float = 0.0  # share of the shorter of launches and kernels that is hidden
    new_hidden_share: float = 1.0  # the same of the newest builds


FORM = Form()


def is_new_build(settings: Settings) -> Flags:
    """Which settings ran one of the newest builds."""
    pairs = zip(settings.rows.engine, settings.rows.engine_version.astype(str), strict=True)
    return np.array([_is_new(engine, version) for engine, version in pairs], dtype=bool)


def _is_new(engine: str, version: str) -> bool:
    return engine in NEW_BUILDS and version[:1].isdigit() and not is_before(version, NEW_BUILDS[engine])


@dataclass(frozen=True, kw_only=True)
class _SettingWork:
    """What some settings compute; arrays of shape (settings,)."""

    tokens: Array
    kernels_s: Array
    launches: Array
    collectives: Array
    transfers: Array  # 1 if another server decodes
    is_new: Flags  # whether they ran one of the newest builds

    @classmethod
    def of(cls, settings: Settings, rows: Flags) -> _SettingWork:
        return cls(
            tokens=settings.of("context_tokens")[rows].astype(float),
            kernels_s=settings.kernels_s[rows],
            launches=settings.launches[rows],
            collectives=settings.collectives[rows],
            transfers=(settings.of("mode")[rows] == "disagg").astype(float),
            is_new=is_new_build(settings)[rows],
        )

    def seconds(self, logs: Array, transfer_s: float, types: Array, systems: Array, hidden: Array | float) -> Array:
        """Predicted seconds.

        logs: logarithms of TERMS, shape (settings, 4). types: log factors on launches. systems: log factors on launches
        and collectives. hidden: share of the shorter of launches and kernels that is hidden.
        """
        request_s, token_s, launch_s, scale = np.exp(logs).T
        launch_s = launch_s * np.exp(systems)
        launches_s = launch_s * np.exp(types) * self.launches
        kernels_s = scale * self.kernels_s
        whole_s = request_s + transfer_s * self.transfers + token_s * self.tokens + launch_s * self.collectives
        return np.asarray(whole_s + launches_s + kernels_s - hidden * np.minimum(launches_s, kernels_s))


@dataclass(frozen=True, kw_only=True)
class EngineConstants:
    """Constants of all engines; factors are logarithms."""

    mean: Array  # logarithms of the engines' mean TERMS, shape (4,)
    by_engine: dict[str, Array]  # logarithms of TERMS by engine
    transfer_s: float  # see Engine.transfer_s
    hidden_share: float = 0.0  # share of the shorter of launches and kernels that is hidden
    new_hidden_share: float = 0.0  # the same of the newest builds
    mixtures: float = 0.0  # factor on launch_s of mixtures
    shared_types: dict[str, float] = field(default_factory=dict)  # factors on launch_s by model_type, of all engines
    model_types: dict[tuple[str, str], float] = field(default_factory=dict)  # by engine and model_type, in addition
    systems: dict[str, float] = field(default_factory=dict)  # factors on launches and collectives by GPU
    versions: dict[tuple[str, str], float] = field(default_factory=dict)  # factors on all seconds

    def seconds(self, settings: Settings, rows: Flags) -> Array:
        """Predict the prefills of some settings."""
        return self.parts(settings, rows)[0]

    def parts(self, settings: Settings, rows: Flags) -> tuple[Array, Array]:
        """Predicted seconds of some settings, and the seconds of their kernels alone."""
        work = _SettingWork.of(settings, rows)
        frame = settings.rows[rows]
        logs = np.array([self.by_engine.get(name, self.mean) for name in frame.engine]).reshape(-1, 4)
        kinds = zip(frame.engine, frame.model_type, frame.kind, strict=True)
        types = np.array([self.type_factor(*kind) for kind in kinds], dtype=float)
        systems = np.array([self.systems.get(gpu, 0.0) for gpu in frame.gpu], dtype=float)
        pairs = zip(frame.engine, frame.engine_version.astype(str), strict=True)
        factors = np.exp(np.array([self.versions.get(pair, 0.0) for pair in pairs], dtype=float))
        hidden = np.where(work.is_new, self.new_hidden_share, self.hidden_share)
        whole_s = work.seconds(logs, self.transfer_s, types, systems, hidden)
        return whole_s * factors, np.exp(logs[:, 3]) * work.kernels_s * factors

    def type_factor(self, engine: str, model_type: str, kind: str) -> float:
        """Log factor on launch_s for an engine, a model_type and a kind of model (mixture or dense)."""
        of_kind = self.mixtures if kind == "mixture" else 0.0
        return of_kind + self.shared_types.get(model_type, 0.0) + self.model_types.get((engine, model_type), 0.0)


def fit(settings: Settings, rows: Flags, form: Form = FORM) -> EngineConstants:
    """Fit constants to some of the settings; `rows` is a mask. The newest builds determine only factors on launches."""
    constants = _fit_terms(settings, rows & ~is_new_build(settings), form)
    constants = _fit_factors(settings, rows, form, constants)
    weights = _weights(settings, rows)
    rest = weights * -log_errors(settings, constants.seconds(settings, rows), rows)
    frame = settings.rows[rows]
    of_version = {}
    for engine, version in dict.fromkeys(zip(frame.engine, frame.engine_version.astype(str), strict=True)):
        own = ((frame.engine == engine) & (frame.engine_version == version)).to_numpy()
        if version[:1].isdigit() and not _is_new(engine, version):
            of_version[engine, version] = float(rest[own].sum() / (weights[own].sum() + _VERSION_ROWS))
    return replace(constants, versions=of_version)


def _weights(settings: Settings, rows: Flags) -> Array:
    return np.where(settings.of("mode")[rows] == "disagg", _DISAGGREGATED, 1.0)


def _fit_terms(settings: Settings, rows: Flags, form: Form) -> EngineConstants:
    """Fit the terms of the engines, the factor of mixtures and transfer_s."""
    from scipy.optimize import least_squares

    work = _SettingWork.of(settings, rows)
    log_s = np.log(settings.of("prefill_s")[rows])
    weights = _weights(settings, rows)
    engines = settings.rows.engine[rows].to_numpy()
    names = [name for name in dict.fromkeys(settings.rows.engine) if name in engines]
    index = np.array([names.index(name) for name in engines])
    is_mixture = (settings.of("kind")[rows] == "mixture") * float(form.mixtures)

    def errors(point: Array) -> Array:
        logs = point[2:6] + point[6:].reshape(-1, 4)[index]
        seconds = work.seconds(logs, float(np.exp(point[0])), point[1] * is_mixture, np.zeros(1), form.hidden_share)
        priors = [(point[0] - _TRANSFER) / _TRANSFER_SD], [point[1] / _MIXTURE_SD], (point[2:6] - PRIOR) / _PRIOR_SD
        apart = (point[6:].reshape(-1, 4) / _ENGINE_SD).ravel()
        return np.concatenate([weights * (np.log(seconds) - log_s) / _NOISE, *priors, apart])

    start = np.concatenate([[_TRANSFER, 0.0], PRIOR, np.zeros(4 * len(names))])
    point = least_squares(errors, start, loss="soft_l1").x
    mean = point[2:6]
    return EngineConstants(
        mean=mean,
        by_engine={name: mean + apart for name, apart in zip(names, point[6:].reshape(-1, 4), strict=True)},
        transfer_s=float(np.exp(point[0])),
        mixtures=float(point[1]),
        hidden_share=form.hidden_share,
        new_hidden_share=form.new_hidden_share,
    )


def _fit_factors(settings: Settings, rows: Flags, form: Form, constants: EngineConstants) -> EngineConstants:
    """Fit the factors on launches: of model types and of GPUs."""
    from scipy.optimize import least_squares

    work = _SettingWork.of(settings, rows)
    log_s = np.log(settings.of("prefill_s")[rows])
    weights = _weights(settings, rows)
    frame = settings.rows[rows]
    logs = np.array([constants.by_engine.get(name, constants.mean) for name in frame.engine])
    of_kind = constants.mixtures * (frame.kind == "mixture").to_numpy()
    hidden = np.where(work.is_new, form.new_hidden_share, form.hidden_share)
    type_sds = (_TYPE_SD, _PAIR_SD) if form.shrinks_types else (1.5, 1.5)
    factors = [
        _Factors.of(frame.model_type.tolist(), type_sds[0]),
        _Factors.of(list(zip(frame.engine, frame.model_type, strict=True)), type_sds[1]),
        _Factors.of([gpu if form.systems else None for gpu in frame.gpu], _SYSTEM_SD),
    ]
    ends = np.cumsum([len(one.keys) for one in factors])
    sds = np.concatenate([np.full(len(one.keys), one.log_sd) for one in factors])

    def errors(point: Array) -> Array:
        of_type, of_pair, of_system = (
            one.of_rows(part) for one, part in zip(factors, np.split(point, ends[:-1]), strict=True)
        )
        types = of_kind + of_type + of_pair
        seconds = work.seconds(logs, constants.transfer_s, types, of_system, hidden)
        return np.concatenate([weights * (np.log(seconds) - log_s) / _NOISE, point / sds])

    point = least_squares(errors, np.zeros(len(sds)), loss="soft_l1").x
    types, pairs, systems = (
        dict(zip(one.keys, part.tolist(), strict=True))
        for one, part in zip(factors, np.split(point, ends[:-1]), strict=True)
    )
    return replace(constants, shared_types=types, model_types=pairs, systems=systems)


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """Log factors of groups of rows."""

    keys: list[Any]  # the groups
    index: npt.NDArray[np.intp]  # group of each row; -1: none
    log_sd: float  # prior standard deviation

    @classmethod
    def of(cls, groups: Sequence[Any], log_sd: float) -> _Factors:
        """groups: the group of each row; None: no group, and no factor."""
        keys = [key for key in dict.fromkeys(groups) if key is not None]
        index = np.array([-1 if group is None else keys.index(group) for group in groups], dtype=int)
        return cls(keys=keys, index=index, log_sd=log_sd)

    def of_rows(self, values: Array) -> Array:
        """The log factor of each row, from those of the groups."""
        return np.append(values, 0.0)[self.index]


def left_out(settings: Settings, split: str, training: Settings | None = None, form: Form = FORM) -> Array:
    """Predictions for each setting by fits without its group; for "engine", by the mean of the other engines.

    training: the settings of the fits; None: the same.
    """
    training = training or settings
    groups = settings.group(split)
    training_groups = training.group(split)
    seconds = np.zeros(len(settings))
    for group in dict.fromkeys(groups.tolist()):
        own = groups == group
        seconds[own] = fit(training, training_groups != group, form).seconds(settings, own)
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
