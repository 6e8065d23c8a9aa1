"""Arguments of the Python API and options of the command line, each declared once.

A field of a group such as ScenarioArgs is an argument. Its annotation has the type of the value that the code uses, and
`Help` has its text, its placeholder and the section of the help that lists it:

    slo: Annotated[Seconds | None, Help("Target of the TTFT.", metavar="TIME", section="Target")] = None

`takes` makes parameters of Python functions and their reference from groups; kvrsim/cli/options.py makes the options
of commands, whose own parameters are annotated in the same way. `option_of` reads an annotation:

    bool, str, Literal[...]            True or False; a text; one of these texts
    Annotated[int, Range(...)]         a whole number within limits
    Annotated[float, Range(...)]       a number without a unit
    Annotated[X, Read(function)]       what the function returns, such as seconds from "30ms"
    X | None                           None is allowed

A check turns what a user gives into a plain value in SI units, or raises an InputError with the parameter's name.
Numbers may be text with a unit, as on the command line, or of NumPy; a path may be any path-like object.

This module evaluates its annotations, so that reading a group takes no time: a class that is not imported is in quotes.
"""

import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Never,
    Self,
    TypeVar,
    dataclass_transform,
)

from kvrsim.choices import Executor, FleetObjective, Method, PoolBackend, PrefixCache
from kvrsim.errors import ABSENT, InputError
from kvrsim.io.annotations import AnnotationParts, Range
from kvrsim.units import (
    MAX_BYTES_PER_S,
    MAX_SECONDS,
    LengthRange,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_lengths,
    parse_number,
    parse_range,
    parse_seconds,
    parse_share,
    parse_tokens,
)

if TYPE_CHECKING:
    import pandas

    import kvrsim
    from kvrsim.engine import Engine
    from kvrsim.hardware import Cluster
    from kvrsim.kernels.prefix import PrefixPlacement
    from kvrsim.kernels.profile import CalibrationProfile
    from kvrsim.model.spec import ModelSpec
    from kvrsim.noise import Noise
    from kvrsim.progress import OnProgress
    from kvrsim.strategies import Strategy

STRATEGY = "kvrsim.strategies.base:Strategy"
MOST_VALUES = 2**16  # in one list
MOST_SEED = 2**32 - 1
REQUIRED: Any = inspect.Parameter.empty  # default of a required argument
_Result = TypeVar("_Result")
Check = Callable[[Any, str], Any]  # value, parameter -> the value to use


# Checks

# Least and largest value and unit of numbers in SI units, by the function that reads them from text.
_SI_LIMITS: dict[Callable[..., float], tuple[float, float, str]] = {
    parse_bandwidth: (1.0, MAX_BYTES_PER_S, " bytes per second"),
    parse_seconds: (1e-30, MAX_SECONDS, " seconds"),
}


def tokens(value: object, parameter: str) -> int:
    """Read a number of tokens: a whole number, or text such as "4k"."""
    if isinstance(value, str):
        return parse_tokens(value, parameter)
    return _whole(value, parameter)


def tokens_or_none(value: object, parameter: str) -> int:
    """Read a number of tokens that may be 0."""
    if isinstance(value, str) and value.strip() == "0":
        return 0
    return tokens(value, parameter)


def context(value: object, parameter: str) -> int:
    """Read a single number of tokens. Raises InputError that names the command for several lengths."""
    if isinstance(value, str) and re.search(r"[0-9][kKmM]? ?[,:-]", value):
        accepted = "one length, such as 16k; kvrsim map --ctx takes several, such as 32k,64k,128k"
        raise InputError(parameter, value, accepted)
    return tokens(value, parameter)


def context_or_range(value: object, parameter: str) -> int | LengthRange:
    """Read a single number of tokens, or a range of them such as "4k:64k"."""
    if isinstance(value, str) and value.count(":") == 1:
        return parse_range(value, parameter)
    return context(value, parameter)


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


def count(limits: Range) -> Check:
    """Check for whole numbers within limits, which have a least and a largest number."""
    assert limits.least is not None
    assert limits.most is not None
    least = int(limits.least)
    most = int(limits.most)

    def check(value: object, parameter: str) -> int:
        if isinstance(value, str):
            return parse_count(value, parameter, minimum=least, maximum=most)
        number = _index(value)
        if number is None or not least <= number <= most:
            raise _refusal(parameter, value, f"a whole number from {least} to {most}")
        return number

    return check


def quantity(parse: Callable[..., float], **limits: object) -> Check:
    """Check for numbers in SI units, or text that `parse` reads."""

    def check(value: object, parameter: str) -> float:
        if isinstance(value, str):
            return parse(value, parameter, **limits)
        number = _real(value)
        if number is None or not math.isfinite(number):
            raise _refusal(parameter, value, "a finite number, or text with its unit")
        least, most, unit = _SI_LIMITS.get(parse, (-math.inf, math.inf, ""))
        if not least <= number <= most and not (number == 0 and limits.get("allow_zero", False)):
            raise _refusal(parameter, value, f"{least:g} to {most:g}{unit}, or text with its unit")
        return number

    return check


