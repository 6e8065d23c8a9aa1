"""Grid: times that were measured at points of a grid of sizes, and between them; gemm_grid, attention_grid."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.data import ELEMENTWISE, Measurement
from calibrate.fit.gemm import at_burst, model_shapes
from calibrate.shipped.recipes import VIDUR_URL, Recipe
from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.engine import NO_HOST
from kvrsim.errors import KvrsimError
from kvrsim.hardware import builtin_clusters, load_cluster
from kvrsim.io.files import write_atomically
from kvrsim.kernels.elementwise import Traffic, after_mixer, before_mixer
from kvrsim.kernels.profile import load_profile
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Compute, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.simulate import run_simulation
from validate.report import RESULTS

_LEAST_STEP = 2.0  # past the end of a grid, the slope is that between sizes at least so many times apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Seconds, and the sizes in which they were not measured."""

    seconds: float
    between: frozenset[str] = frozenset()  # interpolated
    beyond: frozenset[str] = frozenset()  # extrapolated

    @classmethod
    def total(cls, parts: Iterable[Reading | None]) -> Reading | None:
        """All of them one after another; None where one is missing."""
        known = list(parts)
        found = [part for part in known if part is not None]
        return reduce(cls._plus, found) if found and len(found) == len(known) else None

    def _plus(self, other: Reading) -> Reading:
        return Reading(
            seconds=self.seconds + other.seconds,
            between=self.between | other.between,
            beyond=self.beyond | other.beyond,
        )

    def times(self, count: int) -> Reading:
        """The same so many times."""
        return Reading(seconds=count * self.seconds, between=self.between, beyond=self.beyond)

    @property
    def how(self) -> str:
        """In words."""
        parts = []
        if self.between:
            parts.append(f"between {', '.join(sorted(self.between))}")
        if self.beyond:
            parts.append(f"beyond {', '.join(sorted(self.beyond))}")
        return "; ".join(parts) or "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Times by sizes; linear in the logarithms of both between points, one size after another."""

    names: tuple[str, ...]  # of the sizes
    points: Mapping[tuple[int, ...], float]  # seconds, median of what was measured there
    tree: Mapping[int, Any]  # the same, nested: by the first size, the second, ..., seconds

    @classmethod
    def of(cls, names: tuple[str, ...], rows: Iterable[tuple[tuple[int | None, ...], float]]) -> Grid:
        """From sizes and seconds in any order; rows that lack a size are passed over."""
        found: dict[tuple[int, ...], list[float]] = {}
        for sizes, seconds in rows:
            whole = tuple(size for size in sizes if size is not None)
            if len(whole) == len(names):
                found.setdefault(whole, []).append(seconds)
        points = {sizes: float(np.median(seconds)) for sizes, seconds in found.items()}
        tree: dict[int, Any] = {}
        for sizes, median_s in points.items():
            branch = tree
            for size in sizes[:-1]:
                branch = branch.setdefault(size, {})
            branch[sizes[-1]] = median_s
        return cls(names=names, points=points, tree=tree)

    def at(self, *sizes: int) -> Reading | None:
        """None where the grid has a single other value of one of the sizes."""
        return _read(self.tree, self.names, sizes)


def _read(tree: Mapping[int, Any], names: Sequence[str], sizes: Sequence[int]) -> Reading | None:
    name, size = names[0], sizes[0]
    ends = _ends(sorted(tree), size)
    found = [_branch(tree[end], names[1:], sizes[1:]) for end in ends]
    parts = [part for part in found if part is not None]
    if len(parts) < max(1, len(ends)):
        return None
    if len(parts) == 1:
        return parts[0]
    low, high = parts
    share = math.log(size / ends[0]) / math.log(ends[1] / ends[0])
    outside = frozenset((name,)) if not 0 <= share <= 1 else frozenset[str]()
    return Reading(
        seconds=math.exp((1 - share) * math.log(low.seconds) + share * math.log(high.seconds)),
        between=low.between | high.between | (frozenset((name,)) - outside),
        beyond=low.beyond | high.beyond | outside,
    )


def _branch(found: Any, names: Sequence[str], sizes: Sequence[int]) -> Reading | None:
    return _read(found, names, sizes) if names else Reading(seconds=found)


