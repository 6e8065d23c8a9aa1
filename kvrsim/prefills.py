"""`kvrsim.calibrate`: an engine fitted to whole prefills.

This module joins the package calibrate, which fits, and the package planner, which predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import kvrsim
from kvrsim.arguments import PrefillArgs, ProgressFunction, Read, named, takes
from kvrsim.errors import ABSENT, InputError
from kvrsim.progress import OnProgress

if TYPE_CHECKING:
    from calibrate.prefills.fit import PrefillCases
    from kvrsim.kernels.profile import CalibrationProfile

_FILE = "str | PathLike[str] | pandas.DataFrame"
_FRAME = ("pandas:DataFrame", "pandas.core.frame:DataFrame")
# Parameters of the rows; other parameters are those of a scenario, and hold for all rows.
_OF_ROWS = ("ctx", "gpus", "model", "profile", "batch", "cached_prefix", "dtype", "strategy", "columns")


def _files(value: object, parameter: str) -> list[object]:
    check = named(*_FRAME)
    if isinstance(value, list | tuple):
        return [check(file, parameter) for file in value]
    return [check(value, parameter)]


@takes(
    prefills=Annotated[Sequence[object], Read(_files, f"{_FILE} | Sequence[{_FILE}]")],
    name=str,
    on_progress=ProgressFunction | None,
)
def calibrate(
    args: PrefillArgs, *, prefills: Sequence[object], name: str = "mine", on_progress: OnProgress | None = None
) -> kvrsim.PrefillFit:
    """Fit a serving engine to whole prefills measured on it.

    Parameters
    ----------
    prefills : DataFrame, path or a list of them
        A column `ttft_s` in seconds or `ttft_ms` in milliseconds, and any of model, gpu, num_gpus, strategy,
        context_len, batch, cached_prefix and dtype; or files as `kvrsim calibrate prefills` reads them.
    name : str
        Name of the profile.
    on_progress : callable
        As in `plan`.

    Returns
    -------
    PrefillFit
        `profile` is what other functions take; `before`, `after` and `left_out` are its errors.

    Raises
    ------
    InputError
        Its message names the parameter, and the row, or the file and the line.

    Examples
    --------
    >>> import kvrsim, pandas
    >>> rows = pandas.DataFrame({"context_len": [2048, 8192], "ttft_s": [0.31, 1.34]})
    >>> fit = kvrsim.calibrate(prefills=rows, profile="h100-flash", model="llama-2-70b", gpus=2)
    >>> plan = kvrsim.plan(profile=fit.profile, model="llama-2-70b", gpus=8, ctx="16k", strategies="tp")
    """
    return fit(args, cases_of(args, prefills, on_progress), prefills, name, on_progress)


def profile_of(args: PrefillArgs, gpu: str | None = None) -> CalibrationProfile:
    """Return the profile of the kernels that the engine runs.

    gpu: name of the rows' GPU; where `args` names no profile, the default profile of the cluster's GPU, or of this one.
    """
    from kvrsim.kernels.profile import load_profile

    if args.profile is None:
        return _default_profile(args, gpu)
    if args.profile == "roofline":
        raise InputError("profile", args.profile, "a calibration profile, which has measured kernels")
    return load_profile(args.profile) if isinstance(args.profile, str) else args.profile


def _default_profile(args: PrefillArgs, gpu: str | None) -> CalibrationProfile:
    from calibrate.prefills.fit import chips_of
    from kvrsim.builder import DEFAULT_PROFILES
    from kvrsim.hardware import Cluster, load_cluster
    from kvrsim.kernels.profile import load_profile

    names = chips_of(gpu or "")
    if args.cluster is not None:
        cluster = args.cluster if isinstance(args.cluster, Cluster) else load_cluster(args.cluster)
        names = [cluster.gpu.name]
    for profile in map(load_profile, DEFAULT_PROFILES):
        if profile.gpu in names:
            return profile
    accepted = "a calibration profile; by default that of the GPU in the column `gpu` or in `cluster`, if it has one"
    raise InputError("profile", ABSENT, accepted)


def cases_of(args: PrefillArgs, prefills: Sequence[object], on_progress: OnProgress | None) -> PrefillCases:
    """Make cases from the measured prefills, ready to be predicted, with notes on them."""
    from calibrate.prefills.fit import make_cases
    from calibrate.prefills.limits import check_times
    from calibrate.prefills.rows import read_prefills
    from kvrsim.strategies import get_strategy
    from planner.candidates import partition_of

    if args.strategy is not None:
        get_strategy(args.strategy)
    common = {name: getattr(args, name) for name in ("model", "strategy", "batch", "cached_prefix", "dtype")}
    defaults = common | {"num_gpus": args.gpus or 1, "context_len": args.ctx}
    rows = read_prefills(prefills, defaults, columns=args.columns)
    profile = profile_of(args, rows.rows[0].gpu)
    setting = {name: value for name, value in vars(args).items() if name not in _OF_ROWS}
    cases = make_cases(rows.rows, profile, partition_of, setting, on_progress)
    checked, unit_notes = check_times(cases.cases)
    return replace(cases, cases=checked, notes=(*rows.notes, *unit_notes, *cases.notes))


def fit(
    args: PrefillArgs, cases: PrefillCases, prefills: Sequence[object], name: str, on_progress: OnProgress | None
) -> kvrsim.PrefillFit:
    """Fit the engine to the cases."""
    from calibrate.prefills.fit import fit_prefills
    from planner.uncertainty.intervals import interval

    return fit_prefills(
        cases.cases,
        profile_of(args),
        cases.cases[0].scenario.engine,
        name=name,
        source=", ".join(dict.fromkeys(Path(one).name if isinstance(one, str) else "DataFrame" for one in prefills)),
        cluster=cases.cluster,
        interval_of=interval,
        on_progress=on_progress,
    )
