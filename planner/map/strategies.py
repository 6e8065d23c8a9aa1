"""kvrsim.map_strategies: a StrategyMap for what a person would write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrsim.arguments import checked, wholes
from kvrsim.ranges import counts_of, counts_up_to, lengths_of
from kvrsim.setup import make_scenario
from kvrsim.units import parse_bandwidth
from planner.map.build import DEFAULT_STRATEGIES, OnPlace, make_map
from planner.map.map import StrategyMap


@checked(ctx=wholes, gpus=wholes)
def map_strategies(
    *,
    ctx: Sequence[int] | str,
    gpus: Sequence[int] | str | None = None,
    link_bandwidths: Sequence[float | str] | None = None,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    on_place: OnPlace | None = None,
    **scenario: Any,
) -> StrategyMap:
    """Find which strategy on how many GPUs is the fastest, and from which context on each pays.

    ctx: contexts in tokens, or text such as "1k:64k:x2" (both ends included) or "4k,8k".
    gpus: numbers of GPUs, or text such as "2,4,8"; None: 2, 4, 8, ... up to those of the cluster.
    link_bandwidths: bytes per second one way, or text such as "10GB/s"; None: the cluster's own.
    strategies: names, or "all"; one GPU is always compared.
    on_place: called with places done and places in all.
    scenario: the other arguments of make_scenario.

    Raises InputError naming the parameter.
    """
    lengths = lengths_of(ctx, "ctx")
    if gpus is None:
        gpus = counts_up_to(make_scenario(ctx=1, gpus=None, **scenario)[0].num_gpus)
    counts = counts_of(gpus, "gpus")
    base, warnings = make_scenario(ctx=lengths[-1], gpus=counts[-1], **scenario)
    bandwidths = None
    if link_bandwidths is not None:
        bandwidths = [
            parse_bandwidth(one, "link_bandwidths") if isinstance(one, str) else one for one in link_bandwidths
        ]
    return make_map(
        base,
        lengths=lengths,
        gpu_counts=counts,
        bandwidths=bandwidths,
        strategies=strategies,
        warnings=warnings,
        on_place=on_place,
    )
