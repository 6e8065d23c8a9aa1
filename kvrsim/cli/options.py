"""Options of commands, generated from groups of arguments (kvrsim/arguments.py), and groups that only commands have."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import click

from kvrsim.arguments import (
    REQUIRED,
    Arguments,
    BudgetArgs,
    Help,
    MeasuredArgs,
    NumJobs,
    Option,
    PoolArgs,
    Read,
    ScenarioArgs,
    Seconds,
    Seed,
    flag,
    groups_of,
    option_of,
    options_of,
    unchanged,
)
from kvrsim.choices import ALL_OPTIONS, FEW_OPTIONS, DeployEngine, Device, Launch, RankBackend
from kvrsim.cli.help import Place
from kvrsim.errors import ABSENT, InputError
from kvrsim.io.annotations import Range

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.hardware import Hardware
    from planner.processes import Pool

Format = Literal["csv", "md"]
FORMATS: tuple[Format, ...] = get_args(Format)
_DATA = Path(__file__).parents[1] / "data"
_NAMED = {  # folder or file of kvrsim/data with the names of an option's values
    **{"model": "models", "cluster": "clusters", "profile": "profiles", "engine": "engines", "gpu": "gpus"},
    **{"link": "links", "strategy": "strategies", "strategies": "strategies"},
}
_PLACES = ("model", "cluster")  # options of a question that may also be given by position
OUTPUT = ("--output", "-o")  # spellings of the option
Json = Annotated[bool, Help("Print one JSON object instead of tables.")]


def with_options(
    *, fixed: Mapping[str, object] = MappingProxyType({})
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of Click from a function; its parameters by position are groups of arguments.

    The command has an option for each of their fields, except those with a `fixed` value, and for each further
    parameter, which is annotated like a field. The model and the cluster of a question may also be given as the first
    and second argument.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        groups = groups_of(function)
        further = _further_options(function)
        declared: dict[str, Option] = {}
        for group in groups:
            declared |= options_of(group)
        declared |= further
        asks = any(issubclass(group, ScenarioArgs) for group in groups)
        if any(option.positional for option in further.values()):
            asks = False
        places = [name for name in _PLACES if asks and name not in fixed]

        def command(**values: object) -> None:
            given = {name: value for name, value in values.items() if value is not None}
            for name in places:
                _move_place(given, name, declared[name])
            parts = [group.take(given, fixed) for group in groups]
            others = {name: option.read(given.get(name, option.default), name) for name, option in further.items()}
            function(*parts, **others)

        parameters: list[click.Parameter] = [_place(name, declared[name]) for name in places]
        for name, option in declared.items():
            if name in places:
                parameters.append(_parameter(name, option, default=None))
            elif name not in fixed:
                parameters.append(_parameter(name, option, default=option.default))
        num_options = sum(not option.positional for option in declared.values()) - len(fixed)
        if num_options > FEW_OPTIONS:
            parameters.append(_help_all())
        command.__doc__ = function.__doc__
        command.__click_params__ = parameters[::-1]  # type: ignore[attr-defined]
        return command

    return decorate


def _further_options(function: Callable[..., None]) -> dict[str, Option]:
    """Options of a function's parameters by keyword, which belong to no group."""
    options: dict[str, Option] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = option_of(parameter.annotation, parameter.default)
    return options


def _move_place(given: dict[str, object], name: str, option: Option) -> None:
    """Move the value of an argument by position to the option of that name.

    Raises InputError if both are given, or none of a required option.
    """
    value = given.pop(f"{name}_", None)
    if value is not None and name in given:
        raise InputError(name, value, f"the option or the argument, not both (--{name} {given[name]})")
    if value is not None:
        given[name] = value
    elif name not in given and option.default is REQUIRED:
        raise InputError(name, ABSENT, option.help)


