"""Each profile's prefill compared with the sum of the kernels that it was fitted to.

`python -m validate.kernel_sums --vidur CLONE` rewrites docs/results/kernel_sums.md from the sources that
calibrate/shipped/recipes.json lists: the installed package aiconfigurator-core, and a git clone of vidur.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from calibrate.data import ELEMENTWISE, Measurement
from calibrate.fit.gemm import at_burst, model_shapes
from calibrate.shipped.recipes import VIDUR_URL, Recipe
from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.engine import NO_HOST
from kvrsim.hardware import builtin_clusters, load_cluster
from kvrsim.kernels.elementwise import Traffic, after_mixer, before_mixer
from kvrsim.kernels.profile import load_profile
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Compute
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.simulate import run_simulation
from validate.report import RESULTS, fill, numbers_table, run_command, write_page

PAGE = RESULTS / "kernel_sums.md"
_LEAST_STEP = 2.0  # least ratio of the two sizes from which a grid is extrapolated
_LONG = 1024  # tokens from which the two sources of matrix products are compared
_Kernel = tuple[str, int]  # an element-wise operation and the bytes that it moves in all
_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Seconds, and the sizes in which they were not measured."""

    seconds: float
    between: frozenset[str] = frozenset()  # interpolated
    beyond: frozenset[str] = frozenset()  # extrapolated

    @classmethod
    def total(cls, parts: Iterable[Reading | None]) -> Reading | None:
        """The sum of all parts; None if there are none or one is missing."""
        parts = list(parts)
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return cls(
            seconds=sum(part.seconds for part in known),
            between=frozenset().union(*(part.between for part in known)),
            beyond=frozenset().union(*(part.beyond for part in known)),
        )

    @property
    def source(self) -> str:
        """Where the seconds are from, in words."""
        sizes = {"between": self.between, "beyond": self.beyond}
        return "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in sizes.items() if names) or "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Times by sizes; linear in the logarithms of both between points, one size after another."""

    names: tuple[str, ...]  # of the sizes
    points: Mapping[tuple[int, ...], float]  # median seconds by sizes

    @classmethod
    def of(cls, names: tuple[str, ...], rows: Iterable[tuple[tuple[int | None, ...], float]]) -> Grid:
        """From sizes and seconds in any order; rows that lack a size are skipped."""
        complete = ((tuple(size for size in sizes if size is not None), seconds) for sizes, seconds in rows)
        return cls(names=names, points=_medians(row for row in complete if len(row[0]) == len(names)))

    def at(self, *sizes: int) -> Reading | None:
        """None where the grid has a single value of a size, and it is another one."""
        return _read(self.points, self.names, sizes)


def _medians(rows: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Median seconds of each key."""
    samples: dict[_Key, list[float]] = {}
    for key, seconds in rows:
        samples.setdefault(key, []).append(seconds)
    return {key: float(np.median(seconds)) for key, seconds in samples.items()}


def _read(points: Mapping[tuple[int, ...], float], names: Sequence[str], sizes: Sequence[int]) -> Reading | None:
    if not names:
        return Reading(seconds=points[()])
    name, size = names[0], sizes[0]
    branches: dict[int, dict[tuple[int, ...], float]] = {}
    for (first, *others), seconds in points.items():
        branches.setdefault(first, {})[tuple(others)] = seconds
    ends = _ends(list(branches), size)
    readings = [_read(branches[end], names[1:], sizes[1:]) for end in ends]
    total = Reading.total(readings)
    if total is None or len(ends) == 1:
        return total
    share = math.log(size / ends[0]) / math.log(ends[1] / ends[0])
    low_s, high_s = (reading.seconds for reading in readings if reading is not None)
    total = replace(total, seconds=math.exp((1 - share) * math.log(low_s) + share * math.log(high_s)))
    if 0 <= share <= 1:
        return replace(total, between=total.between | {name})
    return replace(total, beyond=total.beyond | {name})


