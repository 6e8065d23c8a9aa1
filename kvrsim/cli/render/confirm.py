"""A confirmation and a search on the machine, for people; imported only where no JSON is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvrsim.cli.render.format import format_interval, format_partition
from kvrsim.cli.render.layout import Shrinkable, columns, facts, show
from kvrsim.units import format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.confirm.result import Confirmation
    from planner.confirm.run import RunResult
    from planner.confirm.search import Searched

_SHOWN_WRONG = 3  # pairs that were measured in another order than predicted


def show_confirmation(found: Confirmation) -> None:
    """One row per candidate, the one predicted to be the fastest first; then orders, regret and errors."""
    rows = columns("strategy\n", "partition\n(tokens)")
    columns(
        *("predicted\n", "prediction\ninterval", "measured\nmedian", "spread\n(IQR)", "error\n"),
        *("place:\npredicted", "\nmeasured"),
        numbers=True,
        into=rows,
    )
    pairs = zip(found.candidates, found.places(), strict=True)
    for one, places in sorted(pairs, key=lambda pair: pair[0].predicted_s):
        rows.add_row(
            one.strategy,
            format_partition(one.partition),
            format_seconds(one.predicted_s),
            format_interval(one.predicted_low_s, one.predicted_high_s),
            format_seconds(one.median_s),
            format_seconds(one.iqr_s),
            f"{one.rel_error:+.1%}",
            str(places["predicted_rank"]),
            str(places["measured_rank"]),
            style="bold" if one is found.choice else None,
        )
    table = facts()
    table.add_row("regret:", _regret(found))
    table.add_row("order:", _order(found))
    table.add_row("error:", f"{found.median_error:.1%}: |predicted / measured - 1|, median of the candidates")
    if found.drift is not None and found.median_error_after_drift is not None:
        tokens, error = format_tokens(found.drift.num_tokens), found.median_error_after_drift
        fast = f"{found.drift.speed:.2f} times as fast as when calibrated ({tokens} tokens on every rank at once)"
        table.add_row("clock drift:", f"{fast}; corrected for that, the error is {error:.1%}")
    if found.max_logit_error is not None:
        table.add_row("logits:", f"differ from one process's by at most {found.max_logit_error:.2g}")
    table.add_row("TSP:", found.tsp)
    table.add_row("measured:", "; ".join(found.measured))
    if found.modelled:
        table.add_row("modelled:", "; ".join(found.modelled))
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    for reason in found.reasons:
        table.add_row(Text("NOT MET:", style="red"), reason)
    length = format_tokens(found.context_len)
    title = Text(f"Prefill of {length} tokens by {found.model}, predicted and measured", style="bold")
    setting = f"{found.cluster.describe()} · {found.attention} attention · {found.dtype} · profile {found.profile}"
    narrower = Shrinkable(rows, ("prediction", "spread", "partition"))
    show(title, Text(setting, style="dim"), "", narrower, "", table)


def _order(found: Confirmation) -> str:
    """How many pairs are ordered by measurement, and how many of them by prediction as well."""
    orders = found.orders
    if orders.num_pairs and not orders.significant:
        return f"none of {orders.num_pairs} pairs differ by more than their spreads"
    wrong = "; ".join(f"{fast} is faster than {slow}" for fast, slow in orders.wrong[:_SHOWN_WRONG])
    more = ", ..." if len(orders.wrong) > _SHOWN_WRONG else ""
    text = f"{orders.right} of {len(orders.significant)} significant pairs predicted right, of {orders.num_pairs} pairs"
    return f"{text}; not predicted: {wrong}{more}" if wrong else text


def _regret(found: Confirmation) -> str:
    """How much slower the plan's choice was than the fastest candidate, both by name."""
    choice, best = found.choice.strategy, found.best.strategy
    if found.choice is found.best:
        return f"none: the plan's choice, {choice}, was the fastest"
    significant = "significant" if found.regret_beyond_spread else "not significant"
    amount = f"{found.regret:.1%} ± {found.regret_spread:.1%}"
    return f"{amount}: the plan's choice, {choice}, was slower than {best}, the fastest ({significant})"


def show_search(found: Searched) -> None:
    """The fastest measured partition, and the cost of the search."""
    table = facts()
    table.add_row(
        "best:", f"{', '.join(map(str, found.best.partition))}, {format_seconds(found.best.median_s)} measured"
    )
    seed = f"{', '.join(map(str, found.seed.partition))}, {format_seconds(found.seed.median_s)} measured"
    table.add_row("plan:", seed)
    table.add_row("gain:", f"{found.gain:.1%}")
    table.add_row("search:", f"{found.num_partitions} partitions, {found.num_prefills} prefills, {found.ended}")
    table.add_row("written:", found.output)
    show(table)


def show_run(found: RunResult) -> None:
    """One row per rank, then TTFT and its spread."""
    rows = columns("rank", "tokens", "compute", "wait", "sent", numbers=True)
    values = found.to_dict()["per_rank"]
    chunks = found.partition if found.chunk_a_rank else (found.context_len,) * len(values)
    tokens = [*[0] * (len(values) - len(chunks)), *chunks]
    for row, chunk in zip(values, tokens, strict=True):
        times = (format_seconds(row["compute_s"]), format_seconds(row["wait_s"]))
        rows.add_row(str(row["rank"]), str(chunk), *times, format_bytes(row["sent_bytes"]))
    table = facts()
    count = len(found.samples_s)
    table.add_row(
        "TTFT:", f"{format_seconds(found.ttft_s)}, median of {count}; spread {format_seconds(found.iqr_s)} (IQR)"
    )
    if found.predicted_s is not None:
        error = found.predicted_s / found.ttft_s - 1
        table.add_row("predicted:", f"{format_seconds(found.predicted_s)} ({error:+.1%})")
    if found.logits_error is not None:
        shown = f"{found.logits_error:.2g} of {found.logits_scale:.2g}; KV cache by at most {found.kv_cache_error:.2g}"
        table.add_row("logits:", f"differ from one process's by at most {shown}")
    for row in found.generated:
        table.add_row("tokens:", " ".join(map(str, row)))
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    title = f"Prefill of {format_tokens(found.context_len)} tokens by {found.model}, measured: {found.strategy}"
    show(Text(title, style="bold"), "", rows, "", table)
