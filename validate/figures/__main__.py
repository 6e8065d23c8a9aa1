"""`python -m validate.figures`: draw the paper's figures and write their page, docs/results/figures.md.

Every number of the page is computed or read from a data file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from kvrsim.io.files import write_atomically
from kvrsim.noise import parse_noise
from kvrsim.results.results import SimResult
from kvrsim.units import format_tokens
from validate.figures.cases import LOOKS, PROFILE, Predictions, Printed, Scope, full_scope, read_printed
from validate.figures.drawings import (
    Interpolated,
    breakdown_contexts,
    comparison,
    draw_breakdown,
    draw_kvr_p,
    draw_noise,
    draw_scalability,
    draw_ttft,
    increases,
    mean_increase,
    scalings,
    tables,
)
from validate.published.compare import Row, summary
from validate.report import RESULTS, fill, numbers_table

IMAGES = "figures"  # folder of the images, next to the page


def page(scope: Scope, predictions: Predictions, printed: Printed) -> str:
    """The whole page."""
    every = [
        one
        for num_gpus in scope.lookup_gpu_counts
        for knots in tables(scope).values()
        for one in comparison(scope, predictions, num_gpus, knots)
    ]
    limits = (f"{LOOKS[name].label} {share:.1%}" for name, share in printed.noisy_network.shares.items())
    lines = fill(
        "figures",
        profile=PROFILE,
        within=sum(is_within(row, predictions.of_row(row)) for row in scope.rows),
        rows=len(scope.rows),
        model=scope.partition_model,
        case=f"{scope.partition_model}, {format_tokens(scope.scaling_context_len)} tokens",
        ttft_images="\n\n".join(
            f"![{model}: TTFT of TSP, KVR-E and KVR-S by context]({IMAGES}/ttft-{model}.png)" for model in scope.models
        ),
        speedups=_speedups(scope, predictions),
        above_no_communication=printed.kvr_s_above_no_communication,
        scalability=_scalability(scope, predictions),
        partitions=_partitions(scope, predictions),
        printed_partitions=_printed_partitions(predictions, printed),
        claims=" and ".join(f"{share:.1%}" for share in printed.kvr_p_above_kvr_s),
        middles=_middles(every),
        worst=_worst(scope, predictions, every),
        noise=scope.noise,
        noise_parameters=parse_noise(scope.noise).describe(),
        limits=", ".join(limits),
        noise_samples=scope.noise_samples,
        increases=_increases(scope, predictions, printed),
        appendix=appendix(scope.rows, predictions),
    )
    return "\n".join(lines)


def _speedups(scope: Scope, predictions: Predictions) -> list[str]:
    contexts = sorted({tokens for model in scope.models for tokens in scope.contexts(model)})
    cells = [
        (f"{model}, {num_gpus} GPUs", *(_speedup(scope, predictions, model, num_gpus, c) for c in contexts))
        for model in scope.models
        for num_gpus in scope.gpu_counts
        if scope.reported(model, num_gpus, "kvr-s")
    ]
    return numbers_table(("", *map(format_tokens, contexts)), cells)


def _speedup(scope: Scope, predictions: Predictions, model: str, num_gpus: int, context_len: int) -> str:
    """Printed / predicted, or nothing where a row is missing."""
    pair = [
        row
        for strategy in ("tsp", "kvr-s")
        for row in scope.reported(model, num_gpus, strategy)
        if row.context_len == context_len
    ]
    if len(pair) < 2:
        return ""
    tsp, own = pair
    predicted = predictions.of_row(tsp).ttft_s / predictions.of_row(own).ttft_s
    return f"{tsp.ttft_s / own.ttft_s:.2f} / {predicted:.2f}"


def _scalability(scope: Scope, predictions: Predictions) -> list[str]:
    cells = [
        (
            str(one.num_gpus) + ("" if one.fits else " (does not fit)"),
            *(f"{one.ttft_s[name]:.3f}" for name in ("tsp", "kvr-e", "kvr-s", "no-communication", "closed-form")),
            f"{one.lower_bound_s:.3f}",
            f"{one.ttft_s['kvr-s'] / one.ttft_s['no-communication'] - 1:.1%}",
            " / ".join(f"{one.reported_s[name]:g}" for name in ("tsp", "kvr-s") if name in one.reported_s),
        )
        for one in scalings(scope, predictions)
    ]
    heads = ("GPUs", "TSP", "KVR-E", "KVR-S", "TTFT(p)", "TTFT*(p)", "proven bound", "KVR-S above TTFT(p)")
    return numbers_table((*heads, "reported TSP / KVR-S"), cells)


def _partitions(scope: Scope, predictions: Predictions) -> list[str]:
    cells = []
    for num_gpus, tokens in product(scope.gpu_counts, breakdown_contexts(scope)):
        own, even = (predictions.of(scope.partition_model, tokens, num_gpus, name) for name in ("kvr-s", "kvr-e"))
        shares = shares_text([chunk / tokens for chunk in own.partition])
        cells.append((f"{num_gpus} × {format_tokens(tokens)}", shares, f"{even.ttft_s / own.ttft_s - 1:.1%}"))
    return numbers_table(("GPUs × context", "KVR-S", "KVR-E above KVR-S"), cells)


def _printed_partitions(predictions: Predictions, printed: Printed) -> list[str]:
    lines = []
    for one in printed.partitions:
        case = f"{one.num_gpus} × {format_tokens(one.context_len)}"
        own = predictions.of(one.model, one.context_len, one.num_gpus, "kvr-s")
        here = shares_text([chunk / one.context_len for chunk in own.partition])
        lines.append(f"- {case}, {one.method}: {one.printed_as} ({one.place}); KVR-S here: {here}.")
    return lines


def _middles(every: Sequence[Interpolated]) -> list[str]:
    """Table of the contexts halfway between two entries."""
    heads = (
        "GPUs × context",
        "between",
        "KVR-P",
        "KVR-S",
        "KVR-P s",
        "KVR-S s",
        "KVR-P above KVR-S",
        "TSP above KVR-S",
    )
    cells = [
        (
            f"{one.num_gpus} × {format_tokens(one.context_len)}",
            _interval(one),
            shares_text(one.shares),
            shares_text([chunk / one.context_len for chunk in one.searched]),
            f"{one.ttft_s:.4f}",
            f"{one.searched_s:.4f}",
            f"{one.above_searched:+.2%}",
            f"{one.tsp_s / one.searched_s - 1:.1%}",
        )
        for one in every
        if one.context_len == sum(one.neighbours) // 2
    ]
    return numbers_table(heads, cells)


def _worst(scope: Scope, predictions: Predictions, every: Sequence[Interpolated]) -> list[str]:
    """Table of the worst context of each interval."""
    intervals: dict[tuple[int, tuple[int, int]], list[Interpolated]] = {}
    for one in every:
        intervals.setdefault((one.num_gpus, one.neighbours), []).append(one)
    cells = []
    for (num_gpus, (low, _)), group in intervals.items():
        worst = max(group, key=lambda one: one.above_searched)
        even, own = (predictions.of(scope.partition_model, low, num_gpus, name).ttft_s for name in ("kvr-e", "kvr-s"))
        excess = (f"{worst.above_searched:+.2%}", f"{even / own - 1:.1%}")
        cells.append((f"{num_gpus}, {_interval(worst)}", format_tokens(worst.context_len), *excess))
    heads = ("GPUs, interval", "worst at", "KVR-P above KVR-S", "KVR-E above KVR-S at the lower entry")
    return numbers_table(heads, cells)


def _interval(one: Interpolated) -> str:
    return "–".join(format_tokens(tokens) for tokens in one.neighbours)


def shares_text(shares: Sequence[float]) -> str:
    """.350 .255 .210 .185, as the paper prints them."""
    return " ".join(f"{share:.3f}".removeprefix("0") for share in shares)


def _increases(scope: Scope, predictions: Predictions, printed: Printed) -> list[str]:
    """Table of increases of TTFT on the noisy network."""
    noisy = printed.noisy_network
    every = increases(scope, predictions, printed)
    cells = []
    for num_gpus, tokens in product(noisy.num_gpus, noisy.context_lens):
        own = [one for one in every if (one.num_gpus, one.context_len) == (num_gpus, tokens)]
        ranges = (f"{one.mean:.1%} ({one.low:.1%} to {one.high:.1%})" for one in own)
        cells.append((f"{num_gpus}, {format_tokens(tokens)}", *ranges))
    cells.append(("mean", *(f"{mean_increase(every, strategy):.1%}" for strategy in LOOKS)))
    cells.append(("the paper, at most", *(f"{noisy.shares[strategy]:.1%}" for strategy in LOOKS)))
    return numbers_table(("GPUs, tokens", *(look.label for look in LOOKS.values())), cells)


def by_table(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by table, model and link, in the order of the data."""
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.table, row.model, row.link), []).append(row)
    return grouped