def _ends(known: Sequence[int], size: int) -> tuple[int, ...]:
    """The size itself, the two around it, or beyond the grid the outermost and the next at least _LEAST_STEP away."""
    if size in known:
        return (size,)
    below, above = [end for end in known if end < size], [end for end in known if end > size]
    if below and above:
        return max(below), min(above)
    outermost = max(below) if below else min(above, default=size)
    apart = [end for end in known if max(end, outermost) >= _LEAST_STEP * min(end, outermost)]
    return (outermost, min(apart, key=lambda end: abs(end - outermost))) if apart else ()


def gemm_grid(rows: Iterable[Measurement]) -> Grid:
    """By in_features, out_features (the widths of a matrix) and tokens, in half precision."""
    used = (row for row in rows if row.operation == "gemm" and row.dtype in ("fp16", "bf16"))
    sizes = (((row.in_features, row.out_features, row.tokens), row.median_s) for row in used)
    return Grid.of(("widths", "widths", "tokens"), sizes)


def attention_grid(rows: Iterable[Measurement]) -> Grid:
    """Of one sequence without a prefix, by heads, width of a head, KV heads and chunk."""
    used = (row for row in rows if row.operation == "attention" and row.batch == 1 and row.prefix == 0)
    sizes = (
        ((row.num_attention_heads, row.head_dim, row.num_key_value_heads, row.chunk), row.median_s) for row in used
    )
    return Grid.of(("heads", "head widths", "KV heads", "chunks"), sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The prefills of one profile that are summed."""

    profile: str
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    # Folders of mlp.csv by model, whose element-wise kernels are summed as measured; without one: as predicted.
    layers: Mapping[str, str] = field(default_factory=dict)


_VIDUR_LAYERS = {"llama-2-7b": "Llama-2-7b-hf", "llama-3-8b": "Meta-Llama-3-8B"}
_SERVED = ("llama-2-7b", "llama-3-8b", "llama-2-13b")
_SERVED_TOKENS = (1024, 2048, 4096, 8192, 16384)
STUDIES = (
    Study(profile="a100-vidur", models=tuple(_VIDUR_LAYERS), tokens=(1024, 2048, 3072, 4096), layers=_VIDUR_LAYERS),
    *(
        Study(profile=profile, models=_SERVED, tokens=_SERVED_TOKENS)
        for profile in ("a100-flash", "h100-flash", "h200-flash")
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSum:
    """One prefill on one GPU: the sum of its kernels, and the prediction."""

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
    """Of each model and context whose kernels were measured or can be interpolated."""
    attention = attention_grid(rows)
    for model in study.models:
        folder = study.layers.get(model)
        own = [row for row in rows if folder is None or f"/{folder}/" in row.source]
        gemm, kernels = gemm_grid(own), None if folder is None else _elementwise_medians(own)
        sums = (_kernel_sum(study.profile, model, tokens, gemm, attention, kernels) for tokens in study.tokens)
        yield from (one for one in sums if one is not None)


def _elementwise_medians(rows: Iterable[Measurement]) -> dict[_Kernel, float]:
    used = (row for row in rows if row.operation in ELEMENTWISE)
    return _medians(((row.operation, row.bytes), row.median_s) for row in used if row.bytes is not None)


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
        gemm=replace(products, seconds=spec.num_hidden_layers * products.seconds),
        attention=replace(heads, seconds=spec.num_hidden_layers * heads.seconds),
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
    """Seconds of all steps; a step of several kernels repeats the kernel that was timed. None: one was not measured."""
    times = [(kernels, medians.get((op, round(tokens * nbytes / kernels)))) for op, nbytes, kernels in steps]
    known = [kernels * kernel_s for kernels, kernel_s in times if kernel_s is not None]
    return sum(known) if len(known) == len(times) else None


def _head_s(scenario: Scenario) -> float:
    """The last token's logits."""
    chunk = np.array([float(scenario.request.context_len)])
    epilogue = build_program(scenario, get_strategy("single"), [chunk]).epilogue[0]
    return sum(float(np.max(op.device_s)) for op in epilogue if isinstance(op, Compute))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """Vidur's seconds over NVIDIA's, of the same matrix products."""

    gpu: str
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, gpu: str, vidur: Sequence[Measurement], nvidia: Sequence[Measurement]) -> Ratios:
        """Of products of at least _LONG tokens."""
        one, other = gemm_grid(vidur).points, gemm_grid(nvidia).points
        both = sorted(key for key in one.keys() & other.keys() if key[2] >= _LONG)
        return cls(gpu=gpu, ratios=tuple(one[key] / other[key] for key in both))

    @property
    def text(self) -> str:
        """Minimum, maximum, median and the range of 80 %."""
        low, tenth, middle, ninth, high = np.quantile(self.ratios, (0.0, 0.1, 0.5, 0.9, 1.0))
        return (
            f"{low:.2f} to {high:.2f} times NVIDIA's seconds on the {self.gpu} (median {middle:.2f}, 80 %"
            f" {tenth:.2f} to {ninth:.2f}; {len(self.ratios)} products)"
        )


