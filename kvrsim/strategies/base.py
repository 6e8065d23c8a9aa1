"""What a strategy is, and what its program may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrsim.cost.layer import LayerCosts
from kvrsim.program import AllGather, Array, Compute, Op, Recv, Send

PartitionRule = Literal["whole", "even", "search", "table"]
LayerProgram = Callable[["Step", int], Iterator[Op]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to run a prefill on several GPUs."""

    name: str  # as on the command line
    title: str  # one line for people
    source: str  # where it is described
    partition_rule: PartitionRule  # where its partition comes from
    layer: LayerProgram  # the operations of one rank in one layer
    gathers_kv: bool  # every rank ends with the K and V of the whole context


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
        return Compute(name="qkv", device_s=self.costs.qkv_s(self.chunks[rank]), host_s=self.costs.host_qkv_s)

    def append_kv(self, rank: int, prefix: Array) -> Compute:
        """Join the prefix's K, V and the chunk's in one contiguous cache."""
        return Compute(name="append", device_s=self.costs.append_s(self.chunks[rank], prefix))

    def attention(self, rank: int, prefix: Array) -> Compute:
        """The chunk's queries against the prefix and the chunk itself."""
        device_s = self.costs.attention_s(self.chunks[rank], prefix)
        return Compute(name="attention", device_s=device_s, host_s=self.costs.host_attention_s)

    def output_mlp(self, rank: int) -> Compute:
        """Output projection, MLP, norms and residuals of the chunk."""
        device_s = self.costs.output_mlp_s(self.chunks[rank])
        return Compute(name="output+mlp", device_s=device_s, host_s=self.costs.host_output_mlp_s)

    def dense_prefix(self, rank: int) -> Array:
        """What an attention over the gathered context sees besides the chunk: all other tokens, masked or not."""
        return self.costs.gathered_prefix(self.chunks[rank], self.starts[rank], self.chunks[-1] + self.starts[-1])

    def send_kv(self, rank: int) -> Send:
        """Hand all K, V up to the end of the chunk to the next rank."""
        nbytes = self.costs.handed_kv_bytes(self.starts[rank] + self.chunks[rank])
        return Send(dst=rank + 1, nbytes=nbytes, rendezvous=not self.costs.sends_overlap)

    def recv_kv(self, rank: int) -> Recv:
        """Wait for the K, V of all tokens before the chunk."""
        return Recv(src=rank - 1, rendezvous=not self.costs.sends_overlap)

    def all_gather_kv(self, rank: int) -> AllGather:
        """Exchange the chunks' K, V so that every rank holds all."""
        nbytes = self.costs.kv_bytes(self.chunks[rank])
        return AllGather(nbytes=nbytes, host_s=self.costs.host_all_gather_s(self.num_ranks))

    def assemble_kv(self, rank: int) -> Compute:
        """Join the gathered pieces in one contiguous K and V."""
        chunk, total = self.chunks[rank], self.starts[-1] + self.chunks[-1]
        return Compute(name="assemble", device_s=self.costs.assemble_s(chunk, total - chunk))
