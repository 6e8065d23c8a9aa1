"""Prefills on engines of 2025 and 2026: score the records of vLLM, SGLang and TensorRT-LLM, and any other predictor.

`python -m validate.silicon SETTINGS.csv --configs FOLDER` scores kvrsim and another estimator in the file, and writes
docs/results/silicon.md. `--prefills FILE.csv` adds prefills of other sources. `python -m calibrate.engines` fits the
records; calibrate/engines describes the files, which kvrsim does not ship. The other estimator is the column
aisimulate_static_s.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrate.engines.fit import ENGINES, SPLITS, half_left_out, left_out
from calibrate.engines.prefills import EnginePrefill, read_prefills
from calibrate.engines.records import shipped_seconds, widths_of
from calibrate.engines.settings import Settings, read_settings
from calibrate.prefills.fit import RowCheck
from kvrsim.engine import PRIOR_ENGINE, SHORT_TOKENS, load_engine
from kvrsim.program import Array
from kvrsim.units import format_seconds
from planner.candidates import Candidate
from validate.report import RESULTS, fill, run_command, summary, table, write_page

PAGE = RESULTS / "silicon.md"


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

    @classmethod
    def of(cls, prefill: EnginePrefill) -> OtherPrefill:
        """The prefill with its prediction interval."""
        candidate = Candidate(scenario=prefill.scenario, execution=prefill.execution, partition=prefill.partition)
        interval = candidate.interval
        return cls(
            case=prefill.case,
            tokens=prefill.tokens,
            measured_s=prefill.measured_s,
            predicted_s=candidate.ttft_s,
            low_s=interval.low_s,
            high_s=interval.high_s,
        )


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = ArgumentParser(prog="python -m validate.silicon", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("settings", type=Path, metavar="SETTINGS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prefills", type=Path, metavar="FILE.csv", help="prefills of other sources, never fitted")
    options = parser.parse_args(arguments)
    settings = read_settings(options.settings, options.configs)
    prefills = read_prefills(options.prefills) if options.prefills else []
    others = [OtherPrefill.of(prefill) for prefill in prefills]
    predictors = {}
    if "aisimulate_static_s" in settings.rows:
        predictors["AISimulate 0.13, static"] = settings.of("aisimulate_static_s").astype(float)
    write_page(PAGE, page(settings, predictors, others))
    print(f"{PAGE}: {len(settings)} settings")


if __name__ == "__main__":
    sys.exit(run_command(main))