def page(sums: Sequence[KernelSum], ratios: Sequence[Ratios], missing: Sequence[str] = ()) -> list[str]:
    """docs/results/kernel_sums.md; `missing`: profiles whose sources lack kernels of their prefills."""
    profiles = dict.fromkeys(one.profile for one in sums)
    summary_heads = ("profile", "prefills", "mean error", "bias", "largest", "the profile's own part of the sum")
    heads = ("profile", "model", "tokens", "sum ms", "predicted ms", "error", "products", "attention")
    summaries = [_summary(name, [one for one in sums if one.profile == name]) for name in profiles]
    return fill(
        "kernel_sums",
        summary=numbers_table(summary_heads, summaries),
        missing="".join(
            f"Nothing to sum for {name}: its sources have no attention of these models.\n\n" for name in missing
        ),
        differences=_source_differences(ratios),
        sums=numbers_table(heads, map(_cells, sums)),
    )


def _source_differences(ratios: Sequence[Ratios]) -> str:
    if not ratios:
        return ""
    return (
        f"Sources differ by more than that. Of the products of {_LONG} tokens and more that both timed, vidur's take\n"
        + ";\n".join(one.text for one in ratios)
        + ".\nThe two are of other years, libraries and dtypes. Which one a machine is like, only a measurement on it"
        " says.\n\n"
    )


def _summary(name: str, sums: Sequence[KernelSum]) -> tuple[object, ...]:
    errors = np.array([one.error for one in sums])
    own = [one.own_s / one.sum_s for one in sums]
    worst = max(sums, key=lambda one: abs(one.error))
    largest = f"{worst.error:+.1%} ({worst.model}, {worst.tokens})"
    mean, bias = f"{np.abs(errors).mean():.1%}", f"{errors.mean():+.1%}"
    return name, len(sums), mean, bias, largest, f"{min(own):.1%} to {max(own):.1%}"


def _cells(one: KernelSum) -> tuple[object, ...]:
    times = f"{1e3 * one.sum_s:.1f}", f"{1e3 * one.predicted_s:.1f}"
    return one.profile, one.model, one.tokens, *times, f"{one.error:+.1%}", one.gemm.source, one.attention.source


def rewrite(vidur: Path) -> None:
    """Rewrite the page from a clone of vidur and the installed package."""
    recipes = {study.profile: Recipe.read(study.profile, vidur) for study in STUDIES}
    rows = {name: at_burst(recipe.rows(), load_profile(name).kernels.clock) for name, recipe in recipes.items()}
    sums = [one for study in STUDIES for one in kernel_sums(study, rows[study.profile])]
    ratios = [Ratios.of("A100", recipes["a100-vidur"].rows("vidur@", ["gemm"]), rows["a100-flash"])]
    write_page(PAGE, page(sums, ratios, sorted(recipes.keys() - {one.profile for one in sums})))
    print(PAGE.read_text())


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m validate.kernel_sums", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vidur", metavar="CLONE", type=Path, required=True, help=f"a clone of {VIDUR_URL}")
    options = parser.parse_args()
    sys.exit(run_command(lambda: rewrite(options.vidur)))
