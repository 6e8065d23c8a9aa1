"""Engine records as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvrsim.cli.render.layout import columns, show
from kvrsim.engine import SHORT_TOKENS, Engine
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT
from kvrsim.units import format_seconds
from planner.uncertainty.causes import engine_sides

_MEANINGS = {
    "request_s": "before the first layer, once a request",
    "token_s": "more for each token of the request",
    "step_s": "before each pass through the layers",
    "layer_s": "host, to issue one layer",
    "kernel_s": "host, more for each kernel of the layer",
    "gather_piece_s": "host, more for each rank of an all-gather",
    "resume_s": "that the GPU waits after the communication of a layer",
    "message_s": "host, to issue one send or receive",
    "prepare_s": "host, in each step",
    "collective_s": "each collective of tensor parallelism, beside its kernel",
    "kernel_scale": "kernels' seconds over the profile's",
}
_BEYOND = "measured over predicted, beyond what the terms explain"


def show_engines(engines: Sequence[Engine]) -> None:
    """One row per engine."""
    table = columns("engine")
    columns("before", "layer", numbers=True, into=table)
    columns("kernels", "held-out", into=table)
    table.add_column("what it is")
    for engine in engines:
        host = engine.host
        seconds = [format_seconds(value) for value in (host.request_s + host.step_s, host.layer_s)]
        table.add_row(engine.name, *seconds, _scales(engine), _left_out_error(engine), engine.title)
    show(
        table,
        "",
        "before: seconds before the first layer; layer: host seconds of one layer; kernels: times the profile's;"
        " held-out: median error on prefills, rows or engines left out of the fit",
    )


def show_engine(engine: Engine) -> None:
    """Every term with its range, and what the record rests on."""
    table = columns("term")
    columns("value", "80 % range", numbers=True, into=table)
    table.add_column("meaning")
    for term, meaning in _MEANINGS.items():
        for label, value in _values(engine, term):
            if value:
                table.add_row(label, _shown(term, value), _range(term, value, engine.spread.get(term)), meaning)
    sides = engine_sides(engine)
    if sides is not None:
        table.add_row("TTFT", "1", f"{math.exp(-sides[0]):.3g} to {math.exp(sides[1]):.3g}", _BEYOND)
    first_token = "the prefill and one decode step" if engine.decode_step else "the prefill"
    lines = [f"{engine.name}: {engine.title}", engine.description, engine.not_covered]
    rests = [f"{key}: {text}" for key, text in engine.provenance.items()]
    errors = [f"errors: {_errors(engine)}"] if engine.fit is not None else []
    show(*lines, "", table, "", f"TTFT: {first_token}", *errors, *rests)


def _values(engine: Engine, term: str) -> list[tuple[str, float]]:
    if term == "kernel_scale":
        return [(f"{term}, {gpu}", scale) for gpu, scale in engine.kernel_scale.items()]
    return [(term, float(getattr(engine.host, term) or 0.0))]


def _shown(term: str, value: float) -> str:
    return format_seconds(value) if term.endswith("_s") else f"{value:.3g}"


def _range(term: str, value: float, spread: float | None) -> str:
    if spread is None or not value:
        return ""
    factor = math.exp(DEVIATES_OF_80_PERCENT * spread)
    return f"{_shown(term, value / factor)} to {_shown(term, value * factor)}"


def _scales(engine: Engine) -> str:
    return "\n".join(f"{gpu} {scale:.2f}" for gpu, scale in engine.kernel_scale.items()) or "1.00"


def _left_out_error(engine: Engine) -> str:
    fit = engine.fit
    return "" if fit is None else f"{fit.left_out_median_ape:.1%}, {fit.left_out}s"


def _errors(engine: Engine) -> str:
    fit = engine.fit
    assert fit is not None
    short = "" if fit.short_coverage is None else f", {fit.short_coverage:.0%} below {SHORT_TOKENS} tokens"
    left_out = f"median {fit.left_out_median_ape:.1%}, mean {fit.left_out_mape:.1%}"
    inside = f"{fit.coverage:.0%} inside their 80 % intervals{short}; {fit.source}"
    if fit.left_out == "engine":
        return f"each engine left out, {SHORT_TOKENS} tokens and more: {left_out}; {inside}"
    own = f"median {fit.median_ape:.1%}, mean {fit.mape:.1%} on {fit.num_rows} prefills"
    return f"{own}; each {fit.left_out} left out: {left_out}; {inside}"