def appendix(rows: Iterable[Row], predictions: Predictions) -> list[str]:
    """One table per table of the paper, model and link: every TTFT, reported / predicted, by context."""
    lines: list[str] = []
    for (name, model, link), group in by_table(rows).items():
        results = {row: predictions.of_row(row) for row in group}
        where = "on one GPU" if link == "none" else f"at {link}"
        contexts = sorted({row.context_len for row in group})
        cells: dict[tuple[int, str], dict[int, str]] = {}
        for row, result in results.items():
            mark = "" if is_within(row, result) else " *"
            cells.setdefault((row.num_gpus, row.strategy), {})[row.context_len] = (
                f"{row.ttft_s:g} / {result.ttft_s:.3f}{mark}"
            )
        lines += [f"**Table {name}, {model} {where}.** {_summary_line(group, list(results.values()))}", ""]
        lines += numbers_table(
            ("GPUs, strategy", *map(format_tokens, contexts)),
            [
                (f"{num_gpus}, {strategy}", *(row_cells.get(c, "") for c in contexts))
                for (num_gpus, strategy), row_cells in cells.items()
            ],
        )
    return lines


def is_within(row: Row, result: SimResult) -> bool:
    """Whether the reported TTFT lies in the predicted interval, give or take its rounding."""
    return row.is_inside(result.ttft_low_s, result.ttft_high_s)


