"""`kvrsim engines`: the serving engines that ship, and what is in one."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json

app = typer.Typer()


@app.command("list")
@takes(AnswerOptions)
def list_engines(answers: AnswerOptions) -> None:
    """List the built-in engines.

    Example: kvrsim engines list
    """
    answers.check()
    from kvrsim.engine import builtin_engines, load_engine

    engines = [load_engine(name) for name in builtin_engines()]
    if not answers.printed(
        lambda: {"engines": [engine.to_dict() for engine in engines]},
        "engines",
        without=("provenance", "spread", "fit"),
    ):
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
    from kvrsim.engine import load_engine

    engine = load_engine(name, argument="NAME|PATH")
    if json:
        print_json(engine.to_dict())
        return
    from kvrsim.cli.render.engines import show_engine

    show_engine(engine)
