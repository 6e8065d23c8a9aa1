"""`kvrsim models`: the models that ship, and what is in one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.options import Json
from kvrsim.cli.outputs import print_json

if TYPE_CHECKING:
    from kvrsim.model.spec import ModelSpec

app = typer.Typer(help="Models: built in, or any Hugging Face config.json.")


@app.command("list")
def list_models(json: Json = False) -> None:
    """List the built-in models."""
    from kvrsim.model.load import builtin_models, load_model

    models = [load_model(name) for name in builtin_models()]
    if json:
        print_json({"models": [summary(model) for model in models]})
        return
    from kvrsim.cli.render.catalogue import show_models

    show_models(models)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in model, a config.json, or its folder.")],
    json: Json = False,
) -> None:
    """Print one model: shapes, parameters, KV cache."""
    from kvrsim.model.load import load_model

    model = load_model(name, argument="NAME|PATH")
    content = summary(model) | {"layer_kinds": _layer_kinds(model)}
    if json:
        print_json(content)
        return
    from kvrsim.cli.render.layout import show_tree

    show_tree(model.name, content)


def summary(model: ModelSpec) -> dict[str, Any]:
    """A model's numbers, without its layers one by one."""
    shapes = asdict(model)
    del shapes["layers"]
    counts = {
        "num_parameters": model.num_parameters,
        "active_parameters": model.active_parameters,
        "weight_bytes": model.weight_bytes(2),
        "kv_bytes_per_token": model.kv_bytes_per_token(2),
    }
    return shapes | counts


def _layer_kinds(model: ModelSpec) -> list[dict[str, Any]]:
    return [{"num_layers": model.layers.count(kind)} | asdict(kind) for kind in model.layer_kinds]
