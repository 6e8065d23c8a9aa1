"""Both sides of a case, operation by operation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import calibrate.shipped
from kvrsim.model.mixers import LatentAttention
from validate.estimates.cases import FRAMEWORKS, OPERATIONS, Case, Framework
from validate.estimates.package import DIVIDED, WINDOW
from validate.estimates.stored import Estimates

_RECIPES = Path(calibrate.shipped.__file__).with_name("recipes.json")

# The package's names of operations, without context_ and the kind of layer, by rows of the comparison.
_NAMED = {
    "projections": r"qkv_gemm|downscale_gemm|q_b_proj_gemm|kv_b_proj_gemm|in_proj(_ba)?_gemm",
    "attention": r"attention",
    "window": rf"attention{WINDOW}",
    "scan": r"conv1d|scan",
    "output": r"(out_)?proj_gemm",
    "router": r"router_gemm",
    "experts": r"moe",
    "shared": r"shared_(gate_up|down|ffn2|expert_gate)_gemm",
    "norms": r"add_norm_\d|(ffn_|attn_)?norm|shared_merge",
    "steps": r"shared_act_gate|shared_expert_gate_mul",
    "all_reduce": r"ar|embedding_ar|moe_(pre|post)_dispatch",
    "ends": r"embedding|logits_gemm",
}
_MODULE = "mla_block"  # latent attention with its projections, as one measured module
_BEFORE = re.compile(r"context_((gdn|full)_)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One case; seconds by key of OPERATIONS."""

    case: Case
    ours: Mapping[str, float]
    theirs: Mapping[str, float]  # each operation by the framework whose table the profile was fitted to
    frameworks: Mapping[str, Framework]  # of theirs
    whole: Mapping[Framework, float]  # their estimates, each of one framework
    module_s: Mapping[Framework, float]  # latent attention with its projections, as a module that was measured whole

    @property
    def ours_s(self) -> float:
        """TTFT of the kernels alone."""
        return sum(self.ours.values())

    @property
    def theirs_s(self) -> float:
        """The sum of theirs."""
        return sum(self.theirs.values())

    @property
    def latent_s(self) -> float:
        """Of what their module holds, the products and attention."""
        return sum(self.ours[name] for name in ("projections", "attention", "output"))

    def ratio(self, operation: str) -> float | None:
        """Ours over theirs; None where one has none."""
        ours, theirs = self.ours.get(operation), self.theirs.get(operation)
        return ours / theirs if ours and theirs else None


def compare(case: Case, ours: Mapping[str, float], estimates: Estimates) -> Compared:
    """Put both sides of a case together; KeyError where the table of an operation lacks it."""
    found = {one: estimates.of(case, one) for one in FRAMEWORKS}
    by_row = {one: _by_row(seconds) for one, seconds in found.items()}
    frameworks = {name: framework for name in OPERATIONS if (framework := table_of(case, name)) is not None}
    theirs = {name: by_row[framework][name] for name, framework in frameworks.items() if name in by_row[framework]}
    return Compared(
        case=case,
        ours=ours,
        theirs={name: seconds for name, seconds in theirs.items() if seconds is not None},
        frameworks=frameworks,
        whole={one: whole_s for one, seconds in found.items() if (whole_s := _whole_s(seconds)) is not None},
        module_s={
            one: value for one, seconds in found.items() for name, value in _rows(seconds) if name == _MODULE and value
        },
    )


def table_of(case: Case, operation: str) -> Framework | None:
    """The framework whose table the profile's rates of an operation were fitted to.

    SGLang for what the profile and the package take from the datasheet alike, TensorRT-LLM for experts that lie whole
    on GPUs, whatever the profile has them from; None: the package has no such row.
    """
    recipe = _recipes()[case.gpu.profile]
    if operation == "clock":
        return None
    if operation == "experts" and case.experts == "expert":
        return "trtllm"  # SGLang's rows of several GPUs give all that belongs to others to one expert
    if operation == "experts":
        first = next(layer.mlp[0] for layer in case.model.spec().layers if layer.num_experts)
        kind = first.compute or "half"
        return next(
            _framework(part["source"]) for part in recipe["sections"]["experts"]["sources"] if kind in part["types"]
        )
    if operation == "scan":
        return _framework(recipe["sections"]["recurrence"]["gated_delta"])
    if operation == "attention" and _is_latent(case):
        return _framework(recipe["sections"]["latent"]["expanded"])
    if operation in ("norms", "steps"):
        return "sglang"
    table = {"attention": "attention", "window": "attention", "all_reduce": "all_reduce"}.get(operation, "gemm")
    return next(_framework(part["source"]) for part in recipe["sources"] if table in part["operations"])


def _is_latent(case: Case) -> bool:
    return isinstance(case.model.spec().main_mixer, LatentAttention)


def _framework(source: str) -> Framework:
    return cast("Framework", source.split("/")[1])


@cache
def _recipes() -> Any:
    return json.loads(_RECIPES.read_text("utf-8"))


def _whole_s(seconds: Mapping[str, float | None]) -> float | None:
    """The package's own estimate; None where its tables lack an operation."""
    values = [value for name, value in seconds.items() if not name.startswith(DIVIDED)]
    return None if None in values else sum(value for value in values if value is not None)


def _by_row(seconds: Mapping[str, float | None]) -> dict[str, float | None]:
    """Seconds by key of OPERATIONS, of a module its parts; None: an operation is lacking."""
    found: dict[str, float | None] = {}
    for name, value in _rows(seconds):
        if name != _MODULE:
            row = row_of(name)
            before = found.get(row, 0.0)
            found[row] = None if value is None or before is None else before + value
    return found


def _rows(seconds: Mapping[str, float | None]) -> Iterator[tuple[str, float | None]]:
    for name, value in seconds.items():
        yield _BEFORE.sub("", name.removeprefix(DIVIDED)), value


def row_of(name: str) -> str:
    """The key of OPERATIONS that the package's operation belongs to; KeyError for one that is not known."""
    found = next((row for row, pattern in _NAMED.items() if re.fullmatch(pattern, name)), None)
    if found is None:
        raise KeyError(f"no row for the package's operation {name}")
    return found
