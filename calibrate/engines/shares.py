"""The fit of the rule for intervals (kvrsim/error_rule.py) to prefills whose group was left out of the engines' fit.

A prediction has the error log(predicted / measured). The rule gives the standard deviation of this error from the
engine's share of TTFT and a few facts. Its values are those that are most probable if errors have Student's
distribution, which a few rows with large errors do not widen much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.engines.fit import ENGINES, EngineConstants, fit, is_new_build
from calibrate.engines.prefills import EnginePrefill, read_prefills
from calibrate.engines.settings import Settings, work_of
from kvrsim.engine import DEVIATES_OF_80_PERCENT, PRIOR_ENGINE, SHORT_TOKENS, load_engine
from kvrsim.error_rule import OTHER_ENGINE, ErrorRule, ErrorScores, TtftShares
from kvrsim.program import Array, Flags

if TYPE_CHECKING:
    import pandas

LEFT_OUT = ("model_type", "gpu", "engine")  # groups that are left out of the engines' fit, one at a time
LONG_TOKENS = 16384  # least tokens of a long prompt
CALIBRATED_ROWS = 8  # prefills of a user for which ErrorRule.calibrated is stated
_DEGREES = 4.0  # degrees of freedom of Student's distribution
_PRIOR_LOG_SD = 0.15  # of the logarithm of each value of the rule, around START
_CELL_ROWS = 2.0  # largest total weight of a cell: the rows with the same source, model, GPU and engine
_MISS_FACTOR = 10.0  # of the interval score: 2 / (1 - 0.8)
_OWN_ENGINE = "sglang"  # the engine with a value of its own, because its errors are wider
_LEAST_CELL = 5  # cells with fewer rows do not show the error that a calibration leaves
# Centres of the priors: values that fared well on prefills that this fit does not see. Those of engines were 0.55 and
# 0.72 before launches had factors of mixtures and GPUs, which made the errors of left-out prefills smaller: 86.1 to
# 86.5 % of the prefills were inside with 0.55 and 0.72, 85.8 % with 0.45 and 0.58.
START = {
    "floor": 0.05,
    "engine": 0.45,
    "own_engine": 0.58,
    "unknown_engine": 0.2,
    "dense": 0.12,
    "mixture": 0.27,
    "sibling": 0.2,
    "short": 0.3,
}
BY_HAND = {  # log sds of layouts that have no pair of prefills, with and without the layout, on one machine
    "tensor": 0.1,
    "pipeline": 0.25,
    "data": 0.25,
    "experts": 0.25,
    "nodes": 0.25,
}
PROVENANCE = {
    "command": "python -m calibrate.engines SETTINGS.csv --configs FOLDER --prefills FILE.csv,FILE.csv",
    "fitted": "floor, engine, unknown_engine, kernels, sibling and short: most probable values if errors have Student's"
    " distribution with 4 degrees of freedom, with log-normal priors; the row's model type, GPU or engine was left out"
    " of the fit of the engines' terms",
    "layouts.context": "differences between prefills with and without a split context on one machine",
    "layouts.nodes": "set by hand: the pairs on several nodes have a split context and differ by less, but tensor"
    " parallelism over nodes was not compared in pairs, and its collectives took 3 to 5 times as long as predicted",
    "layouts.tensor": "set by hand, for engines whose rows have no tensor parallelism: LoongServe's prefills on 8 GPUs"
    " and on one differ by 0.1",
    "layouts.pipeline, data, experts": "set by hand, as several nodes: no pair of prefills",
    "calibrated": "errors of rows predicted by an engine that was fitted to up to 8 other rows of the same machine",
}


@dataclass(frozen=True, kw_only=True)
class ErrorRows:
    """Predictions of prefills whose group was left out of the fit; arrays of shape (rows,)."""

    facts: tuple[TtftShares, ...]
    log_errors: Array  # log(predicted / measured)
    frame: pandas.DataFrame  # model_type, gpu, engine, cell, kind, tokens, nodes, case

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def weights(self) -> Array:
        """Weights of the rows: those of a cell count together as at most _CELL_ROWS."""
        sizes = np.asarray(self.frame.groupby("cell").cell.transform("size"), dtype=float)
        return np.asarray(np.minimum(1.0, _CELL_ROWS / sizes))

    def where(self, rows: Flags) -> ErrorRows:
        """Some of the rows."""
        facts = tuple(fact for fact, is_kept in zip(self.facts, rows, strict=True) if is_kept)
        return ErrorRows(facts=facts, log_errors=self.log_errors[rows], frame=self.frame[rows].reset_index(drop=True))

    def log_sds(self, rule: ErrorRule) -> Array:
        """Standard deviations of the errors by a rule."""
        return np.array([math.hypot(*rule.log_sds(fact).values()) for fact in self.facts], dtype=float)

    def log_sds_without(self, group: str, rules: Mapping[str, ErrorRule]) -> Array:
        """Standard deviations by rules that were fitted without the row's group; `group`: its column."""
        names = self.frame[group]
        return np.array(
            [math.hypot(*rules[name].log_sds(fact).values()) for name, fact in zip(names, self.facts, strict=True)]
        )


