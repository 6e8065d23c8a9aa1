"""What the installed package aiconfigurator-core estimates, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvrsim.errors import InputError
from validate.estimates.cases import NUM_GPUS, Case, Framework

DISTRIBUTION = "aiconfigurator-core"
_MODULE = "aiconfigurator_core.sdk"
_INSTALL = f"a machine that has it (pip install {DISTRIBUTION} pyarrow, for CPython on Linux)"

# The package estimates latent attention as one measured module. These, which it falls back to where it has no such
# row, divide it: products of its table of products, and attention alone.
DIVIDED = "divided:"
WINDOW = "_window"


def installed_version() -> str:
    """Of the package; InputError where it cannot be imported."""
    try:
        import_module(f"{_MODULE}.engine")
        return version(DISTRIBUTION)
    except ImportError as error:
        raise InputError("package", f"{DISTRIBUTION} is not installed", _INSTALL) from error


def estimate(case: Case, framework: Framework) -> dict[str, float | None]:
    """Seconds of the prefill by operation, as the package names them; None: its tables lack the operation.

    Attention to a window ends in WINDOW. Parts of latent attention that are in another operation's seconds begin with
    DIVIDED.
    """
    engine = import_module(f"{_MODULE}.engine")
    layout = _layout(case)
    config = import_module(f"{_MODULE}.config_builders").build_model_config(pp_size=1, attention_dp_size=1, **layout)
    model = import_module(f"{_MODULE}.models").get_model(case.model.package_name, config, framework)
    handle = engine.EngineHandle.compile(case.model.package_name, case.gpu.system, framework, **layout)
    found: dict[str, float | None] = {}
    for index, operation in enumerate(model.context_ops):
        found[_name(operation)] = _seconds(partial(handle.evaluate_context_ops, [index]), case)
        for part in getattr(operation, "_fallback", ()):
            ask = partial(handle.evaluate_ops_json, engine.build_ops_json([part]), is_context=True)
            found[f"{DIVIDED}{_name(part)}"] = _seconds(ask, case)
    return {name: seconds for name, seconds in found.items() if seconds != 0.0}


def _name(operation: Any) -> str:
    return f"{operation._name}{WINDOW if getattr(operation, '_window_size', 0) else ''}"


def _seconds(ask: Callable[..., list[tuple[Any, ...]]], case: Case) -> float | None:
    missing = import_module(f"{_MODULE}.errors").PerfDataNotAvailableError
    try:
        return sum(1e-3 * float(milliseconds) for _, milliseconds, *_ in ask(batch_size=1, s=case.tokens))
    except missing:
        return None


def _layout(case: Case) -> dict[str, Any]:
    spread = case.experts == "expert"
    return {
        "tp_size": NUM_GPUS,
        "moe_tp_size": 1 if spread else NUM_GPUS,
        "moe_ep_size": NUM_GPUS if spread else 1,
        "kvcache_quant_mode": case.model.cache_and_attention,
        "fmha_quant_mode": case.model.cache_and_attention,
    }