def _ends(known: Sequence[int], size: int) -> tuple[int, ...]:
    """The size itself, or the two that lead to it; none where there are no two."""
    if size in known:
        return (size,)
    below, above = [end for end in known if end < size], [end for end in known if end > size]
    if below and above:
        return below[-1], above[0]
    if below:
        return next(((end, below[-1]) for end in reversed(below) if end * _LEAST_STEP <= below[-1]), ())
    return next(((above[0], end) for end in above if end >= _LEAST_STEP * above[0]), ())


def gemm_grid(rows: Iterable[Measurement]) -> Grid:
    """By in_features, out_features (the widths of a matrix) and tokens, in half precision."""
    return Grid.of(
        ("widths", "widths", "tokens"),
        (
            ((row.in_features, row.out_features, row.tokens), row.median_s)
            for row in rows
            if row.operation == "gemm" and row.dtype in ("fp16", "bf16")
        ),
    )


def attention_grid(rows: Iterable[Measurement]) -> Grid:
    """Of one sequence without a prefix, by heads, width of a head, KV heads and chunk."""
    return Grid.of(
        ("heads", "head widths", "KV heads", "chunks"),
        (
            ((row.num_attention_heads, row.head_dim, row.num_key_value_heads, row.chunk), row.median_s)
            for row in rows
            if row.operation == "attention" and row.batch == 1 and row.prefix == 0
        ),
    )


# -- each profile's prefill beside the sum of the kernels that it was fitted to
#
# `python -m validate.kernel_sums --vidur CLONE` rewrites docs/results/kernel_sums.md from the sources that
# calibrate/shipped/recipes.json lists: the installed package aiconfigurator-core, and a git clone of vidur.

PAGE = RESULTS / "kernel_sums.md"
_Kernel = tuple[str, int]  # an element-wise operation and the bytes that it moves in all
_LONG = 1024  # tokens from which the two sources of matrix products are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The prefills of one profile that are summed."""

    profile: str
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    # Models by the folder of their mlp.csv, where element-wise kernels are summed as measured; none: as predicted.
    layers: Mapping[str, str] = field(default_factory=dict)


