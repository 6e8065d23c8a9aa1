"""`kvrsim predictor`: TTFT over new tokens, cached prefix and batch, built once for routers and looked up."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.options import Json, PredictorOptions, takes
from kvrsim.cli.outputs import print_json, tell
from kvrsim.cli.parsing import check_output
from kvrsim.cli.pool_options import BuildOptions
from kvrsim.version import __version__

if TYPE_CHECKING:
    from planner.predictor.predictor import TtftEstimate, TtftPredictor

app = typer.Typer()


@app.command("build")
@takes(PredictorOptions, BuildOptions)
def build(
    options: PredictorOptions,
    workers: BuildOptions,
    *,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the predictor, as JSON.")],
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            metavar="best|NAME|FILE.py:NAME",
            help="What the GPUs run; best: the fastest that fits, of those that plan compares by default.",
        ),
    ] = "best",
    json: Json = False,
) -> None:
    """Simulate a grid of new tokens, cached prefixes and batches.

    It takes seconds for a strategy such as tp, half a minute for best, and longer for large batches.

    Example: kvrsim predictor build --ctx 32k --gpus 8 --strategy tp -o ttft.json
    """
    from kvrsim.strategies import get_strategy
    from planner.predictor.build import BEST, make_predictor

    if strategy != BEST:
        get_strategy(strategy)
    check_output(output, "output")
    pool = workers.pool()
    scenario, notes = options.scenario()
    from kvrsim.cli.progress import PartProgress

    with pool, PartProgress() as progress:
        predictor = make_predictor(scenario, strategy=strategy, pool=pool, on_part=progress)
    predictor.write(output)
    for note in notes:
        tell(f"note: {note}")
    found = _about(predictor)
    if json:
        from kvrsim.io.schema import to_json

        asked = {"question": predictor.question, "version": __version__, "cluster": to_json(scenario.cluster)}
        print_json(asked | {"output": output, **found})
    else:
        _show_built(output, found)


def _show_built(output: str, found: dict[str, Any]) -> None:
    from kvrsim.cli.text import Hint, facts, show

    table = facts()
    most = f"up to {found['longest_context']} tokens, batch {found['longest_batch']}"
    table.add_row("predictor:", f"{found['prefills']} prefills of {', '.join(found['strategies'])}, {most}")
    table.add_row("written:", output)
    show(table, Hint(f"kvrsim predictor lookup {shlex.quote(output)} --ctx {found['longest_context'] // 2}"))


@app.command("lookup")
def lookup(
    file: Annotated[str, typer.Argument(metavar="PREDICTOR", help="A file that kvrsim predictor build has written.")],
    ctx: Annotated[str, typer.Option("--ctx", metavar="LEN", help="Context length in tokens: 16k is 16384.")],
    cached_prefix: Annotated[
        str,
        typer.Option("--cached-prefix", metavar="LEN", help="Leading tokens of it whose K and V are already cached."),
    ] = "0",
    batch: Annotated[
        str, typer.Option("--batch", metavar="N", help="Number of sequences prefilled together, each of --ctx tokens.")
    ] = "1",
    json: Json = False,
) -> None:
    """Print the TTFT of a prefill, with its interval.

    It is interpolated between simulated prefills.

    Example: kvrsim predictor lookup ttft.json --ctx 9000 --cached-prefix 512
    """
    from kvrsim.units import parse_count, parse_tokens
    from planner.predictor.predictor import load_predictor

    context_len, together = parse_tokens(ctx, "ctx"), parse_count(batch, "batch")
    cached = 0 if cached_prefix == "0" else parse_tokens(cached_prefix, "cached_prefix")
    predictor = load_predictor(file, "PREDICTOR")
    found = predictor.predict(ctx=context_len, cached_prefix=cached, batch=together)
    if json:
        print_json(found.to_dict())
    else:
        _show(found)


def _about(predictor: TtftPredictor) -> dict[str, Any]:
    knots = len(predictor.new_tokens) * len(predictor.cached_prefix) * len(predictor.batch)
    return {
        "prefills": knots * len(predictor.strategies),
        "strategies": [one.strategy for one in predictor.strategies],
        "longest_context": predictor.longest_context,
        "longest_batch": predictor.batch[-1],
    }


def _show(found: TtftEstimate) -> None:
    from kvrsim.cli.text import facts, format_interval, headline, show
    from kvrsim.units import format_seconds

    table, interval = facts(), format_interval(found.ttft_low_s, found.ttft_high_s)
    table.add_row(
        "TTFT:", headline(f"{found.strategy}, {format_seconds(found.ttft_s)} (prediction interval {interval})")
    )
    show(table)
