"""Arguments of the Python API and options of the command line, each declared once.

A field of a group such as ScenarioArgs has the default and the check of an argument. The docstring of the group says
how its value looks, what it means, and which section of the help lists it. `takes` makes parameters of Python
functions and their reference from a group; kvrsim/cli/options.py makes the options of commands.

A check turns what a user gives into a plain value in SI units, or raises an InputError with the parameter's name.
Numbers may be text with a unit, as on the command line, or of NumPy; a path may be any path-like object.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from kvrsim.choices import EXECUTORS, FLEET_OBJECTIVES, METHODS, POOL_BACKENDS
from kvrsim.errors import ABSENT, InputError
from kvrsim.units import (
    MAX_BYTES_PER_S,
    MAX_SECONDS,
    parse_bandwidth,
    parse_count,
    parse_lengths,
    parse_number,
    parse_seconds,
    parse_share,
    parse_tokens,
)

STRATEGY = "kvrsim.strategies.base:Strategy"
MOST_VALUES = 2**16  # in one list
MOST_SEED = 2**32 - 1
REQUIRED: Any = inspect.Parameter.empty  # default of a required argument
_Result = TypeVar("_Result")
_ENTRY = re.compile(r"^(\w+) : (.+)\n((?: {4}.+(?:\n|$))+)", re.MULTILINE)  # name, metavar, help
Check = Callable[[Any, str], Any]  # value, parameter -> the value to use
OnProgress = Callable[[float, float | None, str], object]  # work done, the total (None: unknown), and a text


# Checks

# Least and largest value and unit of numbers in SI units, by the function that reads them from text.
_SI_LIMITS: dict[Callable[..., float], tuple[float, float, str]] = {
    parse_bandwidth: (1.0, MAX_BYTES_PER_S, " bytes per second"),
    parse_seconds: (1e-30, MAX_SECONDS, " seconds"),
}


def tokens(value: object, parameter: str) -> int:
    """Read a number of tokens: a whole number, or text such as "4k"."""
    return parse_tokens(value, parameter) if isinstance(value, str) else _whole(value, parameter)


def tokens_or_none(value: object, parameter: str) -> int:
    """Read a number of tokens that may be 0."""
    return 0 if isinstance(value, str) and value.strip() == "0" else tokens(value, parameter)


def context(value: object, parameter: str) -> int:
    """Read a single number of tokens. Raises InputError that names the command for several lengths."""
    if isinstance(value, str) and re.search(r"[0-9][kKmM]? ?[,:-]", value):
        accepted = "one length, such as 16k; kvrsim map --ctx takes several, such as 32k,64k,128k"
        raise InputError(parameter, value, accepted)
    return tokens(value, parameter)


class ContextShare(float):
    """A share of the context, of at least 0 and less than 1."""


def prefix(value: object, parameter: str) -> int | ContextShare:
    """Read a number of tokens that may be 0, or a share of the context, such as "90%"."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return ContextShare(parse_share(value.strip(), parameter, below=1))
    try:
        return tokens_or_none(value, parameter)
    except InputError as error:
        accepted = f"{error.accepted}; or 0, or a share of the context, such as 90%"
        raise InputError(parameter, error.value, accepted) from None


def count(most: int, *, least: int = 1) -> Check:
    """Check for whole numbers from `least` to `most`."""

    def check(value: object, parameter: str) -> int:
        number = parse_count(value, parameter, minimum=least, maximum=most) if isinstance(value, str) else _index(value)
        if number is None or not least <= number <= most:
            raise _refusal(parameter, value, f"a whole number from {least} to {most}")
        return number

    return check


def quantity(parse: Callable[..., float], **limits: Any) -> Check:
    """Check for numbers in SI units, or text that `parse` reads."""

    def check(value: object, parameter: str) -> float:
        if isinstance(value, str):
            return parse(value, parameter, **limits)
        number = None if _is_flag(value) or isinstance(value, bytes | bytearray) else _real(value)
        if number is None or not math.isfinite(number):
            raise _refusal(parameter, value, "a finite number, or text with its unit")
        least, most, unit = _SI_LIMITS.get(parse, (-math.inf, math.inf, ""))
        if not least <= number <= most and not (number == 0 and limits.get("allow_zero", False)):
            raise _refusal(parameter, value, f"{least:g} to {most:g}{unit}, or text with its unit")
        return number

    return check