def _help_all() -> click.Option:
    """Make the option that prints the help with every option, and ends."""

    def print_help(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            context.meta[ALL_OPTIONS] = True
            click.echo(context.get_help())
            context.exit()

    return click.Option(
        ["--help-all"], help="Show all options.", is_flag=True, is_eager=True, expose_value=False, callback=print_help
    )


def _place(name: str, declared: Option) -> click.Argument:
    """Make a positional argument of a command; it sets the option of the same name."""
    return Place([f"{name}_"], metavar=name.upper(), required=False, about=declared.help)


def _parameter(name: str, declaration: Option, default: object) -> click.Parameter:
    """Make a parameter of Click from an argument; its values are texts, which the argument's check reads."""
    is_required = default is REQUIRED
    if declaration.positional:
        count = -1 if declaration.metavar.endswith("...") else 1
        return Place([name], metavar=declaration.metavar, required=is_required, nargs=count, about=declaration.help)
    if declaration.check is flag:
        about: dict[str, Any] = {"is_flag": True, "default": default}
    else:
        text = ",".join(default) if isinstance(default, tuple) else None if default is None else str(default)
        about = {"metavar": declaration.metavar, "required": is_required, "show_default": True}
        about |= {} if is_required else {"default": text}
        about["shell_complete"] = functools.partial(_completion, name, declaration.metavar)
    spelling = declaration.spelling or (f"--{name.replace('_', '-')}",)
    made = click.Option([*spelling, name], help=declaration.help, **about)
    made.section = declaration.section  # type: ignore[attr-defined]  # read by kvrsim.cli.help
    return made


def _completion(name: str, metavar: str, _context: object, _parameter: object, incomplete: str) -> list[str]:
    """Complete values of an option: shipped names, and words of the metavar, such as fp16|bf16."""
    words = re.findall(r"(?<![\w:])[a-z][a-z0-9-]*", metavar)
    if (path := _DATA / f"{_NAMED.get(name)}").is_dir():
        words += sorted(one.stem for one in path.glob("*.json"))
    elif (path := path.with_suffix(".json")).exists():
        words += [word for word in json.loads(path.read_text("utf-8")) if not word.startswith("_")]
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in words if word.startswith(last)]


def writable(value: object, parameter: str) -> str:
    """Check that a file can be written, before the work starts."""
    path = str(value)
    if path.startswith("-"):  # the user means standard output, or has forgotten the value
        raise InputError(parameter, path, f"a file; ./{path} is one of this name")
    from kvrsim.io.files import check_writable

    check_writable(path, parameter)
    return path


def picture(value: object, parameter: str, *, page: bool = False) -> str:
    """Check a picture's suffix, which names its format; `page` allows .html as well."""
    from kvrsim.views.figure import check_suffix

    check_suffix(str(value), parameter, page=page)
    return writable(value, parameter)


WritablePath = Annotated[str, Read(writable)]
PictureOrPagePath = Annotated[str, Read(functools.partial(picture, page=True))]
Sources = Annotated[tuple[str, ...], Read(unchanged)]  # of an argument that may be repeated


