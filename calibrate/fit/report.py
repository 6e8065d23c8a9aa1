"""FitReport: errors of a fit as JSON, Markdown and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.data import Measurement
from calibrate.fit.fit import Comparison, Errors, column
from kvrsim.io.files import write_atomically
from kvrsim.io.schema import fields_to_json, to_json
from kvrsim.kernels.attention import AttentionRates
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.elementwise import ELEMENTWISE_OPS
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.profile import CalibrationProfile, KernelRates
from kvrsim.model.spec import ModelSpec
from kvrsim.scenario import dtype_bytes
from kvrsim.text import in_markdown, markdown_table
from kvrsim.units import format_bandwidth, format_seconds
from kvrsim.views.figure import save_figure
from kvrsim.views.style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = "layers, sum of parts"
_MAX_POINTS = 3000  # most points of one operation in the picture

TITLES = {
    "gemm": "matrix products",
    "attention": "attention",
    "latent": "latent attention",
    "sparse": "sparse attention",
    "experts": "experts",
    "recurrence": "recurrences",
    "elementwise": "element-wise kernels",
    "send_recv": "messages",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "host": "host",
}

_ABOUT = (
    "Times are those of the operations alone, not of whole prefills. *Left out* rows are held out: the fit that"
    " predicts them did not use them. *error* is the mean of the absolute relative errors. *bias* is the mean"
    " error with its sign; above 0 the prediction is too long. *inside* is the share of rows inside an 80 %"
    " interval that is derived from the other half of the rows."
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitReport:
    """The profile, and for each operation that was measured the errors and the rows of the fit."""

    profile: CalibrationProfile
    lines: Mapping[str, Sequence[Errors]]  # by operation
    fits: Mapping[str, Comparison]  # by operation
    notes: tuple[str, ...]  # omitted rows, and values from other sources
    layers: Comparison | None = None  # whole layers by the sum of their parts; None: none were measured

    @property
    def layers_note(self) -> tuple[str, ...]:
        """Note on the error of whole layers, which no fit used."""
        if self.layers is None:
            return ()
        errors = self.layers.errors()
        return (
            f"{errors.num_rows} whole layers, which were not fitted, by the sum of their parts: mean error"
            f" {errors.mape:.1%}, median {errors.median_ape:.1%}, bias {errors.bias:+.1%}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, without the rates, which are in the profile."""
        profile = self.profile
        return {
            "profile": profile.name,
            **fields_to_json(profile, "gpu", "description", "not_covered"),
            "operations": {
                kind: to_json(fit) | {"errors": to_json(self.lines.get(kind, ()))}
                for kind, fit in profile.operations.items()
            },
            "layers": None if self.layers is None else to_json(self.layers.errors()),
            "notes": [*self.layers_note, *self.notes],
            "provenance": dict(profile.provenance),
        }

    def to_markdown(self, picture: str | None = None) -> str:
        """A page: what was measured by whom, the constants, a table of errors per operation; `picture` is its file."""
        profile = self.profile
        description = profile.description[:1].upper() + profile.description[1:]
        parts = [
            f"# Profile {in_markdown(profile.name)}",
            f"{in_markdown(description)} Not covered: {in_markdown(profile.not_covered)}",
            _ABOUT,
        ]
        if picture is not None:
            parts.append(f"![Measured against fitted times of each operation]({picture})")
        for kind in profile.operations:
            parts += self._section(kind)
        if self.layers is not None:
            note = f"{in_markdown(self.layers_note[0])}."
            parts += ["## Whole layers", note, _table([self.layers.errors()])]
        if self.notes:
            parts += ["## Notes", "\n".join(f"- {in_markdown(note)}" for note in self.notes)]
        origin = (f"- {in_markdown(key)}: {in_markdown(value)}" for key, value in profile.provenance.items())
        return "\n\n".join((*parts, "## Provenance", "\n".join(origin))) + "\n"

    def _section(self, kind: str) -> list[str]:
        fit = self.profile.operations[kind]
        texts = [
            f"## {TITLES[kind].capitalize()}",
            f"Source: {in_markdown(fit.source)}.",
            _constants(self.profile, kind),
        ]
        if fit.seen:
            spans = (f"{name} {_plain(low)} to {_plain(high)}" for name, (low, high) in fit.seen.items())
            texts.append(f"Measured: {', '.join(spans)}.")
        if self.lines.get(kind):
            texts.append(_table(self.lines[kind]))
        return [text for text in texts if text]

    def write(self, path: str | Path, picture: str | None = None, argument: str = "report") -> None:
        """The page, as a file."""
        write_atomically(path, self.to_markdown(picture).encode(), argument=argument)

    def plot(self, path: str | Path, argument: str = "plot") -> None:
        """Measured against fitted time, and their ratio, a column per operation."""
        with styled():
            save_figure(_figure(self.fits), path, argument=argument, dpi=90)