def number(**limits: float) -> Check:
    """Check for numbers without a unit within the limits of `parse_number`."""

    def check(value: object, parameter: str) -> float:
        text = value if isinstance(value, str) else quantity(parse_number)(value, parameter)
        return parse_number(text, parameter, **limits)

    return check


def percentage(most: float) -> Check:
    """Check for percentages from 1 to `most`. Less is refused, because it is usually a share: 0.95 instead of 95."""

    check_number = number(above=0, most=most)

    def check(value: object, parameter: str) -> float:
        percent: float = check_number(value, parameter)
        if percent < 1:
            raise InputError(parameter, value, f"a percentage from 1 to {most:g}; did you mean {100 * percent:g}?")
        return percent

    return check


def text(value: object, parameter: str) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise _refusal(parameter, value, "a text")
    return str(value)


def choice(*names: str) -> Check:
    """Check for one of these texts."""

    def check(value: object, parameter: str) -> str:
        if text(value, parameter) not in names:
            raise InputError(parameter, value, f"one of {', '.join(names)}")
        return str(value)

    return check


def flag(value: object, parameter: str) -> bool:
    """Read True or False."""
    if not _is_flag(value):
        raise _refusal(parameter, value, "True or False")
    return bool(value)


def function(value: object, parameter: str) -> object:
    """Check for a callable."""
    if not callable(value):
        raise _refusal(parameter, value, "a function")
    return value


def named(*kinds: str, what: str = "a name or path") -> Check:
    """Check for a text, a path, or an object of one of these classes ("module:Class"); no class is imported.

    what: description of the text in the error.
    """

    def check(value: object, parameter: str) -> object:
        if isinstance(value, str) or hasattr(type(value), "__fspath__"):
            return str(value)
        if not _is_one_of(value, kinds):
            classes = " or ".join(f"a {kind.partition(':')[2]}" for kind in kinds)
            raise _refusal(parameter, value, f"{what}{', or ' if classes else ''}{classes}")
        return value

    return check


def strategy_list(value: object, parameter: str) -> list[object]:
    """Read names or Strategies in a list, names in a text with commas between, or one Strategy; each once."""
    values = [value] if _is_one_of(value, (STRATEGY,)) else _parts(value, parameter, "names, such as tsp,kvr-s")
    return list(dict.fromkeys(named(STRATEGY)(one, parameter) for one in values))


def chunk_lens(value: object, parameter: str) -> list[int]:
    """Read tokens of each chunk: text such as "5000,3192", or a list, tuple or array of one dimension."""
    return [tokens(one, parameter) for one in _parts(value, parameter, "chunk lengths, such as 5000,3192")]


def bandwidths(value: object, parameter: str) -> list[float]:
    """Read bandwidths in bytes per second, or texts such as "10GB/s", in a list or with commas between; sorted."""
    parts = _parts(value, parameter, "a list of numbers or texts with units, such as 10GB/s,100GB/s")
    return sorted({quantity(parse_bandwidth)(one, parameter) for one in parts})


def counts(value: object, parameter: str) -> tuple[int, ...]:
    """Read whole numbers above 0: one, a list, or a text such as "2,4,8"; sorted, each once."""
    parts = [value] if _index(value) is not None else _parts(value, parameter, "whole numbers, such as 2,4,8")
    return tuple(sorted({count(2**20)(one, parameter) for one in parts}))


def lengths(value: object, parameter: str) -> tuple[int, ...]:
    """Read lengths in tokens: one, a list, or a text that `parse_lengths` reads; sorted, each once."""
    if isinstance(value, str):
        return parse_lengths(value, parameter)
    parts = [value] if _index(value) is not None else _parts(value, parameter, "lengths, such as 4k,8k or 1k:32k:1k")
    return parse_lengths(
        ",".join(str(one if isinstance(one, str) else _whole(one, parameter)) for one in parts), parameter
    )


def price(value: object, parameter: str) -> object:
    """Read one number, a text, or a mapping from group sizes to numbers."""
    check = quantity(lambda text, _: text)
    if isinstance(value, Mapping):
        return {_whole(size, parameter): check(one, parameter) for size, one in value.items()}
    return check(value, parameter)


def _whole(value: object, parameter: str) -> int:
    if (number := _index(value)) is None:
        raise _refusal(parameter, value, "a whole number")
    return number