_SERVED = ("llama-2-7b", "llama-3-8b", "llama-2-13b")
_SERVED_TOKENS = (1024, 2048, 4096, 8192, 16384)
STUDIES = (
    Study(
        profile="a100-vidur",
        models=("llama-2-7b", "llama-3-8b"),
        tokens=(1024, 2048, 3072, 4096),
        layers={"llama-2-7b": "Llama-2-7b-hf", "llama-3-8b": "Meta-Llama-3-8B"},
    ),
    Study(profile="a100-flash", models=_SERVED, tokens=_SERVED_TOKENS),
    Study(profile="h100-flash", models=_SERVED, tokens=_SERVED_TOKENS),
    Study(profile="h200-flash", models=_SERVED, tokens=_SERVED_TOKENS),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSum:
    """One prefill on one GPU: what its kernels sum to, and what is predicted."""

    profile: str
    model: str
    tokens: int
    gemm: Reading  # of all layers
    attention: Reading  # of all layers
    elementwise_s: float  # measured or, see Study.layers, the profile's own
    head_s: float  # the profile's own
    own_s: float  # how much of the sum is the profile's own
    predicted_s: float

    @property
    def sum_s(self) -> float:
        """Of all kernels."""
        return self.gemm.seconds + self.attention.seconds + self.elementwise_s + self.head_s

    @property
    def error(self) -> float:
        """Predicted over summed, less one."""
        return self.predicted_s / self.sum_s - 1


@cache
def scenario_of(profile: str, model: str, tokens: int) -> Scenario:
    """The prefill on one GPU at the burst clock, launched by a host that takes no time."""
    shipped = load_profile(profile)
    loaded = replace(shipped, host=NO_HOST, engine="none", kernels=replace(shipped.kernels, clock=None))
    clusters = (load_cluster(name) for name in builtin_clusters())
    cluster = next(cluster for cluster in clusters if cluster.gpu.name == loaded.gpu)
    return make_scenario(ctx=tokens, gpus=1, model=model, profile=loaded, cluster=cluster)[0]


def kernel_sums(study: Study, rows: Sequence[Measurement]) -> Iterator[KernelSum]:
    """Of each model and context whose kernels the measurements have or lead to."""
    attention = attention_grid(rows)
    for model in study.models:
        named = study.layers.get(model)
        own = [row for row in rows if named is None or f"/{named}/" in row.source]
        gemm, kernels = gemm_grid(own), _elementwise_medians(own) if named else None
        for tokens in study.tokens:
            found = _kernel_sum(study.profile, model, tokens, gemm, attention, kernels)
            if found is not None:
                yield found


def _kernel_sum(
    profile: str, model: str, tokens: int, gemm: Grid, attention: Grid, kernels: Mapping[_Kernel, float] | None
) -> KernelSum | None:
    scenario = scenario_of(profile, model, tokens)
    spec = scenario.model
    products = Reading.total(gemm.at(*shape, tokens) for shape in model_shapes(model))
    heads = attention.at(spec.num_attention_heads, spec.head_dim, spec.num_key_value_heads, tokens)
    steps = _steps(spec)
    if kernels is None:
        elementwise_s: float | None = float(scenario.cost.traffic_s(np.asarray(float(tokens)), steps))
    else:
        elementwise_s = _measured_s(steps, tokens, kernels)
    if products is None or heads is None or elementwise_s is None:
        return None
    head_s = _head_s(scenario)
    return KernelSum(
        profile=profile,
        model=model,
        tokens=tokens,
        gemm=products.times(spec.num_hidden_layers),
        attention=heads.times(spec.num_hidden_layers),
        elementwise_s=elementwise_s,
        head_s=head_s,
        own_s=head_s + (elementwise_s if kernels is None else 0.0),
        predicted_s=run_simulation(scenario, strategy="single").ttft_s,
    )


def _steps(spec: ModelSpec) -> tuple[Traffic, ...]:
    """The element-wise kernels of all layers, and the embedding."""
    first = spec.layers[0]
    after = after_mixer(spec, first, fused=True, intermediate=spec.intermediate_size)
    layer = [step for step in (*before_mixer(spec, first, fused=True), *after) if step.kernels]
    return (*layer * spec.num_hidden_layers, Traffic("embedding", 4.0 * spec.hidden_size, 1))


def _measured_s(steps: Iterable[Traffic], tokens: int, medians: Mapping[_Kernel, float]) -> float | None:
    """None where one was not measured; a step of several kernels is as often the one that was timed."""
    seconds = 0.0
    for op, nbytes, kernels in steps:
        one_s = medians.get((op, round(tokens * nbytes / kernels)))
        if one_s is None:
            return None
        seconds += kernels * one_s
    return seconds


def _elementwise_medians(rows: Iterable[Measurement]) -> dict[_Kernel, float]:
    """Seconds of each kernel, median of its rows."""
    found: dict[_Kernel, list[float]] = {}
    for row in rows:
        if row.operation in ELEMENTWISE and row.bytes is not None:
            found.setdefault((row.operation, row.bytes), []).append(row.median_s)
    return {key: float(np.median(seconds)) for key, seconds in found.items()}


def _head_s(scenario: Scenario) -> float:
    """The last token's logits."""
    chunk = np.array([float(scenario.request.context_len)])
    return sum(map(_device_s, build_program(scenario, get_strategy("single"), [chunk]).epilogue[0]))


def _device_s(op: Op) -> float:
    return float(np.max(op.device_s)) if isinstance(op, Compute) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """How long vidur's matrix products take where NVIDIA timed the same ones."""

    gpu: str
    ratios: tuple[float, ...]  # vidur's over NVIDIA's seconds

    @classmethod
    def of(cls, gpu: str, vidur: Sequence[Measurement], nvidia: Sequence[Measurement]) -> Ratios:
        """Of products of at least _LONG tokens."""
        one, other = gemm_grid(vidur).points, gemm_grid(nvidia).points
        both = sorted(key for key in one.keys() & other.keys() if key[2] >= _LONG)
        return cls(gpu=gpu, ratios=tuple(one[key] / other[key] for key in both))

    @property
    def text(self) -> str:
        """Least, most and the middle."""
        low, tenth, middle, ninth, high = np.quantile(self.ratios, (0.0, 0.1, 0.5, 0.9, 1.0))
        return (
            f"{low:.2f} to {high:.2f} times NVIDIA's seconds on the {self.gpu} (median {middle:.2f}, 80 %"
            f" {tenth:.2f} to {ninth:.2f}; {len(self.ratios)} products)"
        )


_ABOUT = """\
# How far predictions are from the sum of measured kernels

Regenerated by `python -m validate.kernel_sums --vidur CLONE`. Nobody has published whole prefills with the kernels
of these profiles. But a prefill on one GPU is a sequence of kernels. *Sum* adds up the tables that the profile was
fitted to. *Predicted* is kvrsim's TTFT on one GPU with a host that takes no time. The page therefore shows how far the
formulas and tables of a profile are from their own measurements, all at the burst clock. It is no blind test. It does
not show how consecutive kernels differ from kernels timed alone: gaps, clocks under load and the host are in neither
column.

A layer is Q, K and V as one product, attention, the output product, gate and up as one product, the activation, down,
two norms, the rotary embedding and two residual additions. The embedding and the logits of the last token are added;
they are the profile's own in both columns. `a100-vidur` has products and element-wise kernels from one table, which
timed these models at these numbers of tokens (the sum has the median of its rows), and the profile keeps tables of all
these products. In the other profiles, the element-wise kernels are the profile's own in both columns too: they come
from another table than products and attention, and [profiles.md](profiles.md) has their errors.

What was not measured is interpolated, linear in the logarithms of time and sizes: *between widths* is a product whose
matrix lies between those of NVIDIA's grid (from 16384 columns it goes to 51200 or 65536), *between chunks* a call of
attention between measured ones. *Beyond* is the same past the end of the table. Interpolated sums may be off
by some percent, because the last wave of tiles is not equally full at all sizes.
"""


def page(sums: Sequence[KernelSum], ratios: Sequence[Ratios], missing: Sequence[str] = ()) -> str:
    """docs/results/kernel_sums.md; `missing`: profiles whose sources lack what their prefills are summed from."""
    of_profile = {name: [one for one in sums if one.profile == name] for name in dict.fromkeys(s.profile for s in sums)}
    lines = [
        _ABOUT,
        "| profile | prefills | mean error | bias | largest | the profile's own part of the sum |",
        "|---|---:|---:|---:|---:|---:|",
        *(_summary(name, found) for name, found in of_profile.items()),
        "",
        "An *error* is predicted over sum, less one; *mean error* is of absolute values, *bias* with sign.",
        "",
        *(f"Nothing to sum for {name}: its sources have no attention of these models.\n" for name in missing),
        *_compared(ratios),
        "| profile | model | tokens | sum ms | predicted ms | error | products | attention |",
        "|---|---|---:|---:|---:|---:|---|---|",
        *map(_line, sums),
    ]
    return "\n".join(lines) + "\n"


def _compared(ratios: Sequence[Ratios]) -> list[str]:
    if not ratios:
        return []
    return [
        f"Sources differ by more than that. Of the products of {_LONG} tokens and more that both timed, vidur's take",
        ";\n".join(one.text for one in ratios) + ".",
        "The two are of other years, libraries and dtypes. Which one a machine is like, only a measurement on it says.",
        "",
    ]


def _summary(name: str, sums: Sequence[KernelSum]) -> str:
    errors = np.array([one.error for one in sums])
    own = [one.own_s / one.sum_s for one in sums]
    worst = max(sums, key=lambda one: abs(one.error))
    largest = f"{worst.error:+.1%} ({worst.model}, {worst.tokens})"
    shares = f"{np.abs(errors).mean():.1%} | {errors.mean():+.1%} | {largest} | {min(own):.1%} to {max(own):.1%}"
    return f"| {name} | {len(sums)} | {shares} |"


def _line(one: KernelSum) -> str:
    figures = f"{one.tokens} | {1e3 * one.sum_s:.1f} | {1e3 * one.predicted_s:.1f} | {one.error:+.1%}"
    return f"| {one.profile} | {one.model} | {figures} | {one.gemm.how} | {one.attention.how} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page."""
    parser = ArgumentParser(prog="python -m validate.kernel_sums", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vidur", metavar="CLONE", type=Path, required=True, help=f"a clone of {VIDUR_URL}")
    vidur: Path = parser.parse_args(arguments).vidur
    try:
        recipes = {study.profile: Recipe.read(study.profile, vidur) for study in STUDIES}
        rows = {name: at_burst(recipe.rows(), load_profile(name).kernels.clock) for name, recipe in recipes.items()}
        sums = [one for study in STUDIES for one in kernel_sums(study, rows[study.profile])]
        ratios = [Ratios.of("A100", recipes["a100-vidur"].rows("vidur@", ["gemm"]), rows["a100-flash"])]
        missing = sorted(recipes.keys() - {one.profile for one in sums})
        write_atomically(PAGE, page(sums, ratios, missing).encode(), argument="page")
    except KvrsimError as error:
        print(f"validate.kernel_sums: error: {error}", file=sys.stderr)
        return error.exit_code
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