def _summary_line(rows: Sequence[Row], results: Sequence[SimResult]) -> str:
    pairs = list(zip(rows, results, strict=True))
    errors = summary(
        [{"rel_error": result.ttft_s / row.ttft_s - 1, "inside": is_within(row, result)} for row, result in pairs]
    )
    within = round(errors["coverage"] * errors["n"])
    shares = f"mean absolute error {errors['mape']:.1%}, median {errors['median_ape']:.1%}"
    return f"{errors['n']} rows, {shares}; {within} within the predicted interval."


Step = tuple[Path, Callable[[], bytes]]  # a file, and the function that returns its contents


def steps(scope: Scope, predictions: Predictions, docs: Path) -> list[Step]:
    """The files in the order in which they are written; the page comes last."""
    printed = read_printed()
    drawn: dict[str, Callable[[], bytes]] = {
        **{f"ttft-{model}": partial(draw_ttft, scope, predictions, model) for model in scope.models},
        "scalability": lambda: draw_scalability(scope, predictions, printed),
        "partitions": lambda: draw_breakdown(scope, predictions, printed),
        "kvr-p": lambda: draw_kvr_p(scope, predictions, printed),
        "noise": lambda: draw_noise(scope, predictions, printed),
    }
    files = [(docs / IMAGES / f"{name}.png", draw) for name, draw in drawn.items()]
    return [*files, (docs / "figures.md", lambda: page(scope, predictions, printed).encode())]


def write(scope: Scope, predictions: Predictions, docs: Path) -> Iterator[Path]:
    """Write the files in turn, each whole or not at all; yields the path of each after it is written."""
    (docs / IMAGES).mkdir(parents=True, exist_ok=True)
    for path, content in steps(scope, predictions, docs):
        write_atomically(path, content(), argument="figures")
        yield path


def main() -> None:
    """Rewrite docs/results/figures.md and docs/figures/*.png, with progress on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    scope = full_scope()
    simulated = TextColumn("{task.fields[simulated]} simulations")
    columns = (TextColumn("figures"), BarColumn(), MofNCompleteColumn(), simulated, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(steps(scope, Predictions(), RESULTS)), simulated=0)
        count = 0

        def on_new() -> None:
            nonlocal count
            count += 1
            progress.update(task, simulated=count)

        for path in write(scope, Predictions(on_new), RESULTS):
            progress.console.print(f"{path.relative_to(RESULTS.parent)}: {path.stat().st_size / 1e3:.0f} kB")
            progress.advance(task)


if __name__ == "__main__":
    main()
