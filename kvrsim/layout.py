"""Layout: which GPUs share a model and a prompt, for attention, for the routed experts and for the layers.

A name states the sizes, joined by "+":

| part | what it splits |
|---|---|
| tpN | every matrix of attention and of dense MLPs, over N GPUs that act as one rank |
| ppN, ppN-s | the layers, over N stages; -s: pieces of searched lengths |
| cpN, zigzag | the context, over N ranks that each have an early and a late piece |
| cpN-i, interleave | the context, over N ranks that each have every N-th token |
| kvr-s, tsp, ring, ... | the context, by another strategy, over all GPUs that are left |
| dpN | prompts, over N groups of GPUs for attention; one prompt is in one group |
| epN | routed experts, whole, over N of the GPUs of a stage; each is then sliced over the rest |
| edpN | copies of the routed experts: each of N context or data ranks has all of them |

A part without a number takes all GPUs that the others leave. In the layouts that serving engines have (tp, pp, cp,
dp), experts are sliced over all GPUs of a stage unless the name says otherwise, as in vLLM and SGLang.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from kvrsim.errors import InputError
from kvrsim.io.schema import Check

_SCHEME_OF_SUFFIX = {"": "zigzag", "-i": "interleave"}  # how ranks split the context, by what follows cpN
ENGINE_SCHEMES = tuple(_SCHEME_OF_SUFFIX.values())  # the schemes of context parallelism in serving engines
Exchange = Literal["none", "all-to-all", "gather"]
Pieces = Literal["none", "even", "searched"]
_PART = re.compile(r"(tp|pp|cp|dp|ep|edp)([1-9]\d{0,4})?(-s|-i)?")
_WITH_SUFFIX = (("-s", "pp"), ("-i", "cp"))
_FIELDS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The sizes in a strategy's name. At most one of the first four is None: it takes all GPUs that are left."""

    data: int | None = 1  # groups of GPUs for attention, each with prompts of its own
    tensor: int | None = 1  # GPUs that split every matrix
    pipeline: int | None = 1  # stages of layers
    context: int | None = 1  # ranks that split the context, or each piece of it
    scheme: str | None = None  # scheme that splits the context; None: the context is not split
    pieces: Pieces = "none"  # how the context is divided into pieces in a pipeline
    experts: Literal["default", "ep", "edp"] = "default"  # placement of experts that the name states
    num_experts_groups: int | None = None  # N of epN and edpN; None: as many as the GPUs or ranks allow

    @property
    def name(self) -> str:
        """The name that a user writes, without sizes of 1."""
        parts = [_size_text(part, getattr(self, name)) for part, name in (("dp", "data"), ("tp", "tensor"))]
        if self.pieces != "none":
            parts.append(f"pp{self.pipeline or ''}" + "-s" * (self.pieces == "searched"))
        if self.scheme in ENGINE_SCHEMES and (self.context is not None or self.pipeline is None):
            parts.append(_size_text("cp", self.context) + "-i" * (self.scheme == "interleave" and self.context != 1))
        elif self.scheme is not None:
            parts.append(self.scheme)
        parts.append("" if self.experts == "default" else _size_text(self.experts, self.num_experts_groups or None))
        return "+".join(filter(None, parts)) or "single"

    @property
    def is_deployable(self) -> bool:
        """Whether serving engines have layouts of this kind."""
        return self.scheme is None or self.scheme in ENGINE_SCHEMES

    def on(self, num_gpus: int) -> Degrees:
        """Return the degrees without None. Raises InputError if the product of the sizes is not the number of GPUs."""
        degrees = {name: getattr(self, name) for name in _FIELDS.values()}
        product = math.prod(size or 1 for size in degrees.values())
        free = [name for name, size in degrees.items() if size is None]
        if free and num_gpus % product == 0:
            return replace(self, **{free[0]: num_gpus // product})
        if not free and product == num_gpus:
            return self
        sizes = [f"{name} {size}" for name, size in degrees.items() if size not in (None, 1)] or ["1"]
        accepted = f"groups that {num_gpus} GPUs divide into" if free else f"sizes whose product is {num_gpus} GPUs"
        raise InputError("strategies", self.name, f"{accepted}, not {' x '.join(sizes)}")


def _size_text(part: str, size: int | None) -> str:
    return "" if size == 1 else part if size is None else f"{part}{size}"


def parse_degrees(name: str, parameter: str = "strategy") -> tuple[Degrees, str | None]:
    """Return the sizes in a name, and the strategy that splits the context; None if the name has sizes only.

    Raises InputError if a part occurs twice, or if parts exclude each other.
    """
    if name == "single":
        return Degrees(), None
    sizes: dict[str, int | None] = {}
    words: dict[str, str] = {}
    rest: list[str] = []
    for part in name.split("+"):
        matched = _PART.fullmatch(part)
        if matched is None or (matched[3] and (matched[3], matched[1]) not in _WITH_SUFFIX):
            rest.append(part)
        elif matched[1] in sizes:
            raise InputError(parameter, name, f"{matched[1]} once")
        else:
            sizes[matched[1]] = None if matched[2] is None else int(matched[2])
            words[matched[1]] = matched[3] or ""
    scheme = "+".join(rest) if rest else None
    if scheme is not None and ({"pp", "cp"} & set(sizes)):
        raise InputError(parameter, name, f"cpN or cpN-i between the parts of a pipeline, not {scheme}")
    if "ep" in sizes and "edp" in sizes:
        raise InputError(parameter, name, "epN or edpN, as experts are either spread or copied")
    if "cp" in sizes and sizes["cp"] != 1:
        scheme = _SCHEME_OF_SUFFIX[words["cp"]]
        if words.get("pp"):
            raise InputError(parameter, name, "even pieces where ranks split the context: ppM+cpK, without -s")
    fields = {_FIELDS[part]: size for part, size in sizes.items() if part in _FIELDS}
    if "pp" in sizes and fields.get("context", 1) is None:
        raise InputError(parameter, name, "cpN with its number in a pipeline")
    if scheme is not None:
        fields.setdefault("context", None)
    if sum(size is None for size in fields.values()) > 1:
        raise InputError(parameter, name, "a number at all parts but one, as only one takes what the others leave")
    experts: Literal["default", "ep", "edp"] = "ep" if "ep" in sizes else "edp" if "edp" in sizes else "default"
    pieces: Pieces = "none"
    if "pp" in sizes and not (sizes["pp"] == 1 and scheme):
        pieces = "searched" if words["pp"] else "even"
    degrees = Degrees(**fields, scheme=scheme, pieces=pieces, experts=experts, num_experts_groups=sizes.get(experts))
    if degrees.data != 1 and not degrees.is_deployable:
        raise InputError(parameter, name, "dpN with tp, pp or cp, which serving engines have")
    return degrees, None if scheme in ENGINE_SCHEMES and "cp" in sizes else scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the GPUs of a run share a model and a prompt; all sizes are known.

    A stage has data x context x tensor GPUs, which hold all routed experts of the stage's layers.
    """

    data: int = 1  # groups of GPUs for attention, each with prompts of its own
    tensor: int = 1  # GPUs that split every matrix of attention and of dense MLPs
    pipeline: int = 1  # stages of layers
    context: int = 1  # ranks that split the context, or each piece of it
    scheme: str | None = None  # scheme that splits the context; None: the context is not split
    pieces: Pieces = "none"  # how the context is divided into pieces in a pipeline
    expert_tensor: int = 1  # GPUs over which each expert is sliced
    expert_parallel: int = 1  # groups of GPUs over which whole experts are spread
    is_mixture: bool = False  # whether the model has routed experts

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.stage_gpus * self.pipeline

    @property
    def effort(self) -> tuple[int, int, bool]:
        """Sort key of the effort of deployment: GPUs, stages, and whether the context is divided into pieces."""
        return self.num_gpus, self.pipeline, self.pieces != "none"

    @property
    def stage_gpus(self) -> int:
        """Number of GPUs of a stage, which hold the stage's experts."""
        return self.data * self.context * self.tensor

    @property
    def expert_data(self) -> int:
        """Number of copies of the routed experts in a stage."""
        return self.stage_gpus // (self.expert_tensor * self.expert_parallel)

    @property
    def expert_ranks(self) -> int:
        """Number of context and data ranks that together hold one copy of the experts."""
        return max(1, self.expert_tensor * self.expert_parallel // self.tensor) if self.is_mixture else 1

    @property
    def exchange(self) -> Exchange:
        """How tokens reach experts of other ranks.

        all-to-all: each rank sends a token to the ranks that hold its experts. gather: every rank gets all tokens, and
        the experts' results are summed and scattered, as in engines without a library for all-to-all.
        """
        if self.expert_ranks == 1:
            return "none"
        spread_alone = self.expert_tensor == 1 and self.data == 1 and self.pipeline == 1
        return "all-to-all" if spread_alone else "gather"

    @property
    def dispatches_tokens(self) -> bool:
        """Whether data groups can send tokens to whole experts by all-to-all; engines do so over several nodes."""
        return self.exchange == "gather" and self.data > 1 and self.expert_tensor == 1

    @property
    def degrees(self) -> Degrees:
        """The degrees that the layout's name states; with experts only if their placement is not the default."""
        experts: Literal["default", "ep", "edp"] = "default"
        number = None
        slices_all = self.expert_tensor == self.stage_gpus
        if self.is_mixture and self.expert_parallel > 1:
            experts = "ep"
            number = self.expert_parallel
        elif self.is_mixture and not slices_all and (self.scheme is None or self.scheme in ENGINE_SCHEMES):
            experts = "edp"
            number = self.expert_data
        context = self.context if self.scheme in (None, *ENGINE_SCHEMES) else None
        return Degrees(
            **{name: getattr(self, name) for name in ("data", "tensor", "pipeline", "scheme", "pieces")},
            context=context,
            experts=experts,
            num_experts_groups=number,
        )

    @property
    def name(self) -> str:
        """Name with all sizes, such as tp4+pp2+cp2 or dp8+ep8."""
        return self.degrees.name


# Ways to divide a prefill over GPUs, in words. A measured prefill says nothing about ways that it does not have.
LAYOUT_KINDS = {
    "tensor": "tensor parallelism",
    "pipeline": "a pipeline",
    "context": "a context that GPUs split",
    "data": "attention data parallelism",
    "experts": "expert parallelism",
    "nodes": "several nodes",
}
LayoutKinds = Annotated[
    tuple[str, ...], Check(f"some of {', '.join(LAYOUT_KINDS)}", lambda kinds: set(kinds) <= set(LAYOUT_KINDS))
]
ONE_LAYOUT = Layout()  # layout of one GPU


def layout_on(degrees: Degrees, num_gpus: int, *, is_mixture: bool, whole_experts_fit: bool = True) -> Layout:
    """Return the layout of the degrees on a number of GPUs.

    whole_experts_fit: whether a rank's GPUs have memory for all experts. In a strategy that no engine has, each rank
    then holds all experts; if they do not fit, they are spread over all GPUs.
    Raises InputError where the product of the sizes is not the number of GPUs.
    """
    sizes = degrees.on(num_gpus)
    layout = Layout(
        **{name: getattr(sizes, name) for name in _FIELDS.values()},
        scheme=sizes.scheme if sizes.context != 1 else None,
        pieces=sizes.pieces,
        is_mixture=is_mixture,
    )
    if not is_mixture:
        if degrees.experts != "default":
            raise InputError("strategies", degrees.name, f"no {degrees.experts}, as the model has no routed experts")
        return layout
    gpus = layout.stage_gpus
    ranks = layout.context * layout.data
    experts = degrees.experts
    number = degrees.num_experts_groups
    if experts == "default" and not degrees.is_deployable and not whole_experts_fit and ranks > 1:
        experts = "ep"
    if experts == "edp" or (experts == "default" and not degrees.is_deployable):
        if number not in (None, ranks):
            raise InputError("strategies", degrees.name, f"edp{ranks}, a copy of the experts per context and data rank")
        return replace(layout, expert_tensor=layout.tensor)
    if experts == "default":  # each expert is sliced over all GPUs of a stage
        return replace(layout, expert_tensor=gpus)
    groups = number or gpus
    if not degrees.is_deployable and groups != gpus:
        raise InputError("strategies", degrees.name, f"ep{gpus}, all GPUs")
    if gpus % groups:
        raise InputError("strategies", degrees.name, f"epN with N a divisor of the {gpus} GPUs of a stage")
    return replace(layout, expert_tensor=gpus // groups, expert_parallel=groups)
