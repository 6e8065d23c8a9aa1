"""`kvrsim table`: partitions of many lengths, built once, looked up and shown."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.cli.options import (
    Json,
    ScenarioOptions,
    check_output,
    check_plot,
    parse_choice,
    print_json,
    takes_scenario,
)
from kvrsim.cli.outputs import tell, write_beside
from kvrsim.errors import InputError
from kvrsim.text import printable

if TYPE_CHECKING:
    from kvrsim.cli.progress import EntryProgress
    from kvrsim.scenario import Scenario
    from planner.table.backends import Pool
    from planner.table.table import PartitionTable

app = typer.Typer(help="Partition lookup tables, for KVR-P: build, look up, show.", no_args_is_help=False)

BACKENDS = ("loky", "dask", "ray")
File = Annotated[str, typer.Argument(metavar="TABLE", help="A file that kvrsim table build has written.")]
_LENGTHS = typer.Option(
    "--ctx", metavar="LEN:LEN:STEP", help="Contexts: a range with both ends, such as 1k:32k:1k, or a list, 4k,8k."
)
_COUNTS = typer.Option(
    "--gpus",
    metavar="N,N,...",
    help="Numbers of GPUs, with commas between. Default: 2, 4, 8, ... up to those of the cluster.",
)


def of_many(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with lists for --ctx and --gpus."""

    @functools.wraps(command)
    def many(*args: object, **kwargs: object) -> None:
        command(*args, **kwargs)

    told = {"ctx": (Annotated[str, _LENGTHS], inspect.Parameter.empty), "gpus": (Annotated[str | None, _COUNTS], None)}
    signature = inspect.signature(command)
    parameters = [
        parameter.replace(annotation=told[name][0], default=told[name][1]) if name in told else parameter
        for name, parameter in signature.parameters.items()
    ]
    many.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return many


def lengths_and_counts(options: ScenarioOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contexts and numbers of GPUs of a command of many; by default, numbers up to those of the cluster."""
    from kvrsim.ranges import counts_up_to, parse_counts, parse_lengths

    lengths = parse_lengths(options.ctx, "--ctx")
    if options.gpus is not None:
        return lengths, parse_counts(options.gpus, "--gpus")
    return lengths, counts_up_to(replace(options, ctx=str(lengths[-1])).scenario()[0].num_gpus)


@app.command("build")
@of_many
@takes_scenario
def build(
    options: ScenarioOptions,
    *,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where the table goes, as JSON.")],
    jobs: Annotated[str | None, typer.Option("--jobs", metavar="N", help="Processes. Default: one a core.")] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend", metavar="|".join(BACKENDS), help="Who works: this machine's processes, or a cluster."
        ),
    ] = "loky",
    dask_address: Annotated[
        str | None,
        typer.Option("--dask-address", metavar="ADDRESS", help="A Dask scheduler. Default: a cluster of its own."),
    ] = None,
    json: Json = False,
) -> None:
    """Search the best partition for every number of GPUs and context, and keep them in a file.

    Interrupted work goes on where it was: entries wait in FILE.partial until the table is done.
    """
    lengths, counts = lengths_and_counts(options)
    parse_choice(backend, "--backend", BACKENDS)
    check_output(output, "--output")
    scenario, notes = replace(options, ctx=str(lengths[-1]), gpus=str(counts[-1])).scenario()
    from kvrsim.cli.progress import EntryProgress

    with _pool(jobs, backend, dask_address) as pool, EntryProgress() as progress:
        table = _built(scenario, counts, lengths, Path(output), pool, progress)
    for note in notes:
        tell(f"note: {note}")
    if json:
        print_json({"output": output, "entries": len(table.entries), "setting": table.setting.to_dict()})
    else:
        typer.echo(f"{printable(output)}: {len(table.entries)} entries")


def _pool(jobs: str | None, backend: str, dask_address: str | None) -> Pool:
    from kvrsim.units import parse_count
    from planner.table.backends import Pool, cores

    number = cores() if jobs is None else parse_count(jobs, "--jobs", maximum=4096)
    return Pool(jobs=number, backend=backend, dask_address=dask_address)


def _built(
    scenario: Scenario,
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    output: Path,
    pool: Pool,
    progress: EntryProgress,
) -> PartitionTable:
    """Build and write; what a killed build has left is used, and goes once the table is written."""
    from planner.table.build import make_table
    from planner.table.partial import SUFFIX, Partial
    from planner.table.setting import TableSetting

    with contextlib.closing(Partial(output.with_name(output.name + SUFFIX), TableSetting.of(scenario))) as partial:
        if partial.note:
            tell(f"note: {partial.note}")
        table = make_table(scenario, counts, lengths, pool=pool, partial=partial, on_progress=progress)
        table.write(output)
        partial.remove()
    return table


@app.command("lookup")
def lookup(
    file: File,
    gpus: Annotated[str, typer.Option("--gpus", metavar="N", help="GPUs that take part.")],
    ctx: Annotated[str, typer.Option("--ctx", metavar="LEN", help="Tokens of the context: 16k is 16384.")],
    multiple: Annotated[
        str | None,
        typer.Option(
            "--multiple",
            metavar="N",
            help="All chunks but the last are multiples of N tokens. Default: any length; it ends where tiles do.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """The partition for a context: an entry's, or interpolated between the two nearest."""
    from kvrsim.units import parse_count, parse_tokens
    from planner.table.lookup import look_up
    from planner.table.table import load_table

    counts, tokens = parse_count(gpus, "--gpus"), parse_tokens(ctx, "--ctx")
    step = None if multiple is None else parse_tokens(multiple, "--multiple")
    found = look_up(load_table(file, "TABLE"), counts, tokens, multiple=step)
    if json:
        for warning in found.warnings:
            tell(f"warning: {warning}")
        print_json(found.to_dict())
        return
    from kvrsim.cli.render.table import show_lookup

    show_lookup(found)


@app.command("show")
def show(
    file: File,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw each rank's share over length: FILE.png, .svg or .pdf."),
    ] = None,
    json: Json = False,
) -> None:
    """What a table was made for, and its entries."""
    from planner.table.table import load_table

    check_plot(plot)
    table = load_table(file, "TABLE")
    if json:
        print_json(table.to_dict())
    else:
        from kvrsim.cli.render.table import show_table

        show_table(table)
    from planner.table.plot import write_shares

    write_beside((plot, lambda path: write_shares(table, path)))


def read_table(path: str | None) -> PartitionTable | None:
    """What --table names."""
    if path is None:
        return None
    from planner.table.table import load_table

    return load_table(path)


Table = Annotated[
    str | None,
    typer.Option("--table", metavar="FILE", help="Where kvr-p looks its partition up; kvrsim table build writes it."),
]


def needs_table(names: list[str], table: str | None, *, otherwise: bool = False) -> None:
    """Complain before the work where kvr-p has no table; `otherwise`: it has its partition from elsewhere."""
    if "kvr-p" in names and table is None and not otherwise:
        raise InputError("--table", "nothing", "a file of kvrsim table build, where kvr-p looks its partition up")
