"""The cases that the figures show: which ones, what the paper prints of them, and what the simulator predicts."""

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
    """The published rows, and where between them the simulator is asked."""

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
    noise_samples: int = 400  # runs a bar

    @property
    def models(self) -> tuple[str, ...]:
        """Models whose TTFTs are drawn: those of DRAWN with published TTFTs over NVLink."""
        return tuple(model for model in DRAWN if any((row.model, row.link) == (model, FAST) for row in self.rows))

    def reported(self, model: str, num_gpus: int, strategy: str) -> tuple[Row, ...]:
        """Published rows over NVLink, by context."""
        wanted = (model, num_gpus, strategy, FAST)
        found = [row for row in self.rows if (row.model, row.num_gpus, row.strategy, row.link) == wanted]
        return tuple(sorted(found, key=lambda row: row.context_len))

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
    """All that the page shows."""
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
    shares: tuple[float, ...]  # of the context, one a rank
    printed_as: str  # digit by digit


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
    partitions = [PrintedPartition(**{**entry, "shares": tuple(entry["shares"])}) for entry in data["partitions"]]
    noisy = data["noisy_network"]
    return Printed(
        citation=data["citation"],
        partitions=tuple(partitions),
        kvr_p_above_kvr_s=tuple(float(entry["share"]) for entry in data["kvr_p_above_kvr_s"]),
        kvr_s_above_no_communication=float(data["kvr_s_above_no_communication"]["share"]),
        noisy_network=NoisyNetwork(
            place=str(noisy["place"]),
            model=str(noisy["model"]),
            context_lens=tuple(noisy["context_lens"]),
            num_gpus=tuple(noisy["num_gpus"]),
            shares={name: float(share) for name, share in noisy["shares"].items()},
        ),
    )


class Predictions:
    """Simulates each case once and remembers it; `on_new` is called after each simulation.

    NVLink as the profile has it, save where a published row says otherwise.
    """

    def __init__(self, on_new: Callable[[], None] = lambda: None) -> None:
        self._on_new = on_new
        self._results: dict[tuple[str, int, int, str], SimResult] = {}
        self._of_rows: dict[Row, SimResult] = {}
        self._noisy: dict[tuple[str, int, int, str, str, int], Distribution] = {}
        self._plans: dict[tuple[str, int, int], Plan] = {}

    def of(self, model: str, context_len: int, num_gpus: int, strategy: str) -> SimResult:
        """A strategy with its own partition: kvr-s searches."""
        key = (model, context_len, num_gpus, strategy)
        if key not in self._results:
            self._results[key] = self._new(run_simulation(_scenario(model, context_len, num_gpus), strategy=strategy))
        return self._results[key]

    def of_row(self, row: Row) -> SimResult:
        """A published row, read as on the accuracy page."""
        if row not in self._of_rows:
            scenario, strategy = scenario_of(row)
            self._of_rows[row] = self._new(run_simulation(scenario, strategy=strategy))
        return self._of_rows[row]

    def with_partition(self, model: str, context_len: int, chunk_lens: Sequence[int]) -> SimResult:
        """KVR with that partition."""
        scenario = _scenario(model, context_len, len(chunk_lens))
        return self._new(run_simulation(scenario, strategy="kvr-s", search=Search(partition=chunk_lens)))

    def noisy(
        self, model: str, context_len: int, num_gpus: int, strategy: str, *, noise: str, samples: int
    ) -> Distribution:
        """TTFTs of a strategy with its quiet partition under a noise."""
        key = (model, context_len, num_gpus, strategy, noise, samples)
        if key not in self._noisy:
            result = run_simulation(
                _scenario(model, context_len, num_gpus),
                strategy=strategy,
                search=Search(partition=self.of(model, context_len, num_gpus, strategy).partition),
                disturbance=Disturbance(noise=parse_noise(noise), num_samples=samples),
            )
            assert result.noisy is not None
            self._noisy[key] = result.noisy
            self._on_new()
        return self._noisy[key]

    def plan(self, model: str, context_len: int, num_gpus: int) -> Plan:
        """The paper's strategies and the bounds."""
        key = (model, context_len, num_gpus)
        if key not in self._plans:
            self._plans[key] = self._new(make_plan(_scenario(model, context_len, num_gpus), strategies=_PAPERS))
        return self._plans[key]

    def _new(self, result: _Result) -> _Result:
        self._on_new()
        return result


_PAPERS = ("single", "tsp", "kvr-e", "kvr-s")


def _scenario(model: str, context_len: int, num_gpus: int) -> Scenario:
    return make_scenario(ctx=context_len, gpus=num_gpus, model=model, profile=PROFILE)[0]


# -- the style of the paper's figures: colours that colour-blind readers can tell apart, and small PNGs

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


def png(figure: Any) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    with styled(_RC):
        return encoded(figure, dpi=_DPI)