def interval_scores(log_errors: Array, log_sds: Array) -> Array:
    """Winkler's score of 80 % intervals of log TTFT: the width, and _MISS_FACTOR x what a measurement misses it by."""
    half = DEVIATES_OF_80_PERCENT * log_sds
    return np.asarray(2 * half + _MISS_FACTOR * np.maximum(np.abs(log_errors) - half, 0.0))


def scores_of(log_errors: Array, log_sds: Array) -> ErrorScores:
    """Coverage and mean interval score."""
    inside = np.abs(log_errors) <= DEVIATES_OF_80_PERCENT * log_sds
    return ErrorScores(
        num_rows=len(log_errors),
        coverage=round(float(np.mean(inside)), 4),
        interval_score=round(float(np.mean(interval_scores(log_errors, log_sds))), 4),
    )


# -- the rows


@dataclass(frozen=True, kw_only=True)
class OtherRows:
    """Prefills of other sources as settings, with the facts that settings lack."""

    settings: Settings
    new_layouts: tuple[tuple[str, ...], ...]
    is_sibling: Flags
    prefills: tuple[EnginePrefill, ...]


def read_other_rows(paths: Sequence[Path], configs: Path, folder: Path) -> OtherRows:
    """Read files of prefills, and count their kernels and launches; folder: where models are made from configs."""
    import pandas

    rows = []
    prefills: list[EnginePrefill] = []
    new_layouts = []
    is_sibling = []
    work = []
    known = load_engine(PRIOR_ENGINE).layouts or ()
    for path in paths:
        for prefill in read_prefills(path, configs, folder):
            prefills.append(prefill)
            placed = prefill.execution.placed
            work.append(work_of(prefill.asked, prefill.strategy, prefill.pieces))
            new_layouts.append(tuple(kind for kind in placed.layout_kinds if kind not in known))
            is_sibling.append(placed.has_scaled_kernels)
            model = prefill.scenario.model
            row = {
                "source": prefill.source,
                "model": model.name,
                "model_type": model.model_type,
                "gpu": prefill.scenario.cluster.gpu.name,
                "engine": prefill.engine,
                "engine_version": prefill.version,
                "mode": "agg",
                "kind": "mixture" if model.is_mixture else "dense",
                "context_tokens": prefill.scenario.request.context_len * prefill.scenario.request.batch,
                "tokens": prefill.tokens,
                "prompt_tokens": prefill.scenario.request.context_len,
                "several_nodes": "nodes" in placed.layout_kinds,
                "prefill_s": prefill.measured_s,
            }
            rows.append(row)
    kernels_s, launches, collectives = np.array(work).T
    settings = Settings(rows=pandas.DataFrame(rows), kernels_s=kernels_s, launches=launches, collectives=collectives)
    return OtherRows(
        settings=settings, new_layouts=tuple(new_layouts), is_sibling=np.array(is_sibling), prefills=tuple(prefills)
    )


def training_settings(settings: Settings, other: OtherRows) -> Settings:
    """The settings and other sources' prefills of the newest builds, which alone show how these launch kernels."""
    return settings.joined(other.settings.where(is_new_build(other.settings)))


def error_rows(settings: Settings, other: OtherRows, left_out: str) -> ErrorRows:
    """Errors of all prefills; the engines' terms are fitted without the settings of the row's group.

    left_out: a column that names the group, of LEFT_OUT. Without its own engine, a row is predicted by the mean of the
    other engines.
    """
    import pandas

    groups = settings.of(left_out)
    other_groups = other.settings.of(left_out)
    training = training_settings(settings, other)
    training_groups = training.of(left_out)
    tables = []
    for group in dict.fromkeys([*groups.tolist(), *other_groups.tolist()]):
        is_left_out = groups == group
        constants = fit(training, training_groups != group)
        if is_left_out.any():
            tables.append(_predictions(constants, settings, is_left_out))
        is_other = other_groups == group
        if is_other.any():
            tables.append(_predictions(constants, other.settings, is_other, other))
    frame = pandas.concat(tables, ignore_index=True)
    facts = tuple(
        TtftShares(
            engine=row.engine,
            engine_share=row.engine_share,
            is_mixture=row.kind == "mixture",
            is_sibling=row.is_sibling,
            is_unknown_engine=row.engine == PRIOR_ENGINE or left_out == "engine",
            is_short=row.tokens < SHORT_TOKENS,
            new_layouts=row.new_layouts,
        )
        for row in frame.itertuples()
    )
    return ErrorRows(facts=facts, log_errors=frame.log_error.to_numpy(), frame=frame)


