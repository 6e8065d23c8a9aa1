"""Engines: what the software that serves a model adds to the kernels' own time.

An Engine record holds the seconds that the engine adds (HostRates), the scale of its kernels, their spread and sources.
In software of 2023, launches overlap kernels (HostRates.layer_s, kernel_s). Engines of 2025 and 2026 were measured
at 1k and at 8k tokens, and the time beyond their kernels is about the same at both: it is added (HostRates.launch_s).
The newest builds of SGLang hide it while kernels compute (HostRates.hidden_share).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from kvrsim.choices import DeployEngine
from kvrsim.errors import InputError
from kvrsim.io.schema import (
    Keys,
    NonNegative,
    RelativeError,
    Share,
    Whole,
    named_object,
    read,
    shipped_files,
    write_json,
)
from kvrsim.layout import LayoutKinds
from kvrsim.units import scale

PRIOR_ENGINE = "serving"  # name of the prior that all measured engines share
NO_ENGINE = "none"  # no engine: the kernels and the host times of the profile
OTHER_GPU = "other"  # key of kernel_scale for a GPU that has none of its own
DEVIATES_OF_80_PERCENT = 1.2816  # end of a normal distribution's central 80 %, in standard deviations
SHORT_TOKENS = 512  # tokens of a batch; in smaller batches, the engine's overhead may be most of the time
_BUILTIN_FOLDER = Path(__file__).parent / "data" / "engines"

# Quantities of an engine that have a spread, in the order in which tables list them.
TERMS = (
    *("request_s", "token_s", "step_s", "layer_s", "launch_s", "collective_s"),
    *("kernel_scale", "other_gpu", "model"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFit:
    """Errors of predictions with the engine against prefills that were measured on it."""

    source: str  # where the prefills were published, or who measured them
    num_rows: Whole
    mape: RelativeError  # mean absolute error of TTFT on the rows that the engine was fitted to
    median_ape: RelativeError
    left_out_mape: RelativeError  # mean absolute error of TTFT on rows that were left out of the fit
    left_out_median_ape: RelativeError
    left_out: str  # the unit left out at a time: "row", "setting" (model, strategy, GPUs) or "engine"
    log_sd: RelativeError  # spread of log(predicted / measured) on rows that were left out
    # What a prediction interval is made from: "rows": log_sd; "shares": shares of TTFT, see error_rule.py.
    interval: Literal["rows", "shares"] = "rows"
    coverage: RelativeError  # share of left-out rows whose TTFT is inside its 80 % interval
    short_coverage: RelativeError | None = None  # coverage below SHORT_TOKENS; None: part of `coverage`


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One version of a serving engine: what it adds to the kernels of a profile.

    kernel_scale: by the profile's GPU, seconds of this engine's kernels divided by those of the profile's kernels.
    spread: standard deviation of the logarithm of each of TERMS. "other_gpu": in addition, on a GPU that kernel_scale
        does not name; "model": of whole TTFTs. A term that is absent is known exactly.
    model_types: factor on host.launch_s by Hugging Face's model_type; shrunk towards the factors of other engines,
        which are shrunk towards 1, or towards `mixtures`.
    mixtures: factor on host.launch_s of mixtures of experts whose model type is not in model_types.
    systems: factor on host.launch_s and host.collective_s by GPU, because hosts differ; shrunk towards 1.
    older: how earlier builds launch kernels; None: as the record says.
    models: model types of the whole prefills that were measured on the engine; empty: not recorded.
    gpus: GPUs of the profiles of these prefills; empty: not recorded.
    layouts: ways, of LAYOUT_KINDS, in which these prefills were divided over GPUs; None: not recorded.
    versions: by version, its seconds divided by those of the record; shrunk towards 1.
    """

    name: str
    title: str  # engine and version in words
    description: str  # one sentence: machines, models and rows that the record is based on
    not_covered: str  # one sentence: cases without measurements
    host: HostRates
    kernel_scale: Mapping[str, float] = field(default_factory=dict)
    model_types: Mapping[str, float] = field(default_factory=dict)
    mixtures: float = 1.0
    systems: Mapping[str, float] = field(default_factory=dict)
    older: OlderBuilds | None = None
    models: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    layouts: LayoutKinds | None = None
    versions: Mapping[str, float] = field(default_factory=dict)
    is_other_version: bool = False  # whether the version was not measured itself
    launched_as: DeployEngine | None = None  # the engine of --emit that launches this software; None: none does
    transfer_s: NonNegative = 0.0  # additional time of TTFT if another server decodes (disaggregated serving)
    fused_merge: bool = (
        False  # whether one kernel merges partial results of attention, whatever the profile's code does
    )
    decode_step: bool = False  # whether TTFT includes one decode step, in which the prompt's last token is computed
    spread: Annotated[Mapping[str, RelativeError], Keys(TERMS)] = field(default_factory=dict)
    fit: EngineFit | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)  # source of the record, command, versions

    def scale_on(self, gpu: str) -> float:
        """Scale of the kernels on a GPU; if it was not measured, that of OTHER_GPU or the mean of measured GPUs."""
        scales = self.kernel_scale
        mean = math.prod(scales.values()) ** (1 / max(1, len(scales)))
        return scales.get(gpu, scales.get(OTHER_GPU, mean))

    def scale_log_sd(self, gpu: str) -> float:
        """Standard deviation of the logarithm of `scale_on(gpu)`; 0: known exactly."""
        log_sd = self.spread.get("kernel_scale", 0.0)
        return log_sd if self.knows(gpu) else math.hypot(log_sd, self.spread.get("other_gpu", 0.0))

    def knows(self, gpu: str) -> bool:
        """Whether the scale of the engine's kernels was measured on that GPU, or applies to every GPU."""
        return not self.kernel_scale or not {gpu, OTHER_GPU}.isdisjoint(self.kernel_scale)

    def host_of(self, model_type: str, *, is_mixture: bool = False, gpu: str = "") -> HostRates:
        """Host seconds that the engine adds to a prefill of a model of that type on systems with that GPU."""
        system = self.systems.get(gpu, 1.0)
        launch = system * self.model_types.get(model_type, self.mixtures if is_mixture else 1.0)
        if launch == system == 1:
            return self.host
        host = self.host
        return replace(host, launch_s=launch * host.launch_s, collective_s=system * host.collective_s)

    def without_factors(self, host: HostRates) -> Engine:
        """The engine with these host seconds for every model and every GPU."""
        return replace(self, host=host, model_types={}, mixtures=1.0, systems={})

    def at_version(self, version: str) -> Engine:
        """The engine at a version, or at the nearest one that was measured. Raises InputError if none was."""
        if not self.versions:
            raise InputError("engine", f"{self.name}@{version}", f"{self.name}, of which no versions were measured")
        is_numbered = version[:1].isdigit()  # a nightly build counts as the newest
        nearest = ""
        if is_numbered:
            nearest = min(self.versions, key=lambda one: _distance(one, version))
        factor = self.versions.get(nearest, 1.0)
        host = self.host
        if is_numbered and self.older is not None and is_before(version, self.older.before):
            host = self.older.host(host)
        return replace(
            self,
            name=f"{self.name}@{version}",
            host=scale(host, factor),
            kernel_scale={gpu: factor * own for gpu, own in (self.kernel_scale or {OTHER_GPU: 1.0}).items()},
            is_other_version=not is_numbered or any(_distance(nearest, version)),
        )

    def unknowns(self, model_type: str, gpu: str, tokens: int) -> tuple[str, ...]:
        """What was not measured on this engine: some of "model", "gpu", "version" and "short" (a short prompt)."""
        unknown = {
            "model": bool(self.models) and model_type not in self.models,
            "gpu": bool(self.gpus) and gpu not in self.gpus,
            "version": self.is_other_version,
            "short": tokens < SHORT_TOKENS,
        }
        return tuple(name for name, is_unknown in unknown.items() if is_unknown)

    @property
    def has_share_interval(self) -> bool:
        """Whether intervals are made from shares of TTFT (error_rule.py), not from the errors of the engine's rows."""
        return self.fit is not None and self.fit.interval == "shares"

    @property
    def rows_log_sd(self) -> float | None:
        """Standard deviation of log TTFT on rows left out of the fit; None: never compared with whole prefills."""
        return self.spread.get("model") if self.fit is None else self.fit.log_sd

    def write(self, path: str | Path) -> None:
        """Write the record as JSON; the file appears whole or not at all."""
        write_json(path, self)


