"""`kvrsim table`: partitions for many contexts, built once, looked up and shown."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import Json, ManyOptions, takes
from kvrsim.cli.outputs import print_json, resumable, tell, write_beside
from kvrsim.cli.parsing import check_output, check_plot
from kvrsim.cli.pool_options import BuildOptions

if TYPE_CHECKING:
    from kvrsim.cli.progress import EntryProgress
    from kvrsim.scenario import Scenario
    from kvrsim.strategies import Strategy
    from planner.processes import Pool
    from planner.table.table import PartitionTable

app = typer.Typer()

File = Annotated[str, typer.Argument(metavar="TABLE", help="A file that kvrsim table build has written.")]


@app.command("build")
@takes(ManyOptions, BuildOptions)
def build(
    options: ManyOptions,
    workers: BuildOptions,
    *,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the table, as JSON.")],
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", metavar="NAME|FILE.py:NAME", help="A strategy over single GPUs whose chunks are searched."
        ),
    ] = "kvr-s",
    json: Json = False,
) -> None:
    """Search the best partition for each context and number of GPUs.

    The same command resumes an interrupted build: FILE.partial keeps the finished entries until the table is complete.

    Example: kvrsim table build --ctx 1k:32k:1k --gpus 2,4,8 -o table.json
    """
    pool = workers.pool()
    check_output(output, "output")
    from kvrsim.strategies import searched

    chosen = searched(strategy)
    scenario, notes, lengths, counts = options.scenarios()
    from kvrsim.cli.progress import EntryProgress
    from kvrsim.io.schema import to_json

    with pool, EntryProgress() as progress:
        table = _built(scenario, chosen, counts, lengths, Path(output), pool, progress)
    for note in notes:
        tell(f"note: {note}")
    if json:
        from kvrsim.results.question import Question

        asked = Question.of(scenario, strategy=strategy, lengths=list(lengths), gpu_counts=list(counts))
        built = {"output": output, "entries": len(table.entries), "setting": to_json(table.setting)}
        print_json(asked.header() | {"cluster": to_json(scenario.cluster)} | built)
    else:
        from kvrsim.cli.render.table import show_built

        show_built(table, output)


def _built(
    scenario: Scenario,
    strategy: Strategy,
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    output: Path,
    pool: Pool,
    progress: EntryProgress,
) -> PartitionTable:
    """Build and write; reuse the entries of a killed build, and remove them once the table is written."""
    from planner.table.build import make_table
    from planner.table.partial import SUFFIX, Partial
    from planner.table.setting import TableSetting

    setting = TableSetting.of(scenario, strategy.name)
    journal = output.with_name(output.name + SUFFIX)
    with resumable(journal), contextlib.closing(Partial(journal, setting)) as partial:
        if partial.note:
            tell(f"note: {partial.note}")
        table = make_table(
            scenario, counts, lengths, strategy=strategy, pool=pool, partial=partial, on_progress=progress
        )
        table.write(output)
        partial.remove()
    return table


@app.command("lookup")
def lookup(
    file: File,
    gpus: Annotated[str, typer.Option("--gpus", metavar="N", help="Number of GPUs.")],
    ctx: Annotated[str, typer.Option("--ctx", metavar="LEN", help="Context length in tokens: 16k is 16384.")],
    multiple: Annotated[
        str | None,
        typer.Option(
            "--multiple",
            metavar="N",
            help="All chunks but the last are multiples of N tokens. Default: any length, preferring tile boundaries.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the partition for a context.

    It is an entry of the table, or interpolated between the two nearest ones.

    Example: kvrsim table lookup table.json --gpus 4 --ctx 10k
    """
    from kvrsim.units import parse_count, parse_tokens
    from planner.table.lookup import look_up
    from planner.table.table import load_table

    counts, tokens = parse_count(gpus, "gpus"), parse_tokens(ctx, "ctx")
    step = None if multiple is None else parse_tokens(multiple, "multiple")
    found = look_up(load_table(file, "TABLE"), counts, tokens, multiple=step)
    if json:
        for warning in found.warnings:
            tell(f"warning: {warning}")
        from kvrsim.io.schema import to_json

        print_json(to_json(found))
        return
    from kvrsim.cli.render.table import show_lookup

    show_lookup(found)


@app.command("show")
@takes(AnswerOptions)
def show(
    answers: AnswerOptions,
    file: File,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw each rank's share over the context: FILE.png, .svg or .pdf."),
    ] = None,
) -> None:
    """Print what a table was built for, and its entries.

    Example: kvrsim table show table.json --plot shares.png
    """
    from planner.table.table import load_table

    answers.check()
    check_plot(plot)
    table = load_table(file, "TABLE")
    if not answers.printed(table.to_dict, "entries"):
        from kvrsim.cli.render.table import show_table

        show_table(table)
    from planner.table.plot import write_shares

    write_beside((plot, lambda path: write_shares(table, path)))
