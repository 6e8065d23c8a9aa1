"""`kvrsim compare`: saved answers side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvrsim.arguments import Help
from kvrsim.cli.options import Sources, with_options
from kvrsim.cli.output import write_files
from kvrsim.cli.text import headline, show
from kvrsim.errors import InputError


@with_options()
def compare(
    *,
    answers: Annotated[
        Sources,
        Help(
            "Two or more outputs of kvrsim plan, simulate or confirm with --json, or of capacity --json.",
            metavar="ANSWER.json...",
            positional=True,
        ),
    ],
    plot: Annotated[
        str | None, Help("Write the comparison as a page, FILE.html.", metavar="FILE", spelling=("--plot", "--html"))
    ] = None,
) -> None:
    """Show saved answers side by side.

    It shows the best of each, how the questions differ, the fastest strategies, and where the time goes; of fleets the
    GPUs, the price and the GPUs for more requests.

    Example: kvrsim compare a.json b.json --html both.html
    """
    from kvrsim.io.schema import JsonObject
    from kvrsim.views import compare as view
    from kvrsim.views import fleets
    from kvrsim.views.figure import is_page
    from kvrsim.views.page import write_page
    from kvrsim.views.plan_text import FASTEST_ROWS

    if len(answers) < 2:
        raise InputError("answer", answers[0], "two files or more")
    if plot is not None and not is_page(plot):
        raise InputError("plot", plot, "a file name that ends in .html")
    stems = [Path(path).stem for path in answers]
    names = stems if len(set(stems)) == len(stems) else answers
    contents = [JsonObject.read(Path(path), "answer") for path in answers]
    of_fleets = [fleets.is_fleet(content) for content in contents]
    if all(of_fleets):
        saved_fleets = [fleets.SavedFleet.of(name, content) for name, content in zip(names, contents, strict=True)]
        differences = view.differences(saved_fleets)
        fleet_tables = (fleets.bests(saved_fleets), differences, fleets.growth(saved_fleets))
        show(headline(fleets.headline(saved_fleets)), *(part for one in fleet_tables if one.rows for part in ("", one)))
        write_files((plot, lambda path: write_page(fleets.page(saved_fleets, differences), path)))
        return
    if any(of_fleets):
        raise InputError("answer", answers[of_fleets.index(True)], "fleets only, or plans and simulations only")
    saved = [view.SavedAnswer.of(name, content) for name, content in zip(names, contents, strict=True)]
    tables = (view.bests(saved), view.differences(saved), view.strategies(saved, FASTEST_ROWS), view.limits(saved))
    show(headline(view.headline(saved)), *(part for one in tables if one.rows for part in ("", one)))
    write_files((plot, lambda path: write_page(view.page(saved), path)))