def number(limits: Range) -> Check:
    """Check for numbers without a unit within limits; without a lower limit they are at least 0."""
    least = 0.0 if limits.least is None else limits.least
    most = math.inf if limits.most is None else limits.most

    def check(value: object, parameter: str) -> float:
        text = value if isinstance(value, str) else quantity(parse_number)(value, parameter)
        return parse_number(text, parameter, above=limits.above, least=least, most=most)

    return check


def percentage(most: float) -> Check:
    """Check for percentages from 1 to `most`. Less is refused, because it is usually a share: 0.95 instead of 95."""

    check_number = number(Range(above=0.0, most=most))

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
    check = named(STRATEGY)
    if _is_one_of(value, (STRATEGY,)):
        return [value]
    parts = _parts(value, parameter, "names, such as tsp,kvr-s")
    return list(dict.fromkeys(check(part, parameter) for part in parts))


def chunk_lens(value: object, parameter: str) -> list[int]:
    """Read tokens of each chunk: text such as "5000,3192", or a list, tuple or array of one dimension."""
    return [tokens(one, parameter) for one in _parts(value, parameter, "chunk lengths, such as 5000,3192")]


def bandwidths(value: object, parameter: str) -> list[float]:
    """Read bandwidths in bytes per second, or texts such as "10GB/s", in a list or with commas between; sorted."""
    parts = _parts(value, parameter, "a list of numbers or texts with units, such as 10GB/s,100GB/s")
    return sorted({quantity(parse_bandwidth)(one, parameter) for one in parts})


def counts(value: object, parameter: str) -> tuple[int, ...]:
    """Read whole numbers above 0: one, a list, or a text such as "2,4,8"; sorted, each once."""
    check = count(Range(least=1, most=2**20))
    if _index(value) is not None:
        return (check(value, parameter),)
    parts = _parts(value, parameter, "whole numbers, such as 2,4,8")
    return tuple(sorted({check(part, parameter) for part in parts}))


