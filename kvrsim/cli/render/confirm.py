"""A confirmation and a search on the machine, for people; imported only where no JSON is asked for."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.text import Text

from kvrsim.cli.guide.next_step import again, was_typed
from kvrsim.cli.render.format import (
    format_interval,
    format_partition,
    header,
    headline,
    likely,
    measured_header,
)
from kvrsim.cli.render.layout import Hint, Shrinkable, columns, facts, show
from kvrsim.scenario import ROOFLINE
from kvrsim.units import format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.results.question import Question
    from planner.confirm.result import Confirmation
    from planner.confirm.run import RunResult
    from planner.confirm.search import Searched

_SHOWN_WRONG = 3  # pairs that were measured in another order than predicted


def show_confirmation(found: Confirmation) -> None:
    """One row per candidate, the one predicted to be the fastest first; then orders, regret and errors."""
    rows = columns("strategy\n", "partition\n(tokens)")
    columns(
        *("predicted\n", "prediction\ninterval", "measured\nmedian", "spread\n(IQR)", "error\n"),
        *("predicted\nplace", "measured\nplace"),
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
    answer, table = facts(), facts()
    answer.add_row("measured:", headline(_measured(found)))
    answer.add_row("regret:", _regret(found))
    answer.add_row("order:", _order(found))
    answer.add_row("error:", f"{found.median_error:.1%}: |predicted / measured - 1|, median of the candidates")
    for reason in found.reasons:
        answer.add_row(Text("NOT MET:", style="red"), reason)
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
    narrower = Shrinkable(rows, ("spread", "predicted\nplace", "measured\nplace", "prediction", "partition"))
    show(answer, "", *header(found.question, found.cluster), "", narrower, "", table, *_next())


def _next() -> tuple[Hint, ...]:
    """Predicted and measured timelines, unless they were asked for."""
    return () if was_typed("--plot") else (Hint(again("confirm", "--plot", "confirmed.png")),)


def _measured(found: Confirmation) -> str:
    """The plan's choice: what was measured and predicted, and whether it meets the targets."""
    choice, gpus = found.choice, f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    measured = f"{format_seconds(choice.median_s)} measured (IQR {format_seconds(choice.iqr_s)})"
    said = likely(choice.predicted_low_s, choice.predicted_s, choice.predicted_high_s, None)
    predicted = f"predicted {said}, {choice.rel_error:+.1%}"
    met = "all targets met" if found.ok else f"{len(found.reasons)} target{'s' * (len(found.reasons) != 1)} NOT met"
    return f"{choice.strategy} on {gpus}, TTFT {measured}; {predicted}; {met}"


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
    table, best, seed = facts(), found.best, found.seed
    table.add_row(
        "best:", headline(f"{', '.join(map(str, best.partition))}, TTFT {format_seconds(best.median_s)} measured")
    )
    table.add_row("gain:", f"{found.gain:.1%} over the plan's partition")
    table.add_row("plan:", f"{', '.join(map(str, seed.partition))}, {format_seconds(seed.median_s)} measured")
    table.add_row("search:", f"{found.num_partitions} partitions, {found.num_prefills} prefills, {found.ended}")
    table.add_row("written:", found.output)
    table_file = shlex.quote(found.output)
    look_up = Hint(
        f"kvrsim table lookup {table_file} --gpus {found.question.num_gpus} --ctx {found.question.context_len}"
    )
    show(table, "", *header(found.question, found.question.cluster), look_up)


def show_run(found: RunResult) -> None:
    """One row per rank, then TTFT and its spread."""
    rows = columns("rank", "tokens", "compute", "wait", "sent", numbers=True)
    values = found.to_dict()["per_rank"]
    chunks = found.partition if found.chunk_a_rank else (found.context_len,) * len(values)
    tokens = [*[0] * (len(values) - len(chunks)), *chunks]
    for row, chunk in zip(values, tokens, strict=True):
        times = (format_seconds(row["compute_s"]), format_seconds(row["wait_s"]))
        rows.add_row(str(row["rank"]), str(chunk), *times, format_bytes(row["sent_bytes"]))
    answer, table, count = facts(), facts(), len(found.samples_s)
    gpus = f"{found.num_gpus} GPU{'s' * (found.num_gpus != 1)}"
    measured = f"{format_seconds(found.ttft_s)} measured, median of {count}; spread {format_seconds(found.iqr_s)} (IQR)"
    answer.add_row("TTFT:", headline(f"{found.strategy} on {gpus}, {measured}"))
    if found.predicted_s is not None:
        error = found.predicted_s / found.ttft_s - 1
        answer.add_row("predicted:", f"{format_seconds(found.predicted_s)} ({error:+.1%})")
    if found.chunk_a_rank and len(found.partition) > 1:
        answer.add_row("partition:", f"{format_partition(found.partition, room=10**6)} tokens")
    if found.logits_error is not None:
        shown = f"{found.logits_error:.2g} of {found.logits_scale:.2g}; KV cache by at most {found.kv_cache_error:.2g}"
        table.add_row("logits:", f"differ from one process's by at most {shown}")
    for row in found.generated:
        table.add_row("tokens:", " ".join(map(str, row)))
    table.add_row("machine:", "; ".join(f"{name} {value}" for name, value in found.conditions.items()))
    for warning in found.warnings:
        table.add_row(Text("note:", style="yellow"), warning)
    asked = measured_header(found.question, found.conditions)
    show(answer, "", *asked, "", Shrinkable(rows, ("sent", "tokens")), "", table, next_of_run(found.question))


def next_of_run(question: Question) -> Hint:
    """The same prefill in the plan's comparison; without a profile of the machine, one is made first."""
    if question.profile == ROOFLINE:
        return Hint("kvrsim calibrate all -o here.json")
    return Hint(again("confirm"))