def _is_one_of(value: object, kinds: Iterable[str]) -> bool:
    """Whether the value is an object of one of these classes ("module:Class"); no class is imported."""
    return any(f"{base.__module__}:{base.__qualname__}" in kinds for base in type(value).__mro__)


def _index(value: object) -> int | None:
    try:
        return None if _is_flag(value) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _real(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's name depends on its version


def _parts(value: object, parameter: str, accepted: str) -> list[object]:
    """Split a text at commas, or list the values of an iterable; at least one, texts stripped."""
    values: Iterable[object] = value.split(",") if isinstance(value, str) else ()
    if not isinstance(value, str | bytes | bytearray | Mapping) and isinstance(value, Iterable):
        values = value
    try:
        parts = [one.strip() if isinstance(one, str) else one for one in itertools.islice(values, MOST_VALUES + 1)]
    except TypeError:  # an array without dimensions
        parts = []
    if not parts or "" in [one for one in parts if isinstance(one, str)]:
        raise _refusal(parameter, value, accepted)
    if len(parts) > MOST_VALUES:
        raise InputError(parameter, f"more than {MOST_VALUES} values", f"at most {MOST_VALUES} values")
    return parts


def _refusal(parameter: str, value: object, accepted: str) -> InputError:
    if value is None or isinstance(value, str):
        return InputError(parameter, value, accepted)
    return InputError(parameter, f"{type(value).__name__} {value!r}", accepted)


# Declarations


class Option(NamedTuple):
    """An argument of a function or a command."""

    default: Any = None  # REQUIRED: it must be given
    check: Check = text
    metavar: str = ""  # placeholder of the value in the help; empty: a flag
    help: str = ""  # one or two sentences; they name other arguments as options
    section: str = "Output"  # section of the help, one of kvrsim.choices.SECTIONS
    spelling: tuple[str, ...] = ()  # option names, if not --NAME
    positional: bool = False  # whether a command takes it by position

    def read(self, value: object, name: str) -> Any:
        """Check a value and return it; None is returned unchanged where None is the default."""
        return None if value is None and self.default is None else self.check(value, name)


def option(metavar: str, help: str, section: str = "Output", check: Check = text, default: Any = None) -> Any:
    """Declare an option of a command, as the default of its parameter."""
    return Option(metavar=metavar, help=help, section=section, check=check, default=default)


def entry(check: Check = text, default: Any = None, *, spelling: tuple[str, ...] = ()) -> Any:
    """Declare a field of Arguments; the docstring of the class has its metavar, its help and its section."""
    return Option(check=check, default=default, spelling=spelling)


def switch(help: str, section: str = "Output") -> Any:
    """Declare an option without a value, such as --json; False if the user does not write it."""
    return Option(help=help, section=section, check=flag, default=False)


def argument(metavar: str, help: str, check: Check = text, default: Any = REQUIRED) -> Any:
    """Declare an argument that a command takes by position; a metavar that ends with ... is a list."""
    return Option(metavar=metavar, help=help, section="Arguments", check=check, default=default, positional=True)


def options_of(group: type[Arguments]) -> Mapping[str, Option]:
    """Declarations of a group of arguments by name, those of its base classes first; read once."""
    if "declared" in vars(group):
        return group.declared
    options: dict[str, Option] = {}
    for one in reversed(group.__mro__):
        options |= {name: declared for name, declared in vars(one).items() if isinstance(declared, Option)}
        heads = re.split(r"^(\w+)\n-+\n", inspect.cleandoc(one.__doc__ or ""), flags=re.MULTILINE)
        for section, entries in zip(heads[1::2], heads[2::2], strict=True):
            for name, metavar, help in _ENTRY.findall(entries):
                placeholder = "" if metavar == "bool" else metavar
                words = " ".join(help.split())
                options[name] = options[name]._replace(section=section, metavar=placeholder, help=words)
    group.declared = options
    return options


class Arguments:
    """Base of groups of arguments: each value is checked when an object is made; InputError names the argument.

    The docstring of a group describes its fields in sections of the help, as numpydoc does: `NAME : METAVAR`, with
    `bool` for a flag, then the help.
    """

    declared: ClassVar[dict[str, Option]]  # see options_of

    def __init__(self, **values: Any) -> None:
        for name, one in options_of(type(self)).items():
            value = values.pop(name, one.default)
            if value is REQUIRED:
                raise InputError(name, ABSENT, one.help)
            setattr(self, name, one.read(value, name))
        assert not values, values

    @classmethod
    def take(cls, arguments: dict[str, Any], fixed: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Make a group from its arguments in `arguments`, which are removed there, and from those in `fixed`.

        Raises InputError naming an argument without a default that is missing.
        """
        values = {name: arguments.pop(name) for name in options_of(cls) if name in arguments and name not in fixed}
        return cls(**values, **{name: value for name, value in fixed.items() if name in options_of(cls)})


def takes(
    *groups: type[Arguments], fixed: Mapping[str, Any] | None = None, **checks: Check
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Let a function, whose first parameters are these groups, take all their fields as keywords.

    fixed: values of fields that a caller does not give.
    checks: checks of the function's own parameters by name; a default of None is not checked.
    The fields are listed in the function's signature and in its docstring, after `Parameters`. A call that does not
    match the signature raises TypeError with the function's name.
    """
    fixed = fixed or {}

    def decorate(made: Callable[..., _Result]) -> Callable[..., _Result]:
        own = list(inspect.signature(made).parameters.values())[len(groups) :]
        defaults = {one.name: one.default for one in own}
        options = {name: one for group in groups for name, one in options_of(group).items() if name not in fixed}
        keyword = inspect.Parameter.KEYWORD_ONLY
        arguments = (
            inspect.Parameter(name, keyword, default=one.default, annotation=Any) for name, one in options.items()
        )
        returns = made.__annotations__["return"]
        parameters = [*arguments, *(one.replace(kind=keyword) for one in own)]
        signature = inspect.Signature(parameters, return_annotation=returns)

        @functools.wraps(made)
        def call(*places: Any, **keywords: Any) -> _Result:
            try:
                signature.bind(*places, **keywords)
            except TypeError as error:
                raise TypeError(f"{made.__name__}(): {error}{_suggestion(keywords, signature.parameters)}") from None
            values = [group.take(keywords, fixed) for group in groups]
            for name, check in checks.items():
                if name in keywords and not (keywords[name] is None and defaults[name] is None):
                    keywords[name] = check(keywords[name], name)
            return made(*values, **keywords)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        call.__annotations__["return"] = returns
        head, title, rest = (call.__doc__ or "").partition("Parameters\n    ----------\n")
        call.__doc__ = head + title + "".join(_describe(*one) for one in options.items()) + rest
        return call

    return decorate


def _suggestion(words: Iterable[str], names: Iterable[str]) -> str:
    """Suggest the known parameter nearest to an unknown one; empty if all are known or none is near."""
    import difflib

    names = list(names)
    near = [name for one in words if one not in names for name in difflib.get_close_matches(one, names, n=1)]
    return f"; did you mean {near[0]}?" if near else ""


def _describe(name: str, declaration: Option) -> str:
    """Describe an argument as numpydoc does; the help's options become parameters."""
    words = re.sub(r"--([a-z-]+)", lambda match: f"`{match[1].replace('-', '_')}`", declaration.help)
    return f"    {name} : {declaration.metavar or 'bool'}\n        {words}\n"


# Groups of arguments

_many = count(2**20)


class ScenarioArgs(Arguments):
    """What a prediction is about.

    Question
    --------
    ctx : LEN
        Context length in tokens: 16k is 16384.
    gpus : N
        Number of GPUs. Default: all of the cluster.
    model : NAME|PATH
        A built-in model, a Hugging Face id of a known shape, a config.json or its folder. Default: the paper's
        llama-7b.
    batch : N
        Number of sequences prefilled together, each of --ctx tokens.
    cached_prefix : LEN|SHARE
        Leading tokens whose K and V are already cached, or their share of the context, such as 90%.
    prefix_placement : all|sharded|host[:RATE]|remote[:RATE]
        Location of the cached K and V: every rank, shards of tokens, host memory, or a remote store; RATE is the
        bandwidth per GPU, such as 20GB/s.
    dtype : fp16|bf16|fp8|fp32
        Type of weights, activations and KV cache; with fp8 only the layers' matrix products are in FP8.
        Default: the checkpoint's.
    expert_parallel : bool
        Place whole experts on GPUs (expert parallelism); ranks exchange their tokens.
    expert_imbalance : X
        With --expert-parallel, tokens of the busiest GPU divided by the mean of all GPUs. Default: from a power law.

    Machine
    -------
    cluster : NAME|PATH
        GPUs and their links: a built-in name, a size such as 2x8xh100, or a file. Default: the cluster on which the
        profile was measured, or the built-in one of its GPU; without --profile a100-nvlink.
    profile : NAME|PATH
        A calibration profile, or roofline. Default: the built-in one of the cluster's GPU; on A100, a100-eager
        for the models of the KV-Runahead paper.
    engine : NAME|PATH
        The serving engine: a name of kvrsim engines list, a file, or none for the kernels alone. Default: the
        profile's.
    attention : eager|sdpa|flash
        Attention kernel. Default: the profile's first.
    memory_fraction : F
        Share of each GPU's memory that the prefill may use: above 0, up to 1.
    link_bandwidth : RATE
        Override the cluster's link bandwidth (per direction), such as 10GB/s.
    link_latency : TIME
        Override the cluster's link latency, such as 5us.
    topology : switch|bus|chain
        Override the cluster's topology.
    """

    ctx: Any = entry(context, REQUIRED)
    gpus: Any = entry(_many)
    model: Any = entry(named("kvrsim.model.spec:ModelSpec"), "llama-7b")
    batch: Any = entry(_many, 1)
    cached_prefix: Any = entry(prefix, 0)
    prefix_placement: Any = entry(named("kvrsim.kernels.prefix:PrefixPlacement", what="a text"), "all")
    dtype: Any = entry()
    expert_parallel: Any = entry(flag, False)
    expert_imbalance: Any = entry(number())
    cluster: Any = entry(named("kvrsim.hardware:Cluster"))
    profile: Any = entry(named("kvrsim.kernels.profile:CalibrationProfile"))
    engine: Any = entry(named("kvrsim.engine:Engine"))
    attention: Any = entry()
    memory_fraction: Any = entry(number(above=0, most=1), 0.9)
    link_bandwidth: Any = entry(quantity(parse_bandwidth))
    link_latency: Any = entry(quantity(parse_seconds, allow_zero=True))
    topology: Any = entry()

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if isinstance(self.cached_prefix, ContextShare):
            if not isinstance(self.ctx, int):
                raise InputError("cached_prefix", f"{self.cached_prefix:.4g}", "tokens: a share needs a single context")
            self.cached_prefix = int(self.cached_prefix * self.ctx)


class DeploymentArgs(ScenarioArgs):
    """A scenario with a model and a cluster that the user must name.

    Question
    --------
    model : NAME|PATH
        A built-in model, a Hugging Face id of a known shape, a config.json or its folder.

    Machine
    -------
    cluster : NAME|PATH
        GPUs and their links: a built-in name, a size such as 2x8xh100, or a file.
    """

    model: Any = entry(named("kvrsim.model.spec:ModelSpec"), REQUIRED)
    cluster: Any = entry(named("kvrsim.hardware:Cluster"), REQUIRED)


class ScenariosArgs(ScenarioArgs):
    """Arguments of scenarios with several contexts and numbers of GPUs.

    Question
    --------
    ctx : LEN:LEN:STEP|LEN,...
        Contexts: a range with both ends, such as 1k:32k:1k, or a list.
    gpus : N,N,...
        Numbers of GPUs. Default: 2, 4, 8, ... up to the size of the cluster.
    """

    ctx: Any = entry(lengths, REQUIRED)
    gpus: Any = entry(counts)


class MeasuredArgs(ScenarioArgs):
    """Arguments of a scenario on a small machine, with one GPU per rank.

    Question
    --------
    gpus : N
        Number of ranks.
    """

    gpus: Any = entry(_many, 2)


OF_REQUESTS = {  # arguments that `capacity` does not take, because each request has its own value
    **{"ctx": 1, "gpus": 1, "batch": 1, "cached_prefix": 0, "prefix_placement": "all"},
    **{"expert_parallel": False, "expert_imbalance": None},
}


class PredictorArgs(DeploymentArgs):
    """The model and the machine of a predictor, and its largest context and batch.

    Question
    --------
    ctx : LEN
        Longest context in tokens, cached prefix included.
    batch : N
        Largest number of sequences prefilled together.
    """

    ctx: Any = entry(tokens, "128k")
    batch: Any = entry(_many, 1)


class PrefillArgs(ScenarioArgs):
    """Values for the columns that a file of measured prefills lacks.

    Question
    --------
    ctx : LEN
        Context length in tokens of rows without a context_len.
    gpus : N
        Number of GPUs. Default: 1.
    model : NAME|PATH
        A built-in model, a Hugging Face config.json, or its folder.
    strategy : NAME
        Strategy of rows without a strategy. Default: tp, or single on one GPU.

    Measurement
    -----------
    columns : ROLE=COLUMN,...
        Columns of a CSV file: ttft_s=latency,context_len=tokens; ttft_ms=COLUMN for milliseconds. Default: usual
        names, such as ttft_ms and prompt_tokens.

    Machine
    -------
    profile : NAME|PATH
        The calibration profile whose kernels the engine runs.
    """

    ctx: Any = entry(tokens)
    gpus: Any = entry(_many)
    model: Any = entry()
    profile: Any = entry(named("kvrsim.kernels.profile:CalibrationProfile"), REQUIRED)
    strategy: Any = entry()
    columns: Any = entry()


TABLE = option(
    "FILE",
    "Partition table for kvr-p; kvrsim table build writes one.",
    "Question",
    named("planner.table.table:PartitionTable"),
)
SEED = option(
    "N", "Seed of all random numbers; the same seed gives the same answer.", "Randomness", count(MOST_SEED, least=0), 0
)


class TargetArgs(Arguments):
    """What a TTFT target applies to.

    Target
    ------
    slo : TIME
        Target of the TTFT; the exit code is 1 if it is not 90 % sure that it is met.
    rate : X
        Prompts per second that arrive at the GPUs, at random times. Default: a single prompt on idle GPUs.
    percentile : P
        Percentage of the prompts that must meet the target, with --rate or --noise.
    """

    slo: Any = entry(quantity(parse_seconds))
    rate: Any = entry(number(above=0, most=1e6))
    percentile: Any = entry(percentage(99.9), 90)


class SearchArgs(Arguments):
    """How partitions are searched; `planner.candidates.Search` reads them.

    Search
    ------
    method : auto|analytical|grid
        Search method of partitions over single GPUs; grid is the paper's.
    stride : LEN
        Search only chunk boundaries that are multiples of LEN.
    search_budget : TIME
        Limit of all searches together, in seconds of an idle core (approximate); --strategies all has no limit.
    """

    table: Any = TABLE
    method: Any = entry(choice(*METHODS), "auto")
    stride: Any = entry(tokens)
    search_budget: Any = entry(quantity(parse_seconds, allow_zero=True), "1.5s")


class PlanArgs(SearchArgs, TargetArgs):
    """Which strategies are compared, how their partitions are searched, and what is promised.

    Question
    --------
    strategies : NAMES|all|FILE.py:NAME
        Strategies to compare, such as tsp,kvr-s,./mine.py:STRATEGY. Default and all: every
        strategy that the GPUs allow and that could fit in memory.
    """

    strategies: Any = entry(strategy_list)


class SimulateArgs(Arguments):
    """Which strategy is simulated, and how.

    Question
    --------
    strategy : NAME|FILE.py:NAME
        Strategy, such as tsp, kvr-s, zigzag, tp8+kvr-s.
    partition : LEN,LEN,...
        New tokens of each rank, such as 5000,3192. Default: the strategy's own; kvr-s searches it.

    Search
    ------
    executor : batch|event
        event simulates the queue of every link. Default: batch, or
        event for a timeline, a breakdown or noise.

    Output
    ------
    breakdown : bool
        Print the seconds of every operation and their basis, such as measured or interpolated.
    """

    strategy: Any = entry(named(STRATEGY), REQUIRED)
    partition: Any = entry(chunk_lens)
    table: Any = TABLE
    executor: Any = entry(choice(*EXECUTORS))
    breakdown: Any = entry(flag, False)


class NoiseArgs(Arguments):
    """Noise, the number of its samples, and the seed of all random draws.

    Randomness
    ----------
    noise : SPEC
        Simulate under noise: side-traffic:duty=0.5,share=0.67,slowdown=0.03, jitter:0.05, slow-gpu:3x1.2,
        slow-link:2-3x4, paper, or several joined by +.
    samples : N
        Number of runs under --noise. Default: 200.
    """

    noise: Any = entry(named("kvrsim.noise:Noise"))
    samples: Any = entry(count(2**20))
    seed: Any = SEED

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.samples is not None and self.noise is None:
            raise InputError("samples", self.samples, "with --noise SPEC")


class UsersArgs(Arguments):
    """Closed-loop users: each waits for an answer before the next prompt.

    Question
    --------
    users : C
        Add the mean TTFT of C concurrent users with one request each, as engines' benchmarks report it.
    output_tokens : N
        With --users, mean output tokens of a request. Default: 1024.
    """

    users: Any = entry(count(4096))
    output_tokens: Any = entry(tokens)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.output_tokens is not None and self.users is None:
            raise InputError("output_tokens", self.output_tokens, "with --users C")


class PoolArgs(Arguments):
    """Which processes or machines share the work.

    Processes
    ---------
    jobs : N
        Number of processes. Default: 1; with --pool dask or ray, one per core.
    pool : loky|dask|ray
        Backend of joblib; loky runs processes of this machine.
    dask_address : ADDRESS
        A Dask scheduler. Default: start a local cluster.
    """

    jobs: Any = entry(count(4096))
    pool: Any = entry(choice(*POOL_BACKENDS), "loky")
    dask_address: Any = entry()


class BudgetArgs(PoolArgs):
    """Which processes share the work, and how long they may take.

    Processes
    ---------
    time_budget : TIME
        End after about this time, with what is complete and a note of what is missing. Default: no limit.
    """

    time_budget: Any = entry(quantity(parse_seconds))


class MapArgs(Arguments):
    """What a map compares.

    Question
    --------
    link_bandwidths : RATE,RATE,...
        Link bandwidths to compare, such as 10GB/s,200GB/s. Default: the cluster's own.
    strategies : NAMES|all|FILE.py:NAME
        Strategies to compare with one GPU; all: every strategy that plan compares, which takes longer. Default: the
        main ones, and their hybrids with tensor parallelism.
    """

    link_bandwidths: Any = entry(bandwidths, spelling=("--link-bandwidth", "--link-bandwidths"))
    strategies: Any = entry(strategy_list)


class FleetArgs(Arguments):
    """What a fleet is planned for, and what it may consist of.

    Workload
    --------
    requests : FILE|synthetic:SPEC
        A trace, or random arrivals such as synthetic:poisson,rate=4. In Python also a pandas DataFrame.
    columns : ROLE=COLUMN,...
        Columns of the trace: timestamp=ts,context=prompt_tokens,output=completion_tokens. Default: usual names.
    rate_scale : X
        Multiply the number of requests in the same time.
    replications : N
        Number of independent samples of a synthetic workload.
    pack_tokens : LEN
        Pack waiting prompts into steps of at most LEN new tokens; longer prompts are split.

    Target
    ------
    slo_ttft : TIME
        Target TTFT, such as 2s.
    percentile : P
        Percentage of requests that must meet the target, such as 95; up to 100.
    sure : bool
        Require the upper end of the interval, not only the estimate, to meet the target.

    Fleet
    -----
    max_gpus : N
        Largest fleet to consider, prefill and decoding together. Default: 512.
    group_sizes : N,N,...
        Group sizes to consider. Default: 1,2,4,8; with nodes, up to the GPUs of two nodes.
    uniform_only : bool
        Consider only fleets of equal groups behind one queue.
    price_per_gpu_hour : USD
        Price of a GPU, one for all or by group size: 1=2.0,2=2.0,4=2.4,8=3.1.
    objective : gpus|cost
        What to minimise.
    tpot : TIME
        Target time per output token, such as 30ms; also sizes the fleet that decodes, on other GPUs than prefill.
    kv_transfer_bandwidth : RATE
        Count the transfer of the KV cache to the fleet that decodes; bandwidth per GPU, such as 50GB/s.
    """

    requests: Any = entry(named("pandas:DataFrame", "pandas.core.frame:DataFrame"), REQUIRED)
    columns: Any = entry()
    rate_scale: Any = entry(number(above=0, most=1e6), 1)
    replications: Any = entry(count(2**20), 5)
    pack_tokens: Any = entry(tokens)
    slo_ttft: Any = entry(quantity(parse_seconds), REQUIRED)
    percentile: Any = entry(percentage(100), 99)
    sure: Any = entry(flag, False)
    max_gpus: Any = entry(count(2**20))
    group_sizes: Any = entry(counts)
    uniform_only: Any = entry(flag, False)
    price_per_gpu_hour: Any = entry(price)
    objective: Any = entry(choice(*FLEET_OBJECTIVES), "gpus")
    tpot: Any = entry(quantity(parse_seconds))
    kv_transfer_bandwidth: Any = entry(quantity(parse_bandwidth))
    seed: Any = SEED
