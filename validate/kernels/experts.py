"""Routed experts: the fits beside held-out rows and dense products, and the busiest GPU under expert parallelism.

`python -m validate.kernels.experts` rewrites docs/results/experts.md from the tables that
calibrate/shipped/recipes.json lists under "experts", in the installed package aiconfigurator-core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrate.fit.layers.experts import (
    at_burst,
    by_call,
    fit_experts_section,
    fit_type,
    form_s,
    one_gpu,
    routing,
    thinned,
)
from calibrate.fit.solver import Errors, Fitted
from calibrate.importers.experts import ExpertRows, read_experts
from calibrate.shipped.recipes import Recipe, recipe_names
from kvrsim.errors import KvrsimError
from kvrsim.hardware.cluster import load_gpu
from kvrsim.io.files import write_atomically
from kvrsim.profile.profile import CalibrationProfile, load_profile
from kvrsim.profile.rates.experts import ExpertRates, mean_imbalance
from kvrsim.program import Array

PAGE = Path(__file__).parents[2] / "docs" / "results" / "experts.md"
LONG = 1024  # tokens from which several GPUs are compared
_LEAST_HELD = 4  # experts on a GPU: of fewer, the busiest is a matter of single experts
_MOST_GPUS = 32
_MUCH = 1.5
# Tables whose rows of several GPUs compute what the busiest GPU does: TensorRT-LLM's.
SPREAD = {"h100-flash": "h100_sxm", "h200-flash": "h200_sxm", "b200-flash": "b200_sxm"}
_FRAMEWORK = "trtllm/1.3.0rc20"
_KINDS = ("half", "fp8_block", "fp8", "nvfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeLine:
    """One type of one profile: what was held out, and the same rows as dense products."""

    profile: str
    kind: str
    kernel: str
    held_out: Errors
    long: Errors  # held out, of at least 4096 tokens
    routings: tuple[Errors, ...]  # held out, by routing
    dense: Errors

    def cells(self) -> tuple[str, ...]:
        """Of the table."""
        biases = [f"{one.bias:+.1%}" for one in self.routings]
        return (
            f"`{self.kind}`",
            self.kernel.replace("_", " "),
            str(self.held_out.num_rows),
            *(f"{one.median_ape:.1%}" for one in (self.held_out, self.long)),
            f"{self.held_out.log_sd:.2f}",
            *biases,
            f"{self.dense.median_ape:.1%}",
            f"{self.dense.log_sd:.2f}",
        )


def type_lines(name: str, fitted: Fitted[ExpertRates]) -> Iterator[TypeLine]:
    """From the lines of a fit's report."""
    lines = {one.label: one for one in (check.errors() for check in fitted.checks)}
    for label, held_out in lines.items():
        if not label.endswith(" left out"):
            continue
        kind, kernel, _, _ = label.split(", ")
        routings = [f"{kind}, {routing(exponent)}" for exponent in (0.0, 1.01, 1.2)]
        yield TypeLine(
            profile=name,
            kind=kind,
            kernel=kernel,
            held_out=held_out,
            long=lines[f"{kind}, tokens >= 4096"],
            routings=tuple(lines[one] for one in routings),
            dense=lines[f"{kind}, as dense products"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadLine:
    """The busiest of several GPUs, by rates fitted to one GPU alone."""

    profile: str
    kind: str
    exponent: float
    num_rows: int
    imbalance: float  # median of mean_imbalance
    even: float  # median of log(predicted / measured) as if rows were spread evenly
    uneven: float  # and with the imbalance
    uneven_error: float  # median of its size

    def cells(self) -> tuple[str, ...]:
        """Of the table."""
        errors = (f"{math.expm1(one):+.1%}" for one in (self.even, self.uneven))
        return (
            f"`{self.kind}`",
            routing(self.exponent),
            str(self.num_rows),
            f"{self.imbalance:.2f}",
            *errors,
            f"{math.expm1(self.uneven_error):.1%}",
        )


def load_sd(exponent: float, tokens: float) -> float:
    """Standard deviation of the collector's power law over its mean: from 1 to 0.8 times the tokens."""
    most = 0.8 * tokens

    def moment(power: float) -> float:
        degree = power - exponent + 1.0
        return math.log(most) if abs(degree) < 1e-9 else (most**degree - 1.0) / degree

    mean, square = moment(1) / moment(0), moment(2) / moment(0)
    return math.sqrt(square / mean**2 - 1.0)


def imbalance_of(rows: ExpertRows) -> Array:
    """Of each row, by its power law; 1 where tokens are spread evenly."""
    columns = zip(rows.num_experts, rows.num_experts_per_tok, rows.ep_size, rows.exponent, rows.tokens, strict=True)
    return np.array(
        [
            mean_imbalance(int(experts), int(per_tok), int(gpus), load_sd(exponent, tokens)) if exponent else 1.0
            for experts, per_tok, gpus, exponent, tokens in columns
        ]
    )


def spread_lines(name: str, profile: CalibrationProfile) -> Iterator[SpreadLine]:
    """By type and routing."""
    gpu = load_gpu(profile.gpu)
    for rows in read_experts(f"aiconfigurator:{SPREAD[name]}/{_FRAMEWORK}", None, "experts"):
        if rows.kind not in _KINDS:
            continue
        rates, _, _ = fit_type(one_gpu(rows, profile), gpu)
        held = rows.num_experts / rows.ep_size
        several = (rows.ep_size > 1) & (rows.ep_size <= _MOST_GPUS) & (held >= _LEAST_HELD) & (rows.tokens >= LONG)
        for exponent in np.unique(rows.exponent):
            some = at_burst(thinned(rows.take(several & (rows.exponent == exponent))), profile)
            imbalance = imbalance_of(some)
            even, uneven = (np.log(form_s(rates, some, one) / some.seconds) for one in (1.0, imbalance))
            yield SpreadLine(
                profile=name,
                kind=rows.kind,
                exponent=float(exponent),
                num_rows=len(some.tokens),
                imbalance=float(np.median(imbalance)),
                even=float(np.median(even)),
                uneven=float(np.median(uneven)),
                uneven_error=float(np.median(np.abs(uneven))),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLine:
    """The same calls by SGLang and TensorRT-LLM."""

    profile: str
    kind: str
    ratios: Array  # SGLang's seconds over TensorRT-LLM's

    def cells(self) -> tuple[str, ...]:
        """Of the table."""
        slower, faster = np.mean(self.ratios > _MUCH), np.mean(self.ratios < 1 / _MUCH)
        figures = f"{np.median(self.ratios):.2f}", f"{slower:.0%}", f"{faster:.0%}"
        return (self.profile, f"`{self.kind}`", str(len(self.ratios)), *figures)


def engine_lines(name: str, sources: Sequence[str], profile: CalibrationProfile) -> Iterator[EngineLine]:
    """Of the types that both have; `sources`: all tables of the profile."""
    tables = [[text for text in sources if f"/{framework}" in text] for framework in ("sglang", "trtllm")]
    if not all(tables):
        return
    found = [
        {rows.kind: one_gpu(rows, profile) for rows in read_experts(texts[0], None, "experts")} for texts in tables
    ]
    for kind in (kind for kind in found[0] if kind in found[1]):
        one, other = (by_call(rows[kind], LONG) for rows in found)
        if common := sorted(one.keys() & other.keys(), key=repr):
            yield EngineLine(profile=name, kind=kind, ratios=np.array([one[call] / other[call] for call in common]))


_ABOUT = """\
# How well routed experts are known

Regenerated by `python -m validate.kernels.experts`, which needs the extra `kvrsim[import]`.
[Experts](../explanation/experts.md) explains the form.

## Held-out models

Each type of each profile has six constants, fitted to one kernel's calls of experts that are all on one GPU, of 64 to
16384 tokens. *Held out* is the error on the models that the fit did not see (where a table has fewer than three models,
on other shares of them), in the median and, from 4096 tokens on, again. *log sd* is the spread of log(predicted /
measured); prediction intervals come from that of all types together. *Balanced* and the exponents of the power laws are
the routings of the tables, with the bias on each: one set of constants stands for all. *Dense* prices the same calls as
matrix products of one expert after another, each of its share of the tokens, as kvrsim does where a profile has no
rates of experts.
"""
_HEAD = (
    *("type", "kernel", "rows", "held out", ">= 4096 tokens", "log sd", "balanced", "1.01", "1.2"),
    *("dense", "dense log sd"),
)
_SPREAD = """\
## The busiest of several GPUs

TensorRT-LLM's tables have calls of a GPU that holds 1 / p of the experts. Under a power law the collector times the GPU
with most rows. Nothing here was fitted to calls of several GPUs: the constants are those of one GPU's calls. *Even* is
the bias if that GPU had the mean number of rows; *uneven* the bias with the imbalance that follows from the law's
standard deviation, the number of experts and of GPUs (`mean_imbalance`); *error* the median size of the latter. 2 to 32
GPUs with at least 4 experts each, from 1024 tokens on.
"""
_SPREAD_HEAD = ("type", "routing", "rows", "imbalance", "even", "uneven", "error")


_APART = "Other engines' tables are apart by (a type's root mean square of medians; the median over types): {}."
_ENGINES = """\
## SGLang and TensorRT-LLM

The same calls of at least 1024 tokens in both tables: the median of SGLang's seconds over TensorRT-LLM's, and how many
calls take over half as long again by SGLang, and by TensorRT-LLM. Profiles have SGLang's constants, as of other
products, but for half precision on H100 and H200, and for types that SGLang's tables lack.
"""
_ENGINES_HEAD = ("profile", "type", "calls", "median", "SGLang slower", "TensorRT-LLM slower")


def page(
    types: Sequence[TypeLine],
    systematic: Sequence[tuple[str, float]],
    engines: Sequence[EngineLine],
    spread: Sequence[SpreadLine],
) -> str:
    """docs/results/experts.md; `systematic`: profiles and their differences from other engines."""
    text = [_ABOUT]
    for name in dict.fromkeys(line.profile for line in types):
        text += [f"### {name}", "", *_table(_HEAD, [line.cells() for line in types if line.profile == name]), ""]
    apart = "; ".join(f"{name} {math.expm1(log_sd):.0%}" for name, log_sd in systematic)
    text += [_APART.format(apart), ""]
    text += [_ENGINES, *_table(_ENGINES_HEAD, [line.cells() for line in engines]), ""]
    text.append(_SPREAD)
    for name in dict.fromkeys(line.profile for line in spread):
        lines = [line.cells() for line in spread if line.profile == name]
        text += [f"### {name}, {_FRAMEWORK}", "", *_table(_SPREAD_HEAD, lines), ""]
    return "\n".join(text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|---|---|" + "---:|" * (len(head) - 2)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def main() -> int:
    """Rewrite the page."""
    types: list[TypeLine] = []
    systematic: list[tuple[str, float]] = []
    engines: list[EngineLine] = []
    try:
        for name in recipe_names():
            recipe = Recipe.read(name, Path())
            sections = recipe.data.child("sections") if recipe.data.has("sections") else None
            if sections is None or not sections.has("experts"):
                continue
            experts = sections.child("experts")
            fitted = fit_experts_section(experts, load_profile(name))
            sources = [part.text("source") for part in experts.children("sources")]
            compared = [str(text) for text in experts.sequence("compare")]
            engines += engine_lines(name, [*sources, *compared], load_profile(name))
            types += type_lines(name, fitted)
            if fitted.systematic_log_sd is not None:
                systematic.append((name, fitted.systematic_log_sd))
        spread = [line for name in SPREAD for line in spread_lines(name, load_profile(name))]
        write_atomically(PAGE, page(types, systematic, engines, spread).encode(), argument="page")
    except KvrsimError as error:
        print(f"validate.kernels.experts: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
