"""What a strategy is, and what its program may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvrsim.cost.layer import LayerCosts
from kvrsim.cost.tensor_parallel import all_reduce
from kvrsim.program import AllGather, AllToAll, Array, Collective, Compute, Flags, Op, Program, Recv, RingPass, Send

if TYPE_CHECKING:
    from kvrsim.cost.kernels import CostModel
    from kvrsim.model.spec import ModelSpec
    from kvrsim.scenario import Scenario

PartitionRule = Literal["whole", "even", "search", "table", "pieces"]
LayerProgram = Callable[["Step", int], Iterator[Op]]
PipelineProgram = Callable[["Scenario", Sequence[Array], "CostModel"], Program]
Refusal = Callable[["ModelSpec", int], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to run a prefill on several GPUs."""

    name: str  # as on the command line
    title: str  # one line for people
    source: str  # where it is described
    partition_rule: PartitionRule  # where its partition comes from
    layer: LayerProgram  # the operations of one rank in one layer
    gathers_kv: bool  # every rank has the K and V of the whole context before its attention
    keeps_gathered: bool = True  # K, V that the program says it holds stay to the end; else its own chunk's alone
    group_size: int | None = 1  # GPUs that split every matrix and act as one rank; None: all that there are
    pipeline: PipelineProgram | None = None  # builds the program where ranks hold different layers
    refuses: Refusal | None = None  # what a model and number of ranks must fulfil, where they do not; None: nothing
    approximate: str | None = None  # how its result differs from the model's own prefill; None: it is the same
    chains: bool = False  # it is KVR's chain, which planner.search.bound is about


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of layer over a batch of partitions: the vocabulary of a strategy's program.

    `chunks` and `starts` hold one array of shape (B,) a rank: tokens of its chunk, and tokens of the
    context before it (the cached prefix of the request counted in).
    """

    costs: LayerCosts
    chunks: Sequence[Array]
    starts: Sequence[Array]

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return len(self.chunks)

    def qkv(self, rank: int) -> Compute:
        """Norm, projections to Q, K, V and rotary embedding of the chunk."""
        return Compute(
            name="qkv", device_s=self.costs.qkv_s(self.chunks[rank]), host_s=self.costs.host_qkv_s, kind="qkv"
        )

    def append_kv(self, rank: int, prefix: Array) -> Compute:
        """Join the prefix's K, V and the chunk's in one contiguous cache.

        prefix: tokens that the rank then holds besides its chunk; of a chunk in pieces, all others up to its last one.
        """
        chunk = self.chunks[rank]
        held = self.costs.kv_bytes(prefix + chunk)
        return Compute(name="append", device_s=self.costs.append_s(chunk, prefix), kv_bytes=held, kind="append")

    def attention(self, rank: int, prefix: Array) -> Compute:
        """The chunk's queries against the prefix and the chunk itself."""
        return self._attention("attention", self.chunks[rank], prefix)

    def _attention(self, name: str, tokens: Array, prefix: Array, *, some: Flags | None = None) -> Compute:
        """`some`: where there is anything to do; None: everywhere."""
        device_s = self.costs.attention_s(tokens, prefix)
        return Compute(
            name=name,
            device_s=device_s if some is None else np.where(some, device_s, 0.0),
            host_s=self.costs.host_attention_s,
            score_elements=self.costs.score_elements(tokens, prefix + tokens),
            kind="attention",
        )

    def attention_to(self, name: str, tokens: Array, start: Array) -> Compute:
        """Some of the rank's queries, which begin at `start`, against all keys up to their own."""
        return self._attention(name, np.maximum(tokens, 1.0), start, some=tokens > 0)

    def output_mlp(self, rank: int) -> Compute:
        """Output projection, MLP, norms and residuals of the chunk."""
        device_s = self.costs.output_mlp_s(self.chunks[rank])
        return Compute(name="output+mlp", device_s=device_s, host_s=self.costs.host_output_mlp_s, kind="output+mlp")

    def dense_prefix(self, rank: int) -> Array:
        """What an attention over the gathered context sees besides the chunk: all other tokens, masked or not."""
        return self.costs.gathered_prefix(self.chunks[rank], self.starts[rank], self.chunks[-1] + self.starts[-1])

    def send_kv(self, rank: int) -> Send:
        """Hand all K, V up to the end of the chunk to the next rank."""
        nbytes = self.costs.handed_kv_bytes(self.starts[rank] + self.chunks[rank])
        return Send(
            dst=rank + 1, nbytes=nbytes, host_s=self.costs.host.message_s, rendezvous=not self.costs.sends_overlap
        )

    def recv_kv(self, rank: int) -> Recv:
        """Wait for the K, V of all tokens before the chunk."""
        return Recv(src=rank - 1, host_s=self.costs.host.message_s, rendezvous=not self.costs.sends_overlap)

    def send_own_kv(self, rank: int, dst: int) -> Send:
        """The chunk's own K, V to another rank, after those that go elsewhere."""
        nbytes = self.costs.kv_bytes(self.chunks[rank])
        host_s, rendezvous = self.costs.host.message_s, not self.costs.sends_overlap
        return Send(dst=dst, nbytes=nbytes, host_s=host_s, rendezvous=rendezvous, in_turn=True)

    def recv_own_kv(self, src: int) -> Recv:
        """Wait for the K, V of another rank's chunk."""
        return Recv(src=src, host_s=self.costs.host.message_s, rendezvous=not self.costs.sends_overlap)

    def send_activations(self, tokens: Array, rank: int) -> Send:
        """The residual stream of so many tokens to the next rank."""
        nbytes = self.costs.activation_bytes(tokens)
        return Send(
            dst=rank + 1,
            nbytes=nbytes,
            host_s=self.costs.host.message_s,
            rendezvous=not self.costs.sends_overlap,
            payload="activations",
        )

    def all_gather_kv(self, rank: int) -> AllGather:
        """Exchange the chunks' K, V so that every rank holds all."""
        nbytes = self.costs.kv_bytes(self.chunks[rank])
        return AllGather(nbytes=nbytes, host_s=self.costs.host_all_gather_s(self.num_ranks))

    def assemble_kv(self, rank: int) -> Compute:
        """Join the gathered pieces in one contiguous K and V."""
        chunk, total = self.chunks[rank], self.starts[-1] + self.chunks[-1]
        held = self.costs.kv_bytes(total)
        return Compute(
            name="assemble", device_s=self.costs.assemble_s(chunk, total - chunk), kv_bytes=held, kind="append"
        )

    # -- rings and exchanges
    @property
    def cached(self) -> Array:
        """Tokens that every rank holds the K and V of before it begins."""
        return self.starts[0]

    def zigzag(self, rank: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """(tokens, start) of a rank's early and late piece: the ranks take turns forwards, then backwards.

        Counted from the last rank, so that it has the first piece and the last one.
        """
        early = np.floor(self.lengths / 2)
        late = self.lengths - early
        early_start = self.cached + early[rank + 1 :].sum(axis=0)
        late_start = self.cached + early.sum(axis=0) + late[:rank].sum(axis=0)
        return (early[rank], early_start), (late[rank], late_start)

    def pass_kv(self, rank: int, work_s: Array) -> RingPass:
        """Work on every rank's K, V, one after another, the own first, while they go round; work_s of shape (p, B)."""
        blocks = self.blocks(rank)
        host_s, chunk = self.costs.host_attention_s, self.chunks[rank]
        most_keys = np.maximum(self.lengths.max(axis=0), self.cached + chunk)
        return RingPass(
            name="attention",
            device_s=work_s,
            nbytes=self.costs.kv_bytes(self.lengths[blocks[:-1]]),
            host_s=tuple(host_s if (one > 0).any() else 0.0 for one in work_s),
            overlaps=self.costs.sends_overlap,
            score_elements=self.costs.score_elements(chunk, most_keys),
        )

    def blocks(self, rank: int) -> npt.NDArray[np.intp]:
        """Whose K, V a rank holds in each round of a ring: its own, then that of the rank before, and so on."""
        return (rank - np.arange(self.num_ranks)) % self.num_ranks

    @property
    def lengths(self) -> Array:
        """All ranks' chunks, shape (p, B)."""
        return np.stack(list(self.chunks))

    def all_to_all(self, rank: int, tokens: Array, num_heads: int) -> AllToAll:
        """So many heads of `tokens` tokens, shape (p - 1, B), to each of the others, the next rank first."""
        return AllToAll(nbytes=self.costs.heads_bytes(tokens, num_heads))

    def all_reduces(self, rank: int) -> Iterator[Collective]:
        """Sum what the GPUs of the rank's group have of the output and of the MLP; in one where they are parallel."""
        group = self.costs.group
        if group is not None:
            for _ in range(1 if self.costs.model.parallel_attn else 2):
                yield all_reduce(group, self.costs.activation_bytes(self.chunks[rank]))