def _figure(fits: Mapping[str, Comparison]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, NullFormatter

    figure = Figure(figsize=(3.2 * len(fits), 5.2), layout="constrained")
    grid = figure.subplots(2, len(fits), squeeze=False, height_ratios=(2, 1), sharex="col")
    style = dict(marker=".", markersize=3, linestyle="none", alpha=0.35, color="tab:blue", rasterized=True)
    for (kind, fit), (over, under) in zip(fits.items(), grid.T, strict=True):
        every = max(1, len(fit.measured_s) // _MAX_POINTS)
        measured, predicted = fit.measured_s[::every], fit.predicted_s[::every]
        span = float(measured.min()), float(measured.max())
        over.loglog(measured, predicted, **style)
        over.loglog(span, span, color="black", linewidth=0.8)
        over.set_title(f"{TITLES[kind]}\n{len(fit.measured_s)} rows, error {fit.errors().mape:.1%}", fontsize=9)
        under.semilogx(measured, predicted / measured, **style)
        under.axhline(1.0, color="black", linewidth=0.8)
        under.set_ylim(0.5, 1.5)
        under.set_xlabel("measured")
        for axis in (over.xaxis, over.yaxis, under.xaxis):
            axis.set_major_formatter(EngFormatter(unit="s", sep=" "))
            axis.set_minor_formatter(NullFormatter())
    grid[0][0].set_ylabel("fitted")
    grid[1][0].set_ylabel("fitted over measured")
    return figure


def _table(lines: Sequence[Errors]) -> str:
    rows = (
        (
            in_markdown(line.label),
            line.num_rows,
            *(f"{value:.1%}" for value in (line.mape, line.median_ape, line.p90_ape)),
            f"{line.bias:+.1%}",
            f"{line.inside:.0%}",
        )
        for line in lines
    )
    return markdown_table(("rows", "number", "error", "median", "nine in ten below", "bias", "inside"), rows)


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == np.floor(value) else f"{value:g}"


def _constants(profile: CalibrationProfile, kind: str) -> str:
    """Describe the constants in a sentence."""
    kernels, links, host = profile.kernels, profile.links, profile.host
    match kind:
        case "gemm":
            return _gemm(kernels)
        case "attention":
            return " ".join(_attention(name, rates) for name, rates in kernels.attention.items())
        case "elementwise":
            rates = kernels.elementwise
            merge = () if rates.merge_bytes_per_s is None else ("merge",)
            listed = (f"{op} {format_bandwidth(rates.bytes_per_s(op))}" for op in (*ELEMENTWISE_OPS, *merge))
            return f"Start {format_seconds(rates.start_s)}; {', '.join(listed)}."
        case "send_recv":
            rate = format_bandwidth(links.bandwidth_bytes_per_s)
            text = f"Latency {format_seconds(links.latency_s)}, bandwidth {rate} one way."
            waits = f" A receive that waits takes {links.pending_share:.1%} of the compute rate."
            return text + waits * (links.pending_share > 0)
        case "all_gather" if links.gather is not None:
            gather = links.gather
            small, large = format_bandwidth(gather.small_bytes_per_s), format_bandwidth(gather.large_bytes_per_s)
            return f"Launch {format_seconds(gather.launch_s)}; small messages {small}, large ones {large}."
        case "all_reduce" if links.all_reduce is not None:
            return " ".join(
                f"{table.num_gpus} GPUs: {format_seconds(table.latency_s)},"
                f" large {format_bandwidth(table.bytes_per_s[-1])}."
                for table in links.all_reduce.measured
            )
        case "host":
            parts = {"layer": host.layer_s, "kernel": host.kernel_s, "gathered piece": host.gather_piece_s}
            always = ("layer", "gathered piece")
            named = [(what, one) for what, one in {**parts, "message": host.message_s}.items() if one or what in always]
            return f"{', '.join(f'{format_seconds(one)} a {what}' for what, one in named)}."
    return ""


def _gemm(kernels: KernelRates) -> str:
    gemm, clock = kernels.gemm, kernels.clock
    tiles = ", ".join(f"{tile.rows}x{tile.cols} {tile.flops_share:.0%}" for tile in gemm.tiles)
    text = (
        f"Full waves reach {_flops(gemm.flops_per_s)} (share of it by tile: {tiles}), device memory"
        f" {format_bandwidth(gemm.bytes_per_s)}; {len(gemm.measured)} shapes have tables of their own."
    )
    if kernels.gemm_types:
        listed = (f"{in_markdown(kind)} {_flops(rates.flops_per_s)}" for kind, rates in kernels.gemm_types.items())
        text += f" Full waves of other types: {', '.join(listed)}."
    if clock is not None:
        tau = format_seconds(clock.time_constant_s)
        text += f" Under load the rates fall to {clock.sustained_share:.1%} of these, with a time constant of {tau}."
    return text


def _attention(name: str, rates: AttentionRates) -> str:
    values = {key: value for key in rates.__slots__ if (value := getattr(rates, key)) is not None}
    sizes = values.pop("measured", None)
    values.pop("repeats_heads", None)
    values |= {f"score_bytes of {family}": value for family, value in values.pop("score_bytes", {}).items()}
    text = f"Kernel {in_markdown(name)}: " + ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    return f"{text}, {len(sizes.sizes)} sizes with factors of their own." if sizes else f"{text}."


def _flops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.0f} GFLOP/s"


def _short(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"


# -- whole layers by the sum of their parts


def layer_costs(profile: CalibrationProfile, model: ModelSpec, kernel: str, dtype: str) -> LayerCosts:
    """Costs of the model's first kind of layer by a profile: one sequence, on one device."""
    rates = profile.kernels
    cost = CalibratedCost(rates=rates, traits=rates.traits(kernel, 1, dtype_bytes(dtype)))
    return LayerCosts(LayerSetting(model=model, cost=cost, host=profile.host), model.layer_kinds[0])


def compare_layers(profile: CalibrationProfile, model: ModelSpec, rows: Sequence[Measurement]) -> Comparison | None:
    """Compare `layer` rows of one sequence in a dtype and kernel of the profile; None without such rows.

    A row whose kernel is not an attention kernel is assumed to be of the profile's only one, if it has just one.
    """
    used = [(row, kernel) for row in rows if (kernel := _kernel(profile, row)) is not None]
    if not used:
        return None
    predicted = np.array([_layer_s(profile, model, row, kernel) for row, kernel in used])
    return Comparison(label=LAYERS, measured_s=column([row for row, _ in used], "expected_s"), predicted_s=predicted)


def _kernel(profile: CalibrationProfile, row: Measurement) -> str | None:
    if row.operation != "layer" or row.batch != 1 or row.dtype not in profile.valid.dtypes:
        return None
    kernels = profile.attention_kernels
    if row.kernel in kernels:
        return row.kernel
    return kernels[0] if len(kernels) == 1 else None


def _layer_s(profile: CalibrationProfile, model: ModelSpec, row: Measurement, kernel: str) -> float:
    costs = layer_costs(profile, model, kernel, row.dtype or "")
    chunk, prefix = np.array([float(row.chunk or 0)]), np.array([float(row.prefix or 0)])
    parts = (costs.qkv_s(chunk), costs.mixer.append_s(chunk, prefix), costs.mixer.attention_s(chunk, prefix))
    return float((sum(parts, np.zeros(1)) + costs.output_mlp_s(chunk))[0])
