"""Tables for people, by Rich; imported only where no JSON is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvrsim.cli.memory_text import over_memory
from kvrsim.units import format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.hardware import Cluster
    from kvrsim.model import ModelSpec
    from kvrsim.profile import CalibrationProfile
    from kvrsim.results import Bounds, Plan, SimResult, StrategyResult
    from kvrsim.scenario import Scenario

_WIDE = 100  # columns; from here on there is room for two blanks between the table's columns
_DETAIL = "dim"


def print_plan(plan: Plan, *, gpu_memory_bytes: int) -> None:
    """Header, one row a strategy, and what the figures mean."""
    console = _console()
    _print_header(console, plan.model, plan.context_len, _setting_of(plan))
    console.print(Padding(_strategies(plan, gpu_memory_bytes, wide=console.width >= _WIDE), (1, 0)))
    facts = _facts()
    best = plan.best
    facts.add_row("best:", _best(plan))
    if len(set(best.partition)) > 1:
        facts.add_row("partition:", ", ".join(map(str, best.partition)))
    for line in _bounds(plan.bounds, plan.num_gpus):
        facts.add_row("bounds:" if line.startswith("proven") else "", line)
    search = plan.search
    taken = f"{search.evaluations} partitions simulated in {format_seconds(search.seconds)}"
    facts.add_row("search:", f"{search.method}, {taken}")
    for result in plan.strategies:
        _add_misfits(facts, result.strategy, [rank for rank in result.memory], gpu_memory_bytes)
    facts.add_row("rests on:", plan.rests_on)
    told = tuple(f"{result.strategy} does not fit" for result in plan.strategies)  # rank by rank, above
    _add_notes(facts, [note for note in plan.warnings if not note.startswith(told)])
    console.print(facts)


def print_simulation(result: SimResult, scenario: Scenario) -> None:
    """Header, TTFT, and one row a rank."""
    console = _console()
    limit = scenario.cluster.gpu.memory_bytes
    _print_header(console, result.model, result.context_len, _setting_of_simulation(result, scenario))
    console.print(Padding(_ranks(result, limit, wide=console.width >= _WIDE), (1, 0)))
    facts = _facts()
    interval = format_interval(result.ttft_low_s, result.ttft_high_s)
    facts.add_row("TTFT:", f"{format_seconds(result.ttft_s)} ({interval}), {result.strategy}")
    facts.add_row("executor:", result.executor)
    _add_misfits(facts, result.strategy, [rank.memory for rank in result.per_rank], limit)
    _add_notes(facts, result.warnings)
    console.print(facts)


def subtitle_of(plan: Plan) -> str:
    """A plan's model and setting, in one line."""
    return " · ".join((plan.model, f"{format_tokens(plan.context_len)} tokens", *_setting_of(plan)))


def subtitle_of_simulation(result: SimResult, scenario: Scenario) -> str:
    """A simulation's model and setting, in one line."""
    length = f"{format_tokens(result.context_len)} tokens"
    return " · ".join((result.model, length, *_setting_of_simulation(result, scenario)))


def format_interval(low_s: float, high_s: float) -> str:
    """Both ends in the unit of the upper: "612–771 ms"; one figure where they are the same."""
    high = format_seconds(high_s)
    if low_s == high_s:
        return high
    number, unit = high.split(" ")
    low = format_seconds(low_s)
    if low.split(" ")[1] == unit:
        return f"{low.split(' ')[0]}–{number} {unit}"
    return f"{low} – {high}"


