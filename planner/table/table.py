"""PartitionTable: the best partitions of many contexts and numbers of GPUs, as versioned JSON; and KVR-P's lookup.

docs/how-to/partition-table.md describes the file for programs that read it.

KVR-P interpolates between the entries of the two nearest contexts. The paper interpolates each rank's share of the
context (section 5). Shares are not smooth in length, because a chunk's time rises in steps of a tile or a wave of tiles
(QuantizationSteps). An entry therefore has two
values per rank: the level, which is the chunk length that the rank could compute in its time without quantization, and
the cost of a token. Both are smooth in length. From the interpolated values follows the longest chunk that each rank
can compute in its time; a common shift of these times makes the chunks sum to the context. These chunks end at steps,
like searched chunks.

If the host or the links limit the speed, the levels say little, and these chunks may be far from the shares. Then the
lookup uses the shares. Where the scenario is at hand, a few rounds of the pattern search refine the chunks.
Interpolation alone is often a few percent slower than a search, and sometimes much more, because the best chunks jump
from one length to the next (benchmarks/results/table_quality.md).
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvrsim.engine import NO_ENGINE
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.io.schema import JsonObject, NonNegative, Whole, fields_to_json, read, to_frame
from kvrsim.notes import note
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array
from kvrsim.results.results import Prediction
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S
from kvrsim.units import format_bandwidth, format_seconds
from planner.grid import GridFile
from planner.search.minimise import (
    Boundaries,
    Evaluator,
    chunk_lens,
    chunks_between,
    minimise,
    rounded,
    to_grid,
    unique_rows,
)

if TYPE_CHECKING:
    import pandas

_WINDOW = 41  # tokens, odd; a step is a rise above the median rise in this window
_LEAST_SHARE = 0.001  # least step as a share of the chunk's time; smaller steps count as part of the slope
_MOST_CHUNK = 2**17  # tokens; steps of longer chunks are too small to matter
_BLOCK = 2**12  # number of chunk lengths that are timed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationSteps:
    """Step function of extra time by chunk length, from tile and wave quantization, over all layers."""

    chunk_lens: tuple[int, ...]  # ascending; the longest chunk before each step of the cost
    seconds: tuple[NonNegative, ...]  # cumulative extra time after each step, for a chunk without a prefix
    seconds_per_prefix_token: tuple[NonNegative, ...]  # cumulative extra time after each step, per token of prefix

    def __post_init__(self) -> None:
        lengths = list(self.chunk_lens)
        if sorted(set(lengths)) != lengths:
            raise InputError("chunk_lens", lengths, "rising whole numbers from 1")
        for key in ("seconds", "seconds_per_prefix_token"):
            values = list(getattr(self, key))
            if len(values) != len(lengths) or sorted(values) != values:
                raise InputError(key, values, "numbers that do not fall, as many as chunk_lens")

    def extra_s(self, chunk_len: int, prefix: float) -> float:
        """Extra time of a chunk: the sum of all steps below its length."""
        return self._after(bisect_left(self.chunk_lens, chunk_len), prefix)

    def longest(self, level: float, token_s: float, prefix: float) -> int:
        """The longest chunk c with c + extra_s(c) / token_s <= level; at least 1."""
        starts = range(1, len(self.chunk_lens) + 1)  # 1 + number of steps passed

        def level_after(number: int) -> float:
            return self.chunk_lens[number - 1] + 1 + self._after(number, prefix) / token_s

        passed = bisect_left(starts, True, key=lambda number: level_after(number) > level)
        most = int(level - self._after(passed, prefix) / token_s)
        return max(1, min(most, self.chunk_lens[passed]) if passed < len(self.chunk_lens) else most)

    def _after(self, passed: int, prefix: float) -> float:
        if passed == 0:
            return 0.0
        return self.seconds[passed - 1] + prefix * self.seconds_per_prefix_token[passed - 1]


def quantization_steps(scenario: PlacedScenario) -> QuantizationSteps:
    """The steps of a chunk's device time on this scenario's GPU, up to the scenario's context.

    The steps of attention (tiles of queries) are modelled as proportional to the prefix.
    """
    context_len = scenario.request.context_len
    most = min(scenario.request.new_tokens, _MOST_CHUNK)
    alone, after = (_times_s(scenario, most, prefix) for prefix in (0.0, float(context_len)))
    steps = _steps(alone)
    steps_after = _steps(after)
    per_token = np.maximum(steps_after - steps, 0.0) / context_len
    large = steps + per_token * context_len / 2 > _LEAST_SHARE * (alone + after)[:-1] / 2
    at = np.nonzero(large)[0]
    return QuantizationSteps(
        chunk_lens=tuple(map(int, at + 1)),
        seconds=_short(np.cumsum(steps[at])),
        seconds_per_prefix_token=_short(np.cumsum(per_token[at])),
    )


def _times_s(scenario: PlacedScenario, most: int, prefix: float) -> Array:
    """Device seconds of all layers for chunks of 1, 2, ... `most` tokens after a prefix."""
    lengths = np.arange(1.0, most + 1.0)
    counts = np.bincount(scenario.model.layer_kind_index)
    parts = []
    for first in range(0, most, _BLOCK):
        chunk = lengths[first : first + _BLOCK]
        start = np.full_like(chunk, prefix)
        total = np.zeros_like(chunk)
        for count, costs in zip(counts, scenario.layer_costs(), strict=True):
            layer = costs.qkv_s(chunk) + costs.mixer.append_s(chunk, start)
            total += count * (layer + costs.mixer.attention_s(chunk, start) + costs.output_mlp_s(chunk))
        parts.append(total)
    return np.concatenate(parts)


def _steps(times_s: Array) -> Array:
    """Rise of the time from each chunk length to the next, minus the median rise around it; at least 0."""
    rises = np.diff(times_s)
    if not len(rises):
        return rises
    around = sliding_window_view(np.pad(rises, _WINDOW // 2, mode="edge"), _WINDOW)
    return np.maximum(rises - np.median(around, axis=1), 0.0)


def _short(values: Array) -> tuple[float, ...]:
    """The values rounded to nine digits, so that tables do not depend on the processor's rounding."""
    return tuple(float(f"{value:.9g}") for value in values)


