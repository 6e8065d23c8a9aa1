"""Prefills on engines of 2025 and 2026: fit the records of vLLM, SGLang and TensorRT-LLM, and score any predictor.

`python -m validate.silicon SETTINGS.csv --configs FOLDER` scores kvrsim and another estimator in the file, and writes
docs/results/silicon.md. `--prefills FILE.csv` adds prefills of other sources, which no fit uses. `--fit` first fits the
engines and rewrites their records in kvrsim/data/engines. SETTINGS.csv has the columns model, config, system, cluster,
engine, engine_version, precision, mode, context_tokens, tp, moe_ep, prefill_s, aisimulate_static_s; FOLDER has each
config as NAME_config.json. kvrsim ships neither of them.

A prefill takes request_s + token_s × tokens + launch_s × launches + kernel_scale × kernels, plus transfer_s if another
server decodes. Each engine's constants are shrunk towards the common mean of all engines: the record `serving` has this
mean. Each model_type then has a factor on the seconds of a launch, common to all engines, and one per engine that is
shrunk towards the common one. Each version then has a factor. Widths come from errors of prefills that were left out:
those of the engine or those of all engines, whichever are wider.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.prefills.fit import RowCheck
from kvrsim.builder import make_scenario
from kvrsim.engine import NO_HOST, OTHER_GPU, PRIOR_ENGINE, SHORT_TOKENS, Engine, EngineFit, load_engine
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.program import Array, Flags
from kvrsim.units import format_seconds
from planner.candidates import Search
from planner.simulate import run_simulation
from validate.report import RESULTS, fill, run_command, summary, table, write_page

if TYPE_CHECKING:
    import pandas

PAGE = RESULTS / "silicon.md"
RECORDS = Path(__file__).parents[1] / "kvrsim" / "data" / "engines"
ENGINES = ("vllm", "sglang", "trtllm")
TERMS = ("request_s", "token_s", "launch_s", "kernel_scale")
# Prior of the logarithms of the engines' mean TERMS; kernel times of the profiles are assumed to be right.
_PRIOR = np.log([6e-3, 1.2e-6, 9e-6, 1.0])
_PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.03])
_ENGINE_SD = np.array([0.3, 0.2, 0.6, 0.05])  # prior spread of an engine's terms around the mean
# Prior standard deviation of the log factor of a model type: of the common factor from 0, and of an engine's factor
# from the common factor.
_MODEL_SD = 1.5
_VERSION_ROWS = 5.0  # prior rows that shrink a version's factor towards 1
_NOISE = 0.25  # scale of log(predicted / measured); settings with larger errors have less weight
# Prior of Engine.transfer_s: a handshake, 0.5 to 2.4 GB of K and V at 50 GB/s, and a step of the server that decodes.
_TRANSFER, _TRANSFER_SD = math.log(0.05), 0.5
_DISAGGREGATED = 0.7  # weight of settings with disaggregated servers, which scatter 1.4 times as far around the fit
_PROBE_S = 1e-6  # seconds of a launch in the run that counts launches
SPLITS = ("setting", "model", "gpu", "version")  # setting: a model on a GPU with an engine
_HALVES = 8
_LEAST_ROWS = 5  # minimum number of errors from which widths are computed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The measured settings, with kvrsim's seconds of kernels and launches for each; arrays of shape (settings,)."""

    rows: pandas.DataFrame
    kernels_s: Array
    launches: Array  # number of launches in the decoder layers
    collectives: Array  # number of collectives of tensor parallelism

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, name: str) -> Array:
        """One column of all settings."""
        return np.asarray(self.rows[name])

    def group(self, split: str) -> Array:
        """The group of each setting; groups are left out as a whole."""
        if split == "version":
            return np.asarray(self.rows.engine + "@" + self.rows.engine_version)
        if split == "setting":
            return np.asarray(self.rows.model + " " + self.rows.gpu + " " + self.rows.engine)
        return self.of(split)


