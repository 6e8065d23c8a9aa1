"""fit_blocks: attention to chosen blocks of tokens, from whole modules and the rates of their products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.fit.layers.modules import ModuleRows, read_modules
from calibrate.fit.solver import Comparison, Fitted, Parameter, Some, cross_validated_s, peak_flops, solve
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.sparse import AttendRates, ScoreRates, SparseKernels
from kvrsim.program import Array

MODEL = "MiniMaxAI/MiniMax-M3"
_LEAST_HEADS = 16  # rows of the smallest matrix product; a KV head's queries are filled up to as many
_NOISE = 0.1  # each share of the heads has an autotuned kernel of its own
_CLASSES = (1024, 4096, 16384, 65536)


def fit_blocks(source: str, profile: CalibrationProfile, gpu: GpuSpec) -> Fitted[SparseKernels]:
    """Scores of all keys and attention to the best blocks of MiniMax M3; what is left of its modules is the start.

    Seconds that are compared are those of whole modules, products included. InputError as read_modules.
    """
    modules = read_modules(source, "msa_context_module", [MODEL], "recipes")
    products = [one.products_s(profile) for one in modules]
    measured = np.concatenate([one.rows.seconds for one in modules])
    contexts = np.concatenate([one.rows.chunk + one.rows.prefix for one in modules])
    heads = np.concatenate([one.rows.heads for one in modules])

    def predicted(kernels: SparseKernels) -> Array:
        pairs = zip(modules, products, strict=True)
        return np.concatenate([start + kernels.seconds(one.call, 1) for one, start in pairs])

    def fit(some: Some) -> SparseKernels:
        found = solve(
            _parameters(gpu), lambda values, rows: predicted(_made(values))[some][rows], measured[some], noise=_NOISE
        )
        return _made(found)

    kernels = fit(np.arange(len(measured)))
    own = Comparison(label="blocks, whole modules, fitted", measured_s=measured, predicted_s=predicted(kernels))
    left_out = {
        what: Comparison(
            label=f"blocks, whole modules, {what} left out",
            measured_s=measured,
            predicted_s=cross_validated_s(labels.tolist(), lambda train, test: predicted(fit(train))[test]),
        )
        for what, labels in (("contexts", contexts), ("counts of heads", heads))
    }
    return Fitted(
        rates=kernels,
        source=modules[0].rows.source,
        own=own,
        cross_validated=left_out["contexts"],
        checks=(*left_out["contexts"].by(contexts, _CLASSES, "context"), left_out["counts of heads"]),
        seen=_seen(modules),
    )


def _parameters(gpu: GpuSpec) -> tuple[Parameter, ...]:
    peak = peak_flops(gpu)
    return (
        Parameter(name="start_s", start=1e-4, low=1e-6, high=1e-3),
        Parameter(name="score", start=0.15 * peak, low=0.01 * peak, high=peak),
        Parameter(name="attend", start=0.1 * peak, low=0.01 * peak, high=peak),
        Parameter(name="full_heads", start=100.0 * gpu.num_sms, low=1.0, high=1000.0 * gpu.num_sms),
    )


def _made(found: Mapping[str, float]) -> SparseKernels:
    attend = AttendRates(
        start_s=found["start_s"],
        flops_per_s=found["attend"],
        query_keys=0.0,
        full_queries=0.0,
        least_heads=_LEAST_HEADS,
    )
    score = ScoreRates(start_s=0.0, flops_per_s=found["score"], full_heads=found["full_heads"])
    return SparseKernels(score=score, attend=attend)


def _seen(modules: Sequence[ModuleRows]) -> dict[str, tuple[float, float]]:
    chunk, context = (
        np.concatenate([one.rows.chunk + behind * one.rows.prefix for one in modules]) for behind in (0, 1)
    )
    return {"chunk": (float(chunk.min()), float(chunk.max())), "context": (float(context.min()), float(context.max()))}
