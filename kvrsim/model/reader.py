"""Read a ModelSpec from transformers' own class, built without memory and run once without values.

No family is named. The class is built on torch's meta device and runs a prefill of a few tokens there; hooks record
what runs in which order. Each module with parameters is then classified: a projection of a mixer, an MLP, a router,
experts, a norm. What fits nowhere is refused by its name. Two gates compare the result with the class: the number of
parameters, and the FLOPs that torch counts in products of matrices.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import signature
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import MODEL_MAPPING, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvrsim.model.gemm import Gemm, Split
from kvrsim.model.mixers import (
    Attention,
    CompressedAttention,
    Indexer,
    LatentAttention,
    Mixer,
    Recurrence,
    RecurrenceKind,
)
from kvrsim.model.spec import LayerSpec, ModelSpec

TOKENS = 16  # of the prefill that is run
_ACTIVATIONS = {"hidden_act", "hidden_activation", "activation_function"}
HYPER = "hyper-connections are counted as element-wise traffic of the residual streams"
SHARED_INDEXERS = "layers with a shared indexer take the choice of the layer before them at no cost"
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.randn, torch.rand)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_INNER = ("intermediate_dim", "expert_dim", "intermediate_size")  # width of an expert
_KEYS_VALUES = re.compile(r"^(?:project_|W)?(?:k|v|key|value)(?:_proj|_lin)?$")
_QUERIES = re.compile(r"^(?:project_|W)?(?:q|query)(?:_proj|_lin)?$")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size")
_GATES = re.compile(r"gate|^g_proj$")
_SERVES_ALL = re.compile(r"latent|routed_expert")  # projections to the width of routed experts and back


class RefusedError(Exception):
    """A class that the reader cannot describe; the message names the submodule."""


class _Sizes(TorchFunctionMode):  # type: ignore[misc]  # torch has no types
    """Remembers the sizes that new tensors are made with, as symbols where a configuration holds such."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES:
            size = (kwargs or {}).get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if len(size) == result.dim():
                self._known[result.untyped_storage()._cdata] = (tuple(size), result)
        return result

    def of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The tensor's shape."""
        size, _ = self._known.get(tensor.untyped_storage()._cdata, ((), tensor))
        return size if tuple(map(int, size)) == tuple(tensor.shape) else tuple(tensor.shape)


@dataclass(kw_only=True)
class _Run:
    """What a prefill of TOKENS tokens does."""

    order: dict[str, int] = field(default_factory=dict)  # of the first calls of modules, by name
    sources: dict[str, int] = field(default_factory=dict)  # first input of a module: the tensor's id
    results: dict[int, str] = field(default_factory=dict)  # tensors by id: the module that made it
    rotary: set[str] = field(default_factory=set)  # modules within which queries and keys are rotated
    alibi: bool = False
    running: list[str] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # tensors whose ids are used
    matrix_flops: int = 0  # of products with a weight that all tokens share
    batched_flops: int = 0  # of all other products
    cache: Any = None

    def begin(self, name: str, args: Any, kwargs: Any) -> None:
        self.order.setdefault(name, len(self.order))
        self.running.append(name)
        first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        if first is not None and name not in self.sources:
            self.sources[name] = id(first)
            self.kept.append(first)

    def end(self, name: str, output: Any) -> None:
        self.running.pop()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor):
            self.results[id(first)] = name
            self.kept.append(first)