_NO_FIGURES = {
    *("name", "model_type", "max_position_embeddings", "method"),  # fields of a model
    *("source", "profile", "memory_source", "memory_bytes"),  # fields of GPUs and links
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSetting:
    """Setting that all entries of a table share."""

    model: str
    profile: str  # name of the profile, or "roofline"
    cluster: str  # name of the cluster
    gpu: str
    topology: str
    link: str  # link between GPUs; for a cluster with nodes, the link inside a node
    link_bandwidth_bytes_per_s: float
    link_latency_s: NonNegative
    attention: str  # attention kernel
    dtype: str
    batch: int
    cached_prefix: Whole  # tokens
    prefix_placement: str = "all"  # placement of the prefix's K and V
    engine: str = NO_ENGINE  # name of the engine, or "none"
    strategy: str = KVR_S.name  # strategy of the searched partitions
    expert_parallel: str = "off"  # "off", or "on" with the imbalance of the experts
    fingerprint: str  # hash of all figures that affect times: model, profile, cluster, request

    @classmethod
    def of(cls, scenario: Scenario, strategy: str = KVR_S.name) -> TableSetting:
        """The setting of a scenario without its number of GPUs and context; `strategy`: name of the strategy."""
        cluster = scenario.cluster
        request = scenario.request
        return cls(
            model=scenario.model.name,
            profile=scenario.profile_name,
            cluster=cluster.name,
            gpu=cluster.gpu.name,
            topology=cluster.topology,
            link=cluster.link.name,
            link_bandwidth_bytes_per_s=cluster.link.bandwidth_bytes_per_s,
            link_latency_s=cluster.link.latency_s,
            attention=scenario.kernel,
            dtype=request.dtype,
            batch=request.batch,
            cached_prefix=request.cached_prefix,
            prefix_placement=scenario.prefix_placement.describe(),
            engine=scenario.engine_name,
            strategy=strategy,
            expert_parallel=_expert_parallelism(scenario),
            fingerprint=_fingerprint(scenario),
        )

    def differences(self, scenario: Scenario, strategy: str = KVR_S.name) -> list[str]:
        """Differences between the table and the scenario with the strategy, in words; empty if there are none."""
        here = TableSetting.of(scenario, strategy)
        facts = self.facts()
        changes = [f"{name} {facts[name]}, not {fact}" for name, fact in here.facts().items() if fact != facts[name]]
        if not changes and self.fingerprint != TableSetting.of(scenario).fingerprint:
            return ["files of the same names with other figures in them, or another version of kvrsim"]
        return changes

    def facts(self) -> dict[str, str]:
        """All fields but the fingerprint, in words."""
        content = {one.name.replace("_", " "): str(getattr(self, one.name)) for one in fields(self)[:-1]}
        for name in ("link bandwidth bytes per s", "link latency s"):
            del content[name]
        rates = f"{format_bandwidth(self.link_bandwidth_bytes_per_s)}, {format_seconds(self.link_latency_s)}"
        return content | {"link": f"{self.link} ({rates})"}


def _expert_parallelism(scenario: Scenario) -> str:
    """Whether experts are spread over GPUs, and the imbalance of their tokens, in words."""
    if not scenario.expert_parallel:
        return "off"
    imbalance = scenario.expert_imbalance
    return "on, imbalance of a power law" if imbalance is None else f"on, imbalance {imbalance:g}"


def _fingerprint(scenario: Scenario) -> str:
    """A hash of all figures that affect times; names, dates and citations do not change it."""
    return hashlib.sha256(json.dumps(_figures(scenario), sort_keys=True).encode()).hexdigest()[:16]


def _figures(scenario: Scenario) -> dict[str, Any]:
    """Figures of the model, the profile or datasheet, the cluster, the kernel, and the request without its length."""
    profile = scenario.profile
    request = scenario.request
    cluster = _numbers(asdict(replace(scenario.cluster, num_gpus=1)))
    calibrated = profile and {
        "kernels": _numbers(asdict(profile.kernels)),
        "host": _numbers(asdict(scenario.host)),
        "scale": scenario.kernel_scale,
        "sends": [profile.links.sends, profile.links.sends_over_bus],
    }
    datasheet = cluster.pop("gpu")
    return {
        "model": _numbers(asdict(scenario.model)),
        "rates": calibrated or datasheet,
        "cluster": cluster,
        "kernel": scenario.kernel,
        **({"experts": _expert_parallelism(scenario)} if scenario.expert_parallel else {}),
        "request": [request.batch, request.cached_prefix, request.dtype],
    }


def _numbers(value: Any) -> Any:
    """The values without fields that affect no time; whole numbers become floats."""
    if isinstance(value, Mapping):
        return {str(key): _numbers(one) for key, one in value.items() if key not in _NO_FIGURES}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry(Prediction):
    """The searched partition of one context on a number of GPUs."""

    num_gpus: int
    context_len: int  # tokens, cached prefix included
    partition: tuple[int, ...]  # new tokens per rank
    speedup_over_tsp: float
    speedup_over_even: float  # TTFT of the same strategy with even chunks, divided by this TTFT
    gap: NonNegative | None  # ttft_s divided by a proven lower bound, minus 1; None: no bound is known
    # Chunk length of each rank without quantization, divided by the new tokens: see the top of this file.
    levels: tuple[float, ...]
    token_s: tuple[float, ...]  # cost in seconds of one more token on each rank, without steps

    @property
    def fractions(self) -> tuple[float, ...]:
        """Each rank's share of the new tokens."""
        return fractions_of(self.partition)

    def __post_init__(self) -> None:
        for key in ("partition", "levels", "token_s"):
            if len(getattr(self, key)) != self.num_gpus:
                raise InputError(key, getattr(self, key), f"{self.num_gpus} numbers, one per GPU")

    @classmethod
    def read(cls, data: JsonObject) -> TableEntry:
        """Read and check one entry; its fractions, which follow from its partition, are not read."""
        return read(cls, data.without("fractions"))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = fields_to_json(self)
        del content["memory"]
        return {"num_gpus": self.num_gpus, "context_len": self.context_len, "fractions": list(self.fractions)} | content


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTable(GridFile):
    """A table: its entries by number of GPUs and context, and the setting that they share."""

    file_format: ClassVar[str] = "kvrsim partition table"
    command: ClassVar[str] = "kvrsim table build"
    rows: ClassVar[str] = "entries"
    kvrsim_version: str  # kvrsim version that built the table
    setting: TableSetting
    steps: QuantizationSteps
    entries: tuple[TableEntry, ...]  # sorted by num_gpus, then context_len; without duplicates

    def __post_init__(self) -> None:
        keys = [(entry.num_gpus, entry.context_len) for entry in self.entries]
        if not keys or sorted(set(keys)) != keys:
            accepted = "entries that rise in num_gpus, then context_len, at least one"
            raise InputError("entries", f"{len(keys)} entries", accepted)
        for index, entry in enumerate(self.entries):
            tokens = entry.context_len - self.setting.cached_prefix
            if sum(entry.partition) != tokens:
                raise InputError(f"entries[{index}].partition", entry.partition, f"chunks that sum to {tokens} tokens")

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """Numbers of GPUs for which the table has entries, in ascending order."""
        return tuple(dict.fromkeys(entry.num_gpus for entry in self.entries))

    def of(self, num_gpus: int) -> tuple[TableEntry, ...]:
        """Entries for this number of GPUs, in order of context; raises InputError if there are none."""
        entries = tuple(entry for entry in self.entries if entry.num_gpus == num_gpus)
        if not entries:
            has = ", ".join(map(str, self.gpu_counts))
            raise InputError("gpus", num_gpus, f"a number of GPUs that the table has: {has}")
        return entries

    def partition_for(self, execution: Execution) -> Partition:
        """KVR-P's partition of a scenario, refined by simulations; raises the same InputErrors as look_up."""
        return Partition(chunk_lens=refined_lookup(self, execution).partition)

    def notes_for(self, execution: Execution) -> tuple[str, ...]:
        """Notes if the table's setting differs from the scenario's, or if the context is outside the table."""
        strategy = execution.strategy
        others = self.setting.differences(execution.placed, strategy.looks_up)
        notes = [note("table setting", strategy=strategy.name, differences="; ".join(others))] if others else []
        request = execution.request
        lookup = look_up(self, execution.cluster.num_gpus, request.context_len, cached_prefix=request.cached_prefix)
        return (*notes, *(f"{strategy.name}: {warning}" for warning in lookup.warnings))

    def to_frame(self) -> pandas.DataFrame:
        """A table with one row per entry."""
        return to_frame(entry.to_dict() for entry in self.entries)


def load_table(path: str | Path, argument: str = "table") -> PartitionTable:
    """Read a file of `kvrsim table build`. Raises InputError naming the argument, file and key."""
    return PartitionTable.load(path, argument)


Source = Literal["exact", "interpolated", "extrapolated"]
_HALVINGS = 64
_BLENDS = 17  # partitions from the interpolated shares to the chunks that end at steps
_ROUNDS = 8  # rounds of the pattern search; with 4, one lookup in a hundred is 1 to 2 % slower than a search
MOST_FROM_SHARE = 0.15  # chunks at steps that differ by more from a chunk of the interpolated share are not used


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLookup:
    """A partition that was looked up."""

    num_gpus: int
    context_len: int  # tokens, cached prefix included
    fractions: tuple[float, ...]  # the partition divided by the new tokens
    partition: tuple[int, ...]  # new tokens per rank
    source: Source
    between: tuple[int, ...]  # contexts of the one or two entries used
    is_refined: bool = False  # whether simulations refined the interpolated partition
    warnings: tuple[str, ...]

    def with_partition(self, partition: tuple[int, ...], *, is_refined: bool) -> TableLookup:
        """The lookup with another partition of the same tokens."""
        return replace(self, partition=partition, fractions=fractions_of(partition), is_refined=is_refined)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolated:
    """Values of the ranks between two entries, or beyond them."""

    tokens: int  # new tokens
    cached_prefix: int  # tokens
    shares: tuple[float, ...]  # of the new tokens; they sum to 1
    levels: tuple[float, ...]  # tokens: see the top of this file
    token_s: tuple[float, ...]  # cost in seconds of one more token

    def at_steps(self, steps: QuantizationSteps) -> tuple[int, ...]:
        """Chunks that end at steps of the cost."""
        return to_steps(self.shares, self.levels, self.token_s, steps, self.tokens, self.cached_prefix)

    def at_shares(self) -> tuple[int, ...]:
        """Chunks of the shares, with boundaries at the nearest token."""
        return whole_chunks(np.array(self.shares) * self.tokens, self.tokens)

    def partition(self, steps: QuantizationSteps) -> tuple[int, ...]:
        """Chunks that end at steps, or chunks of the shares if those at steps are far from them."""
        at_steps = self.at_steps(steps)
        for chunk, share in zip(at_steps, self.shares, strict=True):
            expected = share * self.tokens
            if abs(chunk - expected) > max(1.0, MOST_FROM_SHARE * expected):
                return self.at_shares()
        return at_steps


def fractions_of(partition: Sequence[int]) -> tuple[float, ...]:
    """Each chunk divided by the sum of all."""
    total = sum(partition)
    return tuple(chunk / total for chunk in partition)


def whole_chunks(chunks: Array, tokens: int) -> tuple[int, ...]:
    """Whole chunks of at least 1 token that sum to `tokens`."""
    return chunk_lens(rounded(chunks, 1, tokens).tolist(), tokens)


def look_up(table: PartitionTable, num_gpus: int, context_len: int, *, cached_prefix: int | None = None) -> TableLookup:
    """Return the partition for a context, from the table alone; at an entry's context, the entry's partition.

    cached_prefix: replaces the table's value.
    Beyond the last entry, shares are extrapolated linearly in 1 / context. Below the first entry, the shares of the
    first entry are used. Raises InputError for a number of GPUs that is not in the table or a context with fewer new
    tokens than GPUs.
    """
    entries = table.of(num_gpus)
    cached = table.setting.cached_prefix if cached_prefix is None else cached_prefix
    if context_len - cached < num_gpus:
        accepted = f"a context of at least {num_gpus + cached} tokens, one new token per GPU"
        raise InputError("ctx", context_len, accepted)
    low, high = _neighbours(entries, context_len)
    source: Source = "exact" if low is high else "interpolated"
    warnings = list[str]()
    if not low.context_len <= context_len <= high.context_len:
        source = "extrapolated"
        ends = f"{entries[0].context_len} to {entries[-1].context_len}"
        warnings.append(f"extrapolated: the table's contexts for {num_gpus} GPUs are {ends}, not {context_len}")
    if source == "exact" and cached == table.setting.cached_prefix:
        partition = low.partition
    else:
        partition = interpolated(table, num_gpus, context_len, cached).partition(table.steps)
    return TableLookup(
        num_gpus=num_gpus,
        context_len=context_len,
        fractions=fractions_of(partition),
        partition=partition,
        source=source,
        between=tuple(sorted({low.context_len, high.context_len})),
        warnings=tuple(warnings),
    )


def refined_lookup(table: PartitionTable, execution: Execution) -> TableLookup:
    """The lookup for a scenario of the strategy's ranks; between and beyond entries, refined by simulations.

    Raises the same InputErrors as look_up.
    """
    request = execution.request
    num_gpus = execution.cluster.num_gpus
    lookup = look_up(table, num_gpus, request.context_len, cached_prefix=request.cached_prefix)
    if lookup.source == "exact" or num_gpus == 1:
        return lookup
    tokens = request.new_tokens
    evaluator = Evaluator(execution)

    def ttft_s(boundaries: Boundaries, enough_s: float = math.inf) -> Array:
        return evaluator.ttft_s(chunks_between(boundaries, tokens).astype(float), enough_s)

    values = interpolated(table, num_gpus, request.context_len, request.cached_prefix)
    shares = np.array(values.shares) * tokens
    at_steps = np.array(values.at_steps(table.steps), dtype=float)
    weights = np.linspace(0.0, 1.0, _BLENDS)[:, None]
    blends = np.cumsum(shares + weights * (at_steps - shares), axis=1)[:, :-1]
    starts = unique_rows(to_grid(blends, 1, tokens))
    start = starts[int(ttft_s(starts).argmin())]
    boundaries, _ = minimise(start, tokens, 1, ttft_s, rounds=_ROUNDS)
    return lookup.with_partition(chunk_lens(tuple(boundaries), tokens), is_refined=True)


def interpolated(table: PartitionTable, num_gpus: int, context_len: int, cached_prefix: int) -> Interpolated:
    """The ranks' values between the two entries around a context, or beyond them."""
    low, high = _neighbours(table.of(num_gpus), context_len)
    lengths = low.context_len, high.context_len
    tokens = context_len - cached_prefix
    weight = _weight(*lengths, context_len)
    shares = _between(low.fractions, high.fractions, weight)
    total = math.fsum(shares)
    return Interpolated(
        tokens=tokens,
        cached_prefix=cached_prefix,
        shares=shares if weight <= 1 else tuple(share / total for share in shares),
        levels=tuple(share * tokens for share in _between(low.levels, high.levels, weight)),
        token_s=_between(low.token_s, high.token_s, _linear_weight(*lengths, context_len)),
    )


def _neighbours(entries: Sequence[TableEntry], context_len: int) -> tuple[TableEntry, TableEntry]:
    """The two entries around a context; the same entry twice at its own context and before the first entry.

    Beyond the last entry: this entry, and the longest of at most half its length, because closer ones differ mainly by
    quantization.
    """
    lengths = [entry.context_len for entry in entries]
    upper = bisect_left(lengths, context_len)
    if upper == len(entries):
        half = bisect_right(lengths, lengths[-1] // 2)
        return entries[half - 1 if half else -1], entries[-1]
    if upper == 0 or lengths[upper] == context_len:
        return entries[upper], entries[upper]
    return entries[upper - 1], entries[upper]


def _weight(low: int, high: int, context_len: int) -> float:
    """Weight of the upper entry; beyond the upper entry, linear in 1 / context and at most 2."""
    if low < high < context_len:
        return (1 / low - 1 / context_len) / (1 / low - 1 / high)
    return _linear_weight(low, high, context_len)


def _linear_weight(low: int, high: int, context_len: int) -> float:
    return (context_len - low) / (high - low) if low < high else 0.0


def _between(low: Sequence[float], high: Sequence[float], weight: float) -> tuple[float, ...]:
    """Linear interpolation between two rows; extrapolated values are at least half of the upper row."""
    pairs = zip(low, high, strict=True)
    if weight > 1:
        return tuple(max(b / 2, a + weight * (b - a)) for a, b in pairs)
    return tuple(min(max(a, b), max(min(a, b), a + weight * (b - a))) for a, b in pairs)


def to_steps(
    fractions: Sequence[float],
    levels: Sequence[float],
    token_s: Sequence[float],
    steps: QuantizationSteps,
    num_tokens: int,
    cached_prefix: int = 0,
) -> tuple[int, ...]:
    """Chunks that sum to the tokens: each rank's longest chunk for its level, after a common shift in time.

    levels: tokens. token_s: seconds per token. fractions: shares of the tokens, which determine each chunk's prefix.
    """
    prefixes = [cached_prefix + math.fsum(fractions[:rank]) * num_tokens for rank in range(len(fractions))]

    def chunks(shift_s: float) -> list[int]:
        ranks = zip(levels, token_s, prefixes, strict=True)
        return [steps.longest(level + shift_s / cost, cost, prefix) for level, cost, prefix in ranks]

    most = max(cost * (level + num_tokens) for level, cost in zip(levels, token_s, strict=True))
    low = -most
    high = most
    while sum(chunks(high)) < num_tokens:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(chunks(middle)) >= num_tokens else (middle, high)
    lengths = chunks(high)
    least = chunks(low)
    for rank in range(len(lengths)):  # several ranks may reach a step at the same shift: remove the excess
        lengths[rank] -= max(0, min(sum(lengths) - num_tokens, lengths[rank] - least[rank]))
    return tuple(lengths)
