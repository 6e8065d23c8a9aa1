"""Group: GPUs that split every matrix of a model and act as one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.errors import InputError
from kvrsim.hardware import AllReduceRates, Cluster, Path
from kvrsim.model.mixers import Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.program import Array, Collective
from kvrsim.units import scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """A ring of GPUs that all start a collective at the same time."""

    size: int  # number of GPUs
    path: Path  # slowest path between neighbours
    flows: int = 1  # flows that share a bus during a collective; 1 without a bus

    def gather_s(self, nbytes: Array) -> Array:
        """Seconds of an all-gather or reduce-scatter of `nbytes` in total: p - 1 steps with 1/p of the bytes each."""
        if self.size == 1:
            return nbytes * 0.0
        step_s = self.path.gather_step_s(nbytes * (self.flows / self.size), self.size) + self.path.gather_latency_s
        return (self.size - 1) * step_s

    def gathered_bytes(self, nbytes: Array) -> Array:
        """Bytes that each GPU sends during the collective."""
        return nbytes * ((self.size - 1) / self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """GPUs that split every matrix of a model and act as one rank, and the links between these GPUs."""

    size: int  # number of GPUs
    model: ModelSpec  # one GPU's share of the model
    inside: Ring  # ring of the GPUs of one node
    across: Ring  # ring of one GPU per node

    def all_reduce_s(self, nbytes: Array) -> Array:
        """Seconds of an all-reduce: measured, or those of reduce-scatter, all-reduce over nodes and all-gather.

        Without measurements, one node takes 2 (p - 1) steps with 1/p of the bytes each (Patarasuk and Yuan, 2009).
        """
        if self.all_reduce_rates is not None:
            return self.all_reduce_rates.seconds(nbytes, self.size)
        once_s = self.inside.gather_s(nbytes) + self.across.gather_s(nbytes / self.inside.size)
        return self._launch_s + 2.0 * once_s

    def all_gather_s(self, nbytes: Array) -> Array:
        """Seconds of an all-gather of `nbytes` in total."""
        return self._launch_s + self.across.gather_s(nbytes / self.inside.size) + self.inside.gather_s(nbytes)

    def sent_bytes(self, nbytes: Array) -> Array:
        """Bytes that each GPU sends during an all-gather of `nbytes` in total; an all-reduce sends twice as many."""
        return self.inside.gathered_bytes(nbytes) + self.across.gathered_bytes(nbytes / self.inside.size)

    @property
    def all_reduce_rates(self) -> AllReduceRates | None:
        """Measured all-reduces of this number of GPUs in one node; None if they were not measured."""
        rates = self.inside.path.all_reduce
        if rates is None or self.across.size > 1 or not rates.covers(self.size):
            return None
        return rates

    @property
    def _launch_s(self) -> float:
        return max(ring.path.gather_launch_s for ring in (self.inside, self.across))

    def slower(self, factor: float) -> Group:
        """The group over links that are slower by `factor`."""
        return replace(self, inside=scale(self.inside, factor), across=scale(self.across, factor))


def all_reduce(group: Group, nbytes: Array, more_s: float) -> Collective:
    """All-reduce of `nbytes` over the GPUs of a group; `more_s` is added to the kernel's seconds."""
    sent = 2.0 * group.sent_bytes(nbytes)
    return Collective(name="all-reduce", seconds=more_s + group.all_reduce_s(nbytes), nbytes=sent)


def all_gather(group: Group, nbytes: Array, more_s: float = 0.0) -> Collective:
    """All-gather of `nbytes` from the GPUs of a group; `more_s` is added to the kernel's seconds."""
    sent = group.sent_bytes(nbytes)
    return Collective(name="all-gather", seconds=more_s + group.all_gather_s(nbytes), nbytes=sent)


def group_of(cluster: Cluster, size: int, share: ModelSpec) -> Group:
    """The first group of `size` consecutive GPUs; each GPU holds `share` of a model."""
    flows = 1
    if cluster.shares_bandwidth:
        flows = cluster.num_gpus
    inside = size
    if cluster.topology == "nodes" and cluster.gpus_per_node is not None:
        inside = min(size, cluster.gpus_per_node)
    nodes = size // inside
    near = _closing_path(cluster, 0, inside - 1)
    far = near
    if nodes > 1:
        far = _closing_path(cluster, 0, inside)
    return Group(
        size=size,
        model=share,
        inside=Ring(size=inside, path=near, flows=flows),
        across=Ring(size=nodes, path=far, flows=flows),
    )


