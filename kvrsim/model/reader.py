"""Read a ModelSpec from transformers' own class, built without memory and run once without values.

The reader does not depend on names of model families. The class is built on torch's meta device, where it runs a
prefill of a few tokens. A trace of the products shows the weights that tokens are multiplied with, their order, and the
modules that multiply activations with each other. Three checks compare the result with the class: its parameters, the
FLOPs of each weight and of each mixer as torch's FlopCounterMode counts them, and the bytes of its cache. A part that
the reader cannot describe is refused by its name.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import MODEL_MAPPING, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from kvrsim.model.gemm import Gemm, Split
from kvrsim.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENS = 16  # tokens of the prefill that the reader runs
HYPER = "hyper-connections are counted as element-wise traffic of the residual streams"
REPEATED = "products of less than 0.1 % of the FLOPs that a layer runs several times are counted once"
SHARED_INDEXERS = "layers with a shared indexer take the choice of the layer before them at no cost"
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.randn, torch.rand)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
# Attributes of transformers' modules and configurations, by the names of fields here
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "num_heads": _HEADS,
    "num_attention_heads": _HEADS,
    "rotary_dim": ("qk_rope_head_dim",),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "head_size", "attention_head_size"),
    "num_experts_per_tok": (
        "top_k",
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_top_k",
        "moe_topk",
    ),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length"),
    "top_k": ("index_topk", "topk"),
    "compress_ratio": ("compress_rate",),
    "streams": ("hc_mult", "altup_num_inputs"),
}
_EXPERT_WIDTHS = ("intermediate_dim", "expert_dim", "intermediate_size")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size")
_QUERIES = re.compile(r"^(?:project_|W)?(?:q|query)(?:_proj|_lin)?$")
_KEYS_VALUES = re.compile(r"^(?:project_|W)?(?:k|v|key|value)(?:_proj|_lin)?$")
_GATES = re.compile(r"gate|^g_proj$")
_SERVES_ALL = re.compile(r"latent|routed_expert")  # projections to the width of routed experts and back
_MIXERS = re.compile("(Attention|Mixer)(?!.*Layer)|Attn|RecurrentBlock|LSTMLayer|MambaLayer|DeltaNet|ShortConv")
# Attributes of a module with the sizes of its state, by kind: heads of keys and of values, and their widths.
_STATE_SIZES: Mapping[str, tuple[str, str, str, str]] = {
    "gated_delta": ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    "kda": ("num_heads", "num_heads", "head_dim", "head_dim"),
    "mamba2": ("n_groups", "num_heads", "ssm_state_size", "head_dim"),
}
_STREAMS = re.compile("HyperConnection|HyperHead|AltUp")  # classes with weights of residual streams
_WITH_NORMS = re.compile("HyperConnection|AltUp|Router")  # classes with norms of their own


class RefusedError(Exception):
    """Error for a class that the reader cannot describe; the message names the submodule."""


class _Sizes(TorchFunctionMode):  # type: ignore[misc]  # torch has no types
    """Sizes with which new tensors are created; they are symbols where the configuration has symbols."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _FACTORIES:
            size = args
            if "size" in kwargs:
                size = kwargs["size"]
            elif args and isinstance(args[0], (tuple, list)):
                size = args[0]
            if len(size) == result.dim():
                self._known[_storage(result)] = (tuple(size), result)
        return result

    def of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The tensor's shape, with symbols where they are known."""
        size, _ = self._known.get(_storage(tensor), ((), tensor))
        if tuple(map(int, size)) == tuple(tensor.shape):
            return size
        return tuple(tensor.shape)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Values(TorchDispatchMode):  # type: ignore[misc]
    """Zeros where a class reads a value of a tensor, since meta tensors have no values."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        if func is torch.ops.aten.nonzero.default:
            return torch.empty((0, args[0].dim()), dtype=torch.long, device="meta")
        return func(*args, **(kwargs or {}))


class _Trace(FlopCounterMode):  # type: ignore[misc]
    """Modules and products of a prefill of TOKENS tokens, in order of execution."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(display=False)
        self.weights = {_storage(weight): name for name, weight in model.named_parameters() if weight.dim() > 1}
        self.order: dict[str, int] = {}  # positions of the first calls of modules and products of weights, by name
        self.products: Counter[int] = Counter()  # FLOPs of products with a weight, by the weight's storage
        self.uses: set[tuple[int, str]] = set()  # storages of weights, each with the modules that ran while it was used
        self.others: Counter[str] = Counter()  # FLOPs of products of activations with each other, by module
        # First input tensor of a module, or what a norm made it from, by module.
        self.inputs: dict[str, torch.Tensor | None] = {}
        self.outputs: dict[str, Any] = {}  # outputs of modules, by name
        self.rotary: set[str] = set()  # modules in which queries and keys are rotated
        self.alibi = False
        self.cache: Any = None
        self._running = [""]
        # Input and output of norms, by the id of the output.
        self._before_norm: dict[int, tuple[torch.Tensor | None, object]] = {}
        with ExitStack() as stack:
            for name, module in model.named_modules(remove_duplicate=False):
                before = module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(partial(self._end, name)).remove)
            for source in {type(module).__module__ for module in model.modules()}:
                for name, function in list(vars(sys.modules[source]).items()):
                    if callable(function) and not isinstance(function, type) and re.search("apply.*rotary|alibi", name):
                        stack.enter_context(patch.object(sys.modules[source], name, self._watch(function, name)))
            stack.enter_context(patch.object(torch.distributions.Distribution, "_validate_args", False))
            for context in (torch.no_grad(), _Values(), self):
                stack.enter_context(context)
            output = model(input_ids=torch.zeros((1, TOKENS), dtype=torch.long, device="meta"), use_cache=True)
        self.cache = getattr(output, "past_key_values", None) or getattr(output, "cache_params", None)

    def _begin(self, name: str, _: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Note a module that begins: its place in the order, and its first input tensor as it was before a norm."""
        self.order.setdefault(name, len(self.order))
        self._running.append(name)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        first = None
        if tensors:
            first = tensors[0]
        if id(first) in self._before_norm:
            first, _ = self._before_norm[id(first)]
        self.inputs.setdefault(name, first)

    def _end(self, name: str, module: nn.Module, args: Sequence[object], output: object) -> None:
        """Note a module that ends: its output and, if it is a norm, what it made the output from."""
        self._running.pop()
        self.outputs[name] = output
        if "norm" in type(module).__name__.lower():
            self._before_norm[id(output)] = (self.inputs[name], output)

    def _watch(self, function: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.rotary.update(self._running)
            self.alibi |= "alibi" in name
            return function(*args, **kwargs)

        return call

    def _count_flops(
        self, func_packet: Callable[..., object], out: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        if func_packet in self.flop_registry and "convolution" not in str(func_packet):
            flops = self.flop_registry[func_packet](*args, **kwargs, out_val=out)
            factors = [_storage(factor) for factor in args if isinstance(factor, torch.Tensor)][-2:]
            weights = [storage for storage in factors if storage in self.weights]
            if not weights:
                self.others[self._running[-1]] += flops
            else:
                weight = weights[0]
                self.products[weight] += flops
                self.uses.update((weight, name) for name in self._running)
                self.order.setdefault(self.weights[weight], len(self.order))
        return super()._count_flops(func_packet, out, args, kwargs)

    def starts(self, place: str) -> int:
        """Position of the first module or product inside a module, in the order of execution."""
        return min(number for name, number in self.order.items() if _inside(name, place))

    def within(self, place: str) -> int:
        """FLOPs of products of activations inside a module."""
        return sum(flops for name, flops in self.others.items() if _inside(name, place))


def build(keys: Mapping[str, Any]) -> tuple[PreTrainedConfig, nn.Module, _Sizes]:
    """The configuration, the class on the meta device, and the sizes of its tensors."""
    keys = dict(keys)
    for key in {"hidden_act", "hidden_activation", "activation_function"} & keys.keys():
        if keys[key] not in ACT2FN:  # transformers lacks this name: all element-wise functions cost the same
            keys[key] = "silu"
    model_type = keys.pop("model_type")
    switches = {field.name for field in fields(CONFIG_MAPPING[model_type]) if type(field.default) is bool}
    keys |= {key: bool(value) for key, value in keys.items() if key in switches and isinstance(value, int)}
    config = CONFIG_MAPPING[model_type].from_dict(keys)
    text = config.get_text_config(decoder=True)
    if text is not config:  # a type with several models: the keys are those of its text model
        config = type(text).from_dict(keys)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"), _Sizes() as sizes:
        try:
            model = AutoModelForCausalLM.from_config(config, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model = _text_class(model_type, config)._from_config(config, **options)
    for module in model.modules():  # run experts as a batch where transformers runs them one by one
        routed = hasattr(module, "gate_up_proj") and len(signature(module.forward).parameters) == 3
        if routed and hasattr(module, "num_experts") and not hasattr(module, "has_gate"):
            for name in ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel"):
                setattr(module, name, False)
            module.has_gate = module.is_concatenated = True
            module._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
            module.forward = partial(batched_mm_experts_forward, module)
    return config, model.eval(), sizes


def _text_class(model_type: str, config: PreTrainedConfig) -> Any:
    """The class of a text model that transformers has only inside larger models."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    modules = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    stem = type(config).__name__.removesuffix("Config")
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    for name in (f"{stem.removesuffix('Text')}ForCausalLM", f"{stem}ForCausalLM", f"{stem}Model", usual):
        if hasattr(modules, name):
            return getattr(modules, name)
    raise RefusedError(f"transformers has no text model of {type(config).__name__}")


def causal_types() -> list[str]:
    """Model types for which transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_class(keys: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that transformers builds from a configuration's keys; RefusedError if it cannot be described."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # warnings about missing kernels are not relevant here
    try:
        return _Reader(*build(keys)).spec(name)
    except RefusedError:
        raise
    except Exception as error:  # any exception of transformers for inconsistent numbers
        lines = str(error).strip().splitlines() or [""]
        raise RefusedError(f"transformers: {type(error).__name__} {lines[-1].strip()[:200]}") from error
    finally:
        logging.set_verbosity(verbosity)


def unknown_keys(keys: Mapping[str, Any]) -> list[str]:
    """The keys with a value that the configuration of their type does not define: transformers does not use them."""
    cls = CONFIG_MAPPING[keys["model_type"]]
    known = {*signature(cls).parameters, *getattr(cls, "attribute_map", {}), *vars(cls())}
    return [key for key, value in keys.items() if value and key not in known]


def class_name(model_type: str) -> str | None:
    """The name of the class of a type; None if it has none."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if isinstance(name, str):
        return name
    return None


def _symbol(value: int, *candidates: object) -> int:
    """The first candidate that equals the value, else the value; a candidate may be a symbol."""
    for candidate in candidates:
        if type(candidate) is not bool and isinstance(candidate, int) and candidate == value:
            return candidate
    return value


def _number(field: str, *sources: object) -> Any:
    """The whole number of a field (see _ATTRIBUTES), from the first of the sources that has it; else None."""
    for source in sources:
        for name in _ATTRIBUTES.get(field, (field,)):
            try:
                value = getattr(source, name, None)
            except RuntimeError:  # the value differs from layer to layer
                continue
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _numbers(kind: type[Mixer], *sources: object) -> Any:
    """All whole numbers of a kind of mixer."""
    return {field.name: _number(field.name, *sources) or 0 for field in fields(kind) if field.type == "int"}


@dataclass(kw_only=True)
class _LayerModules:
    """A layer of the class, and the mixer that the reader is describing."""

    place: str  # name of the layer in the model
    named: dict[str, nn.Module]  # modules in the layer, by name
    gemms: dict[str, Gemm]  # weights of its products, by the name of the module or of the parameter
    weights: dict[str, nn.Parameter]
    name: str = ""  # name of the mixer in the layer
    module: Any = None  # the mixer
    inputs: list[str]  # matrices of the mixer except the last in order of execution
    last: str = ""

    @property
    def mixer_place(self) -> str:
        """The mixer's name in the model."""
        return f"{self.place}.{self.name}"

    def projections(self, columns: str) -> tuple[Gemm, ...]:
        """The mixer's inputs, split by columns if the name matches the pattern, else whole."""
        gemms = []
        for path in self.inputs:
            if re.search(columns, path):
                gemms.append(self.gemm(path, "columns"))
            else:
                gemms.append(self.gemm(path))
        return tuple(gemms)

    def gemm(self, path: str, split: Split = "whole") -> Gemm:
        return replace(self.gemms[path], split=split)


class _Reader:
    def __init__(self, config: PreTrainedConfig, model: nn.Module, sizes: _Sizes) -> None:
        self.config = config
        self.model = model
        self.sizes = sizes
        self.trace = _Trace(model)
        self.notes: list[str] = []
        self._counted_flops: Counter[int] = Counter()  # FLOPs of products in the description, by the weight's storage
        self._counted_places: list[str] = []  # modules whose products of activations are in the description
        self._earlier: set[int] = set()  # parameters that earlier layers hold
        self._choice: Indexer | None = None  # indexer of the last layer that chooses keys

    def spec(self, name: str) -> ModelSpec:
        config = self.config
        model = self.model
        place, stack = self._stack()
        tokens = model.get_input_embeddings()
        head = model.get_output_embeddings()
        vocab, hidden = self.sizes.of(tokens.weight)
        _equal("features of the embedding", hidden, config.hidden_size)
        layers: list[LayerSpec] = []
        for number, module in enumerate(stack):
            layers += self._layer(f"{place}.{number}", module)
        outside = self._outside(place, tokens, head)
        if head is None:
            tied = bool(getattr(config, "tie_word_embeddings", False))
            rows = vocab
        else:
            tied = head.weight is tokens.weight
            rows = _symbol(int(head.weight.shape[0]), vocab, getattr(config, "vocab_size", None))
        spec = ModelSpec(
            name=name,
            model_type=config.model_type,
            num_hidden_layers=_symbol(len(layers), config.num_hidden_layers, 2 * config.num_hidden_layers),
            hidden_size=hidden,
            intermediate_size=_number("intermediate_size", config) or _mlp_width(layers, hidden),
            vocab_size=vocab,
            max_position_embeddings=_number("max_position_embeddings", config),
            tie_word_embeddings=tied,
            alibi=self.trace.alibi,
            learned_positions=outside["positions"],
            parallel_attn=self._parallel(f"{place}.0", stack[0]),
            final_norm_parameters=outside["after"],
            embedding_norm_parameters=outside["before"],
            lm_head=Gemm(name="lm_head", in_features=hidden, out_features=rows, bias=_bias(head) is not None),
            layers=tuple(layers),
        )
        parameters = spec.num_parameters
        if head is None and not tied:  # the description has a head of its own, the class has none
            parameters -= spec.lm_head.num_parameters
        self._compare(parameters)
        return replace(spec, approximations=tuple(dict.fromkeys(self.notes)))

    def _compare(self, parameters: int) -> None:
        """Raise RefusedError where the description and the class differ in parameters or products."""
        _equal("parameters", parameters, sum(parameter.numel() for parameter in self.model.parameters()))
        for key, flops in self.trace.products.items():
            if 1000 * abs(flops - self._counted_flops[key]) > sum(self.trace.products.values()):
                _equal(f"FLOPs of {self.trace.weights[key]}", self._counted_flops[key], flops)
            elif flops != self._counted_flops[key]:
                self.notes.append(REPEATED)
        for where in self.trace.others:
            if not any(_inside(where, place) for place in self._counted_places):
                kind = type(self.model.get_submodule(where)).__name__
                raise RefusedError(f"{where} ({kind}): a product of activations")

    def _describe(self, weights: Iterable[torch.Tensor]) -> None:
        """Count the products of these weights as described: 2 FLOPs per weight and token."""
        for weight in weights:
            self._counted_flops[_storage(weight)] += 2 * TOKENS * weight.numel()

    def _stack(self) -> tuple[str, nn.ModuleList]:
        count = int(self.config.num_hidden_layers)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and f"{name}.0" in self.trace.order:
                return name, module
        raise RefusedError(f"no list of {count} layers")

    def _count(self, module: nn.Module) -> int:
        """Parameters that no earlier layer holds; sizes are symbols where a module's attributes have the same value."""
        total = 0
        for inside in module.modules():
            symbols = [value for value in vars(inside).values() if type(value) is not int and isinstance(value, int)]
            for parameter in _direct_parameters(inside).values():
                if id(parameter) in self._earlier:
                    continue
                self._earlier.add(id(parameter))
                elements = 1
                for size in self.sizes.of(parameter):
                    if type(size) is int:
                        size = _symbol(size, *symbols)
                    elements = elements * size
                total += elements
        return total

    def _outside(self, place: str, tokens: nn.Module, head: nn.Module | None) -> Counter[str]:
        """Number of parameters before the layers and after them, and rows of learned positions."""
        counts: Counter[str] = Counter()
        self._earlier |= set(map(id, tokens.parameters()))
        if head is not None:
            self._earlier |= set(map(id, head.parameters()))
            self._describe([head.weight])
        for name, module in self.model.named_modules():
            weights = [weight for weight in _direct_parameters(module).values() if id(weight) not in self._earlier]
            self._earlier |= set(map(id, weights))
            is_table = weights and isinstance(module, nn.Embedding) and name in self.trace.order
            if is_table and re.search("pos|wpe", name) and weights[0].shape[1] == self.config.hidden_size:
                counts["positions"] += self.sizes.of(weights[0])[0]
                continue
            is_first = self.trace.order.get(name, 0) < self.trace.order[f"{place}.0"]
            parameters = sum(prod(self.sizes.of(weight)) for weight in weights)
            if is_first:
                counts["before"] += parameters
            else:
                counts["after"] += parameters
            has_products = any(_storage(weight) in self.trace.products for weight in weights)
            for weight in weights:  # some of these products run for one token alone
                self._counted_flops[_storage(weight)] = self.trace.products[_storage(weight)]
            if has_products and not _STREAMS.search(type(module).__name__):
                self.notes.append(f"{re.sub(r'[.][0-9]+', '', name)} is counted by its parameters alone")
        return counts

    def _parallel(self, place: str, layer: nn.Module) -> bool:
        """Whether attention and MLP read the same input, or norms of the same input."""
        inputs: dict[bool, torch.Tensor | None] = {}  # first input of a mixer and of another module with products
        for name, module in layer.named_children():
            if self._has_products(module) and f"{place}.{name}" in self.trace.order:
                inputs.setdefault(_is_mixer(module), self.trace.inputs[f"{place}.{name}"])
        return len(inputs) == 2 and inputs[True] is inputs[False]

    def _has_products(self, module: nn.Module) -> bool:
        return any(weight.numel() > 0 and _storage(weight) in self.trace.products for weight in module.parameters())

    def _is_norm(self, module: nn.Module) -> bool:
        return "norm" in type(module).__name__.lower() and not self._has_products(module)

    # Layers

    def _layer(self, place: str, module: nn.Module) -> list[LayerSpec]:
        """Describe a layer. A layer with several mixers becomes one layer per mixer, in their order."""
        order = self.trace.order
        hidden = self.config.hidden_size
        if place not in order:
            self.notes.append("layers that a prefill of text does not run are counted by their parameters alone")
            other = self._count(module)
            return [LayerSpec(mixer=None, mlp=(), norms_before_mixer=0, norms_after_mixer=0, other_parameters=other)]
        layer = self._products(place, module)
        runs = {name: inner for name, inner in layer.named.items() if f"{place}.{name}" in order}
        mixers = [name for name, inner in runs.items() if name and _is_mixer(inner) and _within(layer.gemms, name)]
        mixers = [name for name in mixers if not any(name.startswith(f"{other}.") for other in mixers)]
        starts = {name: self.trace.starts(f"{place}.{name}") for name in mixers}
        mixers = sorted(mixers, key=starts.__getitem__)
        if len(mixers) > 1:
            self.notes.append(f"{' and '.join(mixers)} of one layer are counted as layers in a row")
        # Modules outside the mixers, and the number of the mixer that each belongs to: the last that starts before it.
        parts = {name: part for name, part in layer.named.items() if not any(_inside(name, mixer) for mixer in mixers)}
        numbers: dict[str, int] = {}
        for name in parts:
            begins = order.get(f"{place}.{name}", 0)
            numbers[name] = sum(begins >= starts[mixer] for mixer in mixers[1:])
        norms = [name for name in self._norms(parts, hidden) if name in runs]
        passes = self._hyper(place, parts)
        specs = []
        for index in range(max(1, len(mixers))):
            spec = self._mlp(layer, {name: inner for name, inner in parts.items() if numbers[name] == index})
            mixer_norms = [name for name in norms if numbers[name] == index]
            before = 0
            if mixers:
                before = sum(order[f"{place}.{name}"] < starts[mixers[index]] for name in mixer_norms)
                spec = replace(spec, mixer=self._mixer(layer, mixers[index]))
            after = len(mixer_norms) - before
            specs.append(replace(spec, norms_before_mixer=before + passes, norms_after_mixer=after + passes))
        for spec in specs:
            names = {gemm.name for gemm in (*spec.matrices, *spec.mlp)}
            self._describe(weight for name, weight in layer.weights.items() if name in names)
        matrices = sum(spec.num_parameters for spec in specs)
        specs[-1] = replace(specs[-1], other_parameters=self._count(module) - matrices)
        return specs

    def _norms(self, parts: Mapping[str, nn.Module], hidden: int) -> list[str]:
        """Names of norms of the residual stream: `hidden` features wide, and no part of a router or of streams."""
        outer = {name for name, part in parts.items() if _WITH_NORMS.search(type(part).__name__)}
        norms = []
        for name, part in parts.items():
            if not self._is_norm(part) or name.rpartition(".")[0] in outer:
                continue
            width = next((int(weight.shape[0]) for weight in part.parameters()), 0)
            if width in (0, hidden):
                norms.append(name)
        return norms

    def _products(self, place: str, module: nn.Module) -> _LayerModules:
        """The layer with the weights of its products; weights with three dimensions are blocks on a diagonal."""
        layer = _LayerModules(place=place, named=dict(module.named_modules()), gemms={}, weights={}, inputs=[])
        for inside, inner_module in layer.named.items():
            for key, weight in _direct_parameters(inner_module).items():
                if not weight.numel() or (_storage(weight), place) not in self.trace.uses:
                    continue
                name = _weight_name(inside, key)
                *groups, outputs, inputs = self.sizes.of(weight)
                if isinstance(inner_module, Conv1D):
                    outputs, inputs = inputs, outputs
                layer.weights[name] = weight
                layer.gemms[name] = Gemm(
                    name=name,
                    in_features=inputs * prod(groups),
                    out_features=outputs * prod(groups),
                    bias=key == "weight" and _bias(inner_module) is not None,
                    groups=prod(groups),
                )
        return layer

    def _when(self, layer: _LayerModules, name: str) -> int:
        return self.trace.order[self.trace.weights[_storage(layer.weights[name])]]

    def _hyper(self, place: str, parts: Mapping[str, nn.Module]) -> int:
        """Passes over hidden_size that hyper-connections add to each block, in units of a norm.

        A block reads hc_mult streams for their weights and again to write one; then it reads all streams and its
        output, and writes all streams: 4 hc_mult + 2 passes. They replace the 3 passes of a residual addition. A norm
        is two passes.
        """
        streams = [module for module in parts.values() if _STREAMS.search(type(module).__name__)]
        if not streams:
            return 0
        self.notes.append(HYPER)
        self.trace.others.pop(place, None)  # products that mix the streams
        for module in streams:
            self._describe(module.parameters())
        return int(4 * (_number("streams", self.config) or 1) - 1) // 2

    # MLPs and experts

    def _mlp(self, layer: _LayerModules, parts: Mapping[str, nn.Module]) -> LayerSpec:
        """A layer without a mixer, from the modules outside the mixers."""
        linears, cube = self._mlp_weights(layer, parts)
        if cube:
            return self._mixture(layer, parts, linears, cube)
        mlp = self._split(layer, linears)
        widths = [gemm.out_features for gemm in mlp if gemm.split == "columns"]
        return LayerSpec(mixer=None, mlp=mlp, gated_mlp=bool(mlp) and sum(widths) == 2 * mlp[-1].in_features)

    def _mlp_weights(self, layer: _LayerModules, parts: Mapping[str, nn.Module]) -> tuple[list[str], str]:
        """Names of the matrices outside the mixers and the experts, and of the module with experts ("": there is none).

        Modules that a prefill does not run give a note.
        """
        linears: list[str] = []
        cube = ""
        for name, module in parts.items():
            weights = _direct_parameters(module)
            runs = f"{layer.place}.{name}" in self.trace.order
            if _STREAMS.search(type(module).__name__):
                continue
            if runs and any(weight.dim() == 3 and min(weight.shape) > 1 for weight in weights.values()):
                cube = name
                continue
            paths = [_weight_name(name, key) for key in weights]
            linears += [path for path in paths if path in layer.gemms]
            outer = layer.named[name.partition(".")[0]]
            if weights and not runs and not self._has_products(outer) and not isinstance(module, nn.Conv1d):
                self.notes.append(f"{name.partition('.')[0]} is not run in a prefill")
        return linears, cube

    def _mixture(
        self, layer: _LayerModules, parts: Mapping[str, nn.Module], linears: list[str], cube: str
    ) -> LayerSpec:
        """A layer with routed experts, which are the module `cube`; linears: matrices of the router and shared experts.

        Raises RefusedError without a router, and where the class's products of experts are others.
        """
        experts = parts[cube]
        place = f"{layer.place}.{cube}"
        matrices = next(weight for weight in experts.parameters() if weight.dim() == 3)
        count = self.sizes.of(matrices)[0]
        router = self._router(layer, linears, count)
        if router is None:
            raise RefusedError(f"{cube} ({type(experts).__name__}): no router")
        shared = [path for path in linears if path != router]
        near = (router, router.rpartition(".")[0], cube.rpartition(".")[0])
        top_k = _number("num_experts_per_tok", *(parts.get(name) for name in near), self.config)
        if not top_k:
            raise RefusedError(f"{router}: how many experts a token passes through")
        mlp = self._experts(cube, experts)
        expert_flops = 2 * TOKENS * sum(gemm.num_weights for gemm in mlp)
        traced_flops = self.trace.within(place)
        expected_flops = top_k * expert_flops
        if _within(layer.gemms, cube):  # the trace counts products of weights apart
            expected_flops = 0
        if traced_flops not in (expected_flops, count * expert_flops):  # some classes run all experts
            _equal(f"FLOPs of {cube}", top_k * expert_flops, traced_flops)
        self._counted_places.append(place)
        self._describe(experts.parameters())  # these products run if a class runs all experts for all tokens
        return LayerSpec(
            mixer=None,
            mlp=mlp,
            gated_mlp=bool(getattr(experts, "has_gate", True)),
            num_experts=count,
            num_experts_per_tok=top_k,
            router=layer.gemm(router),
            shared_mlp=self._split(layer, shared),
        )

    def _router(self, layer: _LayerModules, linears: Sequence[str], count: int) -> str | None:
        """The matrix with one output per expert; of several, one that is called so."""
        routers = []
        for path in linears:
            gemm = layer.gemms[path]
            if gemm.groups == 1 and gemm.out_features == count:
                routers.append(path)
        return min(routers, key=lambda name: not re.search("router|gate", name), default=None)

    def _experts(self, cube: str, experts: nn.Module) -> tuple[Gemm, ...]:
        """Matrices of one expert; a gate and a projection in one matrix count as two."""
        names = [name for name, _ in experts.named_parameters()]
        transposed = getattr(experts, "is_transposed", None)
        gemms = []
        for key, weight in experts.named_parameters():
            if weight.dim() != 3:
                continue
            outputs, inputs = self.sizes.of(weight)[1:]
            is_down = "down" in key
            outer_width = inputs
            split: Split = "columns"
            if is_down:
                outer_width = outputs
                split = "rows"
            towards_hidden = outer_width == self.config.hidden_size
            if transposed or (transposed is None and not towards_hidden):
                outputs, inputs = inputs, outputs
            keys = [key]
            if key.startswith("gate_up"):
                outputs = _symbol(int(outputs) // 2, *(getattr(experts, name, None) for name in _EXPERT_WIDTHS))
                keys = ["gate_proj", "up_proj"]
            bias = any(name.startswith(key) and "bias" in name for name in names)
            for matrix in keys:
                name = f"{cube}.0.{matrix}"
                gemms.append(Gemm(name=name, in_features=inputs, out_features=outputs, bias=bias, split=split))
        return tuple(gemms)

    def _split(self, layer: _LayerModules, linears: list[str]) -> tuple[Gemm, ...]:
        """Matrices of MLPs: the last product of each module is split by rows, earlier products by columns."""
        linears = sorted(linears, key=lambda name: not _SERVES_ALL.search(name))
        last: dict[str, str] = {}
        for name in sorted(linears, key=lambda name: self._when(layer, name)):
            if not _SERVES_ALL.search(name):
                last[name.rpartition(".")[0]] = name
        gemms = []
        for name in linears:
            weight = layer.weights[name]
            split: Split = "columns"
            if weight.shape[0] == 1 or weight.dim() > 2 or _SERVES_ALL.search(name):
                split = "whole"
            elif name in last.values():
                split = "rows"
            gemms.append(layer.gemm(name, split))
        return tuple(gemms)

    # Mixers

    def _mixer(self, layer: _LayerModules, name: str) -> Mixer:
        paths = _within(layer.gemms, name)
        last = max(paths, key=lambda path: self._when(layer, path))
        inputs = [path for path in paths if path != last]
        layer = replace(layer, name=name, module=layer.named[name], inputs=inputs, last=last)
        self._counted_places.append(layer.mixer_place)
        decays = any(path.endswith("A_log") for path, _ in layer.module.named_parameters())
        states = self._states(layer, decays)
        if states or decays or "ShortConv" in type(layer.module).__name__:
            return self._recurrence(layer, states)
        indexer = self._indexer(layer)
        if hasattr(layer.module, "compressor") or f"{name}.o_a_proj" in paths:
            return self._compressed_attention(layer, indexer)
        if getattr(layer.module, "kv_b_proj", None) is not None:
            return self._latent(layer, indexer)
        return self._attention(layer, indexer)

    def _cache_of(self, module: nn.Module) -> Any:
        """The layer of the class's cache that a mixer writes; None if it writes no cache."""
        layers = getattr(self.trace.cache, "layers", [])
        for inside in module.modules():
            if _number("layer_idx", inside) is not None:
                if 0 <= inside.layer_idx < len(layers):
                    return layers[inside.layer_idx]
                return None
        return None

    def _states(self, layer: _LayerModules, decays: bool) -> list[torch.Tensor]:
        """States of a mixer: in the class's cache, in the mixer itself, or returned with its output."""
        module = layer.module
        cache = getattr(self._cache_of(module), "recurrent_states", None)
        if isinstance(cache, dict):
            cache = cache.values()
        states = [state for state in cache or () if state is not None]
        if states and (decays or "Attention" not in type(module).__name__):  # a layer with two mixers has one cache
            return states
        states = [inside.recurrent_states for inside in module.modules() if hasattr(inside, "recurrent_states")]
        number = _number("layer_idx", module)
        linear = getattr(self.trace.cache, "linear_cache", ())
        if number in range(len(linear)) and isinstance(linear[number], torch.Tensor):
            states.append(linear[number])
        output = self.trace.outputs.get(layer.mixer_place)
        if states or not re.search("LSTM|Rwkv", type(module).__name__) or not isinstance(output, tuple):
            return states
        count = int(self.config.num_hidden_layers)
        for state in output[1] or ():
            if not isinstance(state, torch.Tensor):
                continue
            if state.dim() == 3 and state.shape[-1] == count:  # the states of all layers, the layer last
                state = state[..., 0]
            states.append(state)
        return states

    def _attention(self, layer: _LayerModules, indexer: Indexer | None) -> Attention:
        config = self.config
        module = layer.module
        cached = self._cache_of(layer.module)
        heads = _number("num_attention_heads", module, config)
        output = layer.gemm(layer.last, "rows")
        leaves = {path: path.removesuffix(".linear").rpartition(".")[2] for path in layer.inputs}
        splits: dict[str, Split] = dict.fromkeys(leaves, "qkv_heads")
        splits |= {path: "kv_heads" for path, leaf in leaves.items() if _KEYS_VALUES.match(leaf)}
        queries = [path for path, leaf in leaves.items() if _QUERIES.match(leaf)]
        gates = [path for path, leaf in leaves.items() if _GATES.search(leaf)]
        splits |= dict.fromkeys((*queries, *gates), "columns")
        keys = [path for path, split in splits.items() if split == "kv_heads"]
        fused = [path for path, split in splits.items() if split == "qkv_heads"]
        if fused and (len(fused) > 1 or queries or keys):
            raise RefusedError(f"{', '.join(fused)}: a projection of {type(module).__name__}")
        head_dim = _number("head_dim", module, config) or config.hidden_size // heads
        value_dim = _symbol(int(output.in_features) // int(heads), _number("v_head_dim", module), head_dim)
        ordered = sorted(leaves, key=lambda path: path not in queries)
        projections = {path: layer.gemm(path, splits[path]) for path in ordered}
        counts = [_number("num_key_value_heads", source) for source in (module, config)]
        if keys:
            kv_heads = int(projections[keys[0]].out_features) // int(head_dim)
        elif fused:
            kv_heads = int(projections[fused[0]].out_features - heads * head_dim) // int(head_dim + value_dim)
        else:
            kv_heads = counts[0] or counts[1] or heads
            self.notes.append("layers that take K and V of an earlier layer project and cache none")
        if indexer is None:
            self._equal_products(layer, heads * (head_dim + value_dim))
            tensors = [getattr(cached, name, None) for name in ("keys", "values")]
            is_filled = all(isinstance(tensor, torch.Tensor) and tensor.numel() for tensor in tensors)
            if (keys or fused) and is_filled:
                theirs = sum(tensor.shape[1] * tensor.shape[-1] for tensor in tensors if tensor is not None)
                if theirs != heads * (head_dim + value_dim):  # some classes cache repeated keys
                    _equal(f"cached elements of {layer.name} per token", kv_heads * (head_dim + value_dim), theirs)
        window, chunk = self._window(cached)
        return Attention(
            projections=tuple(projections.values()),
            output=(output,),
            num_attention_heads=heads,
            num_key_value_heads=_symbol(kv_heads, *counts, heads),
            head_dim=head_dim,
            v_head_dim=value_dim,
            sliding_window=window,
            attention_chunk=chunk,
            qk_norm=any(self._is_norm(part) and re.match("q|query", path) for path, part in module.named_modules()),
            rotary=layer.mixer_place in self.trace.rotary,
            gate=bool(gates) or any(projections[path].out_features == 2 * heads * head_dim for path in queries),
            indexer=indexer,
            shared=not keys and not fused,
        )

    def _equal_products(self, layer: _LayerModules, width: int) -> None:
        """Raise RefusedError if attention of all heads to all keys has other FLOPs in the class."""
        _equal(f"FLOPs of {layer.name}", 2 * TOKENS * TOKENS * width, self.trace.within(layer.mixer_place))

    def _window(self, cached: Any) -> tuple[int | None, int | None]:
        """Sliding window and chunk of the layer's cache."""
        window = getattr(cached, "sliding_window", None)
        if window is None or not getattr(cached, "is_sliding", False):
            return None, None
        window = _symbol(int(window), *(getattr(self.config, name, None) for name in _WINDOWS))
        types: Any = getattr(self.config, "layer_types", None)
        number = next(number for number, layer in enumerate(self.trace.cache.layers) if layer is cached)
        if types and types[number] == "chunked_attention":
            return None, window
        return window, None

    def _latent(self, layer: _LayerModules, indexer: Indexer | None) -> LatentAttention:
        expand = f"{layer.name}.kv_b_proj"
        last = f"{layer.name}.o_proj"
        layer.inputs = [path for path in (*layer.inputs, layer.last) if path not in (expand, last)]
        leaves = [path.rpartition(".")[2] for path in layer.inputs]
        sizes = _numbers(LatentAttention, layer.module, self.config)
        if indexer is None:
            width = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] + sizes["v_head_dim"]
            self._equal_products(layer, sizes["num_attention_heads"] * width)
        return LatentAttention(
            projections=layer.projections(r"\.q_proj$|\.q_b_proj$|\.[^.]*gate[^.]*$|\.g_proj$"),
            expand=layer.gemm(expand, "columns"),
            output=(layer.gemm(last, "rows"),),
            indexer=indexer,
            rotary=layer.mixer_place in self.trace.rotary,
            gate=any(map(_GATES.search, leaves)),
            **sizes,
        )

    def _indexer(self, layer: _LayerModules) -> Indexer | None:
        """The indexer, which chooses keys; its projections are removed from those of the mixer."""
        if getattr(layer.module, "skip_topk", False):
            self.notes.append(SHARED_INDEXERS)
            assert self._choice is not None
            return replace(self._choice, projections=(), shared=True)
        modules = layer.module.named_modules()
        module: Any = next((part for path, part in modules if path.rpartition(".")[2] == "indexer"), None)
        if module is None:
            return None
        paths = [path for path in layer.inputs if ".indexer." in path]
        paths.sort(key=lambda path: "kv_proj" in path or "gate_proj" in path)
        layer.inputs = [path for path in layer.inputs if path not in paths]
        heads = _number("num_heads", module)
        head_dim = module.head_dim
        num_blocks = _number("topk_blocks", module)  # None: single keys are chosen
        splits: dict[str, Split] = dict.fromkeys(paths, "whole")
        # vLLM and SGLang cache index keys in FP8, with one fp32 scale per 128 elements; keys of blocks in half
        # precision.
        if num_blocks is None:
            top_k = _number("top_k", module)
            block = 1
            key_bytes = head_dim + 4 * -(-head_dim // 128)
        else:
            top_k = num_blocks * module.block_size
            block = module.block_size
            key_bytes = 2 * head_dim
            if heads == self.config.num_key_value_heads:
                splits |= {path: "kv_heads" for path in paths if path.endswith("q_proj")}
        self._choice = Indexer(
            num_heads=heads,
            head_dim=head_dim,
            top_k=top_k,
            block=block,
            projections=tuple(layer.gemm(path, splits[path]) for path in paths),
            key_bytes=key_bytes,
        )
        return self._choice

    def _compressed_attention(self, layer: _LayerModules, indexer: Indexer | None) -> CompressedAttention:
        grouped = f"{layer.name}.o_a_proj"
        last = f"{layer.name}.o_b_proj"
        layer.inputs = [path for path in (*layer.inputs, layer.last) if path not in (grouped, last)]
        first = layer.gemm(grouped, "columns")
        groups = layer.module.o_a_proj.n_groups
        return CompressedAttention(
            projections=layer.projections(r"\.q_b_proj$"),
            output=(replace(first, in_features=first.in_features * groups, groups=groups), layer.gemm(last, "rows")),
            indexer=indexer,
            **_numbers(CompressedAttention, layer.module, getattr(layer.module, "compressor", None), self.config),
        )

    def _recurrence(self, layer: _LayerModules, states: list[torch.Tensor]) -> Recurrence:
        """Describe delta rules and Mamba-2 by their sizes, other recurrences by the size of the class's state."""
        module = layer.module
        name = layer.name
        output = layer.gemm(layer.last, "rows")
        elements = sum(state.numel() for state in states)
        kind = self._recurrence_kind(layer, states)
        keys = _STATE_SIZES.get(kind, ())
        if keys:
            sizes = [getattr(module, size) for size in keys]
        else:
            width = output.in_features
            heads = None
            if kind == "linear":
                heads = _number("num_heads", module)
            state = max(1, elements // int(width))  # a short convolution is a scan with one element per channel
            state = _symbol(state, *(value for value in vars(module).values() if isinstance(value, int)))
            sizes = [heads or 1, heads or width, state, width // (heads or width)]
        widths = dict(zip(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), sizes, strict=True))
        if states and 100 * abs(prod(sizes[1:]) - elements) > elements:
            _equal(f"elements of the state of {name}", prod(sizes[1:]), elements)
        convolution = next((part for part in module.modules() if isinstance(part, nn.Conv1d)), None)
        channels = 0
        kernel = 0
        if convolution is not None:
            channels = convolution.out_channels
            kernel = convolution.kernel_size[0]
        return Recurrence(
            kind=kind,
            projections=layer.projections(r"(?<!_a_proj)$"),
            output=(output,),
            conv_channels=getattr(module, "conv_dim", channels),
            conv_kernel=getattr(module, "conv_kernel_size", kernel),
            **widths,
        )

    def _recurrence_kind(self, layer: _LayerModules, states: list[torch.Tensor]) -> Any:
        """The kind of a recurrence by the attributes of its module. Raises RefusedError for a mixer without a state."""
        module = layer.module
        if hasattr(module, "num_k_heads"):
            return "gated_delta"
        if hasattr(module, "forget_gate"):
            return "kda"
        if hasattr(module, "n_groups") and set(layer.inputs) <= {f"{layer.name}.in_proj"}:
            return "mamba2"
        if not states and "ShortConv" not in type(module).__name__:
            raise RefusedError(f"{layer.name} ({type(module).__name__})")
        decays = [weight for path, weight in module.named_parameters() if path.endswith("A_log")]
        is_diagonal = any(weight.dim() > 1 for weight in decays)
        if self.trace.within(layer.mixer_place) and not is_diagonal:
            return "linear"
        return "scan"


def _inside(name: str, outer: str) -> bool:
    """Whether a dotted name is the name of a module or of a part of it."""
    return f"{name}.".startswith(f"{outer}.")


def _within(names: Iterable[str], outer: str) -> list[str]:
    return [name for name in names if _inside(name, outer)]


def _direct_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module, without those of the modules inside it."""
    return {key: parameter for key, parameter in module._parameters.items() if parameter is not None}


def _weight_name(module_name: str, key: str) -> str:
    """Name of a weight in the description: the module's name, followed by the parameter's unless it is `weight`."""
    if key == "weight" and module_name:
        return module_name
    return f"{module_name}.{key}".strip(".")


def _mlp_width(layers: Sequence[LayerSpec], hidden: int) -> int:
    """Features inside the first dense MLP, or else inside the first expert; `hidden` without an MLP."""
    mlps = [layer.mlp for layer in sorted(layers, key=lambda layer: layer.num_experts > 0) if layer.mlp]
    if mlps:
        return mlps[0][-1].in_features
    return hidden


def _equal(what: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise RefusedError(f"{int(ours)} {what}, of {theirs} of the class")


def _bias(module: nn.Module | None) -> Any:
    return getattr(module, "bias", None)


def _is_mixer(module: nn.Module) -> bool:
    name = type(module).__name__
    decays = any(path.endswith("A_log") for path, _ in module.named_parameters())
    inner = "Layer" not in name and not any(isinstance(child, nn.ModuleList) for child in module.children())
    return (decays and inner) or bool(_MIXERS.search(name))
