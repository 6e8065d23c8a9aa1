"""`kvrsim calibrate prefills`: an engine fitted to whole prefills, or a profile checked against them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.options import Json, ScenarioOptions, takes
from kvrsim.cli.outputs import print_json, tell
from kvrsim.cli.parsing import check_output, parse_strategy
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from calibrate.prefills.fit import PrefillCases
    from calibrate.prefills.rows import PrefillDefaults
    from kvrsim.cli.progress import WorkProgress
    from kvrsim.profile.profile import CalibrationProfile

_ARGUMENT = "prefills"
_OF_ROWS = ("ctx", "gpus", "model", "profile", "batch", "cached_prefix", "dtype")  # the others hold for all rows


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(ScenarioOptions):
    """What rows are about where their file does not say."""

    ctx: Annotated[
        str, typer.Option("--ctx", metavar="LEN", help="Context length in tokens, of rows that do not say theirs.")
    ] = ""
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="N", help="Number of GPUs. Default: 1.")] = None
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME|PATH", help="A built-in model, a Hugging Face config.json, or its folder."
        ),
    ] = ""
    profile: Annotated[
        str,
        typer.Option("--profile", metavar="NAME|PATH", help="The calibration profile whose kernels the engine runs."),
    ]

    def defaults(self, strategy: str | None) -> PrefillDefaults:
        """Checked; InputError names the option."""
        from calibrate.prefills.rows import PrefillDefaults
        from kvrsim.units import parse_count, parse_tokens

        return PrefillDefaults(
            model=self.model or None,
            num_gpus=1 if self.gpus is None else parse_count(self.gpus, "gpus"),
            strategy=strategy,
            context_len=parse_tokens(self.ctx, "ctx") if self.ctx else None,
            batch=parse_count(self.batch, "batch"),
            cached_prefix=0 if self.cached_prefix == "0" else parse_tokens(self.cached_prefix, "cached_prefix"),
            dtype=self.dtype,
        )

    def setting(self) -> dict[str, Any]:
        """The other arguments of make_scenario."""
        return {name: value for name, value in self._given().items() if name not in _OF_ROWS}


@takes(PrefillOptions)
def prefills(
    options: PrefillOptions,
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="ROWS.csv|OUTPUT.json...",
            help="Measured prefills: a CSV file with a column ttft_s, or what vllm bench latency, vllm bench serve,"
            " sglang.bench_one_batch, AIPerf or GenAI-Perf wrote.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the profile with the fitted engine, as JSON."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="Strategy of rows that do not say theirs. Default: tp, or single on one GPU.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the profile. Default: its file's.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fit nothing; report how far the profile is from the rows.")
    ] = False,
    json: Json = False,
) -> None:
    """Fit a serving engine to whole prefills measured on it.

    A handful of prefills is enough. Prints the engine's terms and the errors of rows that were left out of the fit.

    Example: kvrsim calibrate prefills rows.csv --profile h100-flash -o mine.json
    """
    from calibrate.prefills.rows import read_prefills
    from kvrsim.cli.progress import WorkProgress
    from kvrsim.profile.profile import load_profile

    _check_outputs(output, name, check)
    if strategy is not None:
        parse_strategy(strategy)
    if options.profile == "roofline":
        raise InputError("profile", options.profile, "a calibration profile, which has measured kernels")
    profile = load_profile(options.profile)
    found = read_prefills(files, options.defaults(strategy), _ARGUMENT)
    with WorkProgress() as progress:
        cases = _cases(options, profile, found.rows, progress)
        for note in (*found.notes, *cases.notes):
            tell(f"note: {note}")
        if check:
            content = _checked(cases, progress, json)
        else:
            assert output is not None, "see _check_outputs"
            label = name or Path(output).stem
            content = _fitted(cases, profile, label, files, output, progress, json)
    if json:
        print_json(content | {"warnings": [*found.notes, *cases.notes]})


def _check_outputs(output: str | None, name: str | None, check: bool) -> None:
    """Complain before the work rather than after it."""
    if check:
        for parameter, value in (("output", output), ("name", name)):
            if value is not None:
                raise InputError(parameter, value, "nothing beside --check, which fits no profile")
    elif output is None:
        raise InputError("output", "nothing", "a file for the profile, such as mine.json; or --check, which needs none")
    check_output(output, "output")


def _cases(options: PrefillOptions, profile: CalibrationProfile, rows: Any, progress: WorkProgress) -> PrefillCases:
    from calibrate.prefills.fit import make_cases
    from planner.partitions import partition_of

    return make_cases(rows, profile, partition_of, options.setting(), progress)


def _checked(cases: PrefillCases, progress: WorkProgress, json: bool) -> dict[str, Any]:
    from calibrate.prefills.fit import check_prefills
    from planner.uncertainty.interval import interval

    checked = check_prefills(cases.cases, interval, progress)
    if not json:
        from kvrsim.cli.render.prefills import show_check

        show_check(checked, cases.cases[0].scenario)
    return checked.to_dict()


def _fitted(
    cases: PrefillCases,
    profile: CalibrationProfile,
    name: str,
    files: list[str],
    output: str,
    progress: WorkProgress,
    json: bool,
) -> dict[str, Any]:
    from calibrate.prefills.fit import fit_prefills, source_of
    from planner.uncertainty.interval import interval

    fit = fit_prefills(
        cases.cases,
        profile,
        cases.cases[0].scenario.engine,
        name=name,
        source=source_of(files),
        cluster=cases.cluster,
        interval_of=interval,
        on_progress=progress,
    )
    fit.profile.write(output)
    if not json:
        from kvrsim.cli.render.prefills import show_fit

        show_fit(fit, output)
    return fit.to_dict() | {"output": output}
