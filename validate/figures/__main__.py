"""`python -m validate.figures`: draw everything and write the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kvrsim.io.files import write_atomically
from validate.figures.cases import Predictions, Scope, full_scope, read_printed
from validate.figures.drawings import draw_breakdown, draw_kvr_p, draw_noise, draw_scalability, draw_ttft
from validate.figures.page import IMAGES, page

DOCS = Path(__file__).parents[2] / "docs" / "results"
Step = tuple[Path, Callable[[], bytes]]  # a file, and what it will hold


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
    """Write the files one after another, each whole or not at all; yields each when it is there."""
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
        task = progress.add_task("", total=len(steps(scope, Predictions(), DOCS)), simulated=0)
        count = 0

        def on_new() -> None:
            nonlocal count
            count += 1
            progress.update(task, simulated=count)

        for path in write(scope, Predictions(on_new), DOCS):
            progress.console.print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1e3:.0f} kB")
            progress.advance(task)


if __name__ == "__main__":
    main()
