"""The strategies, each in a short file. Users add theirs by files (load.py)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from kvrsim.errors import InputError
from kvrsim.layout import Degrees, parse_degrees
from kvrsim.strategies.base import Step, Strategy, Use
from kvrsim.strategies.gather import INTERLEAVE, TSP, ZIGZAG
from kvrsim.strategies.kv_runahead import KVR_B, KVR_DIRECT, KVR_E, KVR_P, KVR_S
from kvrsim.strategies.layers import SINGLE, TENSOR_PARALLEL
from kvrsim.strategies.pipeline import PIPELINE, PIPELINE_SEARCHED
from kvrsim.strategies.ring import RING, STRIPED, ZIGZAG_RING
from kvrsim.strategies.ulysses import ULYSSES

__all__ = ["BASELINES", "KVR_E", "KVR_S", "STRATEGIES", "TSP", "Step", "Strategy", "get_strategy"]

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        *(SINGLE, TSP, KVR_E, KVR_S, KVR_P),
        *(KVR_B, KVR_DIRECT, RING, STRIPED, ZIGZAG_RING, ZIGZAG, INTERLEAVE, ULYSSES),
        *(TENSOR_PARALLEL, PIPELINE, PIPELINE_SEARCHED),
    )
}
CHUNKED = "pp1"  # chunked prefill: one stage that takes the context in steps
_POWERS = tuple(2**exponent for exponent in range(17))  # sizes of hybrids that plans consider
# Baselines of speed-ups: a plan uses the first one that fits.
BASELINES = tuple(
    sorted(
        (strategy.name for strategy in STRATEGIES.values() if strategy.baseline_rank is not None),
        key=lambda name: STRATEGIES[name].baseline_rank or 0,
    )
)


def get_strategy(strategy: str | Strategy, parameter: str = "strategy") -> Strategy:
    """Return a strategy by its name; a Strategy is returned unchanged.

    Names are those of kvrsim, "FILE.py:NAME", and layouts such as tp8+kvr-s or dp8+ep8
    (kvrsim.layout). Raises InputError naming the parameter if there is no such strategy, or if a different Strategy has
    the name of one of kvrsim's.
    """
    if isinstance(strategy, Strategy):
        if STRATEGIES.get(strategy.name, strategy) != strategy:
            raise InputError(parameter, strategy.name, "a Strategy with a name that no strategy of kvrsim has")
        return strategy
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    degrees, inner = parse_degrees(strategy, parameter)
    if inner is None:
        return _of_sizes(degrees)
    if inner != strategy:
        try:
            between = get_strategy(inner, parameter)
        except InputError as error:
            raise InputError(parameter, strategy, error.accepted) from error
        if _is_in_hybrids(between):
            return _with_degrees(between, replace(degrees, scheme=between.degrees.scheme))
        raise InputError(parameter, strategy, "tpN+ before a strategy that splits the context or the layers")
    from kvrsim.strategies.load import from_file, is_file  # imported only for names that kvrsim has not

    if is_file(strategy):
        return get_strategy(from_file(strategy, parameter), parameter)
    names = ", ".join(STRATEGIES)
    accepted = f"one of {names}, tpN+ before one, such as tp8+kvr-s, sizes such as tp4+pp2+cp2, or FILE.py:NAME"
    raise InputError(parameter, strategy, accepted)


def _is_in_hybrids(strategy: Strategy) -> bool:
    """Whether the strategy can stand between groups of tensor parallelism."""
    return strategy.group_size == 1 and strategy.partition_rule not in ("whole", "table")


def usual_names(use: Use) -> tuple[str, ...]:
    """Names of the strategies that are considered for this use where the user names none."""
    return tuple(strategy.name for strategy in STRATEGIES.values() if use in strategy.usual_in)


def _of_sizes(degrees: Degrees) -> Strategy:
    """The strategy of a name that has only sizes: tp8, pp4, pp4-s, tp2+pp2+cp4, cp4, dp8+ep8."""
    if degrees.pieces == "none":
        if degrees.scheme is not None:
            return _with_degrees(STRATEGIES[degrees.scheme], degrees)
        if degrees == SINGLE.degrees:
            return SINGLE
        return _with_degrees(TENSOR_PARALLEL, degrees)
    base = PIPELINE
    if degrees.pieces == "searched":
        base = PIPELINE_SEARCHED
    if degrees.scheme is None:
        sized = _with_degrees(base, degrees)
        if degrees.pipeline != 1:
            return sized
        return replace(sized, title=_title("chunked prefill: prompt in pieces", degrees))
    inside = STRATEGIES[degrees.scheme]
    stages = "pipeline of layers"
    if degrees.pipeline is not None:
        stages = f"{degrees.pipeline} stages"
    title = f"{stages}, context over {degrees.context} ranks"
    source = f"{base.source}; inside a stage: {inside.source}"
    return _with_degrees(replace(base, title=title, source=source, layer=inside.layer), degrees)


def _with_degrees(base: Strategy, degrees: Degrees) -> Strategy:
    """A strategy with other sizes, which appear in its name, title and sources."""
    if degrees == base.degrees:
        return base
    if base is TENSOR_PARALLEL:
        return replace(base, name=degrees.name, title=_title("", degrees), degrees=degrees)
    source = base.source
    if degrees.tensor != 1:
        source = f"{TENSOR_PARALLEL.source}; {source}"
    title = _title(base.title, degrees)
    return replace(base, name=degrees.name, title=title, source=source, degrees=degrees)


def _title(inside: str, degrees: Degrees) -> str:
    """Title of a strategy with other sizes. inside: title of what is between the groups of tensor parallelism."""
    parts: list[str] = []
    if degrees.data is None:
        parts.append("prompts over groups")
    elif degrees.data != 1:
        parts.append(f"prompts over {degrees.data} groups")
    if degrees.tensor is None:
        parts.append("tensor parallelism")
    elif degrees.tensor != 1:
        parts.append(f"tensor parallelism by {degrees.tensor}")
    if inside:
        parts.append(inside)
    if degrees.experts == "ep":
        parts.append("experts spread")
    elif degrees.experts != "default":
        parts.append("experts copied")
    return "; ".join(parts)


def label_of(strategy: str | Strategy) -> str:
    """Name of a strategy as the user gave it, for records of inputs."""
    if isinstance(strategy, Strategy):
        return strategy.name
    return strategy


def searched_strategy(strategy: str | Strategy, parameter: str = "strategy") -> Strategy:
    """A strategy of single GPUs with searched chunks, which tables need; raises InputError for other strategies."""
    resolved = get_strategy(strategy, parameter)
    if resolved.partition_rule != "search" or resolved.group_size != 1:
        raise InputError(parameter, resolved.name, "a strategy of single GPUs whose chunks are searched, such as kvr-s")
    return resolved


def chain_like(strategy: Strategy) -> Strategy:
    """KVR's chain with ranks of the strategy's size."""
    return _with_degrees(KVR_S, replace(KVR_S.degrees, tensor=strategy.group_size or 1))


def names_in_all(num_gpus: int, per_node: int | None, *, has_states: bool = False) -> tuple[str, ...]:
    """Names of the strategies in `all`, hybrids included.

    Only the group of chunked prefill may span nodes; no stage does.
    per_node: GPUs of a node; None: there is one node. has_states: whether layers pass a state from token to token,
    which `zigzag-ring` does not.
    """
    hybrids = [*hybrid_names(num_gpus, per_node), *sizes_names(num_gpus, min(num_gpus, per_node or num_gpus))]
    if num_gpus > 1:
        hybrids.append(f"tp{num_gpus}+{CHUNKED}")
    if has_states:
        hybrids = [name.replace("+zigzag-ring", "+ring") for name in hybrids]
    return (*STRATEGIES, *hybrids)


def names_with_spread_experts(num_gpus: int, per_node: int | None) -> tuple[str, ...]:
    """Names of layouts that spread the experts of a mixture over all GPUs or those of a stage, as engines do."""
    if num_gpus == 1:
        return ()
    node = min(num_gpus, per_node or num_gpus)
    has_nodes = num_gpus > node
    stages = f"+pp{num_gpus // node}" if has_nodes else ""
    parts = (("tp", ""), ("dp", ""), ("cp", ""), ("cp", "-i"))
    names: list[str] = []
    if node > 1:
        names += [f"{part}{node}{end}{stages}+ep{node}" for part, end in parts]
    names += [f"{part}{num_gpus}{end}+ep{num_gpus}" for part, end in parts]
    if has_nodes:
        names.append(f"dp{num_gpus // node}+tp{node}+ep{num_gpus}")
    return tuple(dict.fromkeys(names))


def hybrid_names(num_gpus: int, per_node: int | None) -> tuple[str, ...]:
    """Names of the hybrids tpN+NAME in `all`: N is a power of two that divides the GPUs, and no group spans nodes."""
    most = min(num_gpus // 2, per_node or num_gpus)
    sizes = [size for size in _POWERS[1:] if size <= most and num_gpus % size == 0]
    return tuple(f"tp{size}+{name}" for size, name in product(sizes, usual_names("hybrids")))


def rare_names(num_gpus: int, *, is_mixture: bool) -> tuple[str, ...]:
    """Names of the other hybrids and layouts over all GPUs, with sizes that are powers of two.

    These are hybrids with strategies that are rarely the fastest, and every split into tensor, pipeline, context and
    data ranks. is_mixture: also with experts spread over all GPUs of a stage.
    """
    powers = [power for power in _POWERS if num_gpus % power == 0]
    usual = usual_names("hybrids")
    names: list[str] = []
    for tensor in powers:
        if 1 < tensor < num_gpus:
            for strategy in STRATEGIES.values():
                if _is_in_hybrids(strategy) and strategy.name not in usual:
                    names.append(f"tp{tensor}+{strategy.name}")
        for stages in powers:
            if num_gpus % (tensor * stages):
                continue
            rest = num_gpus // (tensor * stages)
            for layout in _layouts(tensor, stages, rest):
                if layout not in STRATEGIES:
                    names.append(layout)
                if is_mixture and tensor * rest > 1:
                    names.append(f"{layout}+ep{tensor * rest}")
    return tuple(dict.fromkeys(names))


def _layouts(tensor: int, stages: int, rest: int) -> list[str]:
    """Names of the layouts with these sizes, where `rest` ranks of each stage split context or batch."""
    head = ""
    if tensor > 1:
        head += f"tp{tensor}+"
    if stages > 1:
        head += f"pp{stages}+"
    if rest > 1:
        return [f"{head}cp{rest}", f"{head}cp{rest}-i", f"{head}dp{rest}"]
    if stages > 1:
        return [head.removesuffix("+")]
    return []


def sizes_names(num_gpus: int, together: int) -> tuple[str, ...]:
    """Names of the hybrids of stages and context ranks in `all`, such as tp2+pp2+cp2.

    They use all GPUs; all sizes except the number of stages are powers of two.
    together: largest number of GPUs of a stage.
    """
    names = []
    for tensor, context in product(_POWERS, _POWERS[1:]):
        of_stage = tensor * context
        if of_stage > together or num_gpus % of_stage or num_gpus == of_stage:
            continue
        name = f"pp{num_gpus // of_stage}+cp{context}"
        if tensor > 1:
            name = f"tp{tensor}+{name}"
        names.append(name)
    return tuple(names)
