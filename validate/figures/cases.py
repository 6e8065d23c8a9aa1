"""The cases of the figures: the published rows, the paper's claims, the predictions, and the style of all figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.noise import Distribution, parse_noise
from kvrsim.results.results import Plan, SimResult
from kvrsim.scenario import Scenario
from kvrsim.units import format_tokens
from kvrsim.views.figure import encoded
from kvrsim.views.style import DIM, INK, STRATEGY_COLOURS, styled
from planner.candidates import Search
from planner.plan import make_plan
from planner.simulate import run_simulation
from planner.uncertainty.noise import Disturbance
from validate.published.compare import DATA, Row, read_rows, scenario_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAST = "300GB/s"  # the link of the figures, as the publication names it
PROFILE = "a100-eager"
DRAWN = ("llama-7b", "falcon-7b", "llama-7b-gqa8")  # the paper's figures, and grouped KV heads
_Result = TypeVar("_Result")
_FILE = DATA / "kv_runahead_icml2024_figures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """The published rows and the cases that are simulated."""

    rows: tuple[Row, ...]
    gpu_counts: tuple[int, ...] = (2, 4, 8)  # panels of the TTFT and partition figures
    points: int = 27  # contexts along a curve of TTFT
    scaling_context_len: int = 16384  # tokens, scalability
    scaling_gpu_counts: tuple[int, ...] = (1, 2, 4, 8)
    partition_model: str = "llama-7b"  # of scalability and partitions
    knots: tuple[int, ...] = (4096, 8192, 12288, 16384)  # tokens; contexts in the lookup table
    interpolated_every: int = 512  # tokens; contexts at which KVR-P is compared with a search
    lookup_gpu_counts: tuple[int, ...] = (4, 8)
    noise: str = "paper"  # of the noisy network
    noise_samples: int = 400  # runs per bar

    @property
    def models(self) -> tuple[str, ...]:
        """Models whose TTFTs are drawn: those of DRAWN with published TTFTs over NVLink."""
        return tuple(model for model in DRAWN if any((row.model, row.link) == (model, FAST) for row in self.rows))

    def reported(self, model: str, num_gpus: int, strategy: str) -> tuple[Row, ...]:
        """Published rows over NVLink, by context."""
        wanted = (model, num_gpus, strategy, FAST)
        rows = [row for row in self.rows if (row.model, row.num_gpus, row.strategy, row.link) == wanted]
        return tuple(sorted(rows, key=lambda row: row.context_len))

    def contexts(self, model: str) -> tuple[int, ...]:
        """The published contexts of a model over NVLink."""
        return tuple(sorted({row.context_len for row in self.rows if row.model == model and row.link == FAST}))

    def curve(self, model: str) -> tuple[int, ...]:
        """The published contexts and points between them, in steps that grow with the context."""
        published = self.contexts(model)
        between = np.geomspace(published[0], published[-1], self.points)
        return tuple(sorted({*published, *(_multiple(tokens, 128) for tokens in between)}))

    @property
    def compared(self) -> tuple[int, ...]:
        """Contexts between the knots, and the knots."""
        return tuple(range(self.knots[0], self.knots[-1] + 1, self.interpolated_every))


def full_scope(rows: Iterable[Row] | None = None) -> Scope:
    """All cases of the page."""
    return Scope(rows=tuple(read_rows() if rows is None else rows))


def _multiple(tokens: float, of: int) -> int:
    return max(of, round(tokens / of) * of)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedPartition:
    """A partition that the paper prints."""

    place: str  # where in the paper
    model: str
    context_len: int  # tokens
    num_gpus: int
    method: str  # how the paper found it
    shares: tuple[float, ...]  # of the context by rank
    printed_as: str  # literally


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyNetwork:
    """What the paper prints of TTFT on a noisy network."""

    place: str  # where in the paper
    model: str
    context_lens: tuple[int, ...]  # tokens
    num_gpus: tuple[int, ...]
    shares: Mapping[str, float]  # by strategy: noisy TTFT over quiet, less one, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """What the paper claims of the figures that are drawn here."""

    citation: str
    partitions: tuple[PrintedPartition, ...]
    kvr_p_above_kvr_s: tuple[float, ...]  # share of TTFT, the worst case of each panel of Fig. 10
    kvr_s_above_no_communication: float  # share of TTFT(p), at most, Fig. 8 d
    noisy_network: NoisyNetwork  # Fig. 11


def read_printed() -> Printed:
    """The claims, from their data file."""
    data = json.loads(_FILE.read_text())
    return Printed(
        citation=data["citation"],
        partitions=tuple(PrintedPartition(**_with_tuples(entry)) for entry in data["partitions"]),
        kvr_p_above_kvr_s=tuple(entry["share"] for entry in data["kvr_p_above_kvr_s"]),
        kvr_s_above_no_communication=data["kvr_s_above_no_communication"]["share"],
        noisy_network=NoisyNetwork(**_with_tuples(data["noisy_network"])),
    )


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


class Predictions:
    """Simulates each case once and stores the result; `on_new` is called after each simulation.

    NVLink as in the profile, unless a published row names another link.
    """

    def __init__(self, on_new: Callable[[], None] = lambda: None) -> None:
        self._on_new = on_new
        self._results: dict[tuple[Any, ...], Any] = {}

    def _once(self, key: tuple[Any, ...], simulate: Callable[[], _Result]) -> _Result:
        if key not in self._results:
            self._results[key] = simulate()
            self._on_new()
        result: _Result = self._results[key]
        return result

    def of(self, model: str, context_len: int, num_gpus: int, strategy: str) -> SimResult:
        """A strategy with its own partition: kvr-s searches."""
        key = (model, context_len, num_gpus, strategy)
        return self._once(key, lambda: run_simulation(_scenario(model, context_len, num_gpus), strategy=strategy))

    def of_row(self, row: Row) -> SimResult:
        """A published row, read as on the accuracy page."""
        return self._once((row,), lambda: _simulate_row(row))

    def with_partition(self, model: str, context_len: int, chunk_lens: Sequence[int]) -> SimResult:
        """KVR with that partition."""
        scenario, search = _scenario(model, context_len, len(chunk_lens)), Search(partition=chunk_lens)
        key = (model, context_len, *chunk_lens)
        return self._once(key, lambda: run_simulation(scenario, strategy="kvr-s", search=search))

    def noisy(
        self, model: str, context_len: int, num_gpus: int, strategy: str, *, noise: str, samples: int
    ) -> Distribution:
        """TTFTs of a strategy with its quiet partition under a noise."""
        quiet = self.of(model, context_len, num_gpus, strategy)
        result = self._once(
            (model, context_len, num_gpus, strategy, noise, samples),
            lambda: run_simulation(
                _scenario(model, context_len, num_gpus),
                strategy=strategy,
                search=Search(partition=quiet.partition),
                disturbance=Disturbance(noise=parse_noise(noise), num_samples=samples),
            ),
        )
        assert result.noisy is not None
        return result.noisy

    def plan(self, model: str, context_len: int, num_gpus: int) -> Plan:
        """The paper's strategies and the bounds."""
        key = ("plan", model, context_len, num_gpus)
        return self._once(key, lambda: make_plan(_scenario(model, context_len, num_gpus), strategies=_PAPERS))


