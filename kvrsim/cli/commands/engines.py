"""`kvrsim engines`: the serving engines that ship, and what is in one."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.cli.options import Json
from kvrsim.cli.outputs import print_json

app = typer.Typer()


@app.command("list")
def list_engines(json: Json = False) -> None:
    """List the built-in engines.

    Example: kvrsim engines list
    """
    from kvrsim.engine.engine import builtin_engines, load_engine

    engines = [load_engine(name) for name in builtin_engines()]
    if json:
        print_json({"engines": [engine.to_dict() for engine in engines]})
        return
    from kvrsim.cli.render.engines import show_engines

    show_engines(engines)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in engine or a file.")],
    json: Json = False,
) -> None:
    """Print one engine: its terms, errors and sources.

    Example: kvrsim engines show vllm-2023
    """
    from kvrsim.engine.engine import load_engine

    engine = load_engine(name, argument="NAME|PATH")
    if json:
        print_json(engine.to_dict())
        return
    from kvrsim.cli.render.engines import show_engine

    show_engine(engine)
