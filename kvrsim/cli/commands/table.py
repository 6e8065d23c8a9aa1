"""`kvrsim table`: build, look up and show a table of partitions for many contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kvrsim.arguments import Count, Help, ScenariosArgs, Tokens
from kvrsim.cli.help import CommandGroup
from kvrsim.cli.options import OUTPUT, BuildArgs, Json, OutputArgs, WritablePath, pool_of, with_options
from kvrsim.cli.output import print_answer, print_result, warn, warn_notes
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Facts, Part, facts, headline, note_rows, round_up_percent
from kvrsim.units import format_count, format_seconds, format_tokens
from kvrsim.views.table import Text, columns, fits_text, format_partition, narrowing

if TYPE_CHECKING:
    from planner.table.table import PartitionTable, TableLookup

app = CommandGroup()
TableFile = Annotated[str, Help("A file that kvrsim table build has written.", metavar="TABLE", positional=True)]
_STRATEGY = "A strategy over single GPUs whose chunks are searched."


@app.command("build")
@with_options()
def build(
    args: ScenariosArgs,
    workers: BuildArgs,
    *,
    output: Annotated[WritablePath, Help("Write the table, as JSON.", metavar="FILE", spelling=OUTPUT)],
    strategy: Annotated[str, Help(_STRATEGY, metavar="NAME|FILE.py:NAME", section="Question")] = "kvr-s",
    json: Json = False,
) -> None:
    """Search the best partition for each context and number of GPUs.

    Example: kvrsim table build --ctx 1k:32k:1k --gpus 2,4,8 -o table.json
    """
    from kvrsim.builder import build_scenarios
    from kvrsim.io.schema import to_json
    from kvrsim.results.question import Question
    from planner.table.build import make_table, table_journal

    scenario, notes, lengths, counts = build_scenarios(args)
    with table_journal(output, scenario, strategy) as journal:
        if journal.results:
            warn(f"note: {journal.path}: {len(journal.results)} entries searched before")
        with pool_of(workers, every_core=True) as pool, Progress() as progress:
            table = make_table(
                scenario, counts, lengths, strategy=strategy, pool=pool, journal=journal, on_progress=progress
            )
        table.write(output)
        if missing := len({*lengths}) * len({*counts}) - len(table.entries):
            advice = f"{journal.path} keeps the searches, and the same command continues"
            warn(f"note: --time-budget {workers.time_budget:g}s ended: {missing} entries are left out; {advice}")
        else:
            journal.remove()
    warn_notes(notes)
    question = Question.of(scenario, strategy=strategy, lengths=list(lengths), gpu_counts=list(counts))
    built = {"output": output, "entries": len(table.entries), "left_out": missing, "setting": to_json(table.setting)}
    content = question.header() | {"cluster": to_json(scenario.cluster)} | built
    print_result(content, summary_of(table), facts(("written:", output)), json=json)


@app.command("lookup")
@with_options()
def lookup(
    *,
    file: TableFile,
    gpus: Annotated[Count, Help("Number of GPUs.", metavar="N", section="Question")],
    ctx: Annotated[Tokens, Help("Context length in tokens: 16k is 16384.", metavar="LEN", section="Question")],
    json: Json = False,
) -> None:
    """Print the partition for a context.

    It is an entry of the table, or interpolated between the two nearest ones and refined by simulations.

    Example: kvrsim table lookup table.json --gpus 4 --ctx 10k
    """
    from kvrsim.io.schema import to_json
    from planner.table.lookup import best_lookup
    from planner.table.table import load_table

    result = best_lookup(load_table(file, "TABLE"), gpus, ctx)
    if json:
        warn_notes(result.warnings)
    print_result(to_json(result), lookup_facts(result), json=json)


@app.command("show")
@with_options()
def show_(answer: OutputArgs, *, file: TableFile) -> None:
    """Print what a table was built for, and its entries.

    Example: kvrsim table show table.json
    """
    answer.check()
    from planner.table.table import load_table

    table = load_table(file, "TABLE")
    print_answer(answer, table.to_dict, "entries", lambda: table_screen(table))


def lookup_facts(result: TableLookup) -> Facts:
    """Make lines of the partition and its origin."""
    between = " and ".join(map(format_tokens, result.between))
    sources = {"exact": "an entry of the table", "interpolated": f"interpolated between {between}"}
    source = sources.get(result.source, f"extrapolated from the shares of {between}")
    if result.is_refined:
        source += ", then refined by simulations"
    return facts(
        ("partition:", headline(", ".join(map(str, result.partition)))),
        ("shares:", " ".join(f"{share:.3f}" for share in result.fractions)),
        ("from:", source),
        *note_rows(result.warnings),
        ("question:", f"{format_tokens(result.context_len)} tokens on {format_count(result.num_gpus, 'GPU')}"),
    )


def table_screen(table: PartitionTable) -> list[Part]:
    """The table's scenario, and one row per entry."""
    rows = columns(">GPUs", ">context", "partition", ">TTFT", ">vs TSP", ">vs even", ">gap", "fits")
    for entry in table.entries:
        gap = ""
        if entry.gap is not None:
            gap = f"{round_up_percent(entry.gap)} %"
        rows.add_row(
            str(entry.num_gpus),
            format_tokens(entry.context_len),
            format_partition(entry.partition, room=30),
            format_seconds(entry.ttft_s),
            f"{entry.speedup_over_tsp:.2f}×",
            f"{entry.speedup_over_even:.2f}×",
            gap,
            fits_text(entry.fits),
        )
    meaning = None
    if any(entry.gap is not None for entry in table.entries):
        meaning = "at most how much slower than the best partition of KV-Runahead (from a proven lower bound)"
    notes = facts(("gap:", meaning), ("built by:", f"kvrsim {table.kvrsim_version}; times are simulated"))
    args = Text(" · ".join(f"{name} {fact}" for name, fact in table.setting.facts().items()), style="dim")
    return [summary_of(table), "", args, "", narrowing(rows, "vs even", "gap", "partition"), "", notes]


def summary_of(table: PartitionTable) -> Facts:
    """Summary of the table, and whether all entries fit."""
    lengths = [entry.context_len for entry in table.entries]
    contexts = " to ".join(dict.fromkeys(map(format_tokens, (min(lengths), max(lengths)))))
    partitions = format_count(len(lengths), "partition")
    gpus = ", ".join(map(str, table.gpu_counts))
    memory = "all of them fit"
    unfit = sum(not entry.fits for entry in table.entries)
    if unfit:
        memory = f"{unfit} of them do not fit"
    return facts(
        ("table:", headline(f"{partitions} of {table.setting.strategy}: {contexts} tokens on {gpus} GPUs")),
        ("memory:", memory),
    )