def _predictions(
    constants: EngineConstants, settings: Settings, rows: Flags, other: OtherRows | None = None
) -> pandas.DataFrame:
    """A table of predictions: the columns of ErrorRows.frame, log_error, engine_share and the facts of the rule."""
    seconds, kernels_s = constants.parts(settings, rows)
    frame = settings.rows[rows]
    table = frame.assign(
        log_error=np.log(seconds) - np.log(frame.prefill_s.to_numpy()),
        engine_share=np.clip(1 - kernels_s / seconds, 0.0, 1.0),
        case=frame.model,
    )
    if other is None:
        table = table.assign(
            source="settings",
            tokens=frame.context_tokens,
            prompt_tokens=frame.context_tokens,
            several_nodes=False,
            is_sibling=False,
            new_layouts=[()] * len(frame),
        )
    else:
        indices = np.flatnonzero(rows)
        table = table.assign(
            is_sibling=other.is_sibling[rows],
            new_layouts=[other.new_layouts[index] for index in indices],
            case=[other.prefills[index].case for index in indices],
        )
    cells = table.source + "|" + table.model + "|" + table.gpu + "|" + table.engine
    columns = ["source", "case", "model_type", "gpu", "engine", "kind", "tokens", "prompt_tokens", "several_nodes"]
    columns += ["prefill_s", "log_error", "engine_share", "is_sibling", "new_layouts"]
    return table.assign(cell=cells)[[*columns, "cell"]]


# -- the fit


def fit_rule(tables: Sequence[ErrorRows], layouts: Mapping[str, float]) -> ErrorRule:
    """The rule whose values are most probable for these rows; layouts: standard deviations that are not fitted here."""
    from scipy.optimize import minimize
    from scipy.stats import t as student

    names = list(START)
    centres = np.log(list(START.values()))
    design = np.concatenate([_squares(table) for table in tables])
    known = np.concatenate([_layout_squares(table, layouts) for table in tables])
    log_errors = np.concatenate([table.log_errors for table in tables])
    weights = np.concatenate([table.weights for table in tables])
    quantile = float(student.ppf(0.9, _DEGREES))

    def cost(point: Array) -> float:
        scales = DEVIATES_OF_80_PERCENT / quantile * np.sqrt(design @ np.exp(2 * point) + known)
        logs = (_DEGREES + 1) / 2 * np.log1p((log_errors / scales) ** 2 / _DEGREES) + np.log(scales)
        return float(weights @ logs + np.sum(((point - centres) / _PRIOR_LOG_SD) ** 2) / 2)

    values = dict(zip(names, np.exp(minimize(cost, centres, method="L-BFGS-B").x).tolist(), strict=True))
    rounded = {name: float(f"{value:.2g}") for name, value in values.items()}
    return _rule_of(rounded, layouts)


def _rule_of(values: Mapping[str, float], layouts: Mapping[str, float]) -> ErrorRule:
    return ErrorRule(
        floor=values["floor"],
        engine={OTHER_ENGINE: values["engine"], _OWN_ENGINE: values["own_engine"]},
        unknown_engine=values["unknown_engine"],
        kernels={"dense": values["dense"], "mixture": values["mixture"]},
        sibling=values["sibling"],
        short=values["short"],
        layouts=layouts,
        calibrated=0.0,
        calibrated_rows=CALIBRATED_ROWS,
        provenance=PROVENANCE,
    )


def _squares(table: ErrorRows) -> Array:
    """For each row, the factor of the square of each value of START in the variance; shape (rows, values)."""
    columns = []
    nothing = dict.fromkeys(BY_HAND | {"context": 0.0}, 0.0)
    for name in START:
        values = dict.fromkeys(START, 0.0) | {name: 1.0}
        columns.append(table.log_sds(_rule_of(values, nothing)) ** 2)
    return np.stack(columns, axis=1)


def _layout_squares(table: ErrorRows, layouts: Mapping[str, float]) -> Array:
    return table.log_sds(_rule_of(dict.fromkeys(START, 0.0), layouts)) ** 2


def context_log_sd(table: ErrorRows) -> tuple[float, int]:
    """Standard deviation that a split context adds, from pairs of prefills that differ only in it; number of pairs.

    Scaled for the number of sources, because pairs of one machine are alike.
    """
    from scipy.stats import t as student

    frame = table.frame
    differences = []
    sources = set()
    for _, rows in frame[frame.source != "settings"].groupby(["source", "model_type", "tokens", "prompt_tokens"]):
        split = rows[[layouts == ("context",) for layouts in rows.new_layouts]]
        whole = rows[[layouts == () for layouts in rows.new_layouts]]
        if len(split) and len(whole):
            differences.append(split.log_error.mean() - whole.log_error.mean())
            sources.add(rows.source.iloc[0])
    if not differences:
        return BY_HAND["tensor"], 0
    scale = float(student.ppf(0.9, len(sources))) / DEVIATES_OF_80_PERCENT
    return float(f"{scale * np.sqrt(np.mean(np.square(differences))):.2g}"), len(differences)


