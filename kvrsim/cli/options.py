"""Options that several commands share: taken as text, so that every complaint about them is kvrsim's own."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Seed = Annotated[
    str,
    typer.Option("--seed", metavar="N", help="Seed of whatever is drawn at random; the same seed, the same answer."),
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write what happened when as JSON for Perfetto or chrome://tracing."),
]
Plot = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE", help="Draw a Gantt chart: FILE.png, FILE.svg or FILE.pdf."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioOptions:
    """What a prediction is about, as text; the fields are the arguments of kvrsim.make_scenario."""

    ctx: Annotated[
        str,
        typer.Option("--ctx", metavar="LEN", help="Tokens of the context: 16k is 16384, 16000 is itself."),
    ]
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="N", help="GPUs that take part. Default: all of the cluster."),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME|PATH",
            help="A built-in model, a Hugging Face config.json, or its folder.",
        ),
    ] = "llama-7b"
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|PATH",
            help="A calibration profile, or roofline. Default: the one of the cluster's GPU.",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|PATH",
            help="GPUs and their links. Default: those that the profile was measured on, or a100-nvlink.",
        ),
    ] = None
    link_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--link-bandwidth", metavar="RATE", help="Overrides the cluster's, per direction; such as 10GB/s."
        ),
    ] = None
    link_latency: Annotated[
        str | None, typer.Option("--link-latency", metavar="TIME", help="Overrides the cluster's; such as 5us.")
    ] = None
    topology: Annotated[
        str | None,
        typer.Option("--topology", metavar="switch|bus|chain", help="Overrides the cluster's."),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="eager|sdpa|flash", help="Kernel. Default: the profile's first."),
    ] = None
    batch: Annotated[
        str, typer.Option("--batch", metavar="N", help="Sequences prefilled together, each of --ctx tokens.")
    ] = "1"
    cached_prefix: Annotated[
        str,
        typer.Option("--cached-prefix", metavar="LEN", help="Leading tokens whose KV every rank holds already."),
    ] = "0"
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="fp16|bf16|fp8|fp32",
            help="Of weights, activations and KV cache. Default: fp16, or what the profile has.",
        ),
    ] = None
    memory_fraction: Annotated[
        str,
        typer.Option(
            "--memory-fraction",
            metavar="F",
            help="Share of each GPU's memory that the prefill may use; the rest is a reserve.",
        ),
    ] = "0.9"

    def scenario(self) -> tuple[Scenario, tuple[str, ...]]:
        """The scenario and its notes; InputError names the option."""
        from kvrsim.setup import make_scenario

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return make_scenario(**values)


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameters are these dataclasses, an option for each of their fields."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def spread(**values: Any) -> None:
            own = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
            command(*own, **values)

        others = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]
        options = [parameter for group in groups for parameter in _parameters(group)]
        spread.__signature__ = inspect.Signature([*options, *others])  # type: ignore[attr-defined]
        return spread

    return decorate


def _parameters(group: type) -> list[inspect.Parameter]:
    """A dataclass's fields as parameters, which Typer turns into options."""
    hints = get_type_hints(group, include_extras=True)
    signature = inspect.signature(group)
    return [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]


takes_scenario = takes(ScenarioOptions)


def parse_list(text: str, argument: str, accepted: str) -> list[str]:
    """The parts of a list with commas; InputError where there is an empty one."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(argument, text, accepted)
    return parts


def parse_chunks(text: str | None) -> list[int] | None:
    """The chunk lengths of --partition; None where it was not given."""
    if text is None:
        return None
    from kvrsim.units import parse_tokens

    accepted = "chunk lengths with commas between, such as 5000,3192"
    return [parse_tokens(part, "--partition") for part in parse_list(text, "--partition", accepted)]


def parse_seed(text: str) -> int:
    """A whole number from 0 to 4294967295."""
    from kvrsim.units import parse_count

    return parse_count(text, "--seed", minimum=0, maximum=2**32 - 1)


def parse_choice(text: str | None, argument: str, choices: tuple[str, ...]) -> str | None:
    """One of the choices, or None where the option was not given."""
    if text is not None and text not in choices:
        raise InputError(argument, text, f"one of {', '.join(choices)}")
    return text


def check_output(path: str | None, argument: str) -> None:
    """Complain before the work, rather than after it, where a file cannot be written."""
    if path is None:
        return
    if path.startswith("-"):  # another command's standard output, or an option whose file was forgotten
        raise InputError(argument, path, f"a file; ./{path} is one of this name")
    from kvrsim.io.files import check_writable

    check_writable(path, argument)


def check_plot(path: str | None) -> None:
    """The same for --plot, whose suffix says what kind of picture it is."""
    if path is not None:
        from kvrsim.plots.save import check_suffix

        check_suffix(path)
        check_output(path, "--plot")


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on standard output; NaN and infinity, which JSON has not got, are refused."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))