class PageArgs(Arguments):
    """Files of a timeline; a picture may be an interactive page."""

    trace: Annotated[
        WritablePath | None, Help("Write the timeline as JSON for Perfetto or chrome://tracing.", metavar="FILE")
    ] = None
    plot: Annotated[
        PictureOrPagePath | None,
        Help(
            "Draw a Gantt chart: FILE.html is an interactive page, FILE.png, FILE.svg and FILE.pdf are pictures.",
            metavar="FILE",
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether one of the files is given."""
        return self.trace is not None or self.plot is not None

    @property
    def is_page(self) -> bool:
        """Whether the picture is a page."""
        return self.plot is not None and Path(self.plot).suffix.lower() == ".html"


class DeployArgs(Arguments):
    """The serving engine of the answer."""

    emit: Annotated[
        DeployEngine | None,
        Help(
            "Print the command that launches the fastest strategy that this engine has.", metavar="vllm|sglang|trtllm"
        ),
    ] = None
    only_deployable: Annotated[
        DeployEngine | None,
        Help("Compare only strategies that this engine has.", metavar="vllm|sglang|trtllm", section="Search"),
    ] = None


class LaunchArgs(DeployArgs):
    """The serving engine of a plan; it may be the fork of vLLM that runs KV-Runahead."""

    emit: Annotated[
        Launch | None,
        Help(
            "Print the command that launches the fastest strategy that this engine has. vllm-runahead is the fork of "
            "vLLM that runs KV-Runahead.",
            metavar="vllm|sglang|trtllm|vllm-runahead",
        ),
    ] = None  # type: ignore[assignment]


class OutputArgs(Arguments):
    """How a command prints its answer."""

    format: Annotated[
        Format | None,
        Help(
            "Print the answer's table as CSV or as a Markdown table, with the names and units of --json.",
            metavar="csv|md",
        ),
    ] = None
    json: Json = False

    def check(self, **others: object) -> None:
        """Refuse a format next to --json or to other options that print something."""
        for name, value in {"json": self.json, **others}.items():
            if self.format is not None and value:
                raise InputError("format", self.format, f"nothing with `{name}`, which prints something else")


class HardwareArgs(Arguments):
    """How ranks run on this machine."""

    device: Annotated[Device, Help("Device that computes.", metavar="auto|cpu|cuda", section="Measurement")] = "auto"
    backend: Annotated[
        RankBackend | None,
        Help(
            "Backend of torch.distributed. Default: nccl if each rank has a GPU, else gloo.",
            metavar="gloo|nccl",
            section="Measurement",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Range(least=1, most=1024),
        Help("CPU threads of each rank. Default: the profile's, or 1.", metavar="N", section="Measurement"),
    ] = None
    repeats: Annotated[
        int,
        Range(least=1, most=10000),
        Help("Measured prefills of each candidate.", metavar="N", section="Measurement"),
    ] = 5
    warmups: Annotated[
        int,
        Range(least=0, most=10000),
        Help("Warm-up prefills of each candidate, which are not measured.", metavar="N", section="Measurement"),
    ] = 1
    other_machine: Annotated[
        bool, Help("Measure even if the profile describes another machine.", section="Measurement")
    ] = False
    timeout: Annotated[
        Seconds | None,
        Help(
            "Longest wait of a rank for a message. Default: from the prediction.", metavar="TIME", section="Measurement"
        ),
    ] = None
    random_weights: Annotated[
        bool, Help("Use random weights although the model's folder has safetensors.", section="Measurement")
    ] = False
    seed: Seed = 0


class BuildArgs(BudgetArgs):
    """Arguments of commands that use all cores by default."""

    jobs: Annotated[
        NumJobs | None, Help("Number of processes. Default: one per core.", metavar="N", section="Processes")
    ] = None


def pool_of(args: PoolArgs, *, every_core: bool = False) -> Pool:
    """The workers of the arguments. every_core: one process per core by default."""
    from planner.processes import Pool, cores

    default = cores() if every_core or args.pool != "loky" else 1
    budget_s = args.time_budget if isinstance(args, BudgetArgs) and args.time_budget else math.inf
    return Pool(jobs=args.jobs or default, backend=args.pool, dask_address=args.dask_address, time_budget_s=budget_s)


def hardware_of(hardware: HardwareArgs, args: MeasuredArgs, scenario: Scenario) -> Hardware:
    """How ranks run on the devices that torch finds; links that the user gives are emulated."""
    require_torch()
    from kvrsim.runtime.host import chosen_device
    from planner.confirm.hardware import Hardware

    emulated = args.link_bandwidth is not None or args.link_latency is not None
    device = chosen_device(hardware.device)
    if hardware.backend == "nccl" and (device == "cpu" or emulated):
        raise InputError("backend", hardware.backend, "gloo, on a CPU and over emulated links")
    measured = None if scenario.profile is None else scenario.profile.cluster
    threads = measured.gpu.num_sms if device == "cpu" and measured is not None else 1  # threads of the measurement
    return Hardware(
        config=str(args.model),
        device=device,
        backend=hardware.backend,
        threads=hardware.threads or threads,
        repeats=hardware.repeats,
        warmups=hardware.warmups,
        seed=hardware.seed,
        random_weights=hardware.random_weights,
        emulated=emulated,
        other_machine=hardware.other_machine,
        timeout_s=hardware.timeout,
    )


def require_torch() -> None:
    """Raise InputError if torch or transformers is not installed."""
    from importlib.util import find_spec

    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            accepted = "torch and transformers, by pip install '.[hardware]' in a checkout of kvrsim"
            raise InputError(name, "no such module", accepted)
