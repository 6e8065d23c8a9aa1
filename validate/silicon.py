"""Prefills on engines of 2025 and 2026: score the records of vLLM, SGLang and TensorRT-LLM, and any other predictor.

`python -m validate.silicon SETTINGS.csv --configs FOLDER --prefills FILE.csv,FILE.csv` scores kvrsim and another
estimator in the file, and writes docs/results/silicon.md. The prefills are of other sources; they score the
intervals. `python -m calibrate.engines` fits the records and the rule for intervals; calibrate/engines describes the
files, which kvrsim does not ship. The other estimator is the column
aisimulate_static_s.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibrate.engines.fit import (
    ENGINES,
    FORM,
    NEW_BUILDS,
    SPLITS,
    Form,
    half_left_out,
    is_new_build,
    left_out,
    log_errors,
)
from calibrate.engines.prefills import EnginePrefill, parser_of
from calibrate.engines.records import shipped_seconds
from calibrate.engines.settings import Settings, read_settings
from calibrate.engines.shares import (
    ErrorRows,
    OtherRows,
    RuleFit,
    fit_shares,
    groups_of,
    read_other_rows,
    scores_of,
    training_settings,
)
from calibrate.prefills.fit import RowCheck
from kvrsim.engine import DEVIATES_OF_80_PERCENT, PRIOR_ENGINE, SHORT_TOKENS, load_engine
from kvrsim.program import Array
from kvrsim.units import format_seconds, format_tokens
from planner.candidates import Candidate
from validate.report import RESULTS, fill, run_command, summary, table, write_page

PAGE = RESULTS / "silicon.md"
_LEAST_ROWS = 5  # least number of an engine's errors from which a width is computed


def constant_half_widths(logs: Array, groups: Array, engines: Array) -> Array:
    """A half-width of log TTFT for each row: the 80 % quantile of the absolute errors of all other groups.

    Where those of the same engine in other groups have a larger one, it is theirs.
    """
    sizes = np.abs(logs)
    half_widths = np.zeros(len(logs))
    for group, engine in set(zip(groups.tolist(), engines.tolist(), strict=True)):
        others = groups != group
        half_width = np.quantile(sizes[others], 0.8)
        same = others & (engines == engine)
        if same.sum() >= _LEAST_ROWS:
            half_width = max(half_width, np.quantile(sizes[same], 0.8))
        half_widths[(groups == group) & (engines == engine)] = half_width
    return half_widths


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


def page(settings: Settings, predictors: dict[str, Array], other: OtherRows) -> list[str]:
    """Markdown lines of docs/results/silicon.md."""
    rule_fit = fit_shares(settings, other)
    measured_s = settings.of("prefill_s")
    training = training_settings(settings, other)
    splits = {f"{split} left out": left_out(settings, split, training) for split in SPLITS}  # "setting" comes first
    half = np.abs(np.expm1(half_left_out(settings)))
    shipped = shipped_seconds(settings)
    prior = left_out(settings, "engine", training)
    kvrsim = {"kvrsim, records as shipped": shipped} | {f"kvrsim, {name}": values for name, values in splits.items()}
    kvrsim["kvrsim, `serving` of the other engines"] = prior
    rows = []
    for name, seconds in (kvrsim | predictors).items():
        has = np.isfinite(seconds)
        errors = np.abs(seconds[has] / measured_s[has] - 1)
        by_engine = [np.median(np.abs(seconds / measured_s - 1)[has & (settings.of("engine") == e)]) for e in ENGINES]
        logs = np.log(seconds[has] / measured_s[has])
        groups = settings.group(name.split(", ")[1].split()[0] if "left out" in name else "model")[has]
        inside = f"{np.mean(np.abs(logs) <= constant_half_widths(logs, groups, settings.of('engine')[has])):.0%}"
        rows.append((name, len(errors), f"{np.median(errors):.1%}", *(f"{one:.1%}" for one in by_engine), inside))
    return fill(
        "silicon",
        splits=table(("predictor", "settings", "median error", *ENGINES, "inside"), rows),
        half=f"{np.median(half):.1%}",
        transfer=format_seconds(load_engine(PRIOR_ENGINE).transfer_s),
        groups=score(settings, {"kvrsim, model left out": splits["model left out"], **predictors}),
        gains=gain_table(settings, training),
        builds=" and ".join(f"`{name}` {version}" for name, version in NEW_BUILDS.items()),
        num_new=int(is_new_build(training).sum()),
        count=len(settings),
        others=other_lines([OtherPrefill.of(prefill) for prefill in other.prefills]),
        intervals=interval_table(rule_fit),
        values=value_table(rule_fit),
        num_rows=len(rule_fit.log_sds),
        num_pairs=rule_fit.num_pairs,
        num_calibrated=rule_fit.num_calibrated,
        calibrated=f"{rule_fit.rule.calibrated:.2g}",
    )


def gain_table(settings: Settings, training: Settings) -> list[str]:
    """Table of errors with each term of the fit left away; training: with the prefills of the newest builds."""
    nothing = Form(mixtures=False, shrinks_types=False, systems=False, hidden_share=0.0, new_hidden_share=0.0)
    forms = {
        "all terms": (FORM, training),
        "no factor on launches of mixtures": (replace(FORM, mixtures=False), training),
        "model types' factors hardly shrunk (1.5)": (replace(FORM, shrinks_types=False), training),
        "no factor on launches per GPU": (replace(FORM, systems=False), training),
        "30 % of the shorter of launches and kernels hidden in all builds": (replace(FORM, hidden_share=0.3), training),
        "newest builds: no launches hidden under kernels": (replace(FORM, new_hidden_share=0.0), training),
        "none of these terms": (nothing, settings),
    }
    newest = training.where(is_new_build(training))
    is_sglang = settings.of("engine") == "sglang"
    rows = []
    for name, (form, fitted) in forms.items():
        by_model = log_errors(settings, left_out(settings, "model", fitted, form))
        by_gpu = log_errors(settings, left_out(settings, "gpu", fitted, form))
        of_newest = log_errors(newest, left_out(newest, "model_type", fitted, form))
        row = [name, _median_error(by_model), _median_error(by_model[is_sglang]), f"{np.abs(by_model).mean():.3f}"]
        row += [_median_error(by_gpu), f"{np.abs(by_gpu).mean():.3f}", _median_error(of_newest)]
        rows.append(row)
    heads = ["terms", "model left out", "of SGLang", "mean log error", "GPU left out", "mean log error"]
    return table([*heads, "newest builds, model type left out"], rows)


def _median_error(logs: Array) -> str:
    return f"{np.median(np.abs(np.expm1(logs))):.1%}"


def interval_table(rule_fit: RuleFit) -> list[str]:
    """Table of the intervals' scores by group, beside those of constant widths."""
    by_model = rule_fit.tables["model_type"]
    others = {name: rule_fit.tables[name] for name in ("gpu", "engine")}
    constant = constant_log_sds(by_model)
    rows = []
    for name, is_in in groups_of(by_model).items():
        if not is_in.any():
            continue
        logs = by_model.log_errors[is_in]
        before = scores_of(logs, constant[is_in])
        rule = scores_of(logs, rule_fit.log_sds[is_in])
        width = np.exp(2 * DEVIATES_OF_80_PERCENT * np.median(rule_fit.log_sds[is_in]))
        cells = [name, rule.num_rows, f"{before.coverage:.0%}", f"{before.interval_score:.2f}"]
        cells += [f"{rule.coverage:.0%}", f"{rule.interval_score:.2f}", f"{width:.2f}"]
        for table_of_split in others.values():
            is_same = groups_of(table_of_split)[name]
            log_sds = table_of_split.log_sds(rule_fit.rule)
            cells.append(f"{scores_of(table_of_split.log_errors[is_same], log_sds[is_same]).coverage:.0%}")
        rows.append(cells)
    heads = ["prefills", "number", "inside, constant width", "score", "inside, by shares", "score", "high / low"]
    return table((*heads, "inside, GPU left out", "inside, engine left out"), rows)


