"""`kvrsim models`: the models that ship, and what is in one."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json

if TYPE_CHECKING:
    from kvrsim.model.spec import LayerSpec, ModelSpec

app = typer.Typer()


@app.command("list")
@takes(AnswerOptions)
def list_models(answers: AnswerOptions) -> None:
    """List the built-in models.

    Example: kvrsim models list
    """
    answers.check()
    from kvrsim.model.load import builtin_models, load_model

    models = [load_model(name) for name in builtin_models()]
    if not answers.printed(
        lambda: {"models": [summary(model) for model in models]}, "models", without=("layer_kind_index", "lm_head")
    ):
        from kvrsim.cli.render.catalogue import show_models

        show_models(models)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in model, a config.json, or its folder.")],
    json: Json = False,
) -> None:
    """Print one model: parameters, kinds of layers, cache.

    Also prints what of the model is approximated.

    Example: kvrsim models show llama-3-8b
    """
    from kvrsim.model.load import load_model

    model = load_model(name, argument="NAME|PATH")
    if json:
        print_json(summary(model))
        return
    from kvrsim.cli.render.catalogue import show_model

    show_model(model)


def summary(model: ModelSpec) -> dict[str, Any]:
    """A model's numbers, its layers by kind."""
    from kvrsim.model.describe import mixers_of
    from kvrsim.model.mixers import Attention

    skipped = ("layers", "layer_kinds", "layer_kind_index")
    own = {field.name: getattr(model, field.name) for field in fields(model) if field.name not in skipped}
    mixer = model.main_mixer
    first = model.layers[0]
    return {
        **own,
        "lm_head": asdict(model.lm_head),
        "quantization": None if model.quantization is None else asdict(model.quantization),
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "gated_mlp": any(layer.gated_mlp for layer in model.layers),
        "qk_norm": isinstance(mixer, Attention) and mixer.qk_norm,
        "norms_before_attention": first.norms_before_mixer,
        "norms_after_attention": first.norms_after_mixer,
        "num_parameters": model.num_parameters,
        "active_parameters": model.active_parameters,
        "weight_bytes": model.weight_bytes(2),
        "kv_bytes_per_token": model.kv_bytes_per_token(2),
        "state_bytes": model.cache_bytes(0, 2),
        "mixers": [{"mixer": title, "num_layers": count} for title, count in mixers_of(model).items()],
        "layer_kinds": [{"num_layers": model.layers.count(kind)} | layer_kind(kind) for kind in model.layer_kinds],
        "layer_kind_index": model.layer_kind_index,
    }


def layer_kind(kind: LayerSpec) -> dict[str, Any]:
    """A kind of layer; of softmax attention its matrices and its window beside the mixer that has them."""
    from kvrsim.model.mixers import Attention

    content, mixer = asdict(kind), kind.mixer
    attention = mixer if isinstance(mixer, Attention) else None
    content["mixer"] = (
        None if mixer is None else {"kind": type(mixer).__name__, "title": mixer.title, **content["mixer"]}
    )
    return content | {
        "qkv": [] if attention is None else [asdict(gemm) for gemm in attention.projections],
        "output": None if attention is None else asdict(attention.output[0]),
        "sliding_window": None if attention is None else attention.sliding_window,
        "norm_parameters": kind.other_parameters,
    }