def _run(model: nn.Module) -> _Run:
    run = _Run()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(
                lambda _module, args, kwargs, name=name: run.begin(name, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(lambda _module, _args, output, name=name: run.end(name, output))
            stack.callback(before.remove)
            stack.callback(after.remove)
        for source in {type(module).__module__ for module in model.modules()}:
            for name, function in list(vars(sys.modules[source]).items()):
                if callable(function) and not isinstance(function, type) and re.search("apply.*rotary|alibi", name):
                    stack.enter_context(patch.object(sys.modules[source], name, _watched(function, name, run)))
        counter = stack.enter_context(FlopCounterMode(display=False))
        stack.enter_context(torch.no_grad())
        tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        output = model(input_ids=tokens, use_cache=True)
    run.cache = getattr(output, "past_key_values", None)
    for operation, flops in counter.get_flop_counts()["Global"].items():
        if str(operation) in ("aten.mm", "aten.addmm"):
            run.matrix_flops += flops
        else:
            run.batched_flops += flops
    return run


def _watched(function: Any, name: str, run: _Run) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        run.rotary.update(run.running)
        run.alibi |= "alibi" in name
        return function(*args, **kwargs)

    return call


def build(fields: Mapping[str, Any]) -> tuple[Any, nn.Module, _Sizes]:
    """The configuration, the class on the meta device, and the sizes of its tensors."""
    fields = dict(fields)
    for key in _ACTIVATIONS & fields.keys():
        if fields[key] not in ACT2FN:  # a name that transformers lacks: an element-wise function costs the same
            fields[key] = "silu"
    config = CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)
    text = config.get_text_config(decoder=True)
    if text is not config:  # a type of several models: the keys are those of its text model
        config = type(text).from_dict(fields)
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"), _Sizes() as sizes:
        try:
            model = AutoModelForCausalLM.from_config(config, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model = _text_class(config)._from_config(config, **options)
    for module in model.modules():  # experts that transformers runs one by one as the others, without their numbers
        routed = hasattr(module, "gate_up_proj") and len(signature(module.forward).parameters) == 3
        if routed and hasattr(module, "num_experts") and not hasattr(module, "has_gate"):
            for name in ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel"):
                setattr(module, name, False)
            module.has_gate = module.is_concatenated = True
            module._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
            module.forward = partial(batched_mm_experts_forward, module)
    return config, model.eval(), sizes


def _text_class(config: Any) -> Any:
    """The class of a text model that transformers has inside of larger models alone."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    modules = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    stem = type(config).__name__.removesuffix("Config")
    names = (f"{stem.removesuffix('Text')}ForCausalLM", f"{stem}ForCausalLM", f"{stem}Model")
    found = next((getattr(modules, name) for name in names if hasattr(modules, name)), None)
    if found is None:
        raise RefusedError(f"transformers has no text model of {type(config).__name__}")
    return found


def causal_types() -> list[str]:
    """The types of transformers that have a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def known_type(model_type: str) -> bool:
    """Whether transformers has a configuration of this type."""
    return model_type in CONFIG_MAPPING


def read_class(fields: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that transformers builds from a configuration's keys; RefusedError for one that cannot be described."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # kernels that are missing here matter to nobody who only counts
    try:
        config, model, sizes = build(fields)
        run = _run(model)
    except Exception as error:  # whatever transformers raises for numbers that do not fit together
        lines = str(error).strip().splitlines() or [""]
        raise RefusedError(f"transformers: {type(error).__name__} {lines[-1].strip()[:200]}") from error
    finally:
        logging.set_verbosity(verbosity)
    reader = _Reader(config=config, model=model, sizes=sizes, run=run)
    spec = reader.spec(name)
    reader.compare(spec)
    return spec


def _symbol(value: int, *candidates: Any) -> int:
    """The first candidate that equals the value, which may be a symbol."""
    return next((one for one in candidates if type(one) is not bool and isinstance(one, int) and one == value), value)


def _attribute(source: Any, *names: str) -> Any:
    """The first attribute that is there and a number."""
    for name in names:
        try:
            value = getattr(source, name, None)
        except RuntimeError:  # a number that differs from layer to layer
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


@dataclass(kw_only=True)
class _Reader:
    config: Any
    model: nn.Module
    sizes: _Sizes
    run: _Run
    notes: list[str] = field(default_factory=list)
    _streams: int = 0  # weights of hyper-connections
    _choice: Indexer | None = None  # the last layer's that chooses keys

    def spec(self, name: str) -> ModelSpec:
        config, model = self.config, self.model
        place, stack = self._stack()
        layers = [self._layer(f"{place}.{number}", layer) for number, layer in enumerate(stack)]
        tokens = model.get_input_embeddings()
        vocab, hidden = self.sizes.of(tokens.weight)
        head = model.get_output_embeddings()
        tied = bool(getattr(config, "tie_word_embeddings", False)) if head is None else head.weight is tokens.weight
        outside = self._outside(place, tokens, head, hidden)
        mlps = [layer.mlp for layer in sorted(layers, key=lambda layer: layer.num_experts > 0) if layer.mlp]
        inner = _attribute(config, "intermediate_size")
        return ModelSpec(
            name=name,
            model_type=config.model_type,
            num_hidden_layers=_symbol(len(layers), config.num_hidden_layers),
            hidden_size=hidden,
            intermediate_size=(mlps[0][-1].in_features if mlps else hidden) if inner is None else inner,
            vocab_size=vocab,
            max_position_embeddings=_attribute(config, "max_position_embeddings", "n_positions", "seq_length"),
            tie_word_embeddings=tied,
            alibi=self.run.alibi,
            learned_positions=outside["positions"],
            parallel_attn=self._parallel(place, stack),
            final_norm_parameters=outside["after"],
            embedding_norm_parameters=outside["before"],
            lm_head=Gemm(name="lm_head", in_features=hidden, out_features=vocab, bias=_has_bias(head)),
            layers=tuple(layers),
            approximations=tuple(dict.fromkeys(self.notes)),
        )

    def _stack(self) -> tuple[str, nn.ModuleList]:
        count = int(self.config.num_hidden_layers)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and f"{name}.0" in self.run.order:
                return name, module
        raise RefusedError(f"no list of {count} layers")

    def _count(self, module: nn.Module) -> int:
        """Parameters of a module; a computed tensor has the sizes that its module has as attributes."""
        total = 0
        for inside in module.modules():
            sides = [one for one in vars(inside).values() if type(one) is not int and isinstance(one, int)]
            for one in inside._parameters.values():
                if one is not None:
                    total += prod(_symbol(size, *(sides if type(size) is int else ())) for size in self.sizes.of(one))
        return total

    def _outside(self, place: str, tokens: nn.Module, head: nn.Module | None, hidden: int) -> dict[str, int]:
        """Parameters outside of the layers: before them, after them, and rows of learned positions."""
        counts = {"before": 0, "after": 0, "positions": 0}
        for name, module in self.model.named_modules():
            own = [one for one in module._parameters.values() if one is not None]
            if not own or name.startswith(f"{place}.") or module is tokens or module is head:
                continue
            size = sum(prod(self.sizes.of(one)) for one in own)
            if isinstance(module, nn.Embedding) and own[0].shape[1] == hidden and name in self.run.order:
                counts["positions"] += self.sizes.of(own[0])[0]
            elif all(one.dim() == 1 for one in own) or "HyperHead" in type(module).__name__:
                self._streams += sum(one.numel() for one in own if one.dim() == 2)
                first = self.run.order.get(name, 0) < self.run.order[f"{place}.0"]
                counts["before" if first else "after"] += size
            else:
                raise RefusedError(f"{name} ({type(module).__name__})")
        return counts

    def _parallel(self, place: str, stack: nn.ModuleList) -> bool:
        """Whether attention and MLP read the same input."""
        first = f"{place}.0"
        named = {name: module for name, module in stack[0].named_children() if f"{first}.{name}" in self.run.order}
        mixers = [name for name, module in named.items() if _is_mixer(module)]
        mlps = [name for name, module in named.items() if not _is_mixer(module) and _linears(module)]
        if not mixers or not mlps:
            return False
        return self._origin(f"{first}.{mixers[0]}") == self._origin(f"{first}.{mlps[0]}")

    def _origin(self, name: str) -> int | None:
        """The tensor that a module reads; behind a norm, the norm's."""
        tensor = self.run.sources.get(name)
        maker = self.run.results.get(tensor or 0)
        if maker is not None and _is_norm(self.model.get_submodule(maker)):
            return self.run.sources.get(maker)
        return tensor

    def _layer(self, place: str, layer: nn.Module) -> LayerSpec:
        mixers = [name for name, module in layer.named_modules() if name and _is_mixer(module)]
        mixers = [name for name in mixers if not any(name.startswith(f"{other}.") for other in mixers)]
        mixers = [name for name in mixers if f"{place}.{name}" in self.run.order]
        if len(mixers) > 1:
            raise RefusedError(f"{' and '.join(mixers)}: two mixers in one layer")
        mixer = self._mixer(place, mixers[0], layer.get_submodule(mixers[0])) if mixers else None
        inside = f"{mixers[0]}." if mixers else "-"
        parts = {name: module for name, module in layer.named_modules() if not f"{name}.".startswith(inside)}
        spec = self._mlp(place, parts)
        norms = [name for name, module in parts.items() if _is_norm(module) and _size(module) in (0, self._hidden())]
        inner = [name for name, one in parts.items() if re.search("HyperConnection|Router", type(one).__name__)]
        norms = [name for name in norms if f"{place}.{name}" in self.run.order and name.rpartition(".")[0] not in inner]
        start = self._start(f"{place}.{mixers[0]}") if mixers else -1
        before = sum(self.run.order[f"{place}.{name}"] < start for name in norms)
        passes = self._hyper(parts)
        spec = replace(
            spec,
            mixer=mixer,
            norms_before_mixer=before + passes,
            norms_after_mixer=len(norms) - before + passes,
        )
        matrices = spec.num_parameters
        return replace(spec, other_parameters=self._count(layer) - matrices)

    def _hidden(self) -> int:
        return int(self.config.hidden_size)

    def _start(self, place: str) -> int:
        return min(number for name, number in self.run.order.items() if name.startswith(f"{place}."))

    def _hyper(self, parts: Mapping[str, nn.Module]) -> int:
        """Passes over hidden_size that hyper-connections add to each block, in norms.

        A block reads hc_mult streams for their weights and again to write one, then reads all and its output and
        writes all: 4 hc_mult + 2 passes, less the 3 of a residual addition; a norm is two passes.
        """
        found = [module for module in parts.values() if "HyperConnection" in type(module).__name__]
        if not found:
            return 0
        self.notes.append(HYPER)
        self._streams += sum(one.numel() for module in found for one in module.parameters() if one.dim() == 2)
        passes: int = (4 * self.config.hc_mult - 1) // 2
        return passes

    def _gemm(self, name: str, module: nn.Module, split: Split = "whole") -> Gemm:
        outputs, inputs = self.sizes.of(module.weight)
        if type(module).__name__ == "Conv1D":
            outputs, inputs = inputs, outputs
        return Gemm(name=name, in_features=inputs, out_features=outputs, bias=_has_bias(module), split=split)

    # MLPs and experts

    def _mlp(self, place: str, parts: Mapping[str, nn.Module]) -> LayerSpec:
        linears: dict[str, Any] = {}
        cube = ""
        router: Gemm | None = None
        for name, module in parts.items():
            own = {key: one for key, one in module._parameters.items() if one is not None}
            if f"{place}.{name}" not in self.run.order and own:
                self.notes.append(f"{re.sub(r'[.].*', '', name)} is not run in a prefill")
            elif any(one.dim() == 3 for one in own.values()):
                cube = name
            elif _is_linear(module):
                linears |= {name: module} if module.weight.numel() else {}
            elif "router" in type(module).__name__.lower() and "weight" in own:
                router = self._gemm(name, module)
            elif not all(one.dim() == 1 for one in own.values()) and not _is_other(module):
                raise RefusedError(f"{name} ({type(module).__name__})")
        if not cube:
            return LayerSpec(mixer=None, mlp=self._split(place, linears), gated_mlp=self._gated(place, linears))
        experts = parts[cube]
        count = self.sizes.of(next(one for one in experts.parameters() if one.dim() == 3))[0]
        if router is None:
            name = next((name for name, one in linears.items() if one.weight.shape[0] == count), "")
            if not name:
                raise RefusedError(f"{cube} ({type(experts).__name__}): no router")
            router = self._gemm(name, linears.pop(name))
        return LayerSpec(
            mixer=None,
            mlp=self._experts(cube, experts),
            gated_mlp=bool(getattr(experts, "has_gate", True)),
            num_experts=count,
            num_experts_per_tok=self._top_k(parts, router.name, cube),
            router=router,
            shared_mlp=self._split(place, linears),
        )

    def _top_k(self, parts: Mapping[str, nn.Module], router: str, cube: str) -> int:
        names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "top_k")
        places = (parts[router], parts.get(router.rpartition(".")[0]), parts.get(cube.rpartition(".")[0]))
        for one in (*places, self.config):
            count: int | None = _attribute(one, "top_k", *names) if one is not None else None
            if count is not None:
                return count
        raise RefusedError(f"{router}: how many experts a token passes through")

    def _experts(self, cube: str, experts: nn.Module) -> tuple[Gemm, ...]:
        """Each matrix of one expert; a gate in one matrix with its projection counts as two."""
        names = [name for name, _ in experts.named_parameters()]
        transposed = getattr(experts, "is_transposed", None)
        gemms = []
        for key, one in experts.named_parameters():
            if one.dim() != 3:
                continue
            outputs, inputs = self.sizes.of(one)[1:]
            towards_hidden = (outputs if "down" in key else inputs) == self.config.hidden_size
            if transposed or (transposed is None and not towards_hidden):
                outputs, inputs = inputs, outputs
            bias = any(name.startswith(key) and "bias" in name for name in names)
            if not key.startswith("gate_up"):
                gemms.append((key, inputs, outputs, bias))
                continue
            inner = _symbol(int(outputs) // 2, *(getattr(experts, name, None) for name in _INNER))
            gemms += [("gate_proj", inputs, inner, bias), ("up_proj", inputs, inner, bias)]
        return tuple(
            Gemm(
                name=f"{cube}.0.{key}",
                in_features=inputs,
                out_features=outputs,
                bias=bias,
                split="rows" if "down" in key else "columns",
            )
            for key, inputs, outputs, bias in gemms
        )

    def _split(self, place: str, linears: Mapping[str, nn.Module]) -> tuple[Gemm, ...]:
        """Matrices of MLPs: of each module the last that runs is split by rows, those before it by columns."""
        gemms = []
        for name, module in sorted(linears.items(), key=lambda item: not _SERVES_ALL.search(item[0])):
            parent = name.rpartition(".")[0]
            order = {
                self.run.order[f"{place}.{other}"]: other
                for other in linears
                if other.rpartition(".")[0] == parent and not _SERVES_ALL.search(other)
            }
            split: Split = "columns"
            if module.weight.shape[0] == 1 or _SERVES_ALL.search(name):
                split = "whole"
            elif order[max(order)] == name:
                split = "rows"
            gemms.append(self._gemm(name, module, split))
        return tuple(gemms)

    def _gated(self, place: str, linears: Mapping[str, nn.Module]) -> bool:
        gemms = self._split(place, linears)
        widths = [gemm.out_features for gemm in gemms if gemm.split == "columns"]
        return bool(gemms) and sum(widths) == 2 * gemms[-1].in_features

    # Mixers

    def _mixer(self, place: str, name: str, module: nn.Module) -> Mixer:
        linears = {f"{name}.{path}": one for path, one in _linears(module).items()}
        linears = {path: one for path, one in linears.items() if f"{place}.{path}" in self.run.order}
        for path, one in module.named_modules():
            wide = [key for key, own in one._parameters.items() if own is not None and own.dim() > 1]
            if wide and not _is_linear(one) and not _is_norm(one) and not _is_other(one):
                raise RefusedError(f"{name}.{path} ({type(one).__name__})")
        last = max(linears, key=lambda path: self.run.order[f"{place}.{path}"])
        if any(path.endswith("A_log") for path, _ in module.named_parameters()):
            return self._recurrence(name, module, linears, last)
        indexer = self._indexer(name, module, linears)
        if hasattr(module, "compressor") or "o_a_proj" in {path.rpartition(".")[2] for path in linears}:
            return self._compressed(name, module, linears, indexer)
        if getattr(module, "kv_b_proj", None) is not None:
            return self._latent(name, module, linears, indexer, f"{place}.{name}")
        return self._attention(place, name, module, linears, last, indexer)

    def _attention(
        self, place: str, name: str, module: nn.Module, linears: Any, last: str, indexer: Indexer | None
    ) -> Attention:
        config = self.config
        heads = _attribute(module, *_HEADS) or config.num_attention_heads
        output = self._gemm(last, linears.pop(last), "rows")
        roles = {path: path.rpartition(".")[2] for path in linears}
        queries = [path for path, leaf in roles.items() if _QUERIES.match(leaf)]
        keys = [path for path, leaf in roles.items() if _KEYS_VALUES.match(leaf)]
        gates = [path for path, leaf in roles.items() if _GATES.search(leaf)]
        others = [path for path in roles if path not in (*queries, *keys, *gates)]
        head_dim = _attribute(module, "head_dim", "head_size", "attention_head_size")
        head_dim = head_dim or _attribute(config, "head_dim") or config.hidden_size // heads
        value_dim = _symbol(int(output.in_features) // int(heads), _attribute(module, "v_head_dim"), head_dim)
        splits: dict[str, Split] = dict.fromkeys(queries, "columns") | dict.fromkeys(gates, "columns")
        splits |= dict.fromkeys(keys, "kv_heads")
        gate = bool(gates)
        if queries and not others and keys:
            width = int(self._gemm(keys[0], linears[keys[0]]).out_features)
            kv_heads = width // int(head_dim)
            gate |= self._gemm(queries[0], linears[queries[0]]).out_features == 2 * heads * head_dim
        elif len(others) == 1 and not queries and not keys:
            width = int(self._gemm(others[0], linears[others[0]]).out_features) - int(heads * head_dim)
            kv_heads = width // int(head_dim + value_dim)
            splits[others[0]] = "qkv_heads"
        else:
            raise RefusedError(f"{', '.join(others or roles)}: a projection of {type(module).__name__}")
        known = [_attribute(one, *_KV_HEADS) for one in (module, config)]
        ordered = sorted(linears, key=lambda path: path not in queries)
        projections = tuple(self._gemm(path, linears[path], splits[path]) for path in ordered)
        window, chunk = self._window(module)
        return Attention(
            projections=projections,
            output=(output,),
            num_attention_heads=heads,
            num_key_value_heads=_symbol(kv_heads, *known, heads),
            head_dim=head_dim,
            v_head_dim=value_dim,
            sliding_window=window,
            attention_chunk=chunk,
            qk_norm=any(_is_norm(one) and re.match("q|query", path) for path, one in module.named_modules()),
            rotary=f"{place}.{name}" in self.run.rotary,
            gate=gate,
            indexer=indexer,
        )

    def _window(self, module: nn.Module) -> tuple[int | None, int | None]:
        """Sliding window and chunk of the layer's cache."""
        number = next((one.layer_idx for one in module.modules() if _attribute(one, "layer_idx") is not None), None)
        layers = getattr(self.run.cache, "layers", [])
        if number is None or number >= len(layers):
            return None, None
        window = getattr(layers[number], "sliding_window", None)
        if window is None or not getattr(layers[number], "is_sliding", False):
            return None, None
        window = _symbol(int(window), *(getattr(self.config, name, None) for name in _WINDOWS))
        types: Any = getattr(self.config, "layer_types", None)
        chunked = bool(types) and types[number] == "chunked_attention"
        return (None, window) if chunked else (window, None)

    def _latent(
        self, name: str, module: nn.Module, linears: Any, indexer: Indexer | None, place: str
    ) -> LatentAttention:
        expand, output = linears.pop(f"{name}.kv_b_proj"), linears.pop(f"{name}.o_proj")
        splits: dict[str, Split] = {"q_proj": "columns", "q_b_proj": "columns"}
        leaves = {path: path.rpartition(".")[2] for path in linears}
        gate = [path for path, leaf in leaves.items() if _GATES.search(leaf)]
        for path, leaf in leaves.items():
            if leaf not in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa") and path not in gate:
                raise RefusedError(f"{path}: a projection of {type(module).__name__}")
        return LatentAttention(
            projections=tuple(
                self._gemm(path, one, "columns" if path in gate else splits.get(leaves[path], "whole"))
                for path, one in linears.items()
            ),
            expand=self._gemm(f"{name}.kv_b_proj", expand, "columns"),
            output=(self._gemm(f"{name}.o_proj", output, "rows"),),
            num_attention_heads=_attribute(module, *_HEADS) or self.config.num_attention_heads,
            kv_lora_rank=module.kv_lora_rank,
            qk_nope_head_dim=module.qk_nope_head_dim,
            qk_rope_head_dim=module.qk_rope_head_dim,
            v_head_dim=module.v_head_dim,
            indexer=indexer,
            rotary=place in self.run.rotary,
            gate=bool(gate),
        )

    def _indexer(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> Indexer | None:
        """What chooses keys; its projections leave `linears`."""
        if getattr(module, "skip_topk", False):
            self.notes.append(SHARED_INDEXERS)
            assert self._choice is not None
            return replace(self._choice, projections=(), shared=True)
        own = sorted(
            (path for path in linears if ".indexer." in path), key=lambda path: "kv_proj" in path or "gate_proj" in path
        )
        found = next((one for path, one in module.named_modules() if path.rpartition(".")[2] == "indexer"), None)
        if found is None:
            return None
        heads, head_dim = _attribute(found, *_HEADS), found.head_dim
        blocks = _attribute(found, "topk_blocks")
        by_kv_head = blocks is not None and heads == self.config.num_key_value_heads
        splits: dict[str, Split] = {path: "kv_heads" for path in own if by_kv_head and path.endswith("q_proj")}
        self._choice = Indexer(
            num_heads=heads,
            head_dim=head_dim,
            top_k=_attribute(found, "index_topk", "topk") if blocks is None else blocks * found.block_size,
            block=1 if blocks is None else found.block_size,
            projections=tuple(self._gemm(path, linears.pop(path), splits.get(path, "whole")) for path in own),
            # In FP8 with a scale of fp32 for 128 elements, as vLLM and SGLang cache it; of blocks in half precision.
            key_bytes=head_dim + 4 * -(-head_dim // 128) if blocks is None else 2 * head_dim,
        )
        return self._choice

    def _compressed(self, name: str, module: nn.Module, linears: Any, indexer: Indexer | None) -> CompressedAttention:
        last, grouped = f"{name}.o_b_proj", f"{name}.o_a_proj"
        back, first = self._gemm(last, linears.pop(last), "rows"), self._gemm(grouped, linears.pop(grouped), "columns")
        groups = module.o_a_proj.n_groups
        compressor = getattr(module, "compressor", None)
        return CompressedAttention(
            projections=tuple(
                self._gemm(path, one, "columns" if path.endswith(".q_b_proj") else "whole")
                for path, one in linears.items()
            ),
            output=(replace(first, in_features=first.in_features * groups, groups=groups), back),
            num_attention_heads=module.num_heads,
            head_dim=module.head_dim,
            rotary_dim=self.config.qk_rope_head_dim,
            sliding_window=module.sliding_window,
            compress_ratio=0 if compressor is None else compressor.compress_rate,
            indexer=indexer,
        )

    def _recurrence(self, name: str, module: nn.Module, linears: Any, last: str) -> Recurrence:
        output = self._gemm(last, linears.pop(last), "rows")
        leaves = {path.rpartition(".")[2] for path in linears}
        kind: RecurrenceKind
        if hasattr(module, "num_k_heads"):
            kind, sizes = "gated_delta", ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        elif hasattr(module, "forget_gate"):
            kind, sizes = "kda", ("num_heads", "num_heads", "head_dim", "head_dim")
        elif leaves == {"in_proj"} and hasattr(module, "n_groups"):
            kind, sizes = "mamba2", ("n_groups", "num_heads", "ssm_state_size", "head_dim")
        else:
            raise RefusedError(f"{name} ({type(module).__name__})")
        key_heads, value_heads, key_dim, value_dim = (getattr(module, size) for size in sizes)
        return Recurrence(
            kind=kind,
            projections=tuple(
                self._gemm(path, one, "whole" if path.endswith("_a_proj") else "columns")
                for path, one in linears.items()
            ),
            output=(output,),
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_head_dim=key_dim,
            value_head_dim=value_dim,
            conv_channels=module.conv_dim,
            conv_kernel=module.conv_kernel_size,
        )

    # Gates

    def compare(self, spec: ModelSpec) -> None:
        """Refuse a description that differs from the class in parameters or in FLOPs."""
        has_head = self.model.get_output_embeddings() is not None
        parameters = spec.num_parameters
        if not has_head and not spec.tie_word_embeddings:
            parameters -= spec.lm_head.num_parameters
        self._equal("parameters", parameters, sum(one.numel() for one in self.model.parameters()))
        matrices = spec.lm_head.num_weights if has_head else 0
        batched = 0
        experts = 0
        for layer in spec.layers:
            matrices += sum(one.num_weights for one in layer.matrices if one.groups == 1)
            batched += sum(one.num_weights for one in layer.matrices if one.groups > 1)
            weights = sum(one.num_weights for one in layer.mlp)
            experts += layer.num_experts_per_tok * weights
            matrices += 0 if layer.num_experts else weights
            if isinstance(layer.mixer, Attention):
                batched += TOKENS * layer.mixer.num_attention_heads * (layer.mixer.head_dim + layer.mixer.v_head_dim)
        self._equal("FLOPs of matrices", 2 * TOKENS * (matrices + self._streams), self.run.matrix_flops)
        if all(
            isinstance(one, Attention) and one.indexer is None for one in (layer.mixer for layer in spec.layers) if one
        ):
            flops = 2 * TOKENS * (batched + experts)
            every = {layer.num_experts // layer.num_experts_per_tok for layer in spec.layers if layer.num_experts}
            if len(every) == 1 and flops != self.run.batched_flops:  # the class runs all experts for all tokens
                flops = 2 * TOKENS * (batched + experts * every.pop())
            self._equal("FLOPs of attention and experts", flops, self.run.batched_flops)

    def _equal(self, what: str, ours: int, theirs: int) -> None:
        if ours != theirs:
            raise RefusedError(f"{int(ours)} {what}, of {theirs} of {type(self.model).__name__}")


def _size(module: nn.Module) -> int:
    return next((int(one.shape[0]) for one in module.parameters()), 0)


def _has_bias(module: nn.Module | None) -> bool:
    return getattr(module, "bias", None) is not None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not _linears(module)


def _is_other(module: nn.Module) -> bool:
    """Whether tokens are not multiplied with the module's parameters of several dimensions."""
    kinds = ("HyperConnection", "Compressor", "Indexer", "Statics", "ForgetGate")
    return isinstance(module, nn.Conv1d) or any(kind in type(module).__name__ for kind in kinds)


def _is_mixer(module: nn.Module) -> bool:
    if any(path.endswith("A_log") for path, _ in module.named_parameters()):
        return (
            not any(isinstance(one, nn.ModuleList) for one in module.children())
            and "Layer" not in type(module).__name__
        )
    return bool(re.search("Attention|Attn", type(module).__name__)) and bool(_linears(module))


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    return {path: one for path, one in module.named_modules() if _is_linear(one)}
