"""`kvrsim validate`: predictions compared with a user's prefills, and with figures that others have published."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.exceptions import Exit

from kvrsim.arguments import Help, PrefillArgs, ProfileSource
from kvrsim.cli.commands.calibrate import check_screen
from kvrsim.cli.help import CommandGroup
from kvrsim.cli.limits import NOT_MET, LimitArgs, verdict_json, verdict_line
from kvrsim.cli.options import Json, OutputArgs, Sources, with_options
from kvrsim.cli.output import print_answer, print_result, warn_notes
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part
from kvrsim.errors import KvrsimError
from kvrsim.units import format_seconds
from kvrsim.views.table import columns

if TYPE_CHECKING:
    pass


class ValidateGroup(CommandGroup):
    """The commands of `kvrsim validate`; a file in place of a command means `kvrsim validate prefills FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `kvrsim validate rows.csv` as `kvrsim validate prefills rows.csv`."""
        if not set(args) & set(self.commands) and any(map(_names_a_file, args)):
            args = ["prefills", *args]
        return super().parse_args(ctx, args)


def _names_a_file(word: str) -> bool:
    return not word.startswith("-") and (Path(word).suffix in (".csv", ".json", ".jsonl") or Path(word).exists())


app = ValidateGroup()


class ValidateArgs(PrefillArgs):
    """Values for the columns that a file of measured prefills lacks; the profile follows from the rows' GPU."""

    profile: Annotated[
        ProfileSource | None,
        Help(
            "The calibration profile to check. Default: that of the GPU in the rows or in --cluster.",
            metavar="NAME|PATH",
            section="Machine",
        ),
    ] = None  # type: ignore[assignment]


@app.command("prefills")
@with_options()
def prefills(
    args: ValidateArgs,
    limits: LimitArgs,
    *,
    files: Annotated[
        Sources,
        Help(
            "Measured prefills, as kvrsim calibrate prefills reads them.",
            metavar="ROWS.csv|OUTPUT.json...",
            positional=True,
        ),
    ],
    json: Json = False,
) -> None:
    """Check predictions against your prefills: pass or fail.

    You state the limits. Nothing is fitted. The exit code is 1 if a limit is not met. kvrsim validate rows.csv means
    the same as kvrsim validate prefills rows.csv.

    Example: kvrsim validate prefills rows.csv --model llama-2-70b --max-median-error 10%
    """
    from calibrate.prefills.fit import check_prefills
    from kvrsim.prefills import cases_of
    from planner.uncertainty.intervals import interval

    with Progress() as progress:
        cases = cases_of(args, files, progress)
        warn_notes(cases.notes)
        checked = check_prefills(cases.cases, interval, progress)
    verdict = limits.wanted.check(checked)
    is_met = all(limit.ok for limit in verdict)
    scores = checked.to_dict() | {"interval_score": checked.interval_score}
    content = {"ok": is_met, "limits": verdict_json(verdict), **scores, "warnings": list(cases.notes)}
    answer = verdict_line(verdict, len(checked.rows))
    print_result(content, answer, "", *check_screen(checked, cases.cases[0].scenario), json=json)
    if not is_met:
        raise Exit(NOT_MET)


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
