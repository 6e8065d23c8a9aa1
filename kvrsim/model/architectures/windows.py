"""Which layers see only a window of the tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import read_num_layers

Windows = Sequence[int | None]  # for each layer its window in tokens; None: sees all


def read_window(config: JsonObject, default: int | None = None, key: str = "sliding_window") -> int | None:
    """The window of the key; null switches it off, absence gives the default."""
    if config.has(key):
        return config.integer(key)
    return None if key in config.fields else default


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


def period_windows(config: JsonObject, default: int | None, period: int) -> Windows:
    """The last of every `period` layers sees all tokens; `default`: the window where the key is absent."""
    return _by_layer(config, read_window(config, default), lambda layer: (layer + 1) % period != 0)


def read_sliding(config: JsonObject, slides: Callable[[int], bool]) -> list[bool]:
    """Of each layer whether layer_types says sliding_attention; without that key, what `slides` does."""
    known = ("full_attention", "sliding_attention")
    return [kind == known[1] for kind in read_layer_types(config, known, lambda layer: known[slides(layer)])]


def read_layer_types(config: JsonObject, known: Sequence[str], kind_of: Callable[[int], str]) -> list[str]:
    """The kind of each layer: as layer_types says, one of `known`; without that key, what `kind_of` says."""
    layers, types = read_num_layers(config), config.sequence("layer_types")
    for number, kind in enumerate(types):
        if kind not in known:
            raise InputError(f"{config.where}: {config.key_path}layer_types[{number}]", kind, " or ".join(known))
    if types and len(types) != layers:
        raise config.error("layer_types", f"an array of {layers}, one a layer")
    return [str(kind) for kind in types] or [kind_of(layer) for layer in range(layers)]


def _by_layer(config: JsonObject, window: int | None, slides: Callable[[int], bool]) -> Windows:
    """`window` where layer_types says sliding_attention; without that key, where `slides` does."""
    return [window if here else None for here in read_sliding(config, slides)]
