"""Serving engines, and the strategies that each can run on the scenario's GPUs.

kvrsim/data/deploy.json describes the engines: versions, flags and documented options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.layout import Degrees, Layout
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

_DATA = Path(__file__).parents[1] / "kvrsim" / "data" / "deploy.json"  # planner and kvrsim are installed in one folder
OptionKind = str | Sequence[str]  # "int", "float", "str", "flag", or the allowed values
_MOST_SPARSE_CONTEXT = 8  # most GPUs for SGLang's context parallelism of sparse attention


class DeployEngine(NamedTuple):
    """A serving engine, in the version that was examined."""

    name: str
    version: str
    looked_at: str  # date of the examination
    sources: tuple[str, ...]
    launcher: tuple[str, ...]
    flags: tuple[str, ...]  # templates of flags, with names of Server.values
    uneven_pieces: bool  # whether a pipeline's pieces may differ in length
    context_models: Mapping[
        str, Mapping[str, str]
    ]  # key: scheme, then model_type; value: how the engine splits the context
    notes: Mapping[str, str]  # key: the feature of a layout that the note describes
    options: Mapping[str, OptionKind]

    @property
    def title(self) -> str:
        """Name and version: "sglang (0.5.23)"."""
        return f"{self.name} ({self.version})"

    def has(self, execution: Execution) -> bool:
        """Whether the engine runs a strategy with the scenario's model on its GPUs."""
        return self.lacks(execution) is None

    def has_kind(self, degrees: Degrees) -> bool:
        """Whether the engine has layouts of this kind with some model."""
        splits = degrees.scheme is None or degrees.scheme in self.context_models
        if self.name == "vllm" and degrees.scheme is not None and degrees.pipeline != 1:
            return False  # see _vllm_lacks
        return splits and (self.uneven_pieces or degrees.pieces != "searched")

    def lacks(self, execution: Execution) -> str | None:
        """The feature of a strategy's layout that the engine lacks; None if the engine runs the layout."""
        if not execution.strategy.degrees.is_deployable:
            return "the way in which it splits the context"
        layout = execution.layout
        scenario = execution.scenario
        model_type = scenario.model.model_type
        schemes = self.context_models.get(layout.scheme or "", {})
        if layout.context > 1 and model_type not in schemes:
            return f"{layout.scheme} of {model_type}"
        if layout.pieces == "searched" and not self.uneven_pieces:
            return "pieces of different lengths"
        if not layout.is_mixture and layout.data > 1:
            per_node = scenario.cluster.gpus_per_node
            if per_node is not None and per_node < layout.num_gpus and self.name in ("trtllm", "sglang"):
                return "data groups of a dense model on several nodes"
            if self.name == "trtllm":
                return "data groups of a dense model"
        return _LACKS[self.name](layout, schemes.get(model_type, ""))


@cache
def deploy_engine(name: str, parameter: str = "emit") -> DeployEngine:
    """The engine with this name; raises InputError for an unknown name."""
    if name not in DEPLOY_ENGINES:
        raise InputError(parameter, name, f"one of {', '.join(DEPLOY_ENGINES)}")
    content: dict[str, Any] = json.loads(_DATA.read_text("utf-8"))[name]
    content |= {key: tuple(content[key]) for key in ("sources", "launcher", "flags")}
    return DeployEngine(name=name, **content)


def launching_engine(scenario: Scenario, asked: str | None = None, parameter: str = "emit") -> str | None:
    """The engine that launches the answer: the one that is asked for, else the one whose times the scenario has.

    None: no engine is asked for, and the scenario's software is none that is launched here. Raises InputError naming
    the parameter if another engine is asked for than the one whose times the scenario has.
    """
    record = scenario.engine
    if record is None or record.launched_as is None:
        return asked
    timed = record.launched_as
    if asked not in (None, timed):
        raise InputError(parameter, asked, f"{timed}, whose times --engine {record.name} gives")
    return timed


def engines_with(execution: Execution) -> dict[str, str]:
    """The engines that have a strategy on the scenario's GPUs, each with the version that was examined."""
    engines = (deploy_engine(name) for name in DEPLOY_ENGINES)
    return {engine.name: engine.version for engine in engines if engine.has(execution)}


def engines_for(strategy: Strategy) -> tuple[str, ...]:
    """Names of the engines that have a strategy for some number of GPUs and some model."""
    if not strategy.degrees.is_deployable:
        return ()
    engines = (deploy_engine(name) for name in DEPLOY_ENGINES)
    return tuple(engine.name for engine in engines if engine.has_kind(strategy.degrees))


def _vllm_lacks(layout: Layout, _: str) -> str | None:
    """The feature that vLLM lacks; None if it runs the layout.

    Context ranks need a pipeline of one stage (v1/worker/gpu/pcp_manager.py). Experts are on all GPUs of a stage,
    either sliced or spread (fused_moe/config.py).
    """
    if layout.context > 1 and layout.pipeline > 1:
        return "context ranks in a pipeline"
    if layout.expert_data > 1 and layout.is_mixture:
        return "copies of the experts"
    if 1 in (layout.expert_tensor, layout.expert_parallel):
        return None
    return "experts both spread and sliced"


def _sglang_lacks(layout: Layout, way: str) -> str | None:
    """The feature that SGLang lacks; None if it runs the layout.

    Context parallelism restricts the other sizes (arg_groups/model_overrides, parallel_hook.py).
    way: "gathered" (attention over heads), "latent" (ranks are single GPUs with DeepEP), or "sparse".
    """
    spread = layout.expert_tensor == 1 and layout.expert_data == 1
    if layout.context > 1 and way != "gathered":
        if layout.scheme == "zigzag" and not (layout.tensor == 1 and (spread or not layout.is_mixture)):
            return "zigzag of latents but on single GPUs with experts spread over all"
        if way == "sparse" and layout.stage_gpus > _MOST_SPARSE_CONTEXT:
            return f"context ranks of sparse attention on more than {_MOST_SPARSE_CONTEXT} GPUs"
    if layout.context > 1 and layout.data > 1 and way == "gathered":
        return "context ranks in several data groups"
    if not layout.is_mixture or layout.expert_data == 1:
        return None
    copies = layout.expert_data == layout.context and layout.pipeline == 1 and way == "gathered"
    if copies:
        return None
    return "a copy of the experts per data rank"


def _trtllm_lacks(layout: Layout, _: str) -> str | None:
    """The feature that TensorRT-LLM lacks; None if it runs the layout.

    The GPUs of a stage split attention either by heads or by prompts (mapping.py).
    """
    if layout.data > 1 and layout.tensor > 1:
        return "attention split by heads in data groups"
    if layout.is_mixture and layout.expert_data > 1:
        return "copies of the experts"
    return None


_LACKS: Mapping[str, Callable[[Layout, str], str | None]] = {
    "vllm": _vllm_lacks,
    "sglang": _sglang_lacks,
    "trtllm": _trtllm_lacks,
}
