"""fit_keys: kernels of attention to chosen keys, each from calls of its own; and the section of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.fit.layers.blocks import fit_blocks
from calibrate.fit.solver import Comparison, Fitted, Parameter, Some, cross_validated_s, peak_flops, solve
from calibrate.importers.sparse import SparseRows, read_kernel
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.sparse import AttendRates, ScoreRates, SelectRates, SparseKernels, SparseRates
from kvrsim.program import Array

LEAST_CHUNK = 128  # fewer queries take next to nothing beside the rest of a layer
_CLASSES = (LEAST_CHUNK, 1024, 4096, 16384, 65536)
_MOST_QUERIES = 4096.0  # that fill the device
_SCORE, _SELECT, _ATTEND = "scores", "selection", "attention"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Stage:
    """One kernel: its constants, its rates from them, and their seconds for rows."""

    name: str
    rows: Sequence[SparseRows]  # tables that are fitted together
    parameters: tuple[Parameter, ...]
    make: Callable[[Mapping[str, float]], Any]
    seconds: Callable[[Any, SparseRows], Array]

    def fit(self, some: Sequence[SparseRows]) -> Any:
        """Robust least squares of the logarithms."""
        measured = np.concatenate([rows.seconds for rows in some])

        def predict(found: Mapping[str, float], kept: Some) -> Array:
            rates = self.make(found)
            return np.concatenate([self.seconds(rates, rows) for rows in some])[kept]

        return self.make(solve(self.parameters, predict, measured, starts=4))

    def fitted(self, label: str) -> tuple[Any, Comparison, Comparison]:
        """Rates, on their own rows, and on contexts left out of the fit."""
        rates = self.fit(self.rows)
        measured = np.concatenate([rows.seconds for rows in self.rows])
        own = np.concatenate([self.seconds(rates, rows) for rows in self.rows])
        contexts = np.concatenate([rows.prefix + rows.chunk for rows in self.rows])
        ends = np.cumsum([0, *(len(rows.seconds) for rows in self.rows)])

        def left_out(train: Some, test: Some) -> Array:
            spans = zip(self.rows, ends[:-1], ends[1:], strict=True)
            parts = [(rows, train[(train >= low) & (train < high)] - low) for rows, low, high in spans]
            found = self.fit([rows.where(kept) for rows, kept in parts if len(kept)])
            return np.concatenate([self.seconds(found, rows) for rows in self.rows])[test]

        predicted = cross_validated_s(contexts.tolist(), left_out)
        return (
            rates,
            Comparison(label=f"{label}, fitted", measured_s=measured, predicted_s=own),
            Comparison(label=f"{label}, contexts left out", measured_s=measured, predicted_s=predicted),
        )


def fit_sparse_section(part: JsonObject, profile: CalibrationProfile) -> Fitted[SparseRates]:
    """From a recipe: sources of kernels, and how many heads an attention kernel takes; InputError for what is wrong."""
    part.only(("keys", "entries", "least_heads", "blocks"))
    gpu = load_gpu(profile.gpu)
    keys = fit_keys(part.text("keys"), part.text("entries"), gpu, least_heads=part.integer("least_heads"))
    blocks = fit_blocks(part.text("blocks"), profile, gpu)
    return Fitted(
        rates=SparseRates(keys=keys.rates, blocks=blocks.rates),
        source=f"{keys.source}; {blocks.source}",
        own=_joined("all, fitted", [keys.own, blocks.own]),
        cross_validated=_joined("all, contexts left out", [keys.cross_validated, blocks.cross_validated]),
        checks=(*keys.checks, blocks.own, blocks.cross_validated, *blocks.checks),
        seen={
            name: (min(low, blocks.seen[name][0]), max(high, blocks.seen[name][1]))
            for name, (low, high) in keys.seen.items()
        },
    )


def fit_keys(keys: str, entries: str, gpu: GpuSpec, *, least_heads: int) -> Fitted[SparseKernels]:
    """Kernels that choose single keys.

    `keys`: a source with GLM-5's kernels; `entries`: one with DeepSeek V4's attention to all entries, whose number of
    keys varies; least_heads: that the attention kernel computes, whatever their number.
    """
    rows = {
        _SCORE: [
            _prefill(read_kernel(keys, "glm5_mqa_logits_module", "recipes")),
            _prefill(read_kernel(keys, "dsv4_paged_mqa_logits_module", "recipes")),
        ],
        _SELECT: [_prefill(read_kernel(keys, "glm5_topk_module", "recipes"))],
        _ATTEND: [
            _prefill(read_kernel(keys, "glm5_dsa_attn_module", "recipes")),
            _prefill(read_kernel(entries, "dsv4_hca_attn_module", "recipes")),
        ],
    }
    stages = _stages(rows, gpu, least_heads)
    found = {name: stage.fitted(name) for name, stage in stages.items()}
    checks = [one for _, own, held_out in found.values() for one in (own, held_out)]
    for name, (_, _, held_out) in found.items():
        contexts = np.concatenate([one.prefix + one.chunk for one in rows[name]])
        checks += held_out.by(contexts, _CLASSES, "context")
    every = [one for some in rows.values() for one in some]
    chunk, context = (np.concatenate([get(one) for one in every]) for get in (_chunk, _context))
    return Fitted(
        rates=SparseKernels(score=found[_SCORE][0], select=found[_SELECT][0], attend=found[_ATTEND][0]),
        source="; ".join(sorted({one.source for one in every})),
        own=_joined("all kernels, fitted", [own for _, own, _ in found.values()]),
        cross_validated=_joined("all kernels, contexts left out", [held_out for _, _, held_out in found.values()]),
        checks=tuple(checks),
        seen={"chunk": _span(chunk), "context": _span(context)},
    )


def _stages(rows: Mapping[str, Sequence[SparseRows]], gpu: GpuSpec, least_heads: int) -> dict[str, _Stage]:
    fp8, half = peak_flops(gpu, ("fp8",)), peak_flops(gpu)
    start = Parameter(name="start_s", start=5e-6, low=1e-7, high=1e-4)

    def full(name: str, value: float) -> Parameter:
        return Parameter(name=name, start=value, low=1.0, high=value / 100 * _MOST_QUERIES)

    return {
        _SCORE: _Stage(
            name=_SCORE,
            rows=rows[_SCORE],
            parameters=(
                start,
                Parameter(name="flops_per_s", start=0.4 * fp8, low=1e-3 * fp8, high=fp8),
                full("full_heads", 128.0 * gpu.num_sms),
                Parameter(name="entries_share", start=0.8, low=0.1, high=1.0),
            ),
            make=lambda found: ScoreRates(**found),
            seconds=lambda rates, one: rates.seconds(
                one.chunk, one.keys, one.heads, one.width, entries=one.compress_ratio > 1
            ),
        ),
        _SELECT: _Stage(
            name=_SELECT,
            rows=rows[_SELECT],
            parameters=(
                start,
                Parameter(name="query_s", start=3e-9, low=1e-12, high=1e-6),
                Parameter(name="key_s", start=1.5e-12, low=1e-14, high=1e-9),
                full("full_queries", float(gpu.num_sms)),
            ),
            make=lambda found: SelectRates(**found),
            seconds=lambda rates, one: rates.seconds(one.chunk, one.keys),
        ),
        _ATTEND: _Stage(
            name=_ATTEND,
            rows=rows[_ATTEND],
            parameters=(
                start,
                Parameter(name="flops_per_s", start=0.5 * half, low=1e-3 * half, high=half),
                Parameter(name="query_keys", start=200.0, low=1.0, high=2048.0),
                full("full_queries", float(gpu.num_sms)),
            ),
            make=lambda found: AttendRates(**found, least_heads=least_heads),
            seconds=lambda rates, one: rates.seconds(one.chunk, one.keys, one.heads, one.width),
        ),
    }


def _prefill(rows: SparseRows) -> SparseRows:
    return rows.where(rows.chunk >= LEAST_CHUNK)


def _chunk(rows: SparseRows) -> Array:
    return rows.chunk


def _context(rows: SparseRows) -> Array:
    return rows.prefix + rows.chunk


def _span(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _joined(label: str, parts: Sequence[Comparison]) -> Comparison:
    """Rows of several comparisons."""
    return Comparison(
        label=label,
        measured_s=np.concatenate([one.measured_s for one in parts]),
        predicted_s=np.concatenate([one.predicted_s for one in parts]),
    )