def _closing_path(cluster: Cluster, first: int, last: int) -> Path:
    """Path between the first and the last GPU of a ring: in a chain the longest, elsewhere like the others."""
    if first == last or last >= cluster.num_gpus:
        return Path(bandwidth_bytes_per_s=1.0, latency_s=0.0, shared_bus=False)  # a ring of one rank is never used
    return cluster.path(first, last)


def grouped_cluster(cluster: Cluster, size: int) -> Cluster:
    """The cluster with groups of `size` GPUs as ranks: each GPU sends to the corresponding GPU of another group.

    Raises InputError where nodes do not divide into such groups, or groups into nodes.
    """
    count = cluster.num_gpus // size
    per_node = cluster.gpus_per_node
    grouped = replace(cluster, num_gpus=count)
    link = cluster.link
    if cluster.topology == "chain":
        return replace(grouped, link=replace(link, latency_s=link.latency_s * size))
    if cluster.topology == "bus":
        return replace(grouped, link=replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / size))
    if cluster.topology != "nodes" or per_node is None or cluster.network is None:
        return grouped
    if per_node % size == 0:
        return replace(grouped, gpus_per_node=per_node // size)
    if size % per_node == 0:
        return replace(grouped, topology="switch", link=cluster.network, gpus_per_node=None, network=None)
    raise InputError("strategies", f"tp{size}", f"groups that nodes of {per_node} GPUs divide into, or the reverse")


def one_of(cluster: Cluster, data: int, context: int) -> Cluster:
    """The cluster of one data group's ranks; each stage has `data` groups of `context` ranks.

    Raises InputError if neither nodes divide into stages nor stages into nodes.
    """
    if data == 1:
        return cluster
    group = replace(cluster, num_gpus=cluster.num_gpus // data)
    per_node = cluster.gpus_per_node
    stage = data * context
    if cluster.topology != "nodes" or per_node is None:
        return group
    if per_node % stage == 0:
        return replace(group, gpus_per_node=per_node // data)
    if stage % per_node == 0:
        return replace(group, gpus_per_node=min(context, per_node))
    raise InputError("strategies", f"dp{data}", f"stages that nodes of {per_node} ranks divide into, or the reverse")


def share_of(model: ModelSpec, size: int) -> ModelSpec:
    """The part of a model on one of `size` GPUs (Shoeybi et al., 2019; with GQA a KV head may be on several GPUs).

    The part has columns of Q, K, V, gate and up, rows of the output and down projections, rows of the embedding and the
    head, and whole norms. Raises InputError where the heads do not divide.
    """
    for layer in model.layer_kinds:
        mixer = layer.mixer
        if mixer is not None and not heads_divide(mixer, size):
            heads = f"the {mixer.num_attention_heads} heads and {mixer.num_key_value_heads} KV heads"
            if isinstance(mixer, Recurrence):
                heads = f"the {mixer.num_attention_heads} value heads and {mixer.num_key_value_heads} key heads"
            raise InputError("strategies", f"tp{size}", f"groups that {heads} of {model.name} divide into")
    shares = {layer: _layer_share(layer, size) for layer in model.layer_kinds}
    return replace(
        model,
        intermediate_size=-(-model.intermediate_size // size),
        vocab_size=-(-model.vocab_size // size),
        lm_head=replace(model.lm_head, out_features=-(-model.lm_head.out_features // size)),
        layers=tuple(shares[layer] for layer in model.layers),
    )


def heads_divide(mixer: Mixer, size: int) -> bool:
    """Whether each GPU gets an equal number of heads; a key head may be on several GPUs."""
    heads = mixer.num_attention_heads
    kv_heads = mixer.num_key_value_heads
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _layer_share(layer: LayerSpec, size: int) -> LayerSpec:
    return replace(
        layer,
        mixer=None if layer.mixer is None else layer.mixer.share(size),
        mlp=tuple(gemm.share(size) for gemm in layer.mlp),
        shared_mlp=tuple(gemm.share(size) for gemm in layer.shared_mlp),
    )
