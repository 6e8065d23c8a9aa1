"""Base classes of strategies, and the operations that their programs use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np

from kvrsim.errors import InputError
from kvrsim.kernels.layer import LayerCosts
from kvrsim.layout import Degrees
from kvrsim.model.spec import ModelSpec
from kvrsim.program import SEND_COPIES, AllGather, Array, Compute, Op, Payload, Recv, Send

PartitionRule = Literal["whole", "even", "search", "table", "pieces", "searched-pieces"]
LayerProgram = Callable[["Step", int], Iterator[Op]]
Refusal = Callable[[ModelSpec, int], str | None]
# What considers a strategy where the user names none: hybrids tpN+NAME of a plan, fleets, fleets whose GPUs share one
# bandwidth, maps, and confirmations.
Use = Literal["hybrids", "fleets", "fleets on a bus", "maps", "paper"]
_ALL_RANKS = Degrees(context=None)  # the strategy itself splits the context over all ranks
_NAME = re.compile(r"[^\s,:]+")


class StrategyWords(NamedTuple):
    """A strategy in words, for p ranks."""

    each_rank: str  # what each rank computes
    communication: str  # what is sent
    holds: str  # what a rank holds at the end
    docs: str = "docs/explanation/strategies.md"  # where to read more


OWN_TOKENS = "each rank holds the K and V of its own tokens"


class RealRun(NamedTuple):
    """How real ranks run a strategy."""

    name: str  # name in labels and timelines; strategies that differ only in their partitions share it
    exchange: str  # module of kvrsim.runtime.exchange, and class
    payload: Payload | Literal["all-gather", "collective"] = "KV"  # content of the messages between ranks
    cache: str = "the last rank holds the K and V of all tokens"  # what holds the KV cache after the prefill
    decodes: bool = True  # whether ranks go on to decode from this cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to run a prefill on several GPUs.

    A variant made with `replace` has all facts of the original that it does not state: state at least `name`, `title`,
    `words`, `colour`, `usual_in`, `baseline_rank` and `real_run`.
    """

    name: str  # name on the command line
    title: str  # title in one line
    source: str  # publication or code that describes it
    partition_rule: PartitionRule  # how its partition is chosen
    layer: LayerProgram  # the operations of one rank in one layer
    gathers_kv: bool = False  # whether every rank has the K and V of the whole context before its attention
    degrees: Degrees = _ALL_RANKS  # sizes of its layout
    stage_layers: tuple[int, ...] | None = None  # layers per stage of a pipeline; None: as even as possible
    refuses: Refusal | None = None  # function returning the requirement that a model and number of ranks do not meet
    passes_state: bool = False  # whether chunks follow each other in rank order, so that a state can be sent on
    sends_in_turn: bool = False  # whether a rank's messages leave one after another, even over different links
    carries_prefix: bool = False  # whether messages carry the shares of a cached prefix that no rank has whole
    passes_queries: bool = False  # whether ranks can send queries, instead of K and V, to the shares of a cached prefix
    splits_heads: bool = False  # whether a rank attends with some heads to all keys, and needs their K and V alone
    merges_blocks: bool = False  # whether a rank attends to one block of keys after another and merges the results
    chains: bool = False  # whether the strategy is KVR's chain, for which planner.search.bound holds
    query_blocks: tuple[int, ...] = (1,)  # allowed numbers of attention calls per chunk; the fastest is used
    near_chain: bool = False  # whether its best chunks are searched from those of KVR's chain, which is similar
    words: StrategyWords | None = field(default=None, compare=False)  # description in words; None: only the title
    family: str = field(default="others", compare=False)  # strategies of a family have similar colours
    colour: tuple[str, str] | None = field(default=None, compare=False)  # on white and on black; None: by its name
    baseline_rank: int | None = None  # the fitting strategy with the lowest rank is the baseline of speed-ups
    usual_in: frozenset[Use] = frozenset()  # what considers the strategy where the user names none
    is_replayable: bool = False  # whether one device can run its ranks one after another
    real_run: RealRun | None = field(default=None, compare=False)  # None: the strategy is planned and simulated only
    looks_up: str = "kvr-s"  # for partition_rule "table": the searched strategy that the table is made for

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError("name", self.name, "a strategy's name without spaces, commas and colons")
        rules = get_args(PartitionRule)
        if self.partition_rule not in rules:
            raise InputError("partition_rule", self.partition_rule, f"one of {', '.join(rules)}")
        if not self.query_blocks or list(self.query_blocks) != sorted({*self.query_blocks} - {0}):
            raise InputError("query_blocks", self.query_blocks, "rising numbers of calls, at least 1")
        if replace(self.degrees, scheme=None) == _ALL_RANKS:
            object.__setattr__(self, "degrees", replace(self.degrees, scheme=self.name))

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks hold different layers, and the context goes through them in pieces."""
        return self.partition_rule in ("pieces", "searched-pieces")

    @property
    def group_size(self) -> int | None:
        """Number of GPUs that split every matrix and act as one rank; None: all GPUs."""
        return self.degrees.tensor


@dataclass(frozen=True)
class Step:
    """One kind of layer over a batch of partitions; its methods are the operations of a strategy's program.

    `chunks` and `starts` have one array of shape (B,) per rank: tokens of its chunk, and tokens before its chunk
    (including the request's cached prefix). `query_blocks`: as in the strategy. `times_only`: leave out values that are
    needed only for memory.
    """

    costs: LayerCosts
    chunks: Sequence[Array]
    starts: Sequence[Array]
    query_blocks: tuple[int, ...] = field(default=(1,), kw_only=True)
    times_only: bool = field(default=False, kw_only=True)

    @classmethod
    def of_all_ranks(cls, costs: LayerCosts, chunks: Array, starts: Array, query_blocks: tuple[int, ...]) -> Step:
        """The operations of all ranks at once, without their memory use: each operation has arrays for all ranks.

        For strategies whose ranks differ only in their neighbours. chunks, starts: shape (ranks, B).
        """
        num_ranks = max(3, len(chunks))  # a middle rank has neighbours on both sides
        return cls(costs, [chunks] * num_ranks, [starts] * num_ranks, query_blocks=query_blocks, times_only=True)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.chunks)

    def qkv(self, rank: int) -> Compute:
        """Norm, projections to Q, K, V and rotary embedding of the chunk."""
        device_s = self._seconds("qkv", rank, self.costs.qkv_s)
        kernels = self.costs.kernels.before
        return Compute(name="qkv", device_s=device_s, host_s=self.costs.host_qkv_s, kernels=kernels, kind="qkv")

    def _seconds(self, name: str, rank: int, seconds_of: Callable[..., Array], *prefix: Array) -> Array:
        """Seconds of a rank's chunk; computed once for all ranks where the prefix is all tokens before the chunk."""
        if self.chunks[0] is self.chunks[-1] or any(tokens is not self.starts[rank] for tokens in prefix):
            return seconds_of(self.chunks[rank], *prefix)
        if name not in self._rows:
            self._rows[name] = seconds_of(self.lengths, *[self.begins] * len(prefix))
        seconds: Array = self._rows[name][rank]
        return seconds

    def of_any_rank(self, name: str, seconds_of: Callable[[], Array]) -> Array:
        """Seconds of an operation that are the same for all ranks; computed once."""
        if name not in self._rows:
            self._rows[name] = seconds_of()
        return self._rows[name]

    def append_kv(self, rank: int, prefix: Array) -> Compute:
        """Join the prefix's K, V and the chunk's in one contiguous cache.

        prefix: tokens that the rank then holds in addition to its chunk.
        """
        device_s = self._seconds("append", rank, self.costs.mixer.append_s, prefix)
        return self._append(self.chunks[rank], prefix, device_s)

    def append_to(self, tokens: Array, prefix: Array) -> Compute:
        """Join the K and V of some of the rank's tokens to those of its `prefix` other tokens."""
        return self._append(tokens, prefix, self.costs.mixer.append_s(tokens, prefix))

    def _append(self, tokens: Array, prefix: Array, device_s: Array) -> Compute:
        kv_bytes = None if self.times_only else self.costs.mixer.cache_bytes(prefix + tokens)
        return Compute(name="append", device_s=device_s, kv_bytes=kv_bytes, kind="append")

    def attention(self, rank: int, prefix: Array) -> Compute:
        """Attention of the chunk's queries to the prefix and the chunk, in blocks if the strategy has blocks."""
        chunk = self.chunks[rank]
        if self.query_blocks == (1,):
            device_s = self._seconds("attention", rank, self.costs.mixer.attention_s, prefix)
            return self._attention("attention", chunk, prefix, device_s)
        device_s, calls = self.costs.attention_in_blocks(self.query_blocks, chunk, prefix)
        return Compute(
            name="attention",
            device_s=device_s,
            # The host issues further calls while the device computes.
            host_s=self.costs.host_attention_s * self.query_blocks[0],
            kernels=self.costs.kernels.mixer * self.query_blocks[0],
            score_elements=None if self.times_only else self.costs.mixer.score_elements(chunk, prefix + chunk) / calls,
            query_blocks=calls,
            kind="attention",
        )

    def scan(self, rank: int) -> Compute:
        """Advance the state over the chunk's tokens; the rank then has the state after the chunk."""
        chunk = self.chunks[rank]
        return Compute(
            name="scan",
            device_s=self._seconds("scan", rank, self.costs.mixer.attention_s, self.starts[rank]),
            host_s=self.costs.host_attention_s,
            kernels=self.costs.kernels.mixer,
            kv_bytes=None if self.times_only else self.costs.mixer.cache_bytes(chunk),
            kind="attention",
        )

    def _attention(self, name: str, tokens: Array, prefix: Array, device_s: Array) -> Compute:
        return Compute(
            name=name,
            device_s=device_s,
            host_s=self.costs.host_attention_s,
            kernels=self.costs.kernels.mixer,
            score_elements=None if self.times_only else self.costs.mixer.score_elements(tokens, prefix + tokens),
            kind="attention",
        )

    def attention_to(self, name: str, tokens: Array, start: Array) -> Compute:
        """Attention of some of the rank's queries, the first at `start`, to all keys up to their own."""
        least_one = np.maximum(tokens, 1.0)  # costs are not defined for no token
        device_s = self.costs.mixer.attention_s(least_one, start) * (tokens > 0)
        return self._attention(name, least_one, start, device_s)

    def attention_share(self, rank: int) -> Compute:
        """Attention of the rank's tokens, spread evenly over the context, to all keys up to their own."""
        total = self.lengths.sum(axis=0)
        chunk = self.chunks[rank]
        whole = self._attention("attention", total, self.cached, self.costs.mixer.attention_s(total, self.cached))
        share = chunk / np.maximum(total, 1.0)
        scores = None if whole.score_elements is None else whole.score_elements * share
        return whole._replace(device_s=whole.device_s * share, score_elements=scores)

    def output_mlp(self, rank: int) -> Compute:
        """Output projection, MLP, norms and residuals of the chunk."""
        device_s = self._seconds("output+mlp", rank, self.costs.output_mlp_s)
        return Compute(
            name="output+mlp",
            device_s=device_s,
            host_s=self.costs.host_output_mlp_s,
            kernels=self.costs.kernels.after,
            kind="output+mlp",
        )

    def send_kv(
        self, rank: int, *, peer: int | None = None, tokens: Array | None = None, in_turn: bool = False
    ) -> Send:
        """Send K and V to another rank.

        peer: the rank that receives; None: the next rank.
        tokens: number of tokens whose K and V are sent; None: all tokens up to the chunk's end that the receiver lacks.
        in_turn: send only after the rank's earlier messages of this kind have left, whichever links they use.
        """
        end = self.starts[rank] + self.chunks[rank]
        return Send(
            dst=rank + 1 if peer is None else peer,
            nbytes=self.costs.forwarded_kv_bytes(end) if tokens is None else self.costs.mixer.cache_bytes(tokens),
            host_s=self.costs.setting.host.message_s,
            rendezvous=not self.costs.setting.sends_overlap,
            in_turn=in_turn,
        )

    def send_copies(self, rank: int, tokens: Array | None = None) -> Iterator[Compute]:
        """Yield what the rank's messages take from its computation, if the profile says that they do.

        tokens: number of tokens whose K and V are sent; None: all tokens up to the chunk's end that the receiver lacks.
        """
        if not self.costs.setting.messages_cost_time:
            return
        if tokens is None:
            tokens = self.starts[rank] + self.chunks[rank] - self.costs.setting.cached_prefix
        yield Compute(name=SEND_COPIES, device_s=self.costs.mixer.message_s(tokens), kind="append")

    def recv_kv(self, rank: int, *, peer: int | None = None) -> Recv:
        """Wait for the next message from another rank; `peer`: the rank that sends; None: the previous rank."""
        src = rank - 1 if peer is None else peer
        return Recv(src=src, host_s=self.costs.setting.host.message_s, rendezvous=not self.costs.setting.sends_overlap)

    def all_gather_kv(self, rank: int) -> AllGather:
        """Exchange the chunks' K and V, and shares of the cached prefix, so that every rank holds all."""
        return AllGather(nbytes=self.piece_bytes[rank], host_s=self.costs.setting.host.gather_piece_s * self.num_ranks)

    def assemble_kv(self, rank: int) -> Compute:
        """Join the gathered pieces in one contiguous K and V."""
        chunk = self.chunks[rank]
        total = self.starts[-1] + self.chunks[-1]
        kv_bytes = None if self.times_only else self.costs.mixer.cache_bytes(total)
        return Compute(
            name="assemble", device_s=self.costs.mixer.concat_s(chunk, total - chunk), kv_bytes=kv_bytes, kind="append"
        )

    @property
    def cached(self) -> Array:
        """Number of tokens that were cached before the request."""
        return self.starts[0]

    @property
    def held_prefix(self) -> Array:
        """Number of cached tokens that a rank has without the other ranks."""
        return self.cached * (self.costs.setting.prefix.share or 1.0)

    @cached_property
    def _rows(self) -> dict[str, Array]:
        """Seconds of all ranks, by operation."""
        return {}

    @cached_property
    def lengths(self) -> Array:
        """Tokens of all ranks' chunks, shape (p, B)."""
        return np.stack(self.chunks)

    @cached_property
    def has_equal_chunks(self) -> bool:
        """Whether all ranks' chunks have the same number of tokens, in every partition."""
        return bool((self.lengths == self.lengths[0]).all())

    @cached_property
    def begins(self) -> Array:
        """Starts of all ranks' chunks, shape (p, B)."""
        return np.stack(self.starts)

    @cached_property
    def piece_bytes(self) -> Array:
        """Bytes of each chunk's K and V and its share of the cached prefix, shape (p, B)."""
        return self.costs.mixer.cache_bytes(self.lengths) + self.costs.share_bytes

    @cached_property
    def half_ends(self) -> tuple[Array, Array]:
        """Ends of all ranks' early pieces and of their late pieces, shape (p, B)."""
        (early, early_start), (late, late_start) = self.halves
        return early_start + early, late_start + late

    @cached_property
    def halves(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """(tokens, start) of all ranks' early pieces and of their late pieces, shape (p, B).

        Early pieces are in reverse order of the ranks, late pieces in their order, so the last rank has the first and
        the last piece.
        """
        early = np.floor(self.lengths / 2)
        late = self.lengths - early
        first_late = self.cached + early.sum(axis=0)
        return (early, first_late - np.cumsum(early, axis=0)), (late, first_late + np.cumsum(late, axis=0) - late)

    @cached_property
    def lengths_twice(self) -> Array:
        """`lengths` twice in a row, shape (2 p, B): the ranks after a rank are then a slice."""
        return np.concatenate([self.lengths, self.lengths])