def builtin_engines() -> tuple[str, ...]:
    """Names of the engines that ship with kvrsim."""
    return tuple(shipped_files(_BUILTIN_FOLDER))


def load_engine(name_or_path: str | Path, argument: str = "engine") -> Engine:
    """Load an engine: a built-in name, NAME@VERSION or a file. InputError names `argument`, the file and the key."""
    name, at, version = str(name_or_path).partition("@")
    if at and name in builtin_engines():
        return load_engine(name).at_version(version)
    return read(Engine, named_object(name_or_path, argument, shipped_files(_BUILTIN_FOLDER), NO_ENGINE))


def is_before(version: str, other: str) -> bool:
    """Whether a numbered version is earlier than another one."""
    return _numbers(version) < _numbers(other)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _distance(one: str, other: str) -> tuple[int, ...]:
    """Difference between two versions, number by number."""
    pairs = zip_longest(_numbers(one), _numbers(other), fillvalue=0)
    return tuple(abs(a - b) for a, b in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """Times of the software on the host: those of the launching thread, and those before a request's first layer."""

    layer_s: NonNegative  # seconds to issue one decoder layer
    gather_piece_s: NonNegative  # additional seconds for the all-gathers of one layer, per participating rank
    resume_s: NonNegative = 0.0  # idle time of the device after communication, until the next operation is issued
    request_s: NonNegative = 0.0  # seconds before the first layer, once per request; the device waits
    token_s: NonNegative = 0.0  # additional seconds per token of the request (tokeniser); the device waits
    step_s: NonNegative = 0.0  # seconds before each pass through the layers; if chunked: per piece and stage
    prepare_s: NonNegative | None = None  # host time of a step; None: not measured, step_s is used
    message_s: NonNegative = 0.0  # seconds to issue one send or one receive
    kernel_s: NonNegative = 0.0  # seconds in addition to layer_s, per kernel that the decoder layer launches
    launch_s: NonNegative = 0.0  # additional device time per kernel that the decoder layer launches
    hidden_share: Share = 0.0  # share of launch_s that is hidden while the layer's kernels compute; 1: all of it
    collective_s: NonNegative = 0.0  # additional time of each collective of tensor parallelism


@dataclass(frozen=True, kw_only=True, slots=True)
class OlderBuilds:
    """How builds before a version launch kernels."""

    before: str  # the first version that launches as the record says
    hidden_share: Share  # see HostRates

    def host(self, host: HostRates) -> HostRates:
        """The host seconds of these builds; `host`: those of the record."""
        return replace(host, hidden_share=self.hidden_share)


NO_HOST = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=0.0)