def lengths(value: object, parameter: str) -> tuple[int, ...]:
    """Read lengths in tokens: one, a list, or a text that `parse_lengths` reads; sorted, each once."""
    if isinstance(value, str):
        return parse_lengths(value, parameter)
    if _index(value) is not None:
        return parse_lengths(str(_whole(value, parameter)), parameter)
    texts = []
    for part in _parts(value, parameter, "lengths, such as 4k,8k or 1k:32k:1k"):
        if isinstance(part, str):
            texts.append(part)
        else:
            texts.append(str(_whole(part, parameter)))
    return parse_lengths(",".join(texts), parameter)


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
    if _is_flag(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _real(value: object) -> float | None:
    if _is_flag(value) or isinstance(value, bytes | bytearray):
        return None
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


def unchanged(value: object, _: str) -> object:
    """Return the value; a command checks it."""
    return value


# Declarations


class Read(NamedTuple):
    """In an annotation: the function that reads the value."""

    function: Check
    accepts: str = ""  # in Python: the type of what a caller gives, as kvrsim/__init__.pyi says it


class Help(NamedTuple):
    """In an annotation: what the help and the reference say of an argument."""

    text: str  # one or two sentences; they name other arguments as options
    metavar: str = ""  # placeholder of the value; empty for a flag
    section: str = "Output"  # one of kvrsim.choices.SECTIONS
    spelling: tuple[str, ...] = ()  # option names, if not --NAME
    positional: bool = False  # whether a command takes it by position; a metavar that ends with ... is a list


class Option(NamedTuple):
    """An argument of a function or a command, as `option_of` reads it."""

    default: object  # REQUIRED: it must be given
    check: Check
    optional: bool  # whether None is allowed
    metavar: str
    help: str
    section: str
    spelling: tuple[str, ...]
    positional: bool

    def read(self, value: object, name: str) -> Any:
        """Check a value and return it; None is returned unchanged where it is allowed."""
        if value is None and self.optional:
            return None
        return self.check(value, name)


def written(text: str) -> Any:
    """The default of an argument as a user writes it; it is read like a value that is given."""
    return text


def option_of(annotation: object, default: object = REQUIRED) -> Option:
    """Read the annotation of an argument. Raises TypeError if it does not say how a value is read."""
    kind = AnnotationParts(annotation)
    help = next((extra for extra in kind.extras if isinstance(extra, Help)), Help(""))
    return Option(
        default=default,
        check=_check_of(kind),
        optional=kind.optional,
        metavar=help.metavar,
        help=help.text,
        section=help.section,
        spelling=help.spelling,
        positional=help.positional,
    )


def _check_of(kind: AnnotationParts) -> Check:
    for extra in kind.extras:
        if isinstance(extra, Read):
            return extra.function
    limits = next((extra for extra in kind.extras if isinstance(extra, Range)), None)
    if kind.base is int and limits is not None:
        return count(limits)
    if kind.base is float:
        return number(limits or Range())
    if kind.origin is Literal:
        return choice(*kind.args)
    simple: dict[object, Check] = {bool: flag, str: text}
    if kind.base not in simple:
        raise TypeError(f"{kind.base} needs Read(function)")
    return simple[kind.base]


def options_of(group: "type[Arguments]") -> Mapping[str, Option]:
    """Declarations of a group of arguments by name, those of its base classes first; read once."""
    if "declared" in vars(group):
        return group.declared
    options: dict[str, Option] = {}
    for base in reversed(group.__mro__):
        for name, annotation in inspect.get_annotations(base, eval_str=True).items():
            if hasattr(annotation, "__metadata__"):  # of Annotated
                options[name] = option_of(annotation, vars(base).get(name, REQUIRED))
    group.declared = options
    return options


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Arguments:
    """Base of groups of arguments: frozen values by keyword, as in a dataclass.

    Each value is checked when an object is made; InputError names the argument. A group is no dataclass: declaring one
    takes a millisecond, and all groups are declared at every start.
    """

    declared: ClassVar[dict[str, Option]]  # see options_of

    def __init__(self, **values: object) -> None:
        for name, option in options_of(type(self)).items():
            value = values.pop(name, option.default)
            if value is REQUIRED:
                raise InputError(name, ABSENT, option.help)
            vars(self)[name] = option.read(value, name)
        assert not values, values
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check conditions on several values."""

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"{type(self).__name__} is frozen")

    @classmethod
    def take(cls, arguments: dict[str, object], fixed: Mapping[str, object] = MappingProxyType({})) -> Self:
        """Make a group from its arguments in `arguments`, which are removed there, and from those in `fixed`.

        Raises InputError naming an argument without a default that is missing.
        """
        values = {name: arguments.pop(name) for name in options_of(cls) if name in arguments and name not in fixed}
        return cls(**values, **{name: value for name, value in fixed.items() if name in options_of(cls)})


def groups_of(function: Callable[..., object]) -> list[type[Arguments]]:
    """The groups that a function takes: its parameters by position."""
    parameters = inspect.signature(function).parameters.values()
    annotations = [one.annotation for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    scope = inspect.unwrap(function).__globals__
    groups = []
    for annotation in annotations:
        if isinstance(annotation, str):
            groups.append(eval(annotation, scope))
        else:
            groups.append(annotation)
    return groups


def takes(
    *, fixed: Mapping[str, object] = MappingProxyType({}), **kinds: object
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Let a function take all fields of its groups as keywords.

    fixed: values of fields that a caller does not give.
    kinds: annotations that read the function's own parameters, by name; other parameters are not checked.
    The fields are listed in the function's signature and in its docstring, after `Parameters`. A call that does not
    match the signature raises TypeError with the function's name.
    """
    own_options = {name: option_of(kind) for name, kind in kinds.items()}

    def decorate(made: Callable[..., _Result]) -> Callable[..., _Result]:
        groups = groups_of(made)
        further = list(inspect.signature(made).parameters.values())[len(groups) :]
        options = {name: one for group in groups for name, one in options_of(group).items() if name not in fixed}
        keyword = inspect.Parameter.KEYWORD_ONLY
        arguments = (
            inspect.Parameter(name, keyword, default=one.default, annotation=Any) for name, one in options.items()
        )
        returns = made.__annotations__["return"]
        parameters = [*arguments, *(parameter.replace(kind=keyword) for parameter in further)]
        signature = inspect.Signature(parameters, return_annotation=returns)

        @functools.wraps(made)
        def call(*places: object, **keywords: object) -> _Result:
            try:
                signature.bind(*places, **keywords)
            except TypeError as error:
                raise TypeError(f"{made.__name__}(): {error}{_suggestion(keywords, signature.parameters)}") from None
            values = [group.take(keywords, fixed) for group in groups]
            for name, option in own_options.items():
                if name in keywords:
                    keywords[name] = option.read(keywords[name], name)
            return made(*values, **keywords)

        call.__signature__ = signature  # type: ignore[attr-defined]
        vars(call)["kinds"] = kinds
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
    if not near:
        return ""
    return f"; did you mean {near[0]}?"


def _describe(name: str, declaration: Option) -> str:
    """Describe an argument as numpydoc does; the help's options become parameters."""
    words = re.sub(r"--([a-z-]+)", lambda match: f"`{match[1].replace('-', '_')}`", declaration.help)
    return f"    {name} : {declaration.metavar or 'bool'}\n        {words}\n"


# Types of arguments

_NUMBER = "float | str"
_LENGTH = "int | str"
Tokens = Annotated[int, Read(tokens, _LENGTH)]
TokensOrZero = Annotated[int, Read(tokens_or_none, _LENGTH)]
Context = Annotated[int, Read(context, _LENGTH)]
ContextOrRange = Annotated[int | LengthRange, Read(context_or_range, _LENGTH)]
CachedPrefix = Annotated[int, Read(prefix, _LENGTH)]
Lengths = Annotated[tuple[int, ...], Read(lengths, "int | str | Iterable[int | str]")]
ChunkLens = Annotated[list[int], Read(chunk_lens, "str | Iterable[int | str]")]
Count = Annotated[int, Range(least=1, most=2**20)]
Counts = Annotated[tuple[int, ...], Read(counts, "int | str | Iterable[int | str]")]
NumJobs = Annotated[int, Range(least=1, most=4096)]
Seconds = Annotated[float, Read(quantity(parse_seconds), _NUMBER)]
SecondsOrZero = Annotated[float, Read(quantity(parse_seconds, allow_zero=True), _NUMBER)]
Bandwidth = Annotated[float, Read(quantity(parse_bandwidth), _NUMBER)]
Bytes = Annotated[int, Read(quantity(parse_bytes), "int | str")]
Bandwidths = Annotated[list[float], Read(bandwidths, "str | Iterable[float | str]")]
Share = Annotated[float, Read(quantity(parse_share), _NUMBER)]
Price = Annotated[float | str | Mapping[int, float], Read(price, "float | str | Mapping[int, float | str]")]
# Classes are named by text, so that no class is imported at a start.
ModelSource = Annotated[
    "str | ModelSpec", Read(named("kvrsim.model.spec:ModelSpec"), "str | PathLike[str] | ModelSpec")
]
ClusterSource = Annotated["str | Cluster", Read(named("kvrsim.hardware:Cluster"), "str | PathLike[str] | Cluster")]
ProfileSource = Annotated[
    "str | CalibrationProfile",
    Read(named("kvrsim.kernels.profile:CalibrationProfile"), "str | PathLike[str] | CalibrationProfile"),
]
EngineSource = Annotated["str | Engine", Read(named("kvrsim.engine:Engine"), "str | PathLike[str] | Engine")]
PlacementSource = Annotated[
    "str | PrefixPlacement",
    Read(named("kvrsim.kernels.prefix:PrefixPlacement", what="a text"), "str | PrefixPlacement"),
]
NoiseSource = Annotated["str | Noise", Read(named("kvrsim.noise:Noise"), "str | PathLike[str] | Noise")]
TableSource = Annotated[
    "str | kvrsim.PartitionTable",
    Read(named("planner.table.table:PartitionTable"), "str | PathLike[str] | PartitionTable"),
]
RequestsSource = Annotated[
    "str | pandas.DataFrame",
    Read(named("pandas:DataFrame", "pandas.core.frame:DataFrame"), "str | PathLike[str] | pandas.DataFrame"),
]
StrategySource = Annotated["str | Strategy", Read(named(STRATEGY), "str | Strategy")]
StrategyList = Annotated[list["str | Strategy"], Read(strategy_list, "str | Strategy | Iterable[str | Strategy]")]
ProgressFunction = Annotated["OnProgress", Read(function, "OnProgress")]

Seed = Annotated[
    int,
    Range(least=0, most=MOST_SEED),
    Help("Seed of all random numbers; the same seed gives the same answer.", metavar="N", section="Randomness"),
]
Table = Annotated[
    TableSource | None,
    Help("Partition table for kvr-p; kvrsim table build writes one.", metavar="FILE", section="Question"),
]


# Groups of arguments


class ScenarioArgs(Arguments):
    """What a prediction is about."""

    ctx: Annotated[Context, Help("Context length in tokens: 16k is 16384.", metavar="LEN", section="Question")]
    gpus: Annotated[
        Count | None, Help("Number of GPUs. Default: all of the cluster.", metavar="N", section="Question")
    ] = None
    model: Annotated[
        ModelSource,
        Help(
            "A built-in model, a Hugging Face id of a known shape, a config.json or its folder. Default: the paper's "
            "llama-7b.",
            metavar="NAME|PATH",
            section="Question",
        ),
    ] = "llama-7b"
    batch: Annotated[
        Count, Help("Number of sequences prefilled together, each of --ctx tokens.", metavar="N", section="Question")
    ] = 1
    cached_prefix: Annotated[
        CachedPrefix,
        Help(
            "Leading tokens whose K and V are already cached, or their share of the context, such as 90%.",
            metavar="LEN|SHARE",
            section="Question",
        ),
    ] = 0
    prefix_placement: Annotated[
        PlacementSource,
        Help(
            "Location of the cached K and V: every rank, shards of tokens, host memory, or a remote store; RATE is "
            "the bandwidth per GPU, such as 20GB/s.",
            metavar="all|sharded|host[:RATE]|remote[:RATE]",
            section="Question",
        ),
    ] = "all"
    dtype: Annotated[
        str | None,
        Help(
            "Type of weights, activations and KV cache; with fp8 only the layers' matrix products are in FP8. "
            "Default: the checkpoint's.",
            metavar="fp16|bf16|fp8|fp32",
            section="Question",
        ),
    ] = None
    expert_parallel: Annotated[
        bool, Help("Place whole experts on GPUs (expert parallelism); ranks exchange their tokens.", section="Question")
    ] = False
    expert_imbalance: Annotated[
        float | None,
        Help(
            "With --expert-parallel, tokens of the busiest GPU divided by the mean of all GPUs. Default: from a power "
            "law.",
            metavar="X",
            section="Question",
        ),
    ] = None
    cluster: Annotated[
        ClusterSource | None,
        Help(
            "GPUs and their links: a built-in name, a size such as 2x8xh100, or a file. Default: the cluster on which "
            "the profile was measured, or the built-in one of its GPU; without --profile a100-nvlink.",
            metavar="NAME|PATH",
            section="Machine",
        ),
    ] = None
    profile: Annotated[
        ProfileSource | None,
        Help(
            "A calibration profile, or roofline. Default: the built-in one of the cluster's GPU; on A100, a100-eager "
            "for the models of the KV-Runahead paper.",
            metavar="NAME|PATH",
            section="Machine",
        ),
    ] = None
    engine: Annotated[
        EngineSource | None,
        Help(
            "The serving engine: a name of kvrsim engines list, a file, or none for the kernels alone. Default: the "
            "profile's.",
            metavar="NAME|PATH",
            section="Machine",
        ),
    ] = None
    attention: Annotated[
        str | None,
        Help("Attention kernel. Default: the profile's first.", metavar="eager|sdpa|flash", section="Machine"),
    ] = None
    memory_fraction: Annotated[
        float,
        Range(above=0, most=1),
        Help("Share of each GPU's memory that the prefill may use: above 0, up to 1.", metavar="F", section="Machine"),
    ] = 0.9
    link_bandwidth: Annotated[
        Bandwidth | None,
        Help(
            "Override the cluster's link bandwidth (per direction), such as 10GB/s.", metavar="RATE", section="Machine"
        ),
    ] = None
    link_latency: Annotated[
        SecondsOrZero | None,
        Help("Override the cluster's link latency, such as 5us.", metavar="TIME", section="Machine"),
    ] = None
    topology: Annotated[
        str | None, Help("Override the cluster's topology.", metavar="switch|bus|chain", section="Machine")
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.cached_prefix, ContextShare):
            if not isinstance(self.ctx, int):
                raise InputError("cached_prefix", f"{self.cached_prefix:.4g}", "tokens: a share needs a single context")
            vars(self)["cached_prefix"] = int(self.cached_prefix * self.ctx)


class DeploymentArgs(ScenarioArgs):
    """A scenario with a model and a cluster that the user must name; a fleet may compare several clusters, A,B."""

    model: Annotated[
        ModelSource,
        Help(
            "A built-in model, a Hugging Face id of a known shape, a config.json or its folder.",
            metavar="NAME|PATH",
            section="Question",
        ),
    ]
    cluster: Annotated[
        ClusterSource,
        Help(
            "GPUs and their links: a built-in name, a size such as 2x8xh100, or a file.",
            metavar="NAME|PATH",
            section="Machine",
        ),
    ]


class ScenariosArgs(ScenarioArgs):
    """Arguments of scenarios with several contexts and numbers of GPUs.

    `ctx` and `gpus` have other types than in a scenario, as in PrefillArgs; `build_scenarios` makes scenarios of them.
    """

    ctx: Annotated[  # type: ignore[assignment]
        Lengths,
        Help(
            "Contexts: a range with both ends, such as 1k:32k:1k, or a list.",
            metavar="LEN:LEN:STEP|LEN,...",
            section="Question",
        ),
    ]
    gpus: Annotated[
        Counts | None,
        Help(
            "Numbers of GPUs. Default: 2, 4, 8, ... up to the size of the cluster.",
            metavar="N,N,...",
            section="Question",
        ),
    ] = None  # type: ignore[assignment]


class RangeArgs(ScenarioArgs):
    """A scenario, or one for a range of contexts (--emit vllm-runahead)."""

    ctx: Annotated[  # type: ignore[assignment]
        ContextOrRange,
        Help(
            "Context length in tokens: 16k is 16384; with --emit vllm-runahead also a range, such as 4k:64k.",
            metavar="LEN",
            section="Question",
        ),
    ]

    @property
    def range(self) -> LengthRange:
        """The range of contexts; of one context, from it to itself."""
        if isinstance(self.ctx, LengthRange):
            return self.ctx
        return LengthRange(first=self.ctx, last=self.ctx, text=str(self.ctx))

    def single(self) -> ScenarioArgs:
        """The arguments of one context. Raises InputError for a range."""
        if isinstance(self.ctx, LengthRange):
            context(self.ctx.text, "ctx")
        return ScenarioArgs(**vars(self))


class MeasuredArgs(ScenarioArgs):
    """Arguments of a scenario on a small machine, with one GPU per rank."""

    gpus: Annotated[Count, Help("Number of ranks.", metavar="N", section="Question")] = 2


OF_REQUESTS = {  # arguments that `capacity` does not take, because each request has its own value
    **{"ctx": 1, "gpus": 1, "batch": 1, "cached_prefix": 0, "prefix_placement": "all"},
    **{"expert_parallel": False, "expert_imbalance": None},
}


class PredictorArgs(DeploymentArgs):
    """The model and the machine of a predictor, and its largest context and batch."""

    ctx: Annotated[
        Tokens, Help("Longest context in tokens, cached prefix included.", metavar="LEN", section="Question")
    ] = written("128k")
    batch: Annotated[
        Count, Help("Largest number of sequences prefilled together.", metavar="N", section="Question")
    ] = 1


class PrefillArgs(ScenarioArgs):
    """Values for the columns that a file of measured prefills lacks."""

    ctx: Annotated[
        Tokens | None,
        Help("Context length in tokens of rows without a context_len.", metavar="LEN", section="Question"),
    ] = None  # type: ignore[assignment]
    gpus: Annotated[Count | None, Help("Number of GPUs. Default: 1.", metavar="N", section="Question")] = None
    model: Annotated[
        str | None,
        Help("A built-in model, a Hugging Face config.json, or its folder.", metavar="NAME|PATH", section="Question"),
    ] = None  # type: ignore[assignment]
    profile: Annotated[
        ProfileSource,
        Help("The calibration profile whose kernels the engine runs.", metavar="NAME|PATH", section="Machine"),
    ]
    strategy: Annotated[
        str | None,
        Help(
            "Strategy of rows without a strategy. Default: tp, or single on one GPU.",
            metavar="NAME",
            section="Question",
        ),
    ] = None
    columns: Annotated[
        str | None,
        Help(
            "Columns of a CSV file: ttft_s=latency,context_len=tokens; ttft_ms=COLUMN for milliseconds. Default: "
            "usual names, such as ttft_ms and prompt_tokens.",
            metavar="ROLE=COLUMN,...",
            section="Measurement",
        ),
    ] = None


class TargetArgs(Arguments):
    """What a TTFT target applies to."""

    slo: Annotated[
        Seconds | None,
        Help(
            "Target of the TTFT; the exit code is 1 if it is not 90 % sure that it is met.",
            metavar="TIME",
            section="Target",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Range(above=0, most=1000000.0),
        Help(
            "Prompts per second that arrive at the GPUs, at random times. Default: a single prompt on idle GPUs.",
            metavar="X",
            section="Target",
        ),
    ] = None
    percentile: Annotated[
        float,
        Read(percentage(99.9)),
        Help(
            "Percentage of the prompts that must meet the target, with --rate or --noise.",
            metavar="P",
            section="Target",
        ),
    ] = 90


class SearchArgs(Arguments):
    """How partitions are searched; `planner.candidates.Search` reads them."""

    table: Table = None
    method: Annotated[
        Method,
        Help(
            "Search method of partitions over single GPUs; grid is the paper's.",
            metavar="auto|analytical|grid",
            section="Search",
        ),
    ] = "auto"
    stride: Annotated[
        Tokens | None, Help("Search only chunk boundaries that are multiples of LEN.", metavar="LEN", section="Search")
    ] = None
    search_budget: Annotated[
        SecondsOrZero,
        Help(
            "Limit of all searches together, in seconds of an idle core (approximate); --strategies all has no limit.",
            metavar="TIME",
            section="Search",
        ),
    ] = written("1.5s")


class PlanArgs(SearchArgs, TargetArgs):
    """Which strategies are compared, how their partitions are searched, and what is promised."""

    strategies: Annotated[
        StrategyList | None,
        Help(
            "Strategies to compare, such as tsp,kvr-s,./mine.py:STRATEGY. Default and all: every strategy that the "
            "GPUs allow and that could fit in memory.",
            metavar="NAMES|all|FILE.py:NAME",
            section="Question",
        ),
    ] = None
    confirmed: Annotated[
        str | None,
        Help(
            "What kvrsim confirm -o FILE measured: show it beside the predictions of the same partitions.",
            metavar="FILE",
            section="Question",
        ),
    ] = None


class SimulateArgs(Arguments):
    """Which strategy is simulated, and how."""

    strategy: Annotated[
        StrategySource,
        Help("Strategy, such as tsp, kvr-s, zigzag, tp8+kvr-s.", metavar="NAME|FILE.py:NAME", section="Question"),
    ]
    partition: Annotated[
        ChunkLens | None,
        Help(
            "New tokens of each rank, such as 5000,3192. Default: the strategy's own; kvr-s searches it.",
            metavar="LEN,LEN,...",
            section="Question",
        ),
    ] = None
    table: Table = None
    executor: Annotated[
        Executor | None,
        Help(
            "event simulates the queue of every link. Default: batch, or event for a timeline, a breakdown or noise.",
            metavar="batch|event",
            section="Search",
        ),
    ] = None
    breakdown: Annotated[
        bool, Help("Print the seconds of every operation and their basis, such as measured or interpolated.")
    ] = False
    explain: Annotated[
        bool,
        Help(
            "Print the KV-Runahead paper's counts for tsp and kvr: dot products, K and V entries, Equation 1; "
            "--plot then draws them."
        ),
    ] = False


class NoiseArgs(Arguments):
    """Noise, the number of its samples, and the seed of all random draws."""

    noise: Annotated[
        NoiseSource | None,
        Help(
            "Simulate under noise: side-traffic:duty=0.5,share=0.67,slowdown=0.03, jitter:0.05, slow-gpu:3x1.2, "
            "slow-link:2-3x4, paper, or several joined by +.",
            metavar="SPEC",
            section="Randomness",
        ),
    ] = None
    samples: Annotated[
        Count | None, Help("Number of runs under --noise. Default: 200.", metavar="N", section="Randomness")
    ] = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.samples is not None and self.noise is None:
            raise InputError("samples", self.samples, "with --noise SPEC")


class UsersArgs(Arguments):
    """Closed-loop users: each waits for an answer before the next prompt."""

    users: Annotated[
        int | None,
        Range(least=1, most=4096),
        Help(
            "Add the mean TTFT of C concurrent users with one request each, as engines' benchmarks report it.",
            metavar="C",
            section="Question",
        ),
    ] = None
    output_tokens: Annotated[
        Tokens | None,
        Help("With --users, mean output tokens of a request. Default: 1024.", metavar="N", section="Question"),
    ] = None

    def __post_init__(self) -> None:
        if self.output_tokens is not None and self.users is None:
            raise InputError("output_tokens", self.output_tokens, "with --users C")


class PoolArgs(Arguments):
    """Which processes or machines share the work."""

    jobs: Annotated[
        NumJobs | None,
        Help(
            "Number of processes. Default: 1; with --pool dask or ray, one per core.", metavar="N", section="Processes"
        ),
    ] = None
    pool: Annotated[
        PoolBackend,
        Help("Backend of joblib; loky runs processes of this machine.", metavar="loky|dask|ray", section="Processes"),
    ] = "loky"
    dask_address: Annotated[
        str | None, Help("A Dask scheduler. Default: start a local cluster.", metavar="ADDRESS", section="Processes")
    ] = None


class BudgetArgs(PoolArgs):
    """Which processes share the work, and how long they may take."""

    time_budget: Annotated[
        Seconds | None,
        Help(
            "End after about this time, with what is complete and a note of what is missing. Default: no limit.",
            metavar="TIME",
            section="Processes",
        ),
    ] = None


class MapArgs(Arguments):
    """What a map compares."""

    link_bandwidths: Annotated[
        Bandwidths | None,
        Help(
            "Link bandwidths to compare, such as 10GB/s,200GB/s. Default: the cluster's own.",
            metavar="RATE,RATE,...",
            section="Question",
            spelling=("--link-bandwidth", "--link-bandwidths"),
        ),
    ] = None
    strategies: Annotated[
        StrategyList | None,
        Help(
            "Strategies to compare with one GPU; all: every strategy that plan compares, which takes longer. Default: "
            "the main ones, and their hybrids with tensor parallelism.",
            metavar="NAMES|all|FILE.py:NAME",
            section="Question",
        ),
    ] = None


class FleetArgs(Arguments):
    """What a fleet is planned for, and what it may consist of."""

    requests: Annotated[
        RequestsSource,
        Help(
            "A trace, or random arrivals such as synthetic:poisson,rate=4. In Python also a pandas DataFrame.",
            metavar="FILE|synthetic:SPEC",
            section="Workload",
        ),
    ]
    columns: Annotated[
        str | None,
        Help(
            "Columns of the trace: timestamp=ts,context=prompt_tokens,output=completion_tokens. Default: usual names.",
            metavar="ROLE=COLUMN,...",
            section="Workload",
        ),
    ] = None
    rate_scale: Annotated[
        float,
        Range(above=0, most=1000000.0),
        Help("Multiply the number of requests in the same time.", metavar="X", section="Workload"),
    ] = 1
    think_time: Annotated[
        str | None,
        Help(
            "Time between an answer and the next turn of its session, where a trace has none: 5s, "
            "lognormal:MEDIAN:SIGMA, exponential:MEAN or uniform:LOW:HIGH.",
            metavar="TIME|DISTRIBUTION",
            section="Sessions",
        ),
    ] = None
    session_rate: Annotated[
        float | None,
        Range(above=0, most=1000000.0),
        Help(
            "Mean number of sessions that begin per second, at random, where a trace has no times.",
            metavar="X",
            section="Sessions",
        ),
    ] = None
    prefix_cache: Annotated[
        PrefixCache,
        Help(
            "Prefix caches for requests with sessions or hash_ids: simulated in the memory of each group, one without "
            "limit that all groups share (turns arrive at the times of the trace), or none.",
            metavar="simulated|unlimited|none",
            section="Sessions",
        ),
    ] = "simulated"
    kv_cache_host: Annotated[
        Bytes | None,
        Help(
            "Memory of the host for prefixes that leave a GPU, for each GPU, such as 200GB. Default: none.",
            metavar="SIZE",
            section="Sessions",
        ),
    ] = None
    kv_cache_remote: Annotated[
        Bandwidth | None,
        Help(
            "Keep all prefixes in a store that all groups share; each GPU loads at this rate. Default: no store.",
            metavar="RATE",
            section="Sessions",
        ),
    ] = None
    replications: Annotated[
        Count, Help("Number of independent samples of a synthetic workload.", metavar="N", section="Workload")
    ] = 5
    max_num_batched_tokens: Annotated[
        Tokens | None,
        Help(
            "Most tokens of a step in which requests share a group; longer prompts are cut. Groups that only prefill "
            "run prompts one by one without it. Default of groups that also decode: 8k.",
            metavar="LEN",
            section="Workload",
        ),
    ] = None
    slo_ttft: Annotated[Seconds, Help("Target TTFT, such as 2s.", metavar="TIME", section="Target")]
    percentile: Annotated[
        float,
        Read(percentage(100)),
        Help("Percentage of requests that must meet the target, such as 95; up to 100.", metavar="P", section="Target"),
    ] = 99
    sure: Annotated[
        bool,
        Help("Require the upper end of the interval, not only the estimate, to meet the target.", section="Target"),
    ] = False
    max_gpus: Annotated[
        Count | None,
        Help("Largest fleet to consider, prefill and decoding together. Default: 512.", metavar="N", section="Fleet"),
    ] = None
    group_sizes: Annotated[
        Counts | None,
        Help(
            "Group sizes to consider. Default: 1,2,4,8; with nodes, up to the GPUs of two nodes.",
            metavar="N,N,...",
            section="Fleet",
        ),
    ] = None
    uniform_only: Annotated[bool, Help("Consider only fleets of equal groups behind one queue.", section="Fleet")] = (
        False
    )
    price_per_gpu_hour: Annotated[
        Price | None,
        Help(
            "Price of a GPU, one for all or by group size: 1=2.0,2=2.0,4=2.4,8=3.1. With several clusters: "
            "2.5,6, one for each.",
            metavar="USD",
            section="Fleet",
        ),
    ] = None
    node_granularity: Annotated[
        Count, Help("GPUs of a node: only whole nodes are rented. 1: single GPUs.", metavar="N", section="Fleet")
    ] = 1
    spare: Annotated[
        int,
        Range(least=0, most=4096),
        Help("Additional nodes, or groups without whole nodes, for the loss of as many.", metavar="N", section="Fleet"),
    ] = 0
    objective: Annotated[FleetObjective, Help("What to minimise.", metavar="gpus|cost", section="Fleet")] = "gpus"
    tpot: Annotated[
        Seconds | None,
        Help(
            "Target time per output token, such as 30ms. Fleets that prefill and decode on the same GPUs are compared "
            "with fleets that split them.",
            metavar="TIME",
            section="Target",
        ),
    ] = None
    colocated: Annotated[
        bool, Help("Consider only fleets that prefill and decode on the same GPUs.", section="Fleet")
    ] = False
    kv_transfer_bandwidth: Annotated[
        Bandwidth | None,
        Help(
            "Bandwidth per GPU for caches that move to GPUs that decode, such as 50GB/s. Default: the cluster's "
            "network, or at most 50 GB/s.",
            metavar="RATE",
            section="Fleet",
        ),
    ] = None
    seed: Seed = 0
