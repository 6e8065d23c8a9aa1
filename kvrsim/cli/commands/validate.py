"""`kvrsim validate`: the simulator compared with figures that others have published."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from click.exceptions import Exit

from kvrsim.cli.help import CommandGroup
from kvrsim.cli.options import OutputArgs, with_options
from kvrsim.cli.output import print_answer
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part
from kvrsim.errors import KvrsimError
from kvrsim.units import format_seconds
from kvrsim.views.table import columns

app = CommandGroup()


class NotACheckoutError(KvrsimError):
    """The published figures are missing, because they are not part of the package."""

    exit_code = 2


@app.command("published")
@with_options()
def published(answer: OutputArgs) -> None:
    """Simulate every published case and print the errors.

    The exit code is 1 if the required accuracy is not met.

    Example: kvrsim validate published --format md
    """
    answer.check()
    try:
        cases = import_module("validate.published.compare")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("validate"):
            raise
        sentence = "kvrsim validate runs from a checkout of kvrsim's repository, which holds the published figures"
        raise NotACheckoutError(sentence) from None
    with Progress("simulating the published cases"):
        result: dict[str, Any] = cases.run()
    print_answer(answer, lambda: result, "rows", lambda: validation_screen(result))
    if result.get("ok") is False:
        raise Exit(1)


def validation_screen(result: Mapping[str, Any]) -> list[Part]:
    """Screen of a validation: one row per case, and the errors of the groups."""
    table = columns("~source", "~case", ">reported", ">simulated", ">error", ">calibration")
    for row in result["rows"]:
        times = (format_seconds(row["reported_s"]), format_seconds(row["simulated_s"]))
        role = "used" if row["used_for_calibration"] else "held out"
        table.add_row(row["source"], row["case"], *times, f"{row['rel_error']:+.1%}", role)
    groups = ("calibration", "held_out", "all")
    return [table, "", *(_errors(group, result[group]) for group in groups if group in result)]


def _errors(group: str, errors: Mapping[str, Any]) -> str:
    """One line: the number of cases and the errors of a group."""
    texts = (f"{key} {value:.1%}" if isinstance(value, float) else f"{key} {value}" for key, value in errors.items())
    return f"{group.replace('_', ' ')}: {', '.join(texts)}"