def constant_log_sds(rows: ErrorRows) -> Array:
    """Standard deviations for intervals of a constant width per engine, from the errors of other model types."""
    columns = [rows.frame[name].to_numpy() for name in ("model_type", "engine")]
    return constant_half_widths(rows.log_errors, *columns) / DEVIATES_OF_80_PERCENT


def value_table(rule_fit: RuleFit) -> list[str]:
    """Table of the rule's values."""
    rule = rule_fit.rule
    rows = [
        ("floor", rule.floor, "every TTFT"),
        *((f"engine, {name}", log_sd, "the seconds that the engine adds") for name, log_sd in rule.engine.items()),
        ("unknown engine", rule.unknown_engine, "the same seconds, in addition, if the engine was not measured"),
        *((f"kernels, {kind}", log_sd, "the seconds of kernels and links") for kind, log_sd in rule.kernels.items()),
        ("sibling", rule.sibling, "the same seconds, in addition, with rates scaled from another GPU"),
        ("short", rule.short, f"TTFT below {SHORT_TOKENS} tokens, in addition"),
        ("context", rule.layouts["context"], "TTFT with a split context, in addition"),
    ]
    return table(("value", "standard deviation of the logarithm", "of"), rows)


@dataclass(frozen=True, kw_only=True)
class OtherPrefill(RowCheck):
    """A prefill of another source, predicted by the record of its engine."""

    source: str  # who published it
    model: str
    gpus: str  # number and kind of GPUs, and the engine
    tokens: int  # tokens of all prompts together

    @classmethod
    def of(cls, prefill: EnginePrefill) -> OtherPrefill:
        """The prefill with its prediction interval."""
        candidate = Candidate(execution=prefill.execution, partition=prefill.partition)
        interval = candidate.interval
        return cls(
            case=prefill.case,
            source=prefill.source,
            model=prefill.scenario.model.name,
            gpus=prefill.case.partition(" on ")[2],
            tokens=prefill.tokens,
            measured_s=prefill.measured_s,
            predicted_s=candidate.ttft_s,
            low_s=interval.low_s,
            high_s=interval.high_s,
        )


