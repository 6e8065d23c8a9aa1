"""Which layers see only a window of the tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrsim.errors import InputError
from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures.parts import read_num_layers

Windows = Sequence[int | None]  # for each layer its window in tokens; None: sees all


def read_window(config: JsonObject, default: int | None = None) -> int | None:
    """The window of the key; null switches it off, absence gives the default."""
    if config.has("sliding_window"):
        return config.integer("sliding_window")
    return None if "sliding_window" in config.fields else default


def same_window(config: JsonObject, default: int | None = None) -> Windows:
    """One window for all layers."""
    return [read_window(config, default)] * read_num_layers(config)


def qwen_windows(config: JsonObject, slides: Callable[[int, int], bool]) -> Windows:
    """Off unless use_sliding_window; `slides(layer, max_window_layers)` tells which layers have one."""
    window = read_window(config, 4096) if config.flag("use_sliding_window", False) else None
    boundary = config.integer("max_window_layers", 28, minimum=0)
    return _by_layer(config, window, lambda layer: slides(layer, boundary))


def gpt_oss_windows(config: JsonObject) -> Windows:
    """Every other layer, from the first, has one."""
    return _by_layer(config, read_window(config, 128), lambda layer: layer % 2 == 0)


def gemma_windows(config: JsonObject, period: int) -> Windows:
    """The last of every `period` layers sees all tokens."""
    return _by_layer(config, read_window(config, 4096), lambda layer: (layer + 1) % period != 0)


def _by_layer(config: JsonObject, window: int | None, slides: Callable[[int], bool]) -> Windows:
    """`window` where layer_types says sliding_attention; without that key, where `slides` does."""
    layers, types = read_num_layers(config), config.sequence("layer_types")
    for number, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError(f"{config.where}: layer_types[{number}]", kind, "full_attention or sliding_attention")
    if types and len(types) != layers:
        raise config.error("layer_types", f"an array of {layers}, one a layer")
    sliding = [kind == "sliding_attention" for kind in types] or [slides(layer) for layer in range(layers)]
    return [window if here else None for here in sliding]