def calibrated_log_sd(table: ErrorRows, rule: ErrorRule) -> tuple[float, int]:
    """Standard deviation of the errors that a calibration with CALIBRATED_ROWS rows leaves; number of rows behind it.

    Each row of a cell of _LEAST_CELL rows and more is predicted after a fit to at most CALIBRATED_ROWS others of it: of
    a factor on the engine's seconds, and one on those of kernels, with the priors of the rule. The value makes 80 % of
    the errors lie inside the interval; each cell has the same weight.
    """
    frame = table.frame
    errors = []
    weights = []
    rng = np.random.default_rng(0)
    for _, rows in frame.groupby("cell"):
        if len(rows) < _LEAST_CELL:
            continue
        shares = rows.engine_share.to_numpy()
        design = np.stack([shares, 1 - shares], axis=1)
        log_errors = rows.log_error.to_numpy()
        engine = rule.engine.get(rows.engine.iloc[0], rule.engine[OTHER_ENGINE])
        kernels = rule.kernels[rows.kind.iloc[0]]
        precision = np.diag([engine**-2, kernels**-2])
        for index in range(len(rows)):
            others = rng.permutation(np.delete(np.arange(len(rows)), index))[:CALIBRATED_ROWS]
            near = design[others]
            normal = precision + near.T @ near / rule.floor**2
            factors = np.linalg.solve(normal, near.T @ log_errors[others] / rule.floor**2)
            errors.append(abs(log_errors[index] - design[index] @ factors))
            weights.append(1 / len(rows))
    if not errors:
        return rule.floor, 0
    order = np.argsort(errors)
    share = np.cumsum(np.array(weights)[order]) / np.sum(weights)
    inside = np.array(errors)[order][int(np.searchsorted(share, 0.8))]
    return float(f"{inside / DEVIATES_OF_80_PERCENT:.2g}"), len(errors)


def groups_of(table: ErrorRows) -> dict[str, Flags]:
    """The groups of rows for which scores are stated."""
    frame = table.frame
    is_dense = (frame.kind == "dense").to_numpy()
    is_long = (frame.tokens >= LONG_TOKENS).to_numpy()
    several_nodes = frame.several_nodes.to_numpy(dtype=bool)
    groups = {
        "all": np.ones(len(frame), dtype=bool),
        "dense": is_dense,
        "mixture": ~is_dense,
        "several nodes": several_nodes,
        "long": is_long,
        "dense, long, one node": is_dense & is_long & ~several_nodes,
        "short": (frame.tokens < SHORT_TOKENS).to_numpy(),
        "GPU with scaled rates": frame.is_sibling.to_numpy(dtype=bool),
    }
    names = frame.engine.to_numpy()
    return groups | {name: names == name for name in (*ENGINES, PRIOR_ENGINE)}


@dataclass(frozen=True, kw_only=True)
class RuleFit:
    """The fitted rule, and the rows behind it."""

    rule: ErrorRule  # with its scores
    tables: Mapping[str, ErrorRows]  # by the group left out, of LEFT_OUT
    log_sds: Array  # of the rows with their model type left out, by rules fitted without this model type
    num_pairs: int  # pairs of prefills with and without a split context
    num_calibrated: int  # rows behind ErrorRule.calibrated


def fit_shares(settings: Settings, other: OtherRows) -> RuleFit:
    """Fit the rule, and score it on rows whose model type both fits lack: that of the engines' terms, and its own."""
    tables = {left_out: error_rows(settings, other, left_out) for left_out in LEFT_OUT}
    by_model = tables["model_type"]
    context, num_pairs = context_log_sd(by_model)
    layouts = BY_HAND | {"context": context}
    rule = fit_rule(list(tables.values()), layouts)
    rules = {}
    for model_type in dict.fromkeys(by_model.frame.model_type):
        kept = [table.where((table.frame.model_type != model_type).to_numpy()) for table in tables.values()]
        rules[model_type] = fit_rule(kept, layouts)
    log_sds = by_model.log_sds_without("model_type", rules)
    scores = {
        name: scores_of(by_model.log_errors[rows], log_sds[rows])
        for name, rows in groups_of(by_model).items()
        if rows.any()
    }
    calibrated, num_calibrated = calibrated_log_sd(by_model, rule)
    return RuleFit(
        rule=replace(rule, scores=scores, calibrated=calibrated),
        tables=tables,
        log_sds=log_sds,
        num_pairs=num_pairs,
        num_calibrated=num_calibrated,
    )
