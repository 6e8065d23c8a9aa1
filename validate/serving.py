"""Prefills on serving engines of 2023 and 2024 compared with predictions by the engines' records.

The records in kvrsim/data/engines/NAME.json are frozen: they were fitted by this module's `--fit` at commit 479bb5ad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibrate.prefills.fit import CheckedRow
from kvrsim.builder import make_scenario
from kvrsim.engine import SHORT_TOKENS, EngineFit, load_engine
from planner.simulate import run_simulation
from validate.published.compare import DATA, read_table
from validate.report import fill, summary, table

PATH = DATA / "serving_prefills.csv"
_PROFILES = {"a100": "a100-flash", "a800": "a100-flash", "h100": "h100-flash", "h800": "h100-flash"}
_OPERATORS = ("ring-flash-attention",)  # operators that were measured alone: attention, not whole prefills


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRow:
    """One published prefill."""

    engine: str  # name of the engine's record
    model: str
    cluster: str
    num_gpus: int
    strategy: str
    context_len: int  # tokens of each prompt
    batch: int  # number of prompts
    dtype: str
    ttft_s: float
    left_out: str  # rule that leaves the row out; empty: the row is compared

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return self.context_len * self.batch


def read_rows() -> list[ServingRow]:
    """All rows of whole prefills."""
    texts = ("model", "cluster", "strategy", "dtype", "left_out")
    return [
        ServingRow(
            **{name: fields[name] for name in texts},
            engine=fields["engine_name"],
            num_gpus=int(fields["num_gpus"]),
            context_len=int(fields["context_len"]),
            batch=int(fields["batch"]),
            ttft_s=float(fields["seconds"]),
        )
        for fields in read_table(PATH.name)
        if fields["engine_name"] not in _OPERATORS
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingError(CheckedRow):
    """One prefill and its prediction."""

    row: ServingRow

    @property
    def is_short(self) -> bool:
        """Whether the prompts have so few tokens that the engine may cause most of the time."""
        return self.row.tokens < SHORT_TOKENS


def errors_of(rows: Sequence[ServingRow], engine: str) -> list[ServingError]:
    """Predict every row with one engine."""
    errors = []
    for row in rows:
        scenario, _ = make_scenario(
            ctx=row.context_len,
            gpus=row.num_gpus,
            model=row.model,
            profile=_PROFILES[row.cluster.partition("-")[0]],
            cluster=row.cluster,
            batch=row.batch,
            dtype=row.dtype,
            engine=engine,
        )
        found = run_simulation(scenario, strategy=row.strategy)
        seconds = {"predicted_s": found.ttft_s, "low_s": found.ttft_low_s, "high_s": found.ttft_high_s}
        errors.append(ServingError(row=row, case=f"{row.model} {row.context_len}", measured_s=row.ttft_s, **seconds))
    return errors


ENGINES = ("vllm-2023", "tensorrt-llm-0.5", "lmdeploy-0.1", "loongserve-2024", "mooncake-vllm-0.11")
_LENGTHS = ((0, 512), (512, 2048), (2048, 8192), (8192, 10**9))  # ranges of the tokens of all prompts together


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows, predicted with their engine's own record."""

    own: tuple[ServingError, ...]
    left_out: tuple[ServingError, ...]  # rows that a rule leaves out
    fits: Mapping[str, EngineFit]  # fits of the records, by engine

    def figures(self) -> dict[str, Any]:
        """The figures of the page's first table, as plain JSON values."""
        return {
            length: summary_of([error for error in self.own if error.is_short is is_short])
            for length, is_short in (("512 tokens and more", False), ("below 512 tokens", True))
        }


def compare() -> Comparison:
    """Compare all rows with predictions by the shipped records."""
    rows, engines = read_rows(), [load_engine(name) for name in ENGINES]
    every = [one for name in ENGINES for one in errors_of([row for row in rows if row.engine == name], name)]
    return Comparison(
        own=tuple(error for error in every if not error.row.left_out),
        left_out=tuple(error for error in every if error.row.left_out),
        fits={engine.name: engine.fit for engine in engines if engine.fit is not None},
    )


def part(comparison: Comparison) -> list[str]:
    """Markdown lines of the accuracy page's part on serving engines."""
    settings = (
        (name, f"{fit.left_out}s", f"{fit.left_out_median_ape:.1%}", f"{fit.left_out_mape:.1%}", f"{fit.coverage:.0%}")
        for name, fit in comparison.fits.items()
    )
    own = comparison.own
    return fill(
        "accuracy_serving",
        predictions=_summaries("prediction", comparison.figures()),
        settings=table(("engine", "left out", "median error", "mean", "inside, 512 tokens and more"), settings),
        engines=_summaries("engine", _by(own, lambda error: error.row.engine, short=False)),
        lengths=_summaries("tokens of all prompts", _by(own, _length)),
        strategies=_summaries("strategy", _by(own, lambda error: error.row.strategy)),
        rules=_summaries("engine and rule", _by(comparison.left_out, lambda e: f"{e.row.engine}, `{e.row.left_out}`")),
    )


def _length(error: ServingError) -> str:
    low, high = next(span for span in _LENGTHS if span[0] <= error.row.tokens < span[1])
    if high == _LENGTHS[-1][1]:
        return f"{low} and more"
    return f"{low} to {high - 1}" if low else f"below {high}"


def _by(
    errors: Sequence[ServingError], key: Callable[[ServingError], str], short: bool | None = None
) -> dict[str, dict[str, Any]]:
    used = [error for error in errors if short is None or error.is_short is short]
    names = dict.fromkeys(key(error) for error in sorted(used, key=lambda error: error.row.tokens))
    return {name: summary_of([error for error in used if key(error) == name]) for name in names}


def summary_of(errors: Sequence[ServingError]) -> dict[str, Any]:
    """Summary of some errors."""
    return summary([error.rel_error for error in errors], [error.inside for error in errors])


def _summaries(title: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Table of summaries by name."""
    formats = {"median_ape": ".1%", "mape": ".1%", "median": "+.1%", "coverage": ".0%"}
    rows = (
        (name, group["n"], *(f"{group[key]:{spec}}" for key, spec in formats.items()))
        for name, group in groups.items()
        if group["n"]
    )
    return table((title, "rows", "median error", "mean", "with sign (median)", "inside"), rows)
