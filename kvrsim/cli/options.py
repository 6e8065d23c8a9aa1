"""Options that several commands share; all are taken as text, so that every error message is kvrsim's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kvrsim.choices import ATTENTIONS, DTYPES

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Seed = Annotated[
    str, typer.Option("--seed", metavar="N", help="Seed of all random draws; the same seed gives the same answer.")
]
Table = Annotated[
    str | None,
    typer.Option("--table", metavar="FILE", help="Partition table for kvr-p; kvrsim table build writes one."),
]
PackTokens = Annotated[
    str | None,
    typer.Option(
        "--pack-tokens",
        metavar="LEN",
        help="Pack waiting prompts into steps of at most this number of new tokens, and cut longer prompts.",
    ),
]

_GPUS = typer.Option("--gpus", metavar="N", help="Number of GPUs. Default: all of the cluster.")
_RANKS = typer.Option("--gpus", metavar="N", help="Number of ranks.")
_CONTEXTS = typer.Option(
    "--ctx", metavar="LEN:LEN:STEP|LEN,...", help="Contexts: a range with both ends, such as 1k:32k:1k, or a list."
)
_COUNTS = typer.Option(
    "--gpus", metavar="N,N,...", help="Numbers of GPUs. Default: 2, 4, 8, ... up to the size of the cluster."
)


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """What a prediction is about, as text; the fields are the arguments of kvrsim.make_scenario."""

    ctx: Annotated[str, typer.Option("--ctx", metavar="LEN", help="Context length in tokens: 16k is 16384.")]
    gpus: Annotated[str | None, _GPUS] = None
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME|PATH", help="A built-in model, a Hugging Face config.json, or its folder."
        ),
    ] = "llama-7b"
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|PATH",
            help="A calibration profile, or roofline. Default: the built-in one of the cluster's GPU.",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|PATH",
            help="GPUs and their links. Default: where the profile was measured, or a100-nvlink.",
        ),
    ] = None
    link_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--link-bandwidth",
            metavar="RATE",
            help="Override the cluster's link bandwidth (per direction), such as 10GB/s.",
        ),
    ] = None
    link_latency: Annotated[
        str | None,
        typer.Option("--link-latency", metavar="TIME", help="Override the cluster's link latency, such as 5us."),
    ] = None
    topology: Annotated[
        str | None,
        typer.Option("--topology", metavar="switch|bus|chain", help="Override the cluster's topology."),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention", metavar="|".join(ATTENTIONS), help="Attention kernel. Default: the profile's first."
        ),
    ] = None
    batch: Annotated[
        str, typer.Option("--batch", metavar="N", help="Number of sequences prefilled together, each of --ctx tokens.")
    ] = "1"
    cached_prefix: Annotated[
        str,
        typer.Option("--cached-prefix", metavar="LEN", help="Leading tokens whose K and V are already cached."),
    ] = "0"
    prefix_placement: Annotated[
        str,
        typer.Option(
            "--prefix-placement",
            metavar="all|sharded|host[:RATE]|remote[:RATE]",
            help="Where the cached K and V lie: on every rank, over the ranks by tokens, in host memory,"
            " or in a remote store; RATE is a GPU's bandwidth to it, such as 20GB/s.",
        ),
    ] = "all"
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="|".join(DTYPES),
            help="Type of weights, activations and KV cache; fp8: of the layers' products, all else in half precision."
            " Default: fp16, or the profile's first.",
        ),
    ] = None
    memory_fraction: Annotated[
        str,
        typer.Option(
            "--memory-fraction", metavar="F", help="Share of each GPU's memory that the prefill may use, above 0 to 1."
        ),
    ] = "0.9"
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME|PATH",
            help="What serves the model: kvrsim engines list has the names; none: its kernels alone. Default: the"
            " profile's.",
        ),
    ] = None
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel", help="Spread a mixture's experts whole over all GPUs; ranks exchange tokens for them."
        ),
    ] = False
    expert_imbalance: Annotated[
        str | None,
        typer.Option(
            "--expert-imbalance",
            metavar="X",
            help="With --expert-parallel, rows of the busiest GPU over the mean. Default: that of a power law.",
        ),
    ] = None

    def scenario(self) -> tuple[Scenario, tuple[str, ...]]:
        """The scenario and its notes; InputError names the option."""
        from kvrsim.builder import make_scenario

        return make_scenario(**self._given())

    def _given(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True)
class ManyOptions(ScenarioOptions):
    """The same with lists of contexts and of numbers of GPUs."""

    ctx: Annotated[str, _CONTEXTS]
    gpus: Annotated[str | None, _COUNTS] = None

    def scenarios(self) -> tuple[Scenario, tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
        """The scenario of the longest context on the most GPUs, its notes, all contexts, and all numbers of GPUs."""
        from kvrsim.builder import make_scenarios

        return make_scenarios(**self._given())


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions(ScenarioOptions):
    """The same on as many GPUs as a small machine has ranks."""

    gpus: Annotated[str | None, _RANKS] = "2"
    prefix_placement: str = field(init=False, default="all")
    expert_parallel: bool = field(init=False, default=False)
    expert_imbalance: str | None = field(init=False, default=None)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(ScenarioOptions):
    """The same without what a workload's requests say themselves."""

    ctx: str = field(init=False, default="1")
    gpus: str | None = field(init=False, default="1")
    batch: str = field(init=False, default="1")
    cached_prefix: str = field(init=False, default="0")
    prefix_placement: str = field(init=False, default="all")
    expert_parallel: bool = field(init=False, default=False)
    expert_imbalance: str | None = field(init=False, default=None)


@dataclass(frozen=True, kw_only=True)
class PredictorOptions(ScenarioOptions):
    """The same up to the largest context and batch that a predictor answers for, with any cached prefix."""

    ctx: Annotated[
        str, typer.Option("--ctx", metavar="LEN", help="Longest context in tokens, cached prefix included.")
    ] = "128k"
    batch: Annotated[
        str, typer.Option("--batch", metavar="N", help="Largest number of sequences prefilled together.")
    ] = "1"
    cached_prefix: str = field(init=False, default="0")
    prefix_placement: str = field(init=False, default="all")


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameters are these dataclasses, an option for each of their fields."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def spread(**values: Any) -> None:
            own = [group(**{one: values.pop(one) for one in inspect.signature(group).parameters}) for group in groups]
            command(*own, **values)

        others = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]
        options = [parameter for group in groups for parameter in _parameters(group)]
        named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*options, *others)]
        spread.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return spread

    return decorate


def _parameters(group: type) -> list[inspect.Parameter]:
    """A dataclass's fields as parameters, which Typer turns into options."""
    hints = get_type_hints(group, include_extras=True)
    signature = inspect.signature(group)
    return [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