def read_settings(path: Path, configs: Path) -> Settings:
    """Read settings, and compute seconds of kernels and numbers of launches. InputError names a missing column."""
    import pandas

    rows = pandas.read_csv(path)
    needed = {"config", "cluster", "engine", "engine_version", "mode", "context_tokens", "tp", "moe_ep", "prefill_s"}
    if missing := sorted(needed - set(rows.columns)):
        raise InputError("SETTINGS.csv", ", ".join(rows.columns), f"a file with columns {', '.join(missing)}")
    empty = Engine(name="none", title="", description="", not_covered="", host=NO_HOST)
    engines = (
        empty,
        replace(empty, host=replace(NO_HOST, launch_s=_PROBE_S)),
        replace(empty, host=replace(NO_HOST, collective_s=_PROBE_S)),
    )
    seconds: dict[tuple[Any, ...], tuple[Array, str, str, str]] = {}
    keys = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows.itertuples():
            dtype = "fp8" if getattr(row, "precision", "") == "fp8" else None  # some configurations name no dtype
            key = (row.config, row.cluster, row.context_tokens, row.tp, row.moe_ep, dtype)
            keys.append(key)
            if key not in seconds:
                model = _model_folder(Path(folder), configs, row.config)
                fields = {"ctx": row.context_tokens, "gpus": row.tp, "model": str(model), "cluster": row.cluster}
                fields |= {"dtype": dtype, "expert_parallel": row.moe_ep > 1}
                runs = [make_scenario(**fields, engine=one)[0] for one in engines]
                strategy = "single" if row.tp == 1 else "tp"
                times = np.array([run_simulation(one, strategy=strategy).ttft_s for one in runs])
                spec = runs[0].model
                kind = "mixture" if any(layer.num_experts for layer in spec.layers) else "dense"
                seconds[key] = times, spec.model_type, runs[0].cluster.gpu.name, kind
    times = np.array([seconds[key][0] for key in keys])
    columns = {
        name: [seconds[key][place] for key in keys] for place, name in enumerate(("model_type", "gpu", "kind"), 1)
    }
    rows = rows.assign(**columns)
    launches, collectives = ((times[:, number] - times[:, 0]) / _PROBE_S for number in (1, 2))
    return Settings(rows=rows, kernels_s=times[:, 0], launches=launches, collectives=collectives)


def _model_folder(folder: Path, configs: Path, name: str) -> Path:
    """Make the folder of a model from the files of its configuration."""
    model = folder / name
    if not model.exists():
        model.mkdir()
        folders = sorted(configs.glob(f"{name}_*"))
        if not folders:
            raise InputError("--configs", str(configs), f"a folder with {name}_config.json")
        for path in folders:
            shutil.copy(path, model / path.name.removeprefix(f"{name}_"))
    return model


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
        transfer, mean, apart = point[:1], point[1:5], point[5:].reshape(-1, 4)
        seconds, _ = _predict(np.exp(mean + apart[index]), float(np.exp(transfer[0])), settings, rows)
        priors = (transfer - _TRANSFER) / _TRANSFER_SD, (mean - _PRIOR) / _PRIOR_SD, (apart / _ENGINE_SD).ravel()
        return np.concatenate([weights * (np.log(seconds) - log_s) / _NOISE, *priors])

    start = np.concatenate([[_TRANSFER], _PRIOR, np.zeros(4 * len(names))])
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
    groups, seconds = settings.group(split), np.zeros(len(settings))
    for group in np.unique(groups):
        own = groups == group
        seconds[own] = fit(settings, ~own).seconds(settings, own)
    return seconds


