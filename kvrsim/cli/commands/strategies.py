"""`kvrsim strategies`: the ways to run a prefill on several GPUs, and what is known of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json
from kvrsim.io.schema import JsonObject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrsim.strategies import Strategy

_WORDS = Path(__file__).parents[2] / "data" / "strategies.json"

app = typer.Typer()


@app.command("list")
@takes(AnswerOptions)
def list_strategies(answers: AnswerOptions) -> None:
    """List the strategies.

    Also lists those that installed packages add.

    Example: kvrsim strategies list
    """
    answers.check()
    from kvrsim.strategies import strategy_names

    found = [about(name) for name in strategy_names()]
    if not answers.printed(lambda: {"strategies": found}, "strategies"):
        from kvrsim.cli.render.strategies import show_strategies

        show_strategies(found)


@app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.py:NAME", help="A strategy or a hybrid, such as tp8+kvr-s."),
    ],
    json: Json = False,
) -> None:
    """Print one strategy: what ranks compute, send and hold.

    Also prints which engines have it, and whether kvrsim run runs it.

    Example: kvrsim strategies show zigzag
    """
    found = about(name)
    if json:
        print_json(found)
        return
    from kvrsim.cli.render.strategies import show_strategy

    show_strategy(found)


def about(name: str) -> dict[str, Any]:
    """A strategy as JSON, the fields as docs/reference/json.md has them; raises InputError where there is none."""
    from kvrsim.runtime.exchange import RUN_STRATEGIES
    from kvrsim.strategies import get_strategy
    from planner.deploy.engines import engines_for
    from planner.strategies_for import QUICK

    strategy = get_strategy(name, "NAME|FILE.py:NAME")
    words = _words(strategy)
    return {
        "name": strategy.name,
        "title": strategy.title,
        "partition_rule": strategy.partition_rule,
        **{key: words.get(key) for key in ("each_rank", "communication", "holds")},
        "engines": list(engines_for(strategy)),
        "runs_here": strategy.name in RUN_STRATEGIES,
        "planned_by_default": strategy.name in QUICK,
        "approximate": strategy.approximate,
        "source": strategy.source,
        "docs": words.get("docs"),
    }


def _words(strategy: Strategy) -> Mapping[str, Any]:
    """What data/strategies.json says; of a hybrid what it says of the strategy between its groups."""
    shipped: Mapping[str, Any] = JsonObject.read(_WORDS, "strategies").fields
    own = shipped.get(strategy.name)
    if own is not None or strategy.group_size in (None, 1):
        return dict(own or {})
    between: Mapping[str, Any] = shipped.get(strategy.name.rpartition("+")[2], {})
    rank, moves = f"a rank is {strategy.group_size} GPUs that split every matrix", "two all-reduces in each group"
    return {
        "each_rank": "; ".join(filter(None, (rank, between.get("each_rank")))),
        "communication": "; ".join(filter(None, (between.get("communication"), f"{moves} in each layer"))),
        "holds": between.get("holds") and f"{between['holds']}; of them a GPU 1 / {strategy.group_size}",
        "docs": between.get("docs", "docs/explanation/strategies.md"),
    }
