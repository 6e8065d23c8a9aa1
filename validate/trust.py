"""How far to trust predictions, by kind of question: docs/results/trust.md.

`python -m validate.trust SETTINGS.csv --configs FOLDER --prefills FILE.csv,FILE.csv` fits the engines' terms and the
rule for intervals without each model type, GPU and engine, as `python -m calibrate.engines` does, and scores them by
kind of question. The files are those of validate.silicon.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calibrate.engines.fit import ENGINES
from calibrate.engines.prefills import parser_of
from calibrate.engines.settings import Settings, read_settings
from calibrate.engines.shares import LONG_TOKENS, ErrorRows, RuleFit, fit_shares, read_other_rows, scores_of
from kvrsim.engine import DEVIATES_OF_80_PERCENT, SHORT_TOKENS
from kvrsim.error_rule import ErrorRule
from kvrsim.program import Array, Flags
from validate.report import RESULTS, fill, run_command, table, write_page

PAGE = RESULTS / "trust.md"
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_NARROWER = {  # what narrows an interval, by the cause of most of its width
    "engine": "8 of your prefills (`kvrsim calibrate prefills`)",
    "engine, not measured": "8 of your prefills (`kvrsim calibrate prefills`)",
    "kernels": "8 of your prefills; or kernels of your machine (`kvrsim calibrate`)",
    "unexplained": "8 of your prefills; runs of one machine differ, too",
    "short prompt": "8 of your prefills, some of them as short",
    "GPU, not measured": "kernels of this GPU (`kvrsim calibrate all`)",
}
_LAYOUT = "8 of your prefills in this layout"


def kinds_of(settings: Settings, rows: ErrorRows) -> dict[str, Flags]:
    """The rows of each kind of question; every row is of one kind."""
    frame = rows.frame
    left = np.ones(len(frame), dtype=bool)
    is_dense = (frame.kind == "dense").to_numpy()
    tokens = frame.tokens.to_numpy()
    named = {
        "several nodes": frame.several_nodes.to_numpy(dtype=bool),
        f"fewer than {SHORT_TOKENS} tokens": tokens < SHORT_TOKENS,
        "dense, a GPU whose rates are scaled": is_dense & frame.is_sibling.to_numpy(dtype=bool),
        f"dense, {LONG_TOKENS:,} tokens and more": is_dense & (tokens >= LONG_TOKENS),
        "dense, shorter": is_dense,
        "mixture, expert parallelism in one node": has_expert_parallelism(settings, rows),
        "mixture": ~is_dense,
    }
    kinds = {}
    for name, is_in in named.items():  # the first kind that a row is in
        kinds[name] = left & is_in
        left = left & ~is_in
    shown = (
        f"dense, {LONG_TOKENS:,} tokens and more",
        "dense, shorter",
        "dense, a GPU whose rates are scaled",
        "mixture",
        "mixture, expert parallelism in one node",
        "several nodes",
        f"fewer than {SHORT_TOKENS} tokens",
    )
    return {name: kinds[name] for name in shown}


def has_expert_parallelism(settings: Settings, rows: ErrorRows) -> Flags:
    """Whether each row is a setting with expert parallelism."""
    columns = ("model", "gpu", "engine", "prefill_s")
    of_settings = zip(settings.of("moe_ep"), *(settings.of(column) for column in columns), strict=True)
    split = {tuple(key) for moe_ep, *key in of_settings if moe_ep > 1}
    frame = rows.frame
    keys = zip(frame.case, frame.gpu, frame.engine, frame.prefill_s, strict=True)
    is_setting = (frame.source == "settings").to_numpy()
    is_split = np.array([key in split for key in keys], dtype=bool)
    return np.asarray(is_setting & is_split)


def main_cause(rows: ErrorRows, rule: ErrorRule) -> str:
    """The cause with the largest mean square of log TTFT over the rows."""
    squares: dict[str, float] = {}
    for facts in rows.facts:
        for cause, log_sd in rule.log_sds(facts).items():
            squares[cause] = squares.get(cause, 0.0) + log_sd**2
    return max(squares, key=lambda cause: squares[cause])


def kind_table(settings: Settings, rule_fit: RuleFit) -> list[str]:
    """Table of error, coverage and width by kind of question, with what would narrow the interval."""
    by_model = rule_fit.tables["model_type"]
    lines = []
    for name, is_in in kinds_of(settings, by_model).items():
        if not is_in.any():
            continue
        rows = by_model.where(is_in)
        log_sds = rule_fit.log_sds[is_in]
        scores = scores_of(rows.log_errors, log_sds)
        cause = main_cause(rows, rule_fit.rule)
        lines.append(
            (
                name,
                scores.num_rows,
                f"{_median_size(rows.log_errors):.1%}",
                f"{np.median(np.expm1(rows.log_errors)):+.0%}",
                f"{scores.coverage:.0%}",
                f"{_ratio(float(np.median(log_sds))):.2f}",
                cause,
                _NARROWER.get(cause, _LAYOUT),
            )
        )
    layouts = rule_fit.rule.layouts
    unknown = math.hypot(rule_fit.rule.kernels["mixture"], layouts["data"], layouts["experts"])
    at_least = f"{_ratio(unknown):.2f} or more"
    lines.append(("attention data parallelism with experts (DP + EP)", 0, "", "", "", at_least, "this layout", _LAYOUT))
    heads = (
        "kind of question",
        "rows",
        "median error",
        "with its sign",
        "inside",
        "high / low",
        "most of the width",
        "narrowed by",
    )
    return table(heads, lines)


def _ratio(log_sd: float) -> float:
    """Upper end of an 80 % interval divided by its lower end."""
    return math.exp(2 * DEVIATES_OF_80_PERCENT * log_sd)


def _median_size(log_errors: Array) -> float:
    """Median of the absolute relative errors."""
    return float(np.median(np.abs(np.expm1(log_errors))))


def page(settings: Settings, rule_fit: RuleFit) -> list[str]:
    """Markdown lines of the page."""
    by_model = rule_fit.tables["model_type"]
    is_setting = {name: (rows.frame.source == "settings").to_numpy() for name, rows in rule_fit.tables.items()}
    of_settings = {name: rows.where(is_setting[name]) for name, rows in rule_fit.tables.items()}
    engines = of_settings["model_type"].frame.engine.to_numpy()
    by_engine = [
        f"{_NAMES[engine]} {_median_size(of_settings['model_type'].log_errors[engines == engine]):.0%}"
        for engine in ENGINES
    ]
    others = by_model.where(~is_setting["model_type"])
    others_sds = rule_fit.log_sds[~is_setting["model_type"]]
    is_long = (others.frame.tokens >= SHORT_TOKENS).to_numpy()
    every = scores_of(by_model.log_errors, rule_fit.log_sds)
    return fill(
        "trust",
        kinds=kind_table(settings, rule_fit),
        num_settings=len(settings),
        model_left_out=f"{_median_size(of_settings['model_type'].log_errors):.0%}",
        by_engine=", ".join(by_engine),
        gpu_left_out=f"{_median_size(of_settings['gpu'].log_errors):.0%}",
        engine_left_out=f"{_median_size(of_settings['engine'].log_errors):.0%}",
        num_others=int(is_long.sum()),
        others=f"{_median_size(others.log_errors[is_long]):.0%}",
        others_inside=f"{scores_of(others.log_errors[is_long], others_sds[is_long]).coverage:.0%}",
        num_rows=every.num_rows,
        coverage=f"{every.coverage:.0%}",
        score=f"{every.interval_score:.2f}",
        calibrated=f"{_ratio(rule_fit.rule.calibrated):.2f}",
        num_calibrated=rule_fit.num_calibrated,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = parser_of("validate.trust", (__doc__ or "").split("\n", 1)[0])
    options = parser.parse_args(arguments)
    settings = read_settings(options.settings, options.configs)
    with tempfile.TemporaryDirectory() as folder:
        rule_fit = fit_shares(settings, read_other_rows(options.prefills, options.configs, Path(folder)))
    write_page(PAGE, page(settings, rule_fit))
    print(f"{PAGE}: {len(rule_fit.log_sds)} prefills")


if __name__ == "__main__":
    sys.exit(run_command(main))