def half_left_out(settings: Settings, seed: int = 0) -> Array:
    """Log errors of settings by fits to the other half of the settings, over several random halves."""
    columns = ["model", "gpu", "engine", "engine_version", "precision", "tp", "moe_ep"]
    groups, rng = settings.rows.groupby(columns).ngroup().to_numpy(), np.random.default_rng(seed)
    logs = []
    for _ in range(_HALVES // 2):
        order = rng.permutation(groups.max() + 1)
        first = np.isin(groups, order[: len(order) // 2])
        logs += [log_errors(settings, fit(settings, ~half).seconds(settings, half), half) for half in (first, ~first)]
    return np.concatenate(logs)


def log_errors(settings: Settings, seconds: Array, rows: Flags | slice = slice(None)) -> Array:
    """Log errors: log(predicted / measured)."""
    return np.asarray(np.log(seconds) - np.log(settings.of("prefill_s")[rows]))


# -- the records


def widths_of(logs: Array, own: Flags | None = None) -> tuple[float, float]:
    """Widths of errors: the 90 % quantiles of log(predicted / measured) and of log(measured / predicted).

    own: mask of one engine's errors; its widths are used if they are wider and come from at least 5 errors.
    """
    below, above = np.quantile(logs, [0.1, 0.9])
    widths = _round(max(0.0, float(above))), _round(max(0.0, float(-below)))
    if own is None or own.sum() < _LEAST_ROWS:
        return widths
    shorter, longer = widths_of(logs[own])
    return max(widths[0], shorter), max(widths[1], longer)


def records(settings: Settings) -> list[Engine]:
    """Make the records of the engines and of `serving`."""
    every = np.ones(len(settings), dtype=bool)
    constants = fit(settings, every)
    after = log_errors(settings, constants.seconds(settings, every))
    splits = {split: log_errors(settings, left_out(settings, split)) for split in SPLITS}
    made = []
    for name in ENGINES:
        own = settings.of("engine") == name
        frame, logs = settings.rows[own], constants.by_engine[name]
        widths = {split: widths_of(errors, own) for split, errors in splits.items()}
        fit_of = _fit_of(after[own], splits["model"][own], "model", widths)
        factors = {model: constants.type_factor(name, model) for model in constants.shared_types}
        record = _record(name, constants, logs, factors, (0.3, 0.3, 0.3, 0.12), fit_of)
        versions = {v: _round(np.exp(f)) for (e, v), f in sorted(constants.versions.items()) if e == name}
        models, gpus = (tuple(sorted(set(column))) for column in (frame.model_type, frame.gpu))
        made.append(replace(record, models=models, gpus=gpus, versions=versions))
    others = log_errors(settings, left_out(settings, "engine"))
    spread = np.std([constants.by_engine[name] for name in ENGINES], axis=0, ddof=1)
    deviations = [_round(max(value, least)) for value, least in zip(spread, _LEAST, strict=True)]
    fit_of = _fit_of(after, others, "engine", {"setting": widths_of(others)})
    return [*made, _record(PRIOR_ENGINE, constants, constants.mean, constants.shared_types, deviations, fit_of)]


_LEAST = (0.5, 0.5, 0.3, 0.12)  # minimum standard deviations of terms between engines, of which there are only three


def _record(
    name: str,
    constants: EngineConstants,
    logs: Array,
    factors: Mapping[str, float],
    spread: Sequence[float],
    fit_of: EngineFit,
) -> Engine:
    """The record of an engine with these terms, factors of model types and standard deviations of terms."""
    request_s, token_s, launch_s, scale = (_round(value) for value in np.exp(logs))
    return replace(
        load_engine(name),
        host=replace(NO_HOST, request_s=request_s, token_s=token_s, launch_s=launch_s, collective_s=launch_s),
        kernel_scale={OTHER_GPU: scale},
        transfer_s=_round(constants.transfer_s),
        model_types={model: _round(np.exp(factor)) for model, factor in sorted(factors.items())},
        spread=dict(zip((*TERMS, "collective_s"), (*spread, spread[TERMS.index("launch_s")]), strict=True)),
        fit=fit_of,
        provenance={
            "command": "python -m validate.silicon SETTINGS.csv --configs FOLDER --fit",
            "launches": "launch times are added to the kernel times, because the measured time minus the kernel times"
            " is nearly equal at 1k and at 8k tokens",
        },
    )


def _fit_of(after: Array, without: Array, split: str, widths: Mapping[str, tuple[float, float]]) -> EngineFit:
    sizes, right = np.abs(np.expm1(after)), np.abs(np.expm1(without))
    low, high = widths_of(without)
    return EngineFit(
        source="NVIDIA AISimulate 0.13, silicon_sample.csv (InferenceX and NVIDIA's runs): 128 settings of 8 models",
        num_rows=len(after),
        mape=_round(sizes.mean()),
        median_ape=_round(np.median(sizes)),
        left_out_mape=_round(right.mean()),
        left_out_median_ape=_round(np.median(right)),
        left_out=split,
        log_sd=_round(np.std(without)),
        coverage=_round(np.mean((without <= low) & (-without <= high))),
        widths=widths,
    )


def _round(value: Any) -> float:
    return float(f"{float(value):.4g}")


def coverage_left_out(logs: Array, groups: Array, engines: Array) -> float:
    """Share of settings inside the widths that are computed from the errors of all other groups."""
    inside = []
    for group, engine in set(zip(groups.tolist(), engines.tolist(), strict=True)):
        others = groups != group
        own = ~others & (engines == engine)
        shorter, longer = widths_of(logs[others], engines[others] == engine)
        inside.append((logs[own] <= shorter) & (-logs[own] <= longer))
    return float(np.mean(np.concatenate(inside)))


# -- the page


def score(settings: Settings, predictors: dict[str, Array]) -> list[str]:
    """Table of predictors' median errors by engine, model and other fields, over settings that all of them predict."""
    measured_s = settings.of("prefill_s")
    errors = {name: np.abs(seconds / measured_s - 1) for name, seconds in predictors.items()}
    usable = np.all([np.isfinite(one) for one in errors.values()], axis=0)
    groups: list[tuple[str, Array]] = [("all", usable)]
    for column in ("engine", "kind", "model", "gpu", "precision", "nominal_isl", "tp"):
        values = settings.of(column) if column in settings.rows else np.array([])
        groups += [(f"{column} {value}", usable & (values == value)) for value in dict.fromkeys(values.tolist())]
    rows = [
        (title, int(rows.sum()), *(f"{np.median(one[rows]):.1%}" for one in errors.values()))
        for title, rows in groups
        if rows.any()
    ]
    return table(("settings", "number", *errors), rows)


def page(settings: Settings, predictors: dict[str, Array], others: Sequence[OtherPrefill] = ()) -> list[str]:
    """Markdown lines of docs/results/silicon.md."""
    measured_s = settings.of("prefill_s")
    splits = {f"{split} left out": left_out(settings, split) for split in SPLITS}  # "setting left out" comes first
    half = np.abs(np.expm1(half_left_out(settings)))
    shipped = shipped_seconds(settings)
    prior = left_out(settings, "engine")
    kvrsim = {"kvrsim, records as shipped": shipped} | {f"kvrsim, {name}": values for name, values in splits.items()}
    kvrsim["kvrsim, `serving` of the other engines"] = prior
    rows = []
    for name, seconds in (kvrsim | predictors).items():
        has = np.isfinite(seconds)
        errors = np.abs(seconds[has] / measured_s[has] - 1)
        by_engine = [np.median(np.abs(seconds / measured_s - 1)[has & (settings.of("engine") == e)]) for e in ENGINES]
        logs = np.log(seconds[has] / measured_s[has])
        groups = settings.group(name.split(", ")[1].split()[0] if "left out" in name else "model")[has]
        inside = f"{coverage_left_out(logs, groups, settings.of('engine')[has]):.0%}"
        rows.append((name, len(errors), f"{np.median(errors):.1%}", *(f"{one:.1%}" for one in by_engine), inside))
    return fill(
        "silicon",
        splits=table(("predictor", "settings", "median error", *ENGINES, "inside"), rows),
        half=f"{np.median(half):.1%}",
        transfer=format_seconds(load_engine(PRIOR_ENGINE).transfer_s),
        groups=score(settings, {"kvrsim, model left out": splits["model left out"], **predictors}),
        count=len(settings),
        others=other_lines(others),
    )


@dataclass(frozen=True, kw_only=True)
class OtherPrefill(RowCheck):
    """A prefill of another source, predicted by the record of its engine."""

    tokens: int  # tokens of all prompts together


def read_others(path: Path) -> list[OtherPrefill]:
    """Read prefills that kvrsim can predict with ENGINES, from a file with the columns of prefills_2026.csv."""
    import pandas

    names = JsonObject.read(Path(__file__).with_suffix(".json"), "silicon").fields
    prefills = []
    for row in pandas.read_csv(path).to_dict("records"):
        engine = {"tensorrt-llm": "trtllm"}.get(row["engine"].lower(), row["engine"].lower())
        gpus = [gpu for gpu in names["gpus"] if gpu in re.sub("[^a-z0-9]", "", row["gpu"].lower())]
        if engine not in ENGINES or not gpus or not str(row["n_gpus"]).isdigit() or "do not use" in str(row["note"]):
            continue
        cluster, profile = names["gpus"][gpus[0]]
        try:
            result = run_simulation(
                make_scenario(
                    ctx=int(row["context"]),
                    batch=int(row["batch"]),
                    gpus=int(row["n_gpus"]),
                    model=names["same_shape"].get(row["model"], row["model"]),
                    cluster=cluster,
                    profile=profile,
                    engine=engine,
                    dtype="fp8" if row["dtype"] == "fp8" else None,
                )[0],
                **steps_of(row, engine),
            )
        except InputError:
            continue
        case = f"{row['model']} {row['context']} x {row['batch']} on {row['n_gpus']} {row['gpu']}, {row['engine']}"
        seconds = {"predicted_s": result.ttft_s, "low_s": result.ttft_low_s, "high_s": result.ttft_high_s}
        tokens = int(row["context"]) * int(row["batch"])
        prefills.append(OtherPrefill(case=case, tokens=tokens, measured_s=row["value"], **seconds))
    return prefills


def steps_of(row: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Strategy and search of a prefill: a prompt longer than the engine's step takes several steps.

    Default steps of engines: vLLM takes 2048 tokens before version 0.8 (if max_model_len is above 32k), and 8192 from
    0.8 on; SGLang takes 4096 on GPUs of less than 60 GB, else 8192; TensorRT-LLM takes 8192. A row's note may give
    another number.
    """
    match = re.search(r"max_num_batched_tokens ([0-9]+)", str(row["note"]))
    old, small = re.match(r"0\.[0-7]\.", str(row["engine_version"])), "40GB" in row["gpu"]
    step = 2048 if engine == "vllm" and old else 4096 if engine == "sglang" and small else 8192
    step = int(match[1]) if match else step
    tokens, tensor = int(row["context"]), () if row["strategy"] == "single" else (f"tp{row['n_gpus']}",)
    if tokens <= step:
        return {"strategy": "+".join(tensor) or "single"}
    pieces = [min(step, tokens - first) for first in range(0, tokens, step)]
    return {"strategy": "+".join((*tensor, "pp1")), "search": Search(partition=pieces)}


_LEAST_SHORT = (0.3, 0.7)  # minimum widths below 512 tokens


def short_width(others: Sequence[OtherPrefill]) -> tuple[float, float]:
    """Widths for prompts below 512 tokens. No setting is that short, so prefills of other sources determine them."""
    logs = np.array([math.log(one.predicted_s / one.measured_s) for one in others if one.tokens < SHORT_TOKENS])
    shorter, longer = widths_of(logs) if len(logs) else _LEAST_SHORT
    return max(shorter, _LEAST_SHORT[0]), max(longer, _LEAST_SHORT[1])


def other_lines(others: Sequence[OtherPrefill]) -> list[str]:
    """Lines with the median errors of other prefills, and a table of all."""
    lines = []
    for title, own in (
        (f"{SHORT_TOKENS} tokens and more", [one for one in others if one.tokens >= SHORT_TOKENS]),
        (f"below {SHORT_TOKENS} tokens", [one for one in others if one.tokens < SHORT_TOKENS]),
    ):
        if own:
            errors = summary([one.rel_error for one in own], [one.inside for one in own])
            shares = f"median error {errors['median_ape']:.1%}, {errors['coverage']:.0%} inside"
            lines.append(f"- {title}: {len(own)} prefills, {shares}.")
    rows = [(one.case, f"{one.measured_s:.3g}", f"{one.predicted_s:.3g}", f"{one.rel_error:+.0%}") for one in others]
    return [*lines, "", *table(("prefill", "measured s", "predicted s", "error"), rows)]


def shipped_seconds(settings: Settings) -> Array:
    """Predictions by the shipped records."""
    every = np.ones(len(settings), dtype=bool)
    engines = {name: load_engine(name) for name in ENGINES}
    logs = {
        name: np.log([e.host.request_s, e.host.token_s, e.host.launch_s, e.kernel_scale[OTHER_GPU]])
        for name, e in engines.items()
    }
    constants = EngineConstants(
        mean=_PRIOR,
        by_engine=logs,
        transfer_s=engines[ENGINES[0]].transfer_s,
        model_types={(n, m): float(np.log(f)) for n, e in engines.items() for m, f in e.model_types.items()},
        versions={(n, v): float(np.log(f)) for n, e in engines.items() for v, f in e.versions.items()},
    )
    return constants.seconds(settings, every)


def _write(engines: Sequence[Engine], short: tuple[float, float]) -> None:
    """Write the records, and add widths for prompts below 512 tokens."""
    for engine in engines:
        assert engine.fit is not None
        fit_of = replace(engine.fit, widths={**engine.fit.widths, "short": short})
        replace(engine, fit=fit_of).write(RECORDS / f"{engine.name}.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the records if --fit is given, and write the page."""
    parser = ArgumentParser(prog="python -m validate.silicon", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("settings", type=Path, metavar="SETTINGS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prefills", type=Path, metavar="FILE.csv", help="prefills of other sources, never fitted")
    parser.add_argument("--fit", action="store_true", help="fit the engines and rewrite their records")
    options = parser.parse_args(arguments)
    settings = read_settings(options.settings, options.configs)
    engines = records(settings) if options.fit else []
    _write(engines, _LEAST_SHORT)
    others = read_others(options.prefills) if options.prefills else []
    _write(engines, short_width(others))
    predictors = {}
    if "aisimulate_static_s" in settings.rows:
        predictors["AISimulate 0.13, static"] = settings.of("aisimulate_static_s").astype(float)
    write_page(PAGE, page(settings, predictors, others))
    print(f"{PAGE}: {len(settings)} settings")


if __name__ == "__main__":
    sys.exit(run_command(main))