def format_partition(chunks: Sequence[int], room: int = 14) -> str:
    """All chunks where there is room, "8 × 2048" where they are equal, else the first and the last."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    full = ", ".join(map(str, chunks))
    return full if len(full) <= room else f"{chunks[0]} … {chunks[-1]}"


def _console() -> Console:
    return Console(markup=False, highlight=False, emoji=False)


def _setting_of(plan: Plan) -> tuple[str, ...]:
    return plan.cluster, f"{plan.attention} attention", f"profile {plan.profile}"


def _setting_of_simulation(result: SimResult, scenario: Scenario) -> tuple[str, ...]:
    return scenario.cluster.describe(), f"{scenario.kernel} attention", f"profile {result.profile}"


def _print_header(console: Console, model: str, context_len: int, setting: Iterable[str]) -> None:
    length = format_tokens(context_len)
    shown = length if length == str(context_len) else f"{length} ({context_len})"
    console.print(Text(f"Prefill of {shown} tokens by {model}", style="bold"))
    console.print(Text(" · ".join(setting), style=_DETAIL))


def _table(*, wide: bool) -> Table:
    return Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="bold")


def _strategies(plan: Plan, limit: int, *, wide: bool) -> Table:
    """One row a strategy, the best in bold."""
    table = _table(wide=wide)
    table.add_column("strategy\n", no_wrap=True)
    table.add_column("partition\n(tokens)", no_wrap=True)
    for title in ("TTFT\n", "low–high\n", "vs TSP\n", "comm.\nexposed", "longest\nwait"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(f"peak of\n{format_bytes(limit)}", justify="right", no_wrap=True)
    table.add_column("fits\n", no_wrap=True)
    for result in plan.strategies:
        table.add_row(*_strategy_row(result), style="bold" if result is plan.best else None)
    return table


def _strategy_row(result: StrategyResult) -> list[str | Text]:
    speedup = "" if result.speedup_over_tsp is None else f"{result.speedup_over_tsp:.2f}×"
    return [
        result.strategy,
        format_partition(result.partition),
        format_seconds(result.ttft_s),
        format_interval(result.ttft_low_s, result.ttft_high_s),
        speedup,
        format_seconds(result.exposed_comm_s),
        format_seconds(max(result.wait_s)),
        format_bytes(max(rank.total for rank in result.memory)),
        _fits(result.fits),
    ]


def _fits(fits: bool) -> Text:
    return Text("yes") if fits else Text("NO", style="red")


def _ranks(result: SimResult, limit: int, *, wide: bool) -> Table:
    """One row a rank."""
    table = _table(wide=wide)
    titles = ("rank", "chunk", "compute", "wait", "sent", f"peak of {format_bytes(limit)}")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("fits")
    for rank in result.per_rank:
        numbers = (
            str(rank.rank),
            str(rank.chunk_len),
            format_seconds(rank.compute_s),
            format_seconds(rank.wait_s),
        )
        sizes = (format_bytes(rank.sent_bytes), format_bytes(rank.memory.total))
        table.add_row(*numbers, *sizes, _fits(rank.memory.total <= limit))
    return table


def _facts() -> Table:
    """A label and what it says, wrapped beside it."""
    facts = Table.grid(padding=(0, 1, 0, 0))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column()
    return facts


def _best(plan: Plan) -> str:
    """The winner in a sentence."""
    best = plan.best
    text = f"{best.strategy} ({best.title}), TTFT {format_seconds(best.ttft_s)}"
    others = {result.strategy: result for result in plan.strategies if result is not best and result.fits}
    if best.speedup_over_tsp is not None and best.strategy != "tsp":
        text += f", {best.speedup_over_tsp:.2f}× as fast as TSP"
    if "single" in others:
        text += f", {others['single'].ttft_s / best.ttft_s:.2f}× as fast as one GPU"
    return text if best.fits else f"{text}; but nothing that was compared fits in memory"


def _bounds(bounds: Bounds, num_gpus: int) -> list[str]:
    lower = f"proven lower bound {format_seconds(bounds.lower_bound_s)}"
    if bounds.gap is not None:
        # Never rounded down: the sentence is a proof.
        lower += f": KVR-S is at most {_rounded_up(100 * bounds.gap)} % above the best possible partition"
    no_comm = f"TTFT({num_gpus}) without communication {format_seconds(bounds.ttft_no_comm_s)}"
    return [lower, f"{no_comm}; TTFT*({num_gpus}) of the paper {format_seconds(bounds.ttft_star_s)}"]


def _rounded_up(percent: float) -> str:
    """Two decimals, not less than the value."""
    import math

    return f"{math.ceil(max(0.0, percent) * 100 - 1e-9) / 100:.2f}"


def _add_misfits(facts: Table, strategy: str, memory: Sequence[Any], limit: int) -> None:
    for number, line in enumerate(over_memory(memory, limit)):
        facts.add_row("memory:" if number == 0 else "", f"{strategy}: {line}")


def _add_notes(facts: Table, notes: Iterable[str]) -> None:
    for note in notes:
        facts.add_row(Text("note:", style="yellow"), note)


def print_profiles(profiles: Sequence[CalibrationProfile]) -> None:
    """One row a profile."""
    table = _table(wide=True)
    for title in ("profile", "GPU", "attention", "error", "what it is"):
        table.add_column(title, no_wrap=title != "what it is")
    for profile in profiles:
        error = f"{profile.residual.cross_validated_mape:.1%}" if profile.residual else "unknown"
        kernels = ", ".join(profile.attention_kernels)
        table.add_row(profile.name, profile.gpu, kernels, error, profile.description)
    _console().print(table)


def print_models(models: Sequence[ModelSpec]) -> None:
    """One row a model."""
    table = _table(wide=True)
    for title in ("model", "architecture"):
        table.add_column(title, no_wrap=True)
    for title in ("parameters", "layers", "hidden", "heads", "KV heads", "made for"):
        table.add_column(title, justify="right", no_wrap=True)
    for model in models:
        made_for = model.max_position_embeddings
        table.add_row(
            model.name,
            model.model_type,
            f"{model.num_parameters / 1e9:.1f} B",
            str(model.num_hidden_layers),
            str(model.hidden_size),
            str(model.num_attention_heads),
            str(model.num_key_value_heads),
            "" if made_for is None else format_tokens(made_for),
        )
    _console().print(table)


def print_clusters(clusters: Mapping[str, Cluster]) -> None:
    """One row a cluster."""
    from kvrsim.units import format_bandwidth

    table = _table(wide=True)
    for title in ("cluster", "GPUs", "memory", "topology", "link", "one way", "latency"):
        table.add_column(title, no_wrap=True)
    for name, cluster in clusters.items():
        gpus = f"{cluster.num_gpus} × {cluster.gpu.name}"
        link = cluster.link
        speed, latency = format_bandwidth(link.bandwidth_bytes_per_s), format_seconds(link.latency_s)
        table.add_row(
            name, gpus, format_bytes(cluster.gpu.memory_bytes), cluster.topology, link.name, speed, latency
        )
    _console().print(table)


def print_validation(result: Mapping[str, Any]) -> None:
    """One row a published case, and the errors of the groups."""
    console, table = _console(), _table(wide=True)
    table.add_column("source")
    table.add_column("case")
    for title in ("reported", "simulated", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("calibration", no_wrap=True)
    for row in result["rows"]:
        times = (format_seconds(row["reported_s"]), format_seconds(row["simulated_s"]))
        used = "used" if row["used_for_calibration"] else "held out"
        table.add_row(row["source"], row["case"], *times, f"{row['rel_error']:+.1%}", used)
    console.print(table)
    for group in ("calibration", "held_out", "all"):
        errors = result[group]
        text = ", ".join(f"{key} {_number(value)}" for key, value in errors.items())
        console.print(f"{group.replace('_', ' ')}: {text}")


def _number(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def print_tree(name: str, content: Mapping[str, Any]) -> None:
    """Keys and values, nested ones indented."""
    console = _console()
    console.print(Text(name, style="bold"))
    table = _facts()
    _add_branch(table, content, indent="  ")
    console.print(table)


def _add_branch(table: Table, content: Mapping[str, Any], indent: str) -> None:
    for key, value in content.items():
        if isinstance(value, Mapping):
            table.add_row(f"{indent}{key}", "")
            _add_branch(table, value, indent + "  ")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for number, item in enumerate(value):
                table.add_row(f"{indent}{key} {number}", "")
                _add_branch(table, item, indent + "  ")
        elif value not in (None, ()):
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            table.add_row(f"{indent}{key}", shown)