def other_lines(others: Sequence[OtherPrefill]) -> list[str]:
    """Lines with the median errors of other prefills, and a table by source, model and GPUs."""
    lines = []
    for title, group in (
        (f"{SHORT_TOKENS} tokens and more", [one for one in others if one.tokens >= SHORT_TOKENS]),
        (f"below {SHORT_TOKENS} tokens", [one for one in others if one.tokens < SHORT_TOKENS]),
    ):
        if group:
            errors = summary([one.rel_error for one in group], [one.inside for one in group])
            shares = f"median error {errors['median_ape']:.1%}, {errors['coverage']:.0%} inside"
            lines.append(f"- {title}: {len(group)} prefills, {shares}.")
    by_machine: dict[tuple[str, str, str], list[OtherPrefill]] = {}
    for prefill in others:
        by_machine.setdefault((prefill.source, prefill.model, prefill.gpus), []).append(prefill)
    rows = []
    for machine, group in by_machine.items():
        errors = summary([one.rel_error for one in group], [one.inside for one in group])
        tokens = [one.tokens for one in group]
        lengths = format_tokens(min(tokens))
        if max(tokens) > min(tokens):
            lengths += f" to {format_tokens(max(tokens))}"
        rows.append((*machine, lengths, len(group), f"{errors['median']:+.0%}", f"{errors['coverage']:.0%}"))
    heads = ("source", "model", "GPUs, engine", "tokens", "number", "median error", "inside")
    return [*lines, "", *table(heads, rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = parser_of("validate.silicon", (__doc__ or "").split("\n", 1)[0])
    options = parser.parse_args(arguments)
    settings = read_settings(options.settings, options.configs)
    predictors = {}
    if "aisimulate_static_s" in settings.rows:
        predictors["AISimulate 0.13, static"] = settings.of("aisimulate_static_s").astype(float)
    with tempfile.TemporaryDirectory() as folder:
        other = read_other_rows(options.prefills, options.configs, Path(folder))
        write_page(PAGE, page(settings, predictors, other))
    print(f"{PAGE}: {len(settings)} settings")


if __name__ == "__main__":
    sys.exit(run_command(main))
