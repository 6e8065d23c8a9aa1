"""`kvrsim validate`: the simulator against figures that others have published."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import takes
from kvrsim.cli.parsing import check_output
from kvrsim.errors import KvrsimError

app = typer.Typer()


class NotACheckoutError(KvrsimError):
    """The evidence does not ship with the package."""

    exit_code = 2


@app.callback()
def _validate() -> None:
    """So that one command is one of a group."""


@app.command("published")
@takes(AnswerOptions)
def published(
    answers: AnswerOptions,
    *,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="Also write the report as Markdown.")
    ] = None,
) -> None:
    """Simulate every published case and print the errors.

    The exit code is 1 if the required accuracy is not met.

    Example: kvrsim validate published --report accuracy.md
    """
    answers.check()
    check_output(report, "report")
    try:
        cases = import_module("validate.published.compare")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("validate"):
            raise
        sentence = "kvrsim validate runs from a checkout of kvrsim's repository, which holds the published figures"
        raise NotACheckoutError(sentence) from None
    from kvrsim.cli.progress import WorkProgress

    with WorkProgress() as progress:
        progress("simulating the published cases")
        result: dict[str, Any] = cases.run()
    if report is not None:
        cases.write_report(result, report)
    if not answers.printed(lambda: result, "rows"):
        from kvrsim.cli.render.catalogue import show_validation

        show_validation(result)
    if result.get("ok") is False:
        raise typer.Exit(1)