_PAPERS = ("single", "tsp", "kvr-e", "kvr-s")


def _simulate_row(row: Row) -> SimResult:
    scenario, strategy = scenario_of(row)
    return run_simulation(scenario, strategy=strategy)


def _scenario(model: str, context_len: int, num_gpus: int) -> Scenario:
    return make_scenario(ctx=context_len, gpus=num_gpus, model=model, profile=PROFILE)[0]


GREY, FAINT = DIM, "#e3e3e3"
_DPI = 110
_RC: dict[Any, Any] = {"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK}


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How a series is drawn; a strategy has its colour."""

    label: str
    colour: str
    marker: str
    dashes: Any = "-"

    @property
    def line(self) -> dict[str, Any]:
        """Style of a predicted curve."""
        return dict(color=self.colour, linestyle=self.dashes, linewidth=1.5)

    @property
    def printed(self) -> dict[str, Any]:
        """Style of printed points."""
        return dict(marker=self.marker, color=self.colour, markeredgecolor="white", markersize=7.5)


LOOKS = {
    "tsp": Look(label="TSP", colour=STRATEGY_COLOURS["tsp"].light, marker="s"),
    "kvr-e": Look(label="KVR-E", colour=STRATEGY_COLOURS["kvr-e"].light, marker="^", dashes=(0, (4, 1.6))),
    "kvr-s": Look(label="KVR-S", colour=STRATEGY_COLOURS["kvr-s"].light, marker="o"),
}
NO_COMMUNICATION = Look(label="TTFT(p): KVR-S without communication", colour="#000000", marker="D", dashes=(0, (1, 1)))
CLOSED_FORM = Look(label="TTFT*(p): closed form", colour="#8a8f98", marker="v", dashes=(0, (6, 2, 1, 2)))


def new_figure(width: float, height: float, title: str, subtitle: str) -> Any:
    """A figure of that many inches with its title; the axes are added with a constrained layout beneath."""
    from matplotlib.figure import Figure

    with styled(_RC):
        figure: Any = Figure(figsize=(width, height), layout="constrained")
    top = 1 - 0.66 / height
    figure.get_layout_engine().set(rect=(0.005, 0.005, 0.99, top), w_pad=0.06, h_pad=0.05)
    left: dict[str, Any] = dict(x=0.012, ha="left", va="top")
    figure.text(y=1 - 0.1 / height, s=title, fontsize=12.5, fontweight="bold", color=INK, **left)
    figure.text(y=1 - 0.37 / height, s=subtitle, fontsize=9, color=GREY, **left)
    return figure


def tidy(axes: Axes, title: str = "") -> None:
    """Light grid, two spines, small ticks."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa0a8")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, which="both", color="#9aa0a8")
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def ticks(axis: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    """These ticks and no others, also on a logarithmic axis."""
    axis.set_ticks(list(values), labels=list(labels))
    axis.set_ticks([], minor=True)


def token_ticks(axis: Any, contexts: Sequence[int]) -> None:
    """Ticks at contexts."""
    ticks(axis, contexts, [format_tokens(tokens) for tokens in contexts])


def second_ticks(axes: Axes, candidates: Sequence[float]) -> None:
    """Logarithmic TTFTs, with those candidates as ticks that are within the limits."""
    axes.set_yscale("log")
    low_s, high_s = axes.get_ylim()
    inside = [value for value in candidates if low_s <= value <= high_s]
    ticks(axes.yaxis, inside, [f"{value:g}" for value in inside])


def claim_line(axes: Axes, percent: float, text: str, *, right: float, colour: str) -> None:
    """A dotted line at the paper's claim, with its text at the right end."""
    axes.axhline(percent, color=colour, linestyle=(0, (1, 3)), linewidth=1)
    note: dict[str, Any] = dict(xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8.5, color=GREY)
    axes.annotate(text, xy=(right, percent), **note)


def panels(figure: Any, gpu_counts: Sequence[int]) -> dict[int, Axes]:
    """One panel per number of GPUs, with its title, on the same vertical axis."""
    row = figure.subplots(1, len(gpu_counts), sharey=True, squeeze=False)[0]
    by_count = dict(zip(gpu_counts, row, strict=True))
    for num_gpus, axes in by_count.items():
        tidy(axes, f"{num_gpus} GPUs")
    return by_count


def png(figure: Any) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    with styled(_RC):
        return encoded(figure, dpi=_DPI)
